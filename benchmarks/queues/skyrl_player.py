"""The processes of a round of `skyrl`.

    python benchmarks/queues/skyrl_player.py ROLE DIRECTORY LASTS_S

`worker` answers tasks with prepared groups. `consumer` and `generator` are trainers: they keep `AHEAD` tasks under way,
and settle the groups of a step. One has the groups as the consumer of groups returns them, in our environment; the
other has the rows that SkyRL trains on, from `generate`, in SkyRL's environment.

A trainer prints groups per second, and the milliseconds of CPU that its process used for a group, by all its threads.
"""

import asyncio
import sys
import time
import typing
from collections.abc import Awaitable, Callable
from itertools import count, cycle
from pathlib import Path
from typing import Any, Final

import typing_extensions
import uvloop

from benchmarks.harness import stage
from benchmarks.queues.transferqueue import BATCH, GROUP, SPOOL_BYTES, samples
from rolloutmq import Group, PolicyVersion, Producer, Task, TaskClient, TaskTaker
from rolloutmq.bus.consumer.groups import GroupConsumer, HeldGroup
from rolloutmq.schemas.wire.requests import GROUPS_LIMIT, WINDOW_LIMIT

STEP: Final = BATCH // GROUP
"""Groups of a step: those of a batch in the rows of TransferQueue."""
AHEAD: Final = 2 * STEP
"""Tasks under way."""
WARM_UP: Final = 2
"""Steps before the clock starts."""

Step = Callable[[], Awaitable[None]]
"""Takes one step."""


async def work(directory: Path) -> None:
    """Answer tasks until the process is killed."""
    made = cycle([Group.build("g", **samples(GROUP, number)) for number in range(STEP)])
    async with (
        Producer.open(
            directory, env=stage.ENV, producer="bench", group_size=GROUP, slots=STEP, spool_bytes=SPOOL_BYTES,
            drain_s=0.0,
        ) as producer,
        TaskTaker.open(directory, "bench", lambda: producer.session) as taker,
    ):  # fmt: skip
        await asyncio.to_thread(stage.ready)
        while True:
            for task in await taker.take(STEP):
                one = next(made)
                group = Group(
                    f"g-{task.id.replace('/', '.')}",
                    one.columns,
                    sequences=one.sequences,
                    tokens=one.tokens,
                    task=task.id,
                    stamped=False,
                )
                await producer.send(group)


async def consume(directory: Path, lasts_s: float) -> None:
    """Get groups by the consumer of groups."""
    async with (
        TaskClient.open(directory) as tasks,
        GroupConsumer.open(
            directory, batch_sequences=BATCH, window=WINDOW_LIMIT, groups=GROUPS_LIMIT
        ) as consumer,
    ):

        async def ask(groups: int) -> None:
            await tasks.submit([Task(env=stage.ENV, size=GROUP) for _ in range(groups)])

        async def step() -> None:
            held: list[HeldGroup] = [await consumer.get() for _ in range(STEP)]
            await ask(STEP)
            await consumer.settle(held)

        await ask(AHEAD)
        await timed(step, lasts_s)


async def generate(directory: Path, lasts_s: float) -> None:
    """Get rows by SkyRL's `generate`: one call for each group, as its fully asynchronous trainer does."""
    typing.TypedDict = typing_extensions.TypedDict  # SkyRL 0.3 on Python 3.11
    from skyrl.train.generators.base import TrajectoryID

    from rolloutmq.trainer.integrations.skyrl.generator import BusGenerator

    generator = BusGenerator(directory, batch_sequences=BATCH)
    generator.start(PolicyVersion())
    numbers, steps = count(), count(1)
    done: list[str] = []
    running: set[asyncio.Task[str]] = set()

    async def one() -> str:
        uid = str(next(numbers))
        given: dict[str, Any] = {
            "prompts": [[{"role": "user", "content": uid}]] * GROUP,
            "env_classes": [stage.ENV] * GROUP,
            "trajectory_ids": [TrajectoryID(uid, repetition) for repetition in range(GROUP)],
        }
        output = await generator.generate(given)
        assert set(output["stop_reasons"]) == {"stop"}
        return uid

    async def step() -> None:
        while len(done) < STEP:
            running.update(asyncio.create_task(one()) for _ in range(AHEAD - len(running)))
            ended, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
            running.difference_update(ended)
            done.extend(task.result() for task in ended)
        settling = generator.settlement(done[:STEP], (), PolicyVersion(0, next(steps)))
        del done[:STEP]
        await asyncio.wrap_future(settling)

    await timed(step, lasts_s)


async def timed(step: Step, lasts_s: float) -> None:
    """Warm up, wait for the command, take steps for this long, and print the figures."""
    for _ in range(WARM_UP):
        await step()
    await asyncio.to_thread(stage.ready)
    groups, started, used = 0, time.perf_counter(), time.process_time()
    while (spent := time.perf_counter() - started) < lasts_s:
        await step()
        groups += STEP
    cpu_ms = (time.process_time() - used) * 1e3
    print("figures", groups / spent, cpu_ms / groups, flush=True)
    await asyncio.Event().wait()  # until the process is killed


def main(role: str, directory: str, lasts_s: str) -> None:
    """Run one process of a round."""
    place, seconds = Path(directory), float(lasts_s)
    if role == "worker":
        uvloop.run(work(place))
    else:
        uvloop.run(consume(place, seconds) if role == "consumer" else generate(place, seconds))


if __name__ == "__main__":
    main(*sys.argv[1:])
