"""Both sides of a connection after its handshake, over a socket of this host."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from rolloutmq.bus.transport.keys import ticket
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.trainer.weights.stream.channel import Channel

SECRET = ticket.new_secret()


class Door:
    """A sender's side that accepts one connection."""

    def __init__(self, *, sealed: bool) -> None:
        self.channel: Channel | None = None
        self.error: Exception | None = None
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sealed = sealed
        self._thread = threading.Thread(target=self._accept)
        self._thread.start()

    def _accept(self) -> None:
        try:
            sock, _ = self._listener.accept()
            self.channel = Channel.accept(sock, "receiver", self._key_of, sealed=self._sealed)
        except (RolloutMQError, OSError) as error:
            self.error = error

    def _key_of(self, shown: bytes) -> bytes:
        ticket.read(shown, time.time())
        return ticket.key_of(SECRET, shown)

    def opened(self) -> Channel:
        self._thread.join()
        assert self.channel is not None, self.error
        return self.channel

    def refused(self) -> str:
        self._thread.join()
        assert self.channel is None
        return str(self.error)

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()
        if self.channel is not None:
            self.channel.close()


@contextmanager
def door(*, sealed: bool = False) -> Iterator[Door]:
    made = Door(sealed=sealed)
    try:
        yield made
    finally:
        made.close()


@contextmanager
def pair(*, sealed: bool = False) -> Iterator[tuple[Channel, Channel]]:
    """The sender's side and the receiver's."""
    with door(sealed=sealed) as made:
        mine = Channel.dial("127.0.0.1", made.port, ticket.issue(SECRET, "x"), sealed=sealed)
        try:
            yield made.opened(), mine
        finally:
            mine.close()
