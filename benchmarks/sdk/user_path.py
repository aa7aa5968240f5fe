"""Groups per second of a program as a user writes it: `Group.build` and `send` for each group, default retention.

Two producers build each group from numpy arrays and send it; one consumer pulls, decodes and acks. The rival does the
same work without a bus: msgpack of the arrays' bytes over PUSH -> `zmq.proxy` -> PULL, decoded to arrays again. It
stores, checks and acks nothing.

Both are measured in their steady state. The mark is small enough that the queue is full before the clock starts, so
the rate is that of the whole chain and not of a filling queue.

    python -m benchmarks.sdk.user_path ROLE DIRECTORY SHAPE [SECONDS]    one process of a round
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import uvloop
import zmq

from benchmarks.broker import proxy, throughput
from benchmarks.harness import scratch, stage, workload
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import Durability

PRODUCERS: Final = 2
SLOTS: Final = 64
HIGH_BYTES: Final = 48 << 20
WARM_UP_S: Final = 3.0
LASTS_S: Final = 4.0
ROUNDS: Final = 5
DISTINCT: Final = 200
"""Distinct groups of a producer, at most."""
MARK: Final = 100
"""High-water mark of the rival's sockets, in messages; see `benchmarks.broker.proxy`."""

KINDS: Final = {"async": "Producer", "blocking": "Producer.blocking"}


def rows() -> Iterator[Row]:
    """Small and middle groups, from both kinds of producers; at `disk` the default."""
    for durability in (Durability.MEMORY, Durability.DISK):
        for shape in (throughput.SMALL, throughput.MIDDLE):
            for kind, name in KINDS.items():
                yield compare(
                    f"groups/s of a user's program, {name}, {durability.value}",
                    str(shape),
                    partial(rate, kind, shape, durability),
                    partial(rival_rate, shape),
                    "msgpack of the same arrays over zmq.proxy, which keeps nothing",
                    rounds=ROUNDS,
                )


def rate(
    kind: str,
    shape: Shape,
    durability: Durability,
    lasts_s: float = LASTS_S,
    warm_up_s: float = WARM_UP_S,
) -> float:
    """Run one round through a new broker, and return groups per second."""
    about = stage.config(
        durability=durability.value, high_bytes=HIGH_BYTES, retain_bytes=BrokerConfig().retain_bytes
    )
    with scratch.directory() as directory:
        layout = RunLayout(directory)
        write_json(layout.config, about)
        roles = ("consumer", *(f"{kind}-{number}" for number in range(PRODUCERS)))
        with stage.broker(layout):
            return _round(directory, shape, roles, lasts_s, warm_up_s)


def rival_rate(shape: Shape, lasts_s: float = LASTS_S, warm_up_s: float = WARM_UP_S) -> float:
    """Run one round of the rival, and return groups per second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        mode = proxy.Mode(copy_out=False, copy_in=False, frames=1, mark=MARK)
        with stage.player("broker.proxy", "proxy", directory, shape.word, mode.word) as middle:
            middle.wait_ready()
            middle.begin()
            roles = ("rival-consumer", *(f"rival-{number}" for number in range(PRODUCERS)))
            return _round(Path(directory), shape, roles, lasts_s, warm_up_s)


def _round(directory: Path, shape: Shape, roles: tuple[str, ...], lasts_s: float, warm_up_s: float) -> float:
    """Play the roles, the consumer first, and return what it measured."""
    calls = [(role, directory, shape.word, lasts_s, warm_up_s) for role in roles]
    with stage.players("sdk.user_path", calls) as players:
        for player in players:
            player.wait_ready()
        for player in players:
            player.begin()
        return players[0].figure()


def _columns(shape: Shape, number: int) -> list[dict[str, Any]]:
    distinct = max(1, min(DISTINCT, workload.POOL_BYTES // shape.nbytes))
    return [workload.columns(shape, number * distinct + one) for one in range(distinct)]


def _groups(shape: Shape, number: int) -> Iterator[Group]:
    """Build groups for ever, each under its own id."""
    for one, columns in zip(count(), cycle(_columns(shape, number))):
        yield Group.build(f"{number}/{one}", **columns)


async def _send(number: int, directory: Path, shape: Shape) -> None:
    async with Producer.open(
        directory, env=stage.ENV, group_size=shape.sequences, slots=SLOTS, producer=f"bench-{number}"
    ) as producer:
        groups = _groups(shape, number)
        await producer.send(next(groups))
        stage.ready()
        for group in groups:
            await producer.send(group)


def _send_blocking(number: int, directory: Path, shape: Shape) -> None:
    with Producer.blocking(
        directory, env=stage.ENV, group_size=shape.sequences, slots=SLOTS, producer=f"bench-{number}"
    ) as producer:
        groups = _groups(shape, number)
        producer.send(next(groups))
        stage.ready()
        for group in groups:
            producer.send(group)


async def _consume(directory: Path, shape: Shape, lasts_s: float, warm_up_s: float) -> None:
    sequences = throughput.batch_groups(shape) * shape.sequences
    async with Consumer.open(directory, sequences=sequences, ahead=True) as consumer:
        stage.ready()
        for seconds in (warm_up_s, lasts_s):
            done, started = 0, time.perf_counter()
            async for batch in consumer:
                done += len(batch.groups)
                await batch.ack()
                if (spent := time.perf_counter() - started) >= seconds:
                    break
        print(done / spent, flush=True)


def _rival_send(number: int, directory: Path, shape: Shape) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as push:
        push.linger = 0
        push.set_hwm(MARK)
        columns = _columns(shape, number)
        stage.ready()
        push.connect(f"ipc://{directory}/in")
        for one, group in zip(count(), cycle(columns)):
            arrays = {name: (values.dtype.str, values.shape, values.data) for name, values in group.items()}
            push.send(msgspec.msgpack.encode((f"{number}/{one}", arrays)), copy=False)


def _rival_consume(directory: Path, lasts_s: float, warm_up_s: float) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as pull:
        pull.linger = 0
        pull.set_hwm(MARK)
        stage.ready()
        pull.connect(f"ipc://{directory}/out")
        for seconds in (warm_up_s, lasts_s):
            done, started = 0, time.perf_counter()
            while (spent := time.perf_counter() - started) < seconds:
                _, arrays = msgspec.msgpack.decode(pull.recv())
                _ = {
                    name: np.frombuffer(data, dtype).reshape(shape)
                    for name, (dtype, shape, data) in arrays.items()
                }
                done += 1
        print(done / spent, flush=True)


def main(role: str, directory: str, shape: str, lasts_s: str, warm_up_s: str) -> None:
    """Run one process of a round."""
    place, form, clock = Path(directory), Shape.parse(shape), (float(lasts_s), float(warm_up_s))
    kind, _, number = role.rpartition("-")
    if role == "consumer":
        uvloop.run(_consume(place, form, *clock))
    elif role == "rival-consumer":
        _rival_consume(place, *clock)
    elif kind == "async":
        uvloop.run(_send(int(number), place, form))
    elif kind == "blocking":
        _send_blocking(int(number), place, form)
    else:
        _rival_send(int(number), place, form)


if __name__ == "__main__":
    main(*sys.argv[1:])
