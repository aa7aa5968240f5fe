"""A relay of TCP connections between two networks, and the faults of the way between them.

    python -I -S relay_program.py

It makes two network namespaces, `front` and `back`, and prints their descriptors. Each command is a line of JSON on
its standard input, and each has one line as its answer:

    {"do": "listen", "ports": [7760], "target": "10.77.0.1"}   accept at the front, connect at the back
    {"do": "set", "delay_s": 0.2, "bytes_per_s": 0, "stalled": false, "corrupt_every": 0}
    {"do": "cut"}       end all connections by RST; "ports": only those
    {"do": "half_open"} forget all connections, or those of "ports": nothing is forwarded any more, also no end
    {"do": "stats"}     connections so far, living ones, forwarded bytes, changed bytes

A delayed byte does not hold back those behind it: up to `IN_FLIGHT_BYTES` are under way in each direction, as on a long
line. A stalled relay reads nothing, and goes on later without a loss. The kernel of the relay answers keepalive probes
in any case; for a peer that answers nothing, pull the cable of a host.
"""

import asyncio
import ctypes
import json
import os
import random
import socket
import struct
import sys
import time
from collections import deque
from typing import Any, Final

CLONE_NEWNET: Final = 0x40000000
CHUNK: Final = 1 << 16
IN_FLIGHT_BYTES: Final = 64 << 20
Ends = tuple[socket.socket, socket.socket]
_libc: Final = ctypes.CDLL(None, use_errno=True)


def new_network() -> int:
    """Enter a new network namespace and return its descriptor."""
    if _libc.unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")
    return os.open("/proc/self/ns/net", os.O_RDONLY)


def socket_in(network: int) -> socket.socket:
    """Make a socket in a network namespace."""
    if _libc.setns(network, CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    made = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    made.setblocking(False)
    return made


class Faults:
    """What the way does to the bytes, and counters of it."""

    def __init__(self) -> None:
        self.delay_s = 0.0
        self.bytes_per_s = 0
        self.corrupt_every = 0
        self.clear = asyncio.Event()
        """Set while the way is not stalled."""
        self.clear.set()
        self.forwarded = self.changed = self.accepted = 0
        self._rng = random.Random(0)
        self._next_change = 0

    def set(self, told: dict[str, Any]) -> None:
        for name in ("delay_s", "bytes_per_s", "corrupt_every"):
            setattr(self, name, told.get(name, getattr(self, name)))
        if "corrupt_every" in told:
            self._draw(self.forwarded)
        if told.get("stalled", not self.clear.is_set()):
            self.clear.clear()
        else:
            self.clear.set()

    def passed(self, data: bytes) -> bytes:
        """Count bytes that are forwarded, and return them as they arrive."""
        began = self.forwarded
        self.forwarded += len(data)
        if not self.corrupt_every or self._next_change >= self.forwarded:
            return data
        hurt = bytearray(data)
        while self._next_change < self.forwarded:
            hurt[self._next_change - began] ^= 1 << self._rng.randrange(8)
            self.changed += 1
            self._draw(self._next_change + 1)
        return bytes(hurt)

    def _draw(self, since: int) -> None:
        self._next_change = since + self._rng.randrange(2 * max(1, self.corrupt_every))


class Way:
    """One direction of a connection."""

    def __init__(self, faults: Faults, source: socket.socket, sink: socket.socket) -> None:
        self._faults = faults
        self._source, self._sink = source, sink
        self._flying: deque[tuple[float, bytes]] = deque()
        self._nbytes = 0
        self._news = asyncio.Event()
        self._room = asyncio.Event()
        self._room.set()

    async def read(self) -> None:
        """Read until the source ends; an empty chunk says so."""
        loop = asyncio.get_running_loop()
        data = b"-"
        while data:
            await self._faults.clear.wait()
            await self._room.wait()
            data = await loop.sock_recv(self._source, CHUNK)
            await self._faults.clear.wait()
            self._flying.append((time.monotonic() + self._faults.delay_s, data))
            self._nbytes += len(data)
            self._news.set()
            if self._nbytes >= IN_FLIGHT_BYTES:
                self._room.clear()

    async def write(self) -> None:
        """Write what is due until the source has ended."""
        loop = asyncio.get_running_loop()
        while True:
            while not self._flying:
                self._news.clear()
                await self._news.wait()
            due, data = self._flying[0]
            if (left := due - time.monotonic()) > 0:
                await asyncio.sleep(left)
                continue
            await self._faults.clear.wait()
            self._flying.popleft()
            self._nbytes -= len(data)
            self._room.set()
            if not data:
                self._sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sink, self._faults.passed(data))
            if self._faults.bytes_per_s:
                await asyncio.sleep(len(data) / self._faults.bytes_per_s)


class Relay:
    """All connections."""

    def __init__(self, front: int, back: int) -> None:
        self._front, self._back = front, back
        self._target = ""
        self._faults = Faults()
        self._listeners: dict[int, asyncio.Task[None]] = {}
        self._living: dict[asyncio.Task[None], tuple[int, Ends]] = {}
        self._forgotten: list[socket.socket] = []

    def do(self, told: dict[str, Any]) -> dict[str, Any]:
        """Carry out a command and return the answer."""
        match told["do"]:
            case "listen":
                self._target = told["target"]
                for port in told["ports"]:
                    self._listen(port)
            case "set":
                self._faults.set(told)
            case "cut":
                for task, ends in self._connections(told):
                    task.cancel()
                    for end in ends:
                        reset(end)
                while self._forgotten:
                    reset(self._forgotten.pop())
            case "half_open":
                for task, ends in self._connections(told):
                    self._forgotten += [end.dup() for end in ends]
                    task.cancel()
            case "stats":
                pass
        faults = self._faults
        return {
            "accepted": faults.accepted,
            "living": len(self._living),
            "forwarded": faults.forwarded,
            "changed": faults.changed,
        }

    def _connections(self, told: dict[str, Any]) -> list[tuple[asyncio.Task[None], Ends]]:
        ports = told.get("ports")
        return [(task, ends) for task, (port, ends) in self._living.items() if not ports or port in ports]

    def _listen(self, port: int) -> None:
        if port in self._listeners:
            return
        listener = socket_in(self._front)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("0.0.0.0", port))
        listener.listen(1024)
        self._listeners[port] = asyncio.create_task(self._accept(listener, port))

    async def _accept(self, listener: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        while True:
            near, _ = await loop.sock_accept(listener)
            far = socket_in(self._back)
            self._faults.accepted += 1
            task = asyncio.create_task(self._connect(near, far, port))
            self._living[task] = port, (near, far)
            task.add_done_callback(self._living.pop)

    async def _connect(self, near: socket.socket, far: socket.socket, port: int) -> None:
        loop = asyncio.get_running_loop()
        for end in (near, far):
            end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await loop.sock_connect(far, (self._target, port))
            there, back = Way(self._faults, near, far), Way(self._faults, far, near)
            async with asyncio.TaskGroup() as tasks:
                for way in (there, back):
                    tasks.create_task(way.read())
                    tasks.create_task(way.write())
        except* OSError:
            reset(near)
            reset(far)
        finally:
            near.close()
            far.close()


def reset(end: socket.socket) -> None:
    """End a connection by RST. May be called twice."""
    if end.fileno() >= 0:
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.close()


async def main() -> None:
    front, back = new_network(), new_network()
    print(json.dumps({"front": front, "back": back}), flush=True)  # noqa: T201 - the test reads it
    relay = Relay(front, back)
    loop = asyncio.get_running_loop()
    commands = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(commands), sys.stdin)
    while line := await commands.readline():
        print(json.dumps(relay.do(json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    asyncio.run(main())
