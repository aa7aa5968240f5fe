import socket

import pytest

from rolloutmq.services.http_server.sockets import GONE_S, IDLE_S, bound_socket


@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_accepted_connections_inherit_the_watch_for_peers_that_vanished(host: str) -> None:
    with bound_socket(host, 0) as one:
        one.listen()
        with socket.create_connection(one.getsockname()[:2]) as client:
            accepted, _ = one.accept()
            with accepted:
                assert client.getpeername()[1] == one.getsockname()[1]
                assert accepted.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE) == IDLE_S
                assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 1000 * GONE_S


def test_a_port_that_is_taken_is_an_error_and_leaves_nothing_open() -> None:
    with bound_socket("127.0.0.1", 0) as one:
        one.listen()
        with pytest.raises(OSError, match="in use"):
            bound_socket("127.0.0.1", one.getsockname()[1])
