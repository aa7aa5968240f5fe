"""Rollouts of submitted tasks: each is answered by a group or handed back, and permits balance."""

# ruff: noqa: ARG002 - arguments are those of the protocols

import asyncio
import random
from collections.abc import Sequence
from typing import Any

import pytest
from tests.services.worker.test_rollouts import FakeOutlet, until

from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import GroupTooLargeError, SessionFencedError
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import SingleTurn
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.rollouts import Rollouts
from rolloutmq.services.worker.scripted import ScriptedPolicy
from rolloutmq.services.worker.trajectory import Trajectory


class FakeTasks:
    """Hands out tasks by payload; when there are none, waits for the event as one does who drains."""

    def __init__(self, *payloads: Any, size: int = 0) -> None:
        self.left = [
            LeasedTask(f"t{number}", payload, size, 0.0, 1) for number, payload in enumerate(payloads)
        ]
        self.back: dict[str, str] = {}
        self.asked = 0
        self.error: Exception | None = None

    async def take(
        self, count: int = 1, *, wait: bool = True, until: asyncio.Event | None = None
    ) -> list[LeasedTask]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        if not self.left and wait:
            assert until is not None
            await until.wait()
        taken, self.left = self.left[:count], self.left[count:]
        return taken

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        assert tried
        self.back[task_id] = reason


class Doubling(SingleTurn[int]):
    """Its own tasks are 0."""

    def task(self, rng: random.Random) -> int:
        return 0

    def submitted(self, payload: Any) -> int:
        return int(payload["number"])

    def prompt(self, task: int) -> str:
        return str(task)

    def score(self, task: int, completion: Completion) -> float:
        return float(completion.text == str(2 * task))


class Whole:
    """An environment without a `member`, whose rollouts are of a size that is asked for."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        return await self.rollout_task(policy, "own", size, rng)

    async def rollout_task(
        self, policy: Policy, payload: Any, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        return [Trajectory.of(one) for one in await policy.complete(str(payload), n=size)]


def double(prompt: str) -> str:
    return str(2 * int(prompt))


def made(
    outlet: FakeOutlet, source: FakeTasks, environment: Any = None, **config: Any
) -> tuple[Rollouts, asyncio.Event]:
    section = EnvironmentConfig(
        entry="a:B", **({"group_size": 2, "concurrency": 2, "tasks": "submitted"} | config)
    )
    draining = asyncio.Event()
    policy = ScriptedPolicy(double if environment is None else "x")
    rollouts = Rollouts(
        "d-1", section, environment or Doubling(), policy, outlet, tasks=source, draining=draining
    )
    return rollouts, draining


def answers(outlet: FakeOutlet) -> dict[str, int]:
    return {group.task: group.sequences for group in outlet.groups}


async def test_submitted_tasks_are_answered_by_groups_that_name_them() -> None:
    outlet, tasks = FakeOutlet(3), FakeTasks(*({"number": number} for number in (3, 4, 5)))
    rollouts, _ = made(outlet, tasks)
    await rollouts.run()
    assert answers(outlet) == {"t0": 2, "t1": 2, "t2": 2}
    assert all(group.scores.tolist() == [1.0, 1.0] for group in outlet.groups)
    assert {bytes(group["tokens"][0].astype("u1"))[:1] for group in outlet.groups} == {b"3", b"4", b"5"}


@pytest.mark.parametrize("deadline_s", [0.0, 30.0])
async def test_a_task_says_how_many_sequences_it_wants(deadline_s: float) -> None:
    outlet, tasks = FakeOutlet(1), FakeTasks({"number": 1}, size=5)
    rollouts, _ = made(outlet, tasks, group_deadline_s=deadline_s)
    await rollouts.run()
    assert answers(outlet) == {"t0": 5}


async def test_an_environment_of_any_kind_may_answer_tasks() -> None:
    outlet, tasks = FakeOutlet(1), FakeTasks(["anything"])
    rollouts, _ = made(outlet, tasks, Whole())
    await rollouts.run()
    assert answers(outlet) == {"t0": 2}


async def test_a_failing_task_is_handed_back_and_never_ends_the_worker() -> None:
    outlet, tasks = FakeOutlet(6), FakeTasks(*({"number": "x"} for _ in range(5)), {"number": 1})
    rollouts, _ = made(outlet, tasks, failure_limit=1, concurrency=1)
    await rollouts.run()
    assert list(tasks.back) == ["t0", "t1", "t2", "t3", "t4"]
    assert "invalid literal" in tasks.back["t0"]
    assert (answers(outlet), rollouts.abandoned, outlet.abandoned) == ({"t5": 2}, 5, 5)


async def test_a_group_that_cannot_be_sent_gives_its_task_back() -> None:
    outlet, tasks = FakeOutlet(1), FakeTasks({"number": 1})
    outlet.refusal = GroupTooLargeError(9, 1)
    rollouts, _ = made(outlet, tasks)
    await rollouts.run()
    assert tasks.back == {"t0": str(GroupTooLargeError(9, 1))}
    assert tasks.back["t0"].startswith("group: too large (got 9 bytes, limit 1); ")


async def test_who_drains_stops_waiting_for_tasks_and_gives_the_permit_back() -> None:
    outlet, tasks = FakeOutlet(2), FakeTasks()
    rollouts, draining = made(outlet, tasks)
    running = asyncio.create_task(rollouts.run())
    await until(lambda: tasks.asked == 2)
    assert (rollouts.in_hand, outlet.credit.in_hand) == (0, 2)
    draining.set()
    await running
    assert (outlet.credit.in_hand, rollouts.produced, rollouts.abandoned) == (0, 0, 0)


async def test_a_cancelled_wait_for_a_task_gives_the_permit_back() -> None:
    outlet, tasks = FakeOutlet(2), FakeTasks()
    rollouts, _ = made(outlet, tasks)
    running = asyncio.create_task(rollouts.run())
    await until(lambda: tasks.asked == 2)
    running.cancel()
    await asyncio.wait({running})
    assert outlet.credit.in_hand == 0


async def test_a_fenced_taker_ends_the_worker() -> None:
    outlet, tasks = FakeOutlet(2), FakeTasks()
    tasks.error = SessionFencedError("d-1", 7)
    rollouts, _ = made(outlet, tasks)
    with pytest.raises(SessionFencedError):
        await rollouts.run()
    assert outlet.credit.in_hand == 0


async def test_own_tasks_fill_in_where_none_are_submitted() -> None:
    outlet, tasks = FakeOutlet(4), FakeTasks({"number": 7})
    rollouts, _ = made(outlet, tasks, tasks="both", concurrency=1)
    await rollouts.run()
    assert [group.task for group in outlet.groups] == ["t0", "", "", ""]


async def test_with_own_tasks_alone_nobody_asks_for_others() -> None:
    outlet, tasks = FakeOutlet(4), FakeTasks({"number": 7})
    rollouts, _ = made(outlet, tasks, tasks="own")
    await rollouts.run()
    assert (tasks.asked, {group.task for group in outlet.groups}) == (0, {""})


async def test_a_deadline_holds_for_submitted_tasks_too() -> None:
    class Stuck(Doubling):
        begun = 0

        async def score(self, task: int, completion: Completion) -> float:  # type: ignore[override]
            self.begun += 1
            if self.begun > 2:
                await asyncio.Event().wait()
            return 1.0

    outlet, tasks = FakeOutlet(1), FakeTasks({"number": 7}, size=3)
    rollouts, _ = made(outlet, tasks, Stuck(), group_deadline_s=0.02, min_group_size=2)
    await rollouts.run()
    assert (answers(outlet), rollouts.late_members) == ({"t0": 2}, 1)
