"""Listening sockets of the HTTP servers, whose kernel notices when a peer is gone.

A peer that vanished without a word, such as a host without power, sends nothing and acknowledges nothing. The kernel
probes a silent connection, and closes one whose peer has not answered for `GONE_S`. Accepted connections inherit the
options of the socket that listens.
"""

import socket
from typing import Final

GONE_S: Final = 60
"""Time without an answer of the peer's kernel after which a connection is closed."""
IDLE_S: Final = 30
"""Silence before the first probe."""
_OPTIONS: Final = (
    (socket.SOL_SOCKET, socket.SO_REUSEADDR, 1),
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, (GONE_S - IDLE_S) // 3),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, GONE_S * 1000),
)


def bound_socket(host: str, port: int) -> socket.socket:
    """Return a bound TCP socket; OSError if the address cannot be bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    made = socket.socket(family, socket.SOCK_STREAM)
    try:
        for option in _OPTIONS:
            made.setsockopt(*option)
        made.bind((host, port))
    except OSError:
        made.close()
        raise
    return made
