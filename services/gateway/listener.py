"""The socket that the gateway listens on: bound by its launcher, if it has one, and handed down."""

import socket
from typing import Final

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import GatewayAddress

LISTEN_FD: Final = "ROLLOUTMQ_LISTEN_FD"
"""Names the descriptor of a socket that the launcher holds: who comes while this process is away waits in its line."""
BACKLOG: Final = 2048


def bind(config: GatewayConfig, before: int | None) -> socket.socket:
    """Return a bound socket: at the configured port, or, where any will do, at that of before if it is free."""
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    for port in [config.port] if config.port or before is None else [before, 0]:
        made = socket.socket(family, socket.SOCK_STREAM)
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind((config.host, port))
        except OSError:
            made.close()
            continue
        return made
    raise AddressInUseError(f"{config.host}:{config.port}")


def port_before(layout: RunLayout) -> int | None:
    """Return the port of an earlier life."""
    known = read_json(layout.gateway, GatewayAddress)
    return int(known.url.rpartition(":")[2]) if known is not None else None
