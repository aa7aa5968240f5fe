"""HTTP exchange over ASGI: a body inflated, a reply compressed and sent. Knows no endpoint.

Bodies are bounded while they inflate. Threads do the CPU-bound work. The parts of a stream are compressed separately,
several at once, and form one gzip stream.
"""

import asyncio
import gzip
import struct
import sys
import threading
import zlib
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeVar

from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.services.gateway.in_doubt import Post
from rolloutmq.services.gateway.web.in_hand import Held

Scope = Mapping[str, Any]
Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Part = tuple[int, Callable[[], bytes]]
"""Approximate size of a part of a stream, and the function that makes it."""

LARGE_BYTES: Final = 32 << 10
"""Size from which bodies are inflated and compressed in a thread: from here that costs more than the hand-over."""
LONG_BYTES: Final = 256 << 10
"""Size from which bodies are decoded and encoded in a thread. That holds the interpreter like the loop does and costs
more in a thread; it pays only if the loop would block for more than a millisecond or two."""
COMPRESS_BYTES: Final = 1000
"""Minimum size of a compressed reply, as with Atropos."""
INFLATE_CHUNK: Final = 1 << 20
FED_BYTES: Final = 1 << 16
"""Input per inflate call; the rest of the input is copied each time."""
MEMBERS_LIMIT: Final = 4096
"""Maximum gzip members; clients send one. Each costs a copy of the input."""
SIZE_DIGITS: Final = 18
"""Most digits of the size of a body; Python converts no text of thousands of digits, all of which may be zeros."""
SMALL_BYTES: Final = 8 << 10
"""Size below which work runs inline."""
SENT_BYTES: Final = 256 << 10
"""Part of a reply that is sent at once: what a client does not read stays in memory."""
STALLED_S: Final = 60.0
"""Time without progress after which a client counts as gone."""
AHEAD_PARTS: Final = 2
"""Parts of a stream made ahead of the one being sent; each is in memory until its turn."""
LONG_CHECKSUM_BYTES: Final = 1 << 20
"""Size whose CRC takes about a millisecond; larger checksums run in a thread."""
GZIP_HEAD: Final = b"\x1f\x8b\x08\0\0\0\0\0\0\xff"
GZIP_END: Final = b"\x03\0"
"""Final empty block; checksum and size follow."""
JSON: Final = b"application/json"
VARY: Final = (b"vary", b"accept-encoding")
_INTERPRETER: Final = threading.Lock()
_T = TypeVar("_T")


@dataclass(slots=True)
class Request:
    """One request with its body as it came."""

    method: str
    path: str
    query: Mapping[str, Sequence[str]]
    headers: Mapping[bytes, bytes]
    body: bytes = b""
    gone: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the client has closed the connection."""
    post: Post | None = None
    """The post it made; its reply ends it."""
    held: Held = field(default_factory=Held)
    """Its counted memory."""
    worker: str = ""
    """Worker of the run in its path, or empty."""
    token: str = ""
    """Token in its path, or empty."""

    def header(self, name: str) -> str:
        """Return a header by its lower-case name, empty if it is absent."""
        return self.headers.get(name.encode(), b"").decode("latin-1")

    @property
    def compressed(self) -> bool:
        """Return whether its body is declared as compressed."""
        return b"gzip" in self.headers.get(b"content-encoding", b"").lower()

    @property
    def announced_bytes(self) -> int:
        """Return the size of its body by its headers, 0 if they do not say it. Only good for a refusal."""
        digits = self.headers.get(b"content-length", b"").strip().lstrip(b"0")
        if not digits.isdigit():
            return 0
        return int(digits) if len(digits) <= SIZE_DIGITS else sys.maxsize

    @property
    def probable_bytes(self) -> int:
        """Return the inflated size of its body, as the body itself says; a guess that a client can falsify."""
        if not self.compressed or len(self.body) < len(GZIP_HEAD):
            return len(self.body)
        return max(len(self.body), int.from_bytes(self.body[-4:], "little"))


@dataclass(slots=True)
class Answer:
    """Reply to a request, except batches."""

    body: bytes
    status: int = 200
    kind: bytes = JSON
    headers: tuple[tuple[bytes, bytes], ...] = ()


class TooLargeError(Exception):
    """A body exceeds its limit, on arrival or inflated."""


class Pool(ThreadPoolExecutor):
    """Threads for long work, and turns for short work: one piece in each iteration of the loop.

    Without turns, a small request would wait for all bodies that arrive together, several times.
    """

    def __init__(self, threads: int) -> None:
        super().__init__(threads, thread_name_prefix="gateway")
        self.turn = asyncio.Lock()


async def off(pool: Pool, size: int, work: Callable[[], _T], least: int = LARGE_BYTES) -> _T:
    """Run long work in a thread, if its size is at least `least` bytes; other work in its turn."""
    if size < SMALL_BYTES:
        return work()
    if size >= least:
        return await asyncio.get_running_loop().run_in_executor(pool, work)
    async with pool.turn:
        made = work()
        await asyncio.sleep(0)
    return made


def in_turn(size: int, work: Callable[[], _T]) -> _T:
    """Run work that holds the interpreter; long pieces one at a time, so that the loop gets its share."""
    if size < LONG_BYTES:
        return work()
    with _INTERPRETER:
        return work()


def _pressed(make: Callable[[], bytes], level: int | None) -> tuple[bytes, bytes]:
    """Make a part; return it plain, and as a piece of a gzip stream independent of the earlier pieces."""
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
    """Sends a reply to its client, compressed if the client accepts that."""

    def __init__(self, send: Send, request: Request, config: GatewayConfig, pool: Pool) -> None:
        self.begun = False
        """Whether the status line was sent."""
        self.status = 0
        """The status that was sent; 0 before."""
        self._send = send
        self._origins = config.cors_origins
        self._origin = request.headers.get(b"origin", b"")
        self._gone = request.gone
        self._pool = pool
        self._level = config.gzip_level
        self._takes_gzip = b"gzip" in request.headers.get(b"accept-encoding", b"").lower()

    async def answer(self, answer: Answer) -> None:
        """Send the whole reply.

        Raises:
            TimeoutError: The client is connected but reads nothing.
        """
        body, headers = answer.body, [*answer.headers]
        if len(body) >= COMPRESS_BYTES:
            headers.append(VARY)
        if self._takes_gzip and len(body) >= COMPRESS_BYTES:
            headers.append((b"content-encoding", b"gzip"))
            body = await off(self._pool, len(body), partial(gzip.compress, body, self._level))
        headers.append((b"content-length", b"%d" % len(body)))
        await self._start(answer.status, answer.kind, headers)
        for at in range(0, len(body) or 1, SENT_BYTES):
            async with asyncio.timeout(STALLED_S):
                part, more = body[at : at + SENT_BYTES], at + SENT_BYTES < len(body)
                await self._send({"type": "http.response.body", "body": part, "more_body": more})

    async def stream(self, parts: Iterable[Part]) -> None:
        """Send parts while later ones are made; `end` completes the reply. Stops when the client is gone.

        Raises:
            TimeoutError: The client is connected but reads nothing.
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
        """Yield parts in order, plain and as sent, while some later ones are made."""
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
        """Complete the reply."""
        await self._send({"type": "http.response.body", "body": b""})

    async def _start(self, status: int, kind: bytes, headers: list[tuple[bytes, bytes]]) -> None:
        self.begun, self.status = True, status
        own = [(b"content-type", kind), *headers, *self._cors()]
        await self._send({"type": "http.response.start", "status": status, "headers": own})

    def _cors(self) -> list[tuple[bytes, bytes]]:
        origin = self._origin.decode("latin-1")
        if not origin or not ({origin, "*"} & set(self._origins)):
            return []
        return [
            (b"access-control-allow-origin", self._origin if origin in self._origins else b"*"),
            (b"access-control-allow-methods", b"GET, POST"),
            (b"access-control-allow-headers", b"content-type, content-encoding, authorization"),
            (b"vary", b"origin"),
        ]


def inflated(body: bytes, most: int) -> bytearray:
    """Return the inflated body, all members of it.

    Raises:
        zlib.error: Not gzip, or truncated.
        TooLargeError: It inflates beyond `most` bytes, or has too many members.
    """
    whole = bytearray()  # grows in place: parts and their sum would be in memory together
    view, at = memoryview(body), 0
    for _ in range(MEMBERS_LIMIT):
        press, fed = zlib.decompressobj(wbits=31), b""
        while not press.eof:
            if not fed:
                fed = bytes(view[at : at + FED_BYTES])
                at += len(fed)
            part = press.decompress(fed, min(INFLATE_CHUNK, most + 1 - len(whole)))
            fed = press.unconsumed_tail
            whole += part
            if len(whole) > most:
                raise TooLargeError(f"body inflates to more than {most} bytes")
            if not (part or fed or press.eof) and at == len(view):
                raise zlib.error("truncated")
        at = _behind_zeros(view, at - len(press.unused_data))
        if at == len(view):
            return whole
    raise TooLargeError(f"body with more than {MEMBERS_LIMIT} gzip members")


def _behind_zeros(view: memoryview, at: int) -> int:
    """Return the end of the padding after a member."""
    while part := bytes(view[at : at + FED_BYTES]):
        if rest := part.lstrip(b"\0"):
            return at + len(part) - len(rest)
        at += len(part)
    return at
