"""One HTTP exchange over ASGI: a request read and inflated, an answer compressed and sent. Knows no endpoint.

Bodies are bounded as they come and as they inflate. What takes the processor for long is done in threads. The parts of
a stream are compressed apart from each other, several at once, and are one gzip stream all the same.
"""

import asyncio
import gzip
import struct
import threading
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from rolloutmq.schemas.gateway import GatewayConfig
from rolloutmq.services.gateway.doubts import Post

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Part = tuple[int, Callable[[], bytes]]
"""About how large a part of a stream will be, and what makes it."""

LARGE_BYTES: Final = 32 << 10
"""Bodies from that size on are inflated and compressed in a thread: that takes longer than to hand them over."""
LONG_BYTES: Final = 256 << 10
"""Bodies from that size on are decoded and encoded in a thread. That needs the interpreter as much as the loop does and
costs more there; it is worth it only where the loop would stand still for longer than a millisecond or two."""
COMPRESS_BYTES: Final = 1000
"""Smaller answers are not compressed, as with Atropos."""
INFLATE_CHUNK: Final = 1 << 20
FED_BYTES: Final = 1 << 16
"""What is not inflated yet is copied with each chunk."""
MEMBERS_LIMIT: Final = 4096
"""Clients send one. Each costs a copy of what is fed."""
USUAL_RATIO: Final = 4
"""Of a group as JSON to the same compressed."""
UNTOLD_BYTES: Final = 1 << 20
"""A body whose length is not announced is taken to be that large until it is here."""
SMALL_BYTES: Final = 8 << 10
"""Smaller work is done where it comes."""
STALLED_S: Final = 60.0
"""A client that takes nothing of its answer for that long is gone."""
AHEAD_PARTS: Final = 2
"""So many parts of a stream are made while one is sent; each lies in memory until it is its turn."""
LONG_CHECKSUM_BYTES: Final = 1 << 20
"""To sum so much takes a millisecond, and is done in a thread."""
GZIP_HEAD: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
GZIP_END: Final = b"\x03\0"
"""A last block with nothing in it; checksum and size follow."""
JSON: Final = b"application/json"
VARY: Final = (b"vary", b"accept-encoding")
_INTERPRETER: Final = threading.Lock()
_T = TypeVar("_T")


@dataclass(slots=True)
class Request:
    """One request, its body inflated."""

    method: str
    path: str
    query: Mapping[str, Sequence[str]]
    headers: Mapping[bytes, bytes]
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client closed the connection."""
    post: Post | None = None
    """What it posted; its answer ends it."""
    held: int = 0
    """What it takes in memory, as far as it was counted."""

    @property
    def compressed(self) -> bool:
        """Whether its body says that it is."""
        return b"gzip" in self.headers.get(b"content-encoding", b"").lower()

    @property
    def announced_bytes(self) -> int:
        """Return how large its body will be, about, from what is said before it comes."""
        said = int(self.headers.get(b"content-length", b"0") or 0)
        if not said and b"transfer-encoding" in self.headers:
            return UNTOLD_BYTES
        return said * USUAL_RATIO if self.compressed else said


@dataclass(slots=True)
class Answer:
    """What is answered, but for batches."""

    body: bytes
    status: int = 200
    kind: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class TooLargeError(Exception):
    """A body is beyond its bound, as it came or inflated."""


class Pool(ThreadPoolExecutor):
    """Threads for what takes long, and the turn of what does not: one piece of work in each turn of the loop.

    When many bodies come at once, who asks for a few numbers would otherwise wait for all of them, several times.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="gateway")
        self.turn = asyncio.Lock()


class InHand:
    """Bytes of the bodies, and of the groups in them, that are not answered yet: about what they take in memory.

    Args:
        most: While there are more, no other body is read; its client waits.
    """

    def __init__(self, most: int) -> None:
        self.nbytes = 0
        self._most = most
        self._fewer = asyncio.Event()

    async def room(self) -> None:
        """Wait until another body may be read."""
        while self.nbytes >= self._most:
            self._fewer.clear()
            await self._fewer.wait()

    def change(self, nbytes: int) -> None:
        """Count more, or fewer."""
        self.nbytes += nbytes
        if self.nbytes < self._most:
            self._fewer.set()


async def off(pool: Pool, size: int, work: Callable[[], _T], least: int = LARGE_BYTES) -> _T:
    """Do it in a thread if it takes long: if its size in bytes is at least so much. Otherwise in its turn."""
    if size < SMALL_BYTES:
        return work()
    if size >= least:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    async with pool.turn:
        made = work()
        await asyncio.sleep(0)
    return made


def in_turn(size: int, work: Callable[[], _T]) -> _T:
    """Do what needs the interpreter; one at a time if it takes long, for the loop would have to wait for them all."""
    if size < LONG_BYTES:
        return work()
    with _INTERPRETER:
        return work()


async def body_of(request: Request, receive: Receive, config: GatewayConfig, pool: Pool) -> bytes:
    """Read a body and inflate it. Blocks as long as the client takes to send it.

    Raises:
        TooLargeError: It is beyond a bound.
        zlib.error: It says that it is compressed, and cannot be inflated.
    """
    most = config.max_body_bytes
    if int(request.headers.get(b"content-length", b"0") or 0) > most:
        raise TooLargeError(f"a body may have {most} bytes")
    parts, size = [], 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            request.gone.set()
            return b""
        parts.append(message.get("body", b""))
        size += len(parts[-1])
        if size > most:
            raise TooLargeError(f"a body may have {most} bytes")
        if not message.get("more_body", False):
            break
    body = b"".join(parts)
    if not request.compressed or not body:
        return body
    most = config.max_inflated_bytes
    whole: bytes = await off(pool, len(body), partial(inflated, body, most))
    return whole


def _pressed(make: Callable[[], bytes], level: int | None) -> tuple[bytes, bytes]:
    """Make a part; return it as it is, and as a piece of a gzip stream that needs none of the pieces before it."""
    part = make()
    if level is None:
        return part, part
    press = zlib.compressobj(level, wbits=-zlib.MAX_WBITS)
    return part, press.compress(part) + press.flush(zlib.Z_SYNC_FLUSH)


async def _checksum(part: bytes, before: int) -> int:
    if len(part) < LONG_CHECKSUM_BYTES:
        return zlib.crc32(part, before)
    return await asyncio.to_thread(zlib.crc32, part, before)


async def watch(receive: Receive, gone: asyncio.Event) -> None:
    """Set `gone` when the client closes the connection."""
    while (await receive())["type"] != "http.disconnect":
        pass
    gone.set()


class Out:
    """The way of an answer to its client, compressed if it takes that."""

    def __init__(self, send: Send, request: Request, config: GatewayConfig, pool: Pool) -> None:
        self.begun = False
        """Whether its status is on its way."""
        self._send = send
        self._origins = config.cors_origins
        self._origin = request.headers.get(b"origin", b"")
        self._gone = request.gone
        self._pool = pool
        self._level = config.gzip_level
        self._takes_gzip = b"gzip" in request.headers.get(b"accept-encoding", b"").lower()

    async def answer(self, answer: Answer) -> None:
        """Send all of it."""
        body, headers = answer.body, [*answer.headers]
        if len(body) >= COMPRESS_BYTES:
            headers.append(VARY)
        if self._takes_gzip and len(body) >= COMPRESS_BYTES:
            headers.append((b"content-encoding", b"gzip"))
            body = await off(self._pool, len(body), partial(gzip.compress, body, self._level))
        headers.append((b"content-length", b"%d" % len(body)))
        await self._start(answer.status, answer.kind, headers)
        await self._send({"type": "http.response.body", "body": body})

    async def stream(self, parts: Iterable[Part]) -> None:
        """Send parts while those after them are made; `end` says that it was all. Stops when the client goes.

        Raises:
            TimeoutError: The client is there and takes nothing.
        """
        crc, size = 0, 0
        await self._start(200, JSON, [VARY, (b"content-encoding", b"gzip")] if self._takes_gzip else [VARY])
        head = GZIP_HEAD if self._takes_gzip else b""
        async with aclosing(self._made(parts)) as made:
            async for part, body in made:
                if self._gone.is_set():
                    return
                async with asyncio.timeout(STALLED_S):
                    await self._send({"type": "http.response.body", "body": head + body, "more_body": True})
                head = b""
                if self._takes_gzip:
                    crc = await _checksum(part, crc)
                    size += len(part)
        if self._takes_gzip:
            tail = GZIP_END + struct.pack("<II", crc, size & 0xFFFFFFFF)
            await self._send({"type": "http.response.body", "body": head + tail, "more_body": True})

    async def _made(self, parts: Iterable[Part]) -> AsyncGenerator[tuple[bytes, bytes], None]:
        """Yield parts in order, as they are and as they are sent, and have some more of them made meanwhile."""
        coming: deque[asyncio.Task[tuple[bytes, bytes]]] = deque()
        try:
            for size, make in parts:
                work = partial(_pressed, make, self._level if self._takes_gzip else None)
                least = LARGE_BYTES if self._takes_gzip else LONG_BYTES
                coming.append(asyncio.create_task(off(self._pool, size, work, least)))
                if len(coming) > AHEAD_PARTS:
                    yield await coming.popleft()
            while coming:
                yield await coming.popleft()
        finally:
            for task in coming:
                task.cancel()
            await asyncio.gather(*coming, return_exceptions=True)

    async def end(self) -> None:
        """Say that it was all."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun = True
        own = [(b"content-type", kind), *headers, *self._cors()]
        await self._send({"type": "http.response.start", "status": status, "headers": own})

    def _cors(self) -> list[tuple[bytes, bytes]]:
        origin = self._origin.decode("latin-1")
        if not origin or not ({origin, "*"} & set(self._origins)):
            return []
        return [
            (b"access-control-allow-origin", self._origin if origin in self._origins else b"*"),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"content-type, content-encoding"),
            (b"vary", b"origin"),
        ]


def inflated(body: bytes, most: int) -> bytes:
    """Return what was compressed, all members of it.

    Raises:
        zlib.error: It is no gzip, or was cut.
        TooLargeError: It inflates beyond `most` bytes, or has very many members.
    """
    parts: list[bytes] = []
    view, at, size = memoryview(body), 0, 0
    for _ in range(MEMBERS_LIMIT):
        press, fed = zlib.decompressobj(wbits=31), b""
        while not press.eof:
            if not fed:
                fed = bytes(view[at : at + FED_BYTES])
                at += len(fed)
            part = press.decompress(fed, min(INFLATE_CHUNK, most + 1 - size))
            fed = press.unconsumed_tail
            size += len(part)
            if size > most:
                raise TooLargeError(f"a body may inflate to {most} bytes")
            if not (part or fed or press.eof) and at == len(view):
                raise zlib.error("the end is missing")
            parts.append(part)
        at = _behind_zeros(view, at - len(press.unused_data))
        if at == len(view):
            return b"".join(parts)
    raise TooLargeError(f"a body may have {MEMBERS_LIMIT} members")


def _behind_zeros(view: memoryview, at: int) -> int:
    """Return where the padding ends that may follow a member."""
    while part := bytes(view[at : at + FED_BYTES]):
        if rest := part.lstrip(b"\0"):
            return at + len(part) - len(rest)
        at += len(part)
    return at
