"""A connection without a socket: a transport in memory for the gateway's own protocol class, and a reader of replies.

The reader is strict: what it cannot read as a sequence of replies, a client could not either.
"""

import asyncio
import re
from collections.abc import Sequence
from typing import Any, Final, NamedTuple

from rolloutmq.services.gateway.web.protocol import LimitedProtocol

HIGH_BYTES: Final = 64 << 10
"""Unread bytes of the client from which the server is asked to pause; this client reads everything at once."""
_STATUS: Final = re.compile(rb"HTTP/1\.1 (\d{3}) [^\r\n]*\r\n")
_HEADER: Final = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+): ([^\r\n\x00]*)\r\n")
_SIZE: Final = re.compile(rb"([0-9a-f]+)\r\n")


class Watched(LimitedProtocol):
    """A connection that notes the methods of the requests that began; one whose head is not whole has none."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.methods: list[str] = []

    def on_message_begin(self) -> None:
        """Note a request."""
        self.methods.append("")
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """Note its method."""
        self.methods[-1] = self.parser.get_method().decode()
        super().on_headers_complete()

    @property
    def waits(self) -> bool:
        """Return whether nothing more will come without the client: every whole request has its reply."""
        cycle = self.cycle
        if cycle is None or (cycle.response_complete and not self.pipeline):
            return True
        eaten = not cycle.body and not cycle.message_event.is_set()
        return (
            self._in_body and not self.pipeline and cycle.more_body and eaten and not cycle.response_started
        )


class Line(asyncio.Transport):
    """The server's end of a connection; `out` is what the client gets."""

    def __init__(self, loop: asyncio.AbstractEventLoop, protocol: asyncio.Protocol) -> None:
        super().__init__()
        self.out = bytearray()
        self.lost = asyncio.Event()
        """Set once the protocol has heard of the end."""
        self.reading = True
        self._loop = loop
        self._protocol = protocol
        self._closing = False

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return {"peername": ("127.0.0.1", 50_000), "sockname": ("127.0.0.1", 80)}.get(name, default)

    def is_closing(self) -> bool:
        return self._closing

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self._loop.call_soon(self._lose, None)

    def abort(self) -> None:
        self.close()

    def leave(self) -> None:
        """End the connection as a client that is gone."""
        if not self._closing:
            self._closing = True
            self._lose(ConnectionResetError())

    def _lose(self, error: Exception | None) -> None:
        if not self.lost.is_set():
            self.lost.set()
            self._protocol.connection_lost(error)

    def write(self, data: Any) -> None:
        if not self._closing:
            self.out += data

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True

    def is_reading(self) -> bool:
        return self.reading

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        """Accept any limits: the buffer is always empty."""

    def get_write_buffer_size(self) -> int:
        return 0

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        raise AssertionError(f"no protocol follows another (got {protocol})")


class Reply(NamedTuple):
    """One reply. `whole` is false if the connection ended before it did."""

    status: int
    headers: dict[bytes, bytes]
    body: bytes
    whole: bool


def replies(data: bytes, methods: Sequence[str]) -> list[Reply]:
    """Return the final replies in a stream; AssertionError if it is none of replies.

    Args:
        data: All bytes the client got.
        methods: Methods of its requests, in order: a reply to HEAD has no body.
    """
    found: list[Reply] = []
    at = 0
    while at < len(data):
        status, at = _status(data, at)
        headers, at, whole = _headers(data, at)
        if status == 100:
            assert whole
            continue
        method = methods[len(found)] if len(found) < len(methods) else ""
        body, at, ended = _body(data, at, status, headers, method) if whole else (b"", len(data), False)
        found.append(Reply(status, headers, body, whole and ended))
    return found


def _status(data: bytes, at: int) -> tuple[int, int]:
    match = _STATUS.match(data, at)
    assert match, f"no reply begins like this: {data[at : at + 60]!r}"
    return int(match[1]), match.end()


def _headers(data: bytes, at: int) -> tuple[dict[bytes, bytes], int, bool]:
    headers: dict[bytes, bytes] = {}
    while not data.startswith(b"\r\n", at):
        if at == len(data):
            return headers, at, False
        match = _HEADER.match(data, at)
        assert match, f"no header: {data[at : at + 60]!r}"
        headers[match[1].lower()] = match[2]
        at = match.end()
    return headers, at + 2, True


def _body(
    data: bytes, at: int, status: int, headers: dict[bytes, bytes], method: str
) -> tuple[bytes, int, bool]:
    if method == "HEAD" or status in {204, 304}:
        return b"", at, True
    if headers.get(b"transfer-encoding") == b"chunked":
        return _chunks(data, at)
    assert b"content-length" in headers, "a reply without an end"
    size = int(headers[b"content-length"])
    return data[at : at + size], min(at + size, len(data)), at + size <= len(data)


def _chunks(data: bytes, at: int) -> tuple[bytes, int, bool]:
    parts = []
    while at < len(data):
        match = _SIZE.match(data, at)
        assert match, f"no chunk: {data[at : at + 40]!r}"
        size, at = int(match[1], 16), match.end()
        parts.append(data[at : at + size])
        at += size + 2
        if at > len(data):
            break
        assert data[at - 2 : at] == b"\r\n", "a chunk does not end where it says"
        if not size:
            return b"".join(parts), at, True
    return b"".join(parts), len(data), False
