"""A free address for `broker.listen`."""

import socket
from contextlib import ExitStack

from rolloutmq.schemas.network.address import LISTEN_PORTS


def free_listen() -> str:
    """Return a `broker.listen` on loopback whose ports are free now: a restarted broker has the same ones."""
    while True:
        with ExitStack() as stack:
            first = stack.enter_context(socket.create_server(("127.0.0.1", 0))).getsockname()[1]
            try:
                for port in range(first + 1, first + LISTEN_PORTS):
                    stack.enter_context(socket.create_server(("127.0.0.1", port)))
            except (OSError, OverflowError):
                continue
            return f"tcp://127.0.0.1:{first}"
