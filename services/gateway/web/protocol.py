"""Connections: uvicorn's HTTP protocol, with the limits that it leaves to a proxy in front of it.

The headers of a request have `HEAD_BYTES` and `head_s` seconds, counted from the first byte, on a new connection from
its beginning. A reply that comes before the end of its body leaves `head_s` for the rest, so that the client reads the
reply; the rest is dropped. Few requests may wait behind one that is being answered. Whoever exceeds a limit loses the
connection. `arrival` has the deadline of a body.

Whoever sends bytes that are no request is refused in its turn: whole requests before them are answered first, and no
request is answered twice, since a client would take the second reply for that of its next request.

Beyond the bound of the server the connection that has been idle for the longest time is dropped
(`services.http_server.connection_bounds`).

The kernel looks after peers that vanished (`services.http_server.sockets`).
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Any, Final

from uvicorn._types import ASGI3Application
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from rolloutmq.services.http_server.connection_bounds import Bounds

HEAD_BYTES: Final = 64 << 10
HEAD_S: Final = 10.0
"""Default of `head_s`, for servers that are given this class by name."""
AHEAD_REQUESTS: Final = 16
"""Most requests that wait on one connection; each takes a hundred times the memory of its bytes."""
LATE_S: Final = 1.0
"""A timer that fires later than this after its time says that this process stood still, and nothing about the peer."""


class LimitedProtocol(HttpToolsProtocol):
    """One connection.

    Args:
        head_s: Time for the headers of a request.
        bounds: The open connections of the server; None for one that has its own bound.
    """

    def __init__(
        self,
        *arguments: Any,
        head_s: float = HEAD_S,
        bounds: Bounds | None = None,
        **named: Any,
    ) -> None:
        super().__init__(*arguments, **named)
        self._bounds = bounds
        self._head_s = head_s
        self._head_bytes = 0
        """Fed bytes of the headers that are arriving."""
        self._kept_bytes = 0
        """Parsed bytes of them."""
        self._in_head = False
        self._in_body = False
        self._is_too_large = False
        self._is_over = False
        """Something was refused: nothing is read any more."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or was answered last."""
        self._end: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin; a connection that sends nothing ends."""
        super().connection_made(transport)
        self._expect()
        if self._bounds is not None:
            self._bounds.add(self)

    @property
    def is_idle(self) -> bool:
        """Whether no request of it is under way."""
        answered = self.cycle is None or self.cycle.response_complete
        return answered and not self._in_body and not self.pipeline

    def drop(self) -> None:
        """See `Connection.drop`."""
        self.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._expect_nothing()
        if self._bounds is not None:
            self._bounds.discard(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse the next bytes."""
        if self._is_over:
            return
        super().data_received(data)
        if self._in_head and not self.transport.is_closing():
            self._head_bytes += len(data)
            if self._head_bytes > HEAD_BYTES:
                self._refuse(self._send_431)

    def on_message_begin(self) -> None:
        """Begin the headers of a request."""
        self._in_head, self._head_bytes, self._kept_bytes = True, 0, 0
        if self._end is None:
            self._expect()
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        """Keep a part of the address."""
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Keep a header. One behind a body, a trailer, says nothing: the request was begun without it."""
        self._count(len(name) + len(value))
        if not self._in_body:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Begin the request."""
        if len(self.pipeline) >= AHEAD_REQUESTS:
            raise ValueError("too many requests at once")  # ends the parser, and the connection
        super().on_headers_complete()
        self._in_head, self._in_body = False, True
        if self._bounds is not None:
            self._bounds.touch(self)
        self._expect_nothing()

    def on_message_complete(self) -> None:
        """End the body of a request."""
        self._in_body = False
        self._expect_nothing()
        super().on_message_complete()
        if self.cycle.response_complete:  # it was answered early
            self._unset_keepalive_if_required()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )

    def on_response_complete(self) -> None:
        """End a reply."""
        super().on_response_complete()
        if self._in_body:
            self._expect()

    def send_400_response(self, msg: str) -> None:
        """Refuse what cannot be parsed, or is too large to be."""
        self._refuse(self._send_431 if self._is_too_large else partial(super().send_400_response, msg))

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: ASGI3Application) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _refuse(self, reply: Callable[[], None]) -> None:
        """End the connection after the replies to all whole requests; `reply` is for the one that is not whole."""
        self._is_over = True
        if self._in_body and self.pipeline:
            self.pipeline.popleft()  # the one that is not whole
        elif self._in_body:
            if self.cycle.response_started or self.scope["method"] == "HEAD":
                self.transport.close()  # one has a reply, the other gets no body
            else:
                reply()
            return
        last = self.pipeline[0][0] if self.pipeline else self._running
        if last is None or last.response_complete:
            reply()
        else:
            last.keep_alive = False

    def _count(self, nbytes: int) -> None:
        self._kept_bytes += nbytes
        if self._kept_bytes > HEAD_BYTES:
            self._is_too_large = True
            raise ValueError("headers too large")  # ends the parser, which calls `send_400_response`

    def _send_431(self) -> None:
        text = b"headers larger than %d bytes" % HEAD_BYTES
        head = b"content-type: text/plain\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(text)
        self.transport.write(STATUS_LINE[431] + head + text)
        self.transport.close()

    def _expect(self) -> None:
        self._expect_nothing()
        due = self.loop.time() + self._head_s
        self._end = self.loop.call_at(due, self._late, due)

    def _expect_nothing(self) -> None:
        if self._end is not None:
            self._end.cancel()
            self._end = None

    def _late(self, due: float) -> None:
        self._end = None
        busy = (
            self.cycle is not None and not self.cycle.response_complete
        )  # reading may have stopped until its end
        if busy or self.loop.time() - due > LATE_S:
            self._expect()
        else:
            self.transport.close()
