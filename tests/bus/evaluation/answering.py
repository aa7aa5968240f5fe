"""Workers of a test that answer the evaluation, and a run with a real broker for them."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.tasks.taker import LeasedTask, TaskTaker
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split

Answer = Callable[[LeasedTask], Sequence[float] | None]
"""Scores of the answers to a task; None hands the task back."""
VERSION = PolicyVersion(0, 3)


def configured(run_dir: Path, **sections: Any) -> RunConfig:
    """Write the configuration of a run with evaluation, and return it."""
    tree: dict[str, Any] = {
        "environment": {"e": {"entry": "a:B", "group_size": 2}},
        "evaluation": {"enabled": True, "tasks": 3, "samples": 4, "deadline_s": 60.0},
        "trainer": {"batch_sequences": 4},
        "broker": {"max_deliveries": 2},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    config = RunConfig.model_validate(tree)
    write_json(RunLayout(run_dir).config, config)
    return config


def of_index(task: LeasedTask) -> list[float]:
    """Answer task 0 never right, task 1 half the time, and so on; greedily always."""
    if task.greedy:
        return [1.0] * task.size
    right = min(task.size, task.index * task.size // 2)
    return [1.0] * right + [0.0] * (task.size - right)


def group_of(
    task: str, scores: Sequence[float], oldest: PolicyVersion = VERSION, newest: PolicyVersion | None = None
) -> Group:
    return Group.build(
        uuid4().hex,
        tokens=[[1, 2, 3]] * len(scores),
        mask=[[0, 1, 1]] * len(scores),
        scores=list(scores),
        oldest=oldest,
        newest=newest or oldest,
        task=task,
    )


@asynccontextmanager
async def answering(
    run_dir: Path,
    answer: Answer = of_index,
    *,
    env: str = "e",
    name: str = "e-0.eval",
    split: Split = Split.EVAL,
    version: Callable[[LeasedTask], PolicyVersion] = lambda task: VERSION,  # noqa: ARG005
) -> AsyncIterator[list[LeasedTask]]:
    """Answer the tasks of an environment within the block; yields the list of those taken."""
    taken: list[LeasedTask] = []
    async with (
        Producer.open(run_dir, env=env, producer=name, split=split, group_size=4, slots=4) as producer,
        TaskTaker.open(run_dir, name, lambda: producer.session, 60.0) as taker,
    ):

        async def work() -> None:
            while True:
                permit = await producer.acquire()
                for task in await taker.take():
                    taken.append(task)
                    scores = answer(task)
                    if scores is None:
                        producer.abandon(permit)
                        await taker.hand_back(task.id, "no idea")
                    else:
                        await producer.send(group_of(task.id, scores, version(task)), permit)

        working = asyncio.create_task(work(), name=name)
        try:
            yield taken
        finally:
            working.cancel()
            await asyncio.wait({working})


async def until(met: Callable[[], bool]) -> None:
    """Wait until a condition of another process or thread is met."""
    while not met():  # noqa: ASYNC110 - there is no event to wait for
        await asyncio.sleep(0.01)
