"""Idle one-way latency: from `send` until a waiting `pull` returns, one group at a time; in ms, durability memory.

The rival is a bare relay of the same bytes: PUSH -> `zmq.proxy` -> PULL over ipc, which stores, checks and decodes
nothing. Sender, broker or proxy, and receiver are separate processes; the id of a group is the time of its sending. A
pause between two groups lets everything fall idle.

    python -m benchmarks.broker.one_way ROLE DIRECTORY SHAPE    one process of a round
"""

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from typing import Final

import numpy as np
import uvloop
import zmq

from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, near
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.schemas.files import RunLayout

SHAPE: Final = Shape.of_bytes(5_300)
PAUSE_S: Final = 0.005
WARM_UP: Final = 50
GROUPS: Final = 500
"""Counted groups of one round."""
STAMP_BYTES: Final = 20
GOAL: Final = 2.0
MODULE: Final = "broker.one_way"


def rows() -> Iterator[Row]:
    """The median and the 99th percentile, in the event loops and in the blocking clients."""
    for kind, goal in (("async", GOAL), ("blocking", None)):
        for percentile in (50, 99):
            yield near(
                f"one group, send until pull returns, ms, p{percentile}, {kind}, memory",
                str(SHAPE),
                partial(ours_ms, kind, percentile),
                partial(relay_ms, percentile),
                "a bare relay: PUSH, zmq.proxy, PULL",
                goal,
            )


def ours_ms(kind: str, percentile: int, shape: Shape = SHAPE) -> float:
    """Run one round through a new broker."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        place = Path(directory)
        with stage.broker(RunLayout(place), stage.config(durability="memory")):
            return played(MODULE, place, shape, percentile, (f"receive-{kind}", f"send-{kind}"))


def relay_ms(percentile: int, shape: Shape = SHAPE) -> float:
    """Run one round through a bare relay."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        return played(MODULE, Path(directory), shape, percentile, ("relay-receive", "relay", "relay-send"))


def played(module: str, directory: Path, shape: Shape, percentile: int, roles: Sequence[str]) -> float:
    """Play the roles of a module, the receiver first; return a percentile of what it measured."""
    with stage.players(module, [(role, directory, shape.word) for role in roles]) as players:
        for player in players:
            player.wait_ready()
        for player in players:
            player.begin()
        took = np.array(players[0].line().split(), np.float64)
    return float(np.percentile(took[WARM_UP:], percentile))


def _stamped(shape: Shape) -> Iterator[Group]:
    """Yield groups whose id is the present time in ns."""
    for group in islice(cycle(workload.pool(shape)), WARM_UP + GROUPS):
        yield Group(
            str(time.perf_counter_ns()),
            group.columns,
            sequences=group.sequences,
            tokens=group.tokens,
            stamped=False,
        )


def age_ms(sent_ns: int | str) -> float:
    """Return the milliseconds since that time of the performance counter."""
    return (time.perf_counter_ns() - int(sent_ns)) / 1e6


async def _send(directory: Path, shape: Shape) -> None:
    async with Producer.open(directory, env=stage.ENV, group_size=shape.sequences, slots=8) as producer:
        await asyncio.to_thread(stage.ready)
        groups = _stamped(shape)
        while True:
            await asyncio.sleep(PAUSE_S)
            if (group := next(groups, None)) is None:
                return
            await producer.send(group)


async def _receive(directory: Path, shape: Shape) -> None:
    async with Consumer.open(directory, sequences=shape.sequences) as consumer:
        await asyncio.to_thread(stage.ready)
        took = []
        async for batch in consumer:
            took.append(age_ms(batch.groups[0].group_id))
            await batch.ack()
            if len(took) == WARM_UP + GROUPS:
                break
        print(*took, flush=True)


def _send_blocking(directory: Path, shape: Shape) -> None:
    with Producer.blocking(directory, env=stage.ENV, group_size=shape.sequences, slots=8) as producer:
        stage.ready()
        groups = _stamped(shape)
        while True:
            time.sleep(PAUSE_S)
            if (group := next(groups, None)) is None:
                return
            producer.send(group)


def _receive_blocking(directory: Path, shape: Shape) -> None:
    with Consumer.blocking(directory, sequences=shape.sequences) as consumer:
        stage.ready()
        took = []
        for batch in consumer:
            took.append(age_ms(batch.groups[0].group_id))
            batch.ack()
            if len(took) == WARM_UP + GROUPS:
                break
        print(*took, flush=True)


@contextlib.contextmanager
def opened(kind: int) -> Iterator["zmq.Socket[bytes]"]:
    """Open a socket with a context of its own."""
    with zmq.Context() as context, context.socket(kind) as made:
        made.linger = 0
        yield made


def _relay(directory: Path, _shape: Shape) -> None:
    with opened(zmq.PULL) as inward, inward.context.socket(zmq.PUSH) as outward:
        outward.linger = 0
        inward.bind(f"ipc://{directory}/in")
        outward.bind(f"ipc://{directory}/out")
        stage.ready()
        zmq.proxy(inward, outward)


def _relay_send(directory: Path, shape: Shape) -> None:
    bodies = workload.bodies(shape)
    with opened(zmq.PUSH) as push:
        push.connect(f"ipc://{directory}/in")
        stage.ready()
        for body in islice(cycle(bodies), WARM_UP + GROUPS):
            time.sleep(PAUSE_S)
            push.send(b"%020d" % time.perf_counter_ns() + body)
        sys.stdin.readline()  # the socket drops what is under way when it closes


def _relay_receive(directory: Path, _shape: Shape) -> None:
    with opened(zmq.PULL) as pull:
        pull.connect(f"ipc://{directory}/out")
        stage.ready()
        took = [age_ms(pull.recv()[:STAMP_BYTES].decode()) for _ in range(WARM_UP + GROUPS)]
        print(*took, flush=True)


def main(role: str, directory: str, shape: str) -> None:
    """Run one process of a round."""
    about = Path(directory), Shape.parse(shape)
    match role:
        case "send-async":
            uvloop.run(_send(*about))
        case "receive-async":
            uvloop.run(_receive(*about))
        case "send-blocking":
            _send_blocking(*about)
        case "receive-blocking":
            _receive_blocking(*about)
        case "relay":
            _relay(*about)
        case "relay-send":
            _relay_send(*about)
        case "relay-receive":
            _relay_receive(*about)


if __name__ == "__main__":
    main(*sys.argv[1:])
