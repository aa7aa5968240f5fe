"""The curriculum service with a real broker: workers answer its tasks, and it, the broker and tasks fail."""

import asyncio
import os
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.tasks.taker import LeasedTask, TaskTaker
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import EnvironmentFailedError, RunDirInUseError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.control import Reset
from rolloutmq.schemas.wire.telemetry import CurriculumProgress
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.curriculum.core import Curriculum
from rolloutmq.services.curriculum.event_log import EventLog
from rolloutmq.services.curriculum.server import TaskSupply, curriculum_of, serve
from rolloutmq.services.process.runner import Stop

LIMIT_S = 60.0
TASKS = 40
AHEAD = 4


def config(**broker: Any) -> RunConfig:
    environment = {"entry": "a:B", "group_size": 2, "pacing": False, "task_count": TASKS, "failure_limit": 3}
    section = {"levels": 4, "ahead": AHEAD, "report_every": 1, "options": {"decay": 1.0}}
    return validate(
        {
            "environment": {"e": environment},
            "curriculum": {"e": section},
            "broker": {"max_deliveries": 1, **broker},
            "trainer": {"batch_sequences": 4},
        }
    )


def scores_of(index: int) -> list[float]:
    """Return the scores of every group for a task: sums of them are exact."""
    return [0.0, 1.0] if index % 2 else [0.25, 0.25]


class Worker:
    """Answers tasks, and remembers which."""

    def __init__(self, producer: Producer, taker: TaskTaker, name: str) -> None:
        self._producer = producer
        self.taker = taker
        self._name = name
        self.answered: list[int] = []

    async def take(self) -> LeasedTask:
        while not (taken := await self.taker.take()):
            pass
        return taken[0]

    async def answer(self, task: LeasedTask) -> None:
        group = Group.build(
            f"{self._name}-{len(self.answered)}",
            tokens=np.arange(8, dtype=np.int32).reshape(2, 4),
            mask=np.ones((2, 4), bool),
            scores=scores_of(task.index),
        )
        await self._producer.send(replace(group, task=task.id))
        await self._producer.flush(LIMIT_S)
        self.answered.append(task.index)

    async def work(self, count: int) -> None:
        for _ in range(count):
            await self.answer(await self.take())


@asynccontextmanager
async def worker(run_dir: Path, name: str = "w") -> AsyncIterator[Worker]:
    async with (
        Producer.open(run_dir, env="e", producer=name, group_size=2, slots=8) as producer,
        TaskTaker.open(run_dir, name, lambda: producer.session, LIMIT_S) as taker,
    ):
        yield Worker(producer, taker, name)


@asynccontextmanager
async def supply(about: RunConfig, run_dir: Path) -> AsyncIterator[TaskSupply]:
    """A running supply; at the end it is cancelled, which is as sudden for its files as a kill."""
    one = TaskSupply(about, RunLayout(run_dir), "e", lambda _: None)
    running = asyncio.create_task(one.run())
    try:
        yield one
    finally:
        running.cancel()
        with suppress(asyncio.CancelledError):
            await running


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - other objects change
            await asyncio.sleep(0.005)


def on_file(about: RunConfig, run_dir: Path) -> Curriculum:
    """Return the curriculum in the files."""
    found = curriculum_of(about, "e")
    EventLog(RunLayout(run_dir).curricula, found).load()
    return found


def evidence(curriculum: Curriculum) -> list[float]:
    """Return what the sampler knows of its levels; without decay these are sums over the outcomes."""
    levels: list[float] = msgspec.msgpack.decode(curriculum.state().sampler)[0]
    return levels


def evidence_of(answered: list[int]) -> list[float]:
    """Return the same from the tasks that were answered."""
    sums = [0.0] * 16
    for index in answered:
        scores, level = scores_of(index), index * 4 // TASKS
        flat = scores[0] == scores[1]
        for at, more in enumerate((sum(scores), 2 - sum(scores), not flat, flat)):
            sums[4 * level + at] += more
    return sums


async def test_tasks_are_submitted_answered_and_learned_from(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        async with worker(run_dir) as one, supply(about, run_dir) as tasks:
            await one.work(30)
            figures = tasks.curriculum.figures
            await until(lambda: figures.outcomes == 30)
            assert len(tasks.curriculum.open) <= AHEAD
            assert evidence(tasks.curriculum) == evidence_of(one.answered)
            assert all(0 <= index < TASKS for index in one.answered)
    assert on_file(about, run_dir).state() == tasks.curriculum.state()


async def test_outcomes_that_came_while_it_was_away_are_heard(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        async with worker(run_dir) as one:
            async with supply(about, run_dir) as tasks:
                await until(lambda: len(tasks.curriculum.open) == AHEAD)
                first = await one.take()
            await one.answer(first)
            await one.work(AHEAD - 1)
            assert on_file(about, run_dir).figures.outcomes == 0
            async with supply(about, run_dir) as tasks:
                await until(lambda: tasks.curriculum.figures.outcomes == AHEAD)
                assert evidence(tasks.curriculum) == evidence_of(one.answered)
                assert (tasks.curriculum.figures.failed, tasks.curriculum.figures.dropped) == (0, 0)


async def test_tasks_that_were_drawn_but_not_submitted_are_submitted_after_a_kill(run_dir: Path) -> None:
    about = config()
    one = curriculum_of(about, "e")
    log = EventLog(RunLayout(run_dir).curricula, one)
    log.load()
    drawn = one.refill("life")
    assert drawn is not None
    log.append(drawn)
    with running_broker(about, RunLayout(run_dir)):
        async with worker(run_dir) as taking, supply(about, run_dir):
            taken = [await taking.take() for _ in range(AHEAD)]
            assert {task.id: task.index for task in taken} == drawn.tasks


async def test_what_a_broker_forgot_is_submitted_again(run_dir: Path) -> None:
    about = config(durability="memory")
    layout = RunLayout(run_dir)
    with running_broker(about, layout):
        async with supply(about, run_dir) as tasks:
            await until(lambda: len(tasks.curriculum.open) == AHEAD)
            async with TaskClient.open(run_dir) as client:
                ids = list(tasks.curriculum.open)
                await client.results(ids, 0)
    layout.saved.unlink(missing_ok=True)  # as after a killed broker
    with running_broker(about, layout):
        async with worker(run_dir) as one, supply(about, run_dir) as tasks:
            await one.work(AHEAD)
            await until(lambda: tasks.curriculum.figures.outcomes == AHEAD)
            assert tasks.curriculum.figures.drawn == 2 * AHEAD


async def test_a_broker_that_restarts_is_waited_for(run_dir: Path) -> None:
    about = config()
    layout = RunLayout(run_dir)
    with running_broker(about, layout):
        async with worker(run_dir, "v") as one, supply(about, run_dir) as tasks:
            await one.work(3)
    answered = one.answered
    async with supply(about, run_dir) as tasks:  # begins without a broker
        with running_broker(about, layout):
            async with worker(run_dir) as one:
                await one.work(5)
                await until(lambda: tasks.curriculum.figures.outcomes == 8)
                assert evidence(tasks.curriculum) == evidence_of(answered + one.answered)


async def test_the_tasks_of_a_run_that_was_reset_are_drawn_anew(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)) as broker:
        async with supply(about, run_dir) as tasks:
            await until(lambda: len(tasks.curriculum.open) == AHEAD)
            before = set(tasks.curriculum.open)
            async with TaskClient.open(run_dir) as client:
                await client.results(list(before), 0)
                async with BrokerClient(broker.endpoints.serve) as asking:
                    await asking.request(Reset())
                await until(lambda: tasks.curriculum.figures.dropped == AHEAD)
                await until(lambda: len(tasks.curriculum.open) == AHEAD)
                assert not before & set(tasks.curriculum.open)
            async with worker(run_dir) as one:
                await one.work(AHEAD)
                await until(lambda: tasks.curriculum.figures.outcomes == AHEAD)


async def test_a_cancelled_task_is_replaced(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        async with supply(about, run_dir) as tasks, TaskClient.open(run_dir) as client:
            await until(lambda: len(tasks.curriculum.open) == AHEAD)
            ids = list(tasks.curriculum.open)
            await until_known(client, ids)
            await client.cancel(ids[:2])
            await until(lambda: tasks.curriculum.figures.dropped == 2 and len(tasks.curriculum.open) == AHEAD)
            assert set(ids) & set(tasks.curriculum.open) == set(ids[2:])


async def until_known(client: TaskClient, ids: list[str]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while any(status.over for status in await client.results(ids, 0)):  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def test_tasks_that_fail_one_after_another_end_the_run(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        tasks = TaskSupply(about, RunLayout(run_dir), "e", lambda _: None)
        running = asyncio.create_task(tasks.run())
        async with worker(run_dir) as one:
            await one.work(1)
            for _ in range(3):
                task = await one.take()
                await one.taker.hand_back(task.id, "boom")
            with pytest.raises(
                EnvironmentFailedError, match=r"environment\.e: 3 rollouts in a row failed, .*boom"
            ):
                await asyncio.wait_for(running, LIMIT_S)
    assert on_file(about, run_dir).figures.failed == 3


async def test_a_run_that_failed_goes_on_once_its_environment_is_repaired(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        async with worker(run_dir) as one, TaskClient.open(run_dir) as client:
            running = asyncio.create_task(TaskSupply(about, RunLayout(run_dir), "e", lambda _: None).run())
            for _ in range(3):
                await one.taker.hand_back((await one.take()).id, "boom")
            with pytest.raises(EnvironmentFailedError):
                await asyncio.wait_for(running, LIMIT_S)
            left = [await one.take() for _ in range(len(on_file(about, run_dir).open) - 1)]
            for task in left[1:]:
                await one.taker.hand_back(task.id, "boom")
            await client.cancel([left[0].id])
            async with supply(about, run_dir) as tasks, asyncio.timeout(LIMIT_S):
                for _ in range(2):
                    await one.taker.hand_back((await one.take()).id, "boom")
                await one.work(AHEAD)
                await until(lambda: tasks.curriculum.figures.outcomes == AHEAD)
            assert (tasks.curriculum.figures.failed, tasks.curriculum.figures.dropped) == (4 + len(left), 1)


async def test_failures_that_were_known_before_its_life_do_not_end_it(run_dir: Path) -> None:
    about = config()
    with running_broker(about, RunLayout(run_dir)):
        async with worker(run_dir) as one:
            async with supply(about, run_dir):
                taken = [await one.take() for _ in range(AHEAD)]
            for task in taken:
                await one.taker.hand_back(task.id, "boom")
            async with supply(about, run_dir) as tasks, asyncio.timeout(LIMIT_S):
                await one.work(AHEAD)
                await until(lambda: tasks.curriculum.figures.outcomes == AHEAD)
            assert tasks.curriculum.figures.failed == AHEAD


async def test_tasks_of_an_older_configuration_are_cancelled(run_dir: Path) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with supply(config(), run_dir) as tasks, TaskClient.open(run_dir) as client:
            await until(lambda: len(tasks.curriculum.open) == AHEAD)
            old = list(tasks.curriculum.open)
            await until_known(client, old)
        other = config()
        other.curriculum["e"] = other.curriculum["e"].model_copy(update={"sampler": "uniform", "options": {}})
        TaskSupply(other, RunLayout(run_dir), "e", lambda _: None)  # killed before it asked the broker
        async with supply(other, run_dir) as tasks, TaskClient.open(run_dir) as client:
            found = await client.results(old, LIMIT_S)
            assert {(status.state, status.reason) for status in found} == {
                ("cancelled", "the curriculum was configured anew")
            }
            await until(lambda: len(tasks.curriculum.open) == AHEAD)
            assert tasks.curriculum.figures.drawn == AHEAD


@pytest.mark.parametrize(
    ("key", "value", "difference"),
    [
        ("run.seed", 1, "run_seed 0 -> 1"),
        ("environment.e.entry", "a:C", "environment a:B {} -> a:C {}"),
        ("environment.e.options", {"high": 3}, 'environment a:B {} -> a:B {"high": 3}'),
        ("environment.e.task_count", 41, "task_count 40 -> 41"),
        ("environment.e.concurrency", 3, ""),
        ("trainer.steps", 7, ""),
    ],
)
def test_a_state_belongs_to_the_tasks_that_its_numbers_meant(key: str, value: Any, difference: str) -> None:
    def about(changes: dict[str, Any]) -> RunConfig:
        tree = config().model_dump(mode="json", exclude_unset=True)
        tree["curriculum"]["e"]["seed"] = 5
        for path, new in changes.items():
            *sections, last = path.split(".")
            section = tree
            for name in sections:
                section = section.setdefault(name, {})
            section[last] = new
        return validate(tree)

    before, after = (curriculum_of(about(changes), "e").identity for changes in ({}, {key: value}))
    assert before.difference(after) == difference


async def test_its_progress_is_published_and_on_file(run_dir: Path) -> None:
    about, stop, layout = config(), Stop(), RunLayout(run_dir)
    with running_broker(about, layout):
        async with worker(run_dir) as one, EventFeed(layout, [b"telemetry.curriculum.e"]) as feed:
            await feed.next(0.1)
            serving = asyncio.create_task(serve(about, layout, stop))
            await one.work(3)
            heard: CurriculumProgress | None = None
            async with asyncio.timeout(LIMIT_S):
                while heard is None or heard.outcomes < 3:
                    if (event := await feed.next(1.0)) is not None:
                        heard = msgspec.msgpack.decode(event[1], type=CurriculumProgress)
                    else:
                        await one.work(1)  # the first events may precede the subscription
            with pytest.raises(RunDirInUseError):
                await serve(about, layout, Stop())
            stop.request("test")
            await serving
    assert (heard.env, heard.sampler, heard.levels) == ("e", "learnability", 4)
    assert heard.flat == sum(index % 2 == 0 for index in one.answered[: heard.outcomes])
    written = read_json(layout.curriculum, list[CurriculumProgress])
    assert written is not None
    assert written[0].outcomes >= heard.outcomes


def started(run_dir: Path) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "curriculum", "--run-dir", str(run_dir)]
    return subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


async def test_killed_again_and_again_it_hears_each_group_once(run_dir: Path) -> None:
    about, layout, rng = config(), RunLayout(run_dir), random.Random(7)
    write_json(layout.config, about)
    with running_broker(about, layout):
        async with worker(run_dir) as one:
            for _ in range(5):
                process = started(run_dir)
                try:
                    await asyncio.wait_for(one.work(rng.randrange(3, 30)), LIMIT_S)
                finally:
                    os.kill(process.pid, signal.SIGKILL)
                    process.communicate()
            layout.curriculum.unlink()
            process = started(run_dir)
            try:
                wanted = len(one.answered)
                async with asyncio.timeout(LIMIT_S):
                    while not _heard(layout, wanted):  # noqa: ASYNC110 - another process writes
                        await asyncio.sleep(0.02)
            finally:
                process.terminate()
                _, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors
    found = on_file(about, run_dir)
    assert evidence(found) == evidence_of(one.answered)
    assert found.figures.outcomes == wanted
    assert found.figures.drawn == wanted + len(found.open)
    assert (found.figures.failed, found.figures.dropped) == (0, 0)


def _heard(layout: RunLayout, outcomes: int) -> bool:
    found = read_json(layout.curriculum, list[CurriculumProgress])
    return found is not None and found[0].outcomes == outcomes


def test_a_wrong_sampler_ends_the_process_for_good(run_dir: Path) -> None:
    about = config()
    about.curriculum["e"] = about.curriculum["e"].model_copy(update={"sampler": "lernability"})
    write_json(RunLayout(run_dir).config, about)
    process = started(run_dir)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == PERMANENT_FAILURE
    assert b"curriculum.e.sampler: unknown sampler (got 'lernability')" in errors
