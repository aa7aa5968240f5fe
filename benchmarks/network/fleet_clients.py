"""Processes of `network.fleet`: one with many producers, and the trainer. Each answers commands, a line for a line.

    python -m benchmarks.network.fleet_clients producers ADDRESS KEY DIRECTORY PREFIX COUNT LIFE
    python -m benchmarks.network.fleet_clients trainer ADDRESS KEY DIRECTORY

A process of producers knows these commands. Times are of the monotonic clock, which all processes of a host share.

    open        open all producers, and have a group of each acked; answers when
    load RATE   send so many groups a second from now on, evenly spread over the producers; answers `loaded`
    probe       have another group of each producer acked; answers when, and the longest wait in seconds
    count       answers the number of acked groups
    end         flush, close, and end
"""

import asyncio
import contextlib
import random
import sys
import time
from itertools import count, cycle
from pathlib import Path
from typing import Final

import uvloop

from benchmarks.harness import stage, workload
from benchmarks.harness.workload import Shape
from rolloutmq import Consumer, Group, Producer, remote
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.wire.envelope import PolicyVersion

SHAPE: Final = Shape.of_bytes(16_000)
BATCH: Final = 64
"""Groups of a batch."""
POOL: Final = 8
"""Different groups of a process."""
DRAIN_S: Final = 60.0
PULL_S: Final = 0.5


class Clients:
    """The producers of one process."""

    def __init__(self, where: Where, directory: Path, prefix: str, number: int, life: int) -> None:
        self._where = where
        self._directory = directory
        self._names = [f"{prefix}-{place}" for place in range(number)]
        self._life = life
        self._shapes = cycle([Group.build("g", **workload.columns(SHAPE, seed)) for seed in range(POOL)])
        self._numbers = count()
        self._over = asyncio.Event()
        self._producers: list[Producer] = []

    async def serve(self) -> None:
        """Answer commands until the last one."""
        async with asyncio.TaskGroup() as tasks:
            while (words := (await asyncio.to_thread(sys.stdin.readline)).split()) and words[0] != "end":
                print(await self._answer(tasks, *words), flush=True)
            self._over.set()

    async def _answer(self, tasks: asyncio.TaskGroup, what: str, *words: str) -> str:
        if what == "open":
            opened = [asyncio.get_running_loop().create_future() for _ in self._names]
            for name, future in zip(self._names, opened, strict=True):
                tasks.create_task(self._hold(name, future))
            self._producers = await asyncio.gather(*opened)
            return await self._probed()
        if what == "load":
            period_s = len(self._producers) / float(words[0])
            for producer in self._producers:
                tasks.create_task(self._send(producer, period_s))
            return "loaded"
        if what == "probe":
            return await self._probed()
        assert what == "count", what
        return str(sum(producer.accepted for producer in self._producers))

    async def _hold(self, name: str, opened: "asyncio.Future[Producer]") -> None:
        log = self._directory / f"{name}.jsonl"
        async with Producer.open(
            self._where,
            env=stage.ENV,
            producer=name,
            group_size=SHAPE.sequences,
            slots=2,
            ack_log=log,
            drain_s=DRAIN_S,
        ) as producer:
            opened.set_result(producer)
            await self._over.wait()

    async def _probed(self) -> str:
        """Have a group of each producer acked; return when that was, and the longest wait."""
        began = time.monotonic()
        await asyncio.gather(*map(self._probe, self._producers))
        return f"{time.monotonic()} {time.monotonic() - began}"

    async def _probe(self, producer: Producer) -> None:
        await (await producer.send_acked(self._group(producer)))

    async def _send(self, producer: Producer, period_s: float) -> None:
        due = time.monotonic() + random.random() * period_s
        while not self._over.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._over.wait(), max(0.0, due - time.monotonic()))
                return
            due = max(due + period_s, time.monotonic())
            await producer.send(self._group(producer))

    def _group(self, producer: Producer) -> Group:
        made = next(self._shapes)
        return Group(
            f"{producer.name}/{self._life}/{next(self._numbers)}",
            made.columns,
            sequences=made.sequences,
            tokens=made.tokens,
            oldest=PolicyVersion(),
            stamped=False,
        )


async def _train(where: Where, directory: Path) -> None:
    """Train until the line `end`; write down the ids of each settled batch."""
    ended = asyncio.create_task(asyncio.to_thread(sys.stdin.readline))
    with (directory / "trained").open("a") as log:
        async with Consumer.open(where, sequences=BATCH * SHAPE.sequences) as consumer:
            print("opened", flush=True)
            while not ended.done():
                version = consumer.version
                batch = await consumer.pull(version.step + 1, version, PULL_S)
                if batch is None:
                    continue
                with contextlib.suppress(LeaseLostError):
                    await batch.ack()
                    log.write("".join(f"{group.group_id}\n" for group in batch.groups))
                    log.flush()


def main(role: str, address: str, key: str, directory: str, *words: str) -> None:
    """Run one process."""
    where, place = remote(address, key), Path(directory)
    stage.ready()
    if role == "trainer":
        uvloop.run(_train(where, place))
    else:
        prefix, number, life = words
        uvloop.run(_serve(where, place, prefix, int(number), int(life)))


async def _serve(where: Where, place: Path, prefix: str, number: int, life: int) -> None:
    await Clients(where, place, prefix, number, life).serve()


if __name__ == "__main__":
    main(*sys.argv[1:])
