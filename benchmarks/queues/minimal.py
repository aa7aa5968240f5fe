"""A minimal bus in Python, beside a bare relay: how much of a lone group's latency any such bus has.

PUSH -> a Python loop that decodes one envelope and answers the request that waits -> an event loop that decodes it
and makes three arrays. It has no rules: no session, credit, lease, checksum, journal, or count. Its latency is a floor
for a bus whose ends are event loops of Python, and no promise.

    python -m benchmarks.queues.minimal ROLE DIRECTORY SHAPE    one process of a round
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks.broker.one_way import GROUPS, PAUSE_S, SHAPE, WARM_UP, age_ms, opened, played, relay_ms
from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, near
from benchmarks.harness.workload import Shape

MODULE: Final = "queues.minimal"
ROLES: Final = ("receive", "broker", "send")


class _Header(msgspec.Struct, array_like=True):
    id: str
    seq: int
    nbytes: int
    crc: int
    sequences: int
    tokens: int
    version: tuple[int, int]


class _Envelope(msgspec.Struct, array_like=True):
    protocol: int
    producer: str
    session: int
    groups: tuple[_Header, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Envelope).decode


def rows() -> Iterator[Row]:
    """The median and the 99th percentile."""
    for percentile in (50, 99):
        yield near(
            f"one group through a minimal bus in Python, ms, p{percentile}",
            str(SHAPE),
            partial(minimal_ms, percentile),
            partial(relay_ms, percentile),
            "a bare relay: PUSH, zmq.proxy, PULL",
        )


def minimal_ms(percentile: int, shape: Shape = SHAPE) -> float:
    """Run one round through a minimal bus."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return played(MODULE, Path(directory), shape, percentile, ROLES)


def _broker(directory: Path, _shape: Shape) -> None:
    with opened(zmq.PULL) as ingest, ingest.context.socket(zmq.ROUTER) as serve:
        serve.linger = 0
        ingest.bind(f"ipc://{directory}/in")
        serve.bind(f"ipc://{directory}/serve")
        poller = zmq.Poller()
        poller.register(ingest, zmq.POLLIN)
        poller.register(serve, zmq.POLLIN)
        stage.ready()
        waiting = b""
        while True:
            for readable, _ in poller.poll():
                if readable is serve:
                    waiting = serve.recv_multipart()[0]
                else:
                    head, body = ingest.recv_multipart(copy=False)
                    serve.send_multipart((waiting, _encode(_decode(head.buffer)), body), copy=False)


async def _send(directory: Path, shape: Shape) -> None:
    with opened(zmq.PUSH) as push:
        push.connect(f"ipc://{directory}/in")
        await asyncio.to_thread(stage.ready)
        for seq, body in enumerate(islice(cycle(workload.bodies(shape)), WARM_UP + GROUPS)):
            await asyncio.sleep(PAUSE_S)
            name, tokens = str(time.perf_counter_ns()), shape.sequences * shape.tokens
            header = _Header(name, seq, len(body), 1, shape.sequences, tokens, (0, seq))
            push.send_multipart((_encode(_Envelope(1, "producer", 1, (header,))), body))
        await asyncio.to_thread(sys.stdin.readline)  # the socket drops what is under way when it closes


async def _receive(directory: Path, _shape: Shape) -> None:
    with opened(zmq.DEALER) as dealer:
        dealer.connect(f"ipc://{directory}/serve")
        await asyncio.to_thread(stage.ready)
        loop = asyncio.get_running_loop()
        woken = asyncio.Event()
        descriptor = dealer.getsockopt(zmq.FD)
        assert isinstance(descriptor, int)
        loop.add_reader(descriptor, woken.set)
        took = []
        for _ in range(WARM_UP + GROUPS):
            dealer.send(b"pull")
            while not _is_readable(dealer):
                woken.clear()
                if not _is_readable(dealer):
                    await woken.wait()
            head, body = dealer.recv_multipart(copy=False)
            (header,) = _decode(head.buffer).groups
            third = header.nbytes // 12
            for part in range(3):
                np.frombuffer(body.buffer, np.float32, third, part * third * 4)
            took.append(age_ms(header.id))
        loop.remove_reader(descriptor)
        print(*took, flush=True)


def _is_readable(socket: "zmq.Socket[bytes]") -> bool:
    events = socket.getsockopt(zmq.EVENTS)
    assert isinstance(events, int)
    return bool(events & zmq.POLLIN)


def main(role: str, directory: str, shape: str) -> None:
    """Run one process of a round."""
    about = Path(directory), Shape.parse(shape)
    match role:
        case "broker":
            _broker(*about)
        case "send":
            uvloop.run(_send(*about))
        case "receive":
            uvloop.run(_receive(*about))


if __name__ == "__main__":
    main(*sys.argv[1:])
