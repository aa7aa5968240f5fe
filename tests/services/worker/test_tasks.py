"""Rollouts of submitted tasks: each is answered by a group or handed back, and permits balance."""

# ruff: noqa: ARG002 - arguments are those of the protocols

import asyncio
import random
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import pytest
from tests.services.worker.test_rollouts import FakeOutlet, until

from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import GroupTooLargeError, SessionFencedError
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.services.rewards.raters import EVALUATING
from rolloutmq.services.worker import rollouts as rollouts_module
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
        self.ends: defaultdict[str, asyncio.Future[TaskStatus]] = defaultdict(asyncio.Future)
        """The end of each task, which nobody sees unless a test sets it."""

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

    async def ended(self, task_id: str) -> TaskStatus:
        return await asyncio.shield(self.ends[task_id])


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


class Drawing(SingleTurn[int]):
    """Its tasks are numbers below a million, drawn by chance."""

    def task(self, rng: random.Random) -> int:
        return rng.randrange(1_000_000)

    def prompt(self, task: int) -> str:
        return str(task)

    def score(self, task: int, completion: Completion) -> float:
        return completion.temperature


class Rows(Drawing):
    """Its tasks are rows of a data set."""

    def task_at(self, index: int, rng: random.Random) -> int:
        return 100 + index


class Whole:
    """An environment without a `member`, whose rollouts are of a size that is asked for."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        return await self.rollout_task(policy, "own", size, rng)

    async def rollout_task(
        self, policy: Policy, payload: Any, size: int, rng: random.Random
    ) -> Sequence[Trajectory]:
        return [Trajectory.of(one, 0.0) for one in await policy.complete(str(payload), n=size)]


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


async def test_waiting_for_a_task_counts_as_waiting_and_a_rollout_does_not() -> None:
    now = [0.0]
    clock = rollouts_module.WaitClock(lambda: now[0])
    outlet, tasks = FakeOutlet(2), FakeTasks()
    rollouts, draining = made(outlet, tasks)
    rollouts._taking = clock
    running = asyncio.create_task(rollouts.run())
    await until(lambda: tasks.asked == 2)
    now[0] = 3.0
    assert rollouts.taking_s == 6.0
    now[0] = 4.0
    draining.set()
    await running
    now[0] = 9.0
    assert rollouts.taking_s == 8.0


async def test_an_environment_of_any_kind_may_answer_tasks() -> None:
    outlet, tasks = FakeOutlet(1), FakeTasks(["anything"])
    rollouts, _ = made(outlet, tasks, Whole())
    await rollouts.run()
    assert answers(outlet) == {"t0": 2}


def numbered(*indexes: int, greedy: bool = False) -> FakeTasks:
    """Return a source of tasks that name a number of the task space."""
    source = FakeTasks()
    source.left = [LeasedTask(f"t{index}", None, 0, 0.0, 1, index, greedy) for index in indexes]
    return source


async def prompts_of(name: str, source: FakeTasks, environment: Any, **config: Any) -> list[str]:
    """Return what the environment asked the policy, in the order of the tasks."""
    outlet, policy = FakeOutlet(len(source.left)), ScriptedPolicy("x")
    section = EnvironmentConfig(entry="a:B", group_size=2, concurrency=1, tasks="submitted", **config)
    await Rollouts(name, section, environment, policy, outlet, tasks=source, draining=asyncio.Event()).run()
    assert not source.back
    return list(dict.fromkeys(policy.prompts))


@pytest.mark.parametrize("deadline_s", [0.0, 30.0])
async def test_a_numbered_task_is_the_same_in_every_worker_and_life(deadline_s: float) -> None:
    first = await prompts_of("d-1", numbered(0, 1, 7), Drawing(), group_deadline_s=deadline_s)
    again = await prompts_of("d-2", numbered(7, 1, 0), Drawing(), group_deadline_s=deadline_s)
    other = await prompts_of("e-1", numbered(0, 1, 7), Drawing(), group_deadline_s=deadline_s)
    assert first == again[::-1]
    assert len({*first, *other}) == 6


@pytest.mark.parametrize("deadline_s", [0.0, 30.0])
async def test_a_data_set_gives_the_row_of_the_number(deadline_s: float) -> None:
    assert await prompts_of("d-1", numbered(2, 5), Rows(), group_deadline_s=deadline_s) == ["102", "105"]


async def test_any_environment_has_a_task_space() -> None:
    """It knows nothing of numbers: the generator it draws its task by is seeded with the number."""

    class Plain:
        async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
            return [Trajectory.of(one, 0.0) for one in await policy.complete(str(rng.random()), n=size)]

    first = await prompts_of("d-1", numbered(4, 9), Plain())
    assert await prompts_of("d-8", numbered(9, 4), Plain()) == first[::-1]


async def test_a_greedy_task_is_sampled_at_temperature_zero() -> None:
    temperatures: list[float] = []

    class Listening(ScriptedPolicy):
        async def complete(self, prompt: Any, **how: Any) -> list[Completion]:
            temperatures.append(how["temperature"])
            return await super().complete(prompt, **how)

    for greedy in (False, True):
        outlet, source = FakeOutlet(1), numbered(3, greedy=greedy)
        section = EnvironmentConfig(entry="a:B", group_size=2, tasks="submitted")
        rollouts = Rollouts("d-1", section, Drawing(), Listening("x"), outlet, tasks=source)
        await rollouts.run()
    assert temperatures == [1.0, 0.0]


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


class HeldOut(Drawing):
    def eval_task_at(self, index: int, rng: random.Random) -> int:
        return 700 + index


class Plain:
    """Only a `rollout`."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        return [Trajectory.of(one, 0.0) for one in await policy.complete(str(rng.randrange(10**9)), n=size)]


async def drawn(
    environment: Any = None, worker: str = "d-1", seed: int = 0, evaluation_seed: int | None = None
) -> list[list[int]]:
    """Answer tasks 0 to 3 by their numbers; return the tokens of each."""
    outlet, tasks = FakeOutlet(4), FakeTasks()
    tasks.left = [LeasedTask(f"t{n}", None, 1, 0.0, 1, index=n) for n in range(4)]
    section = EnvironmentConfig(entry="a:B", group_size=2, concurrency=1, tasks="submitted")
    rollouts = Rollouts(
        worker,
        section,
        environment or Drawing(),
        ScriptedPolicy("x"),
        outlet,
        seed=seed,
        tasks=tasks,
        draining=asyncio.Event(),
        evaluation_seed=evaluation_seed,
    )
    await rollouts.run()
    assert not tasks.back, tasks.back
    return [group["tokens"][0].tolist() for group in outlet.groups]


@pytest.mark.parametrize("environment", [Drawing, Plain])
async def test_the_tasks_of_an_evaluation_are_the_same_in_every_run_and_worker(environment: type) -> None:
    asked = await drawn(environment(), evaluation_seed=5)
    assert len({tuple(one) for one in asked}) == 4
    assert await drawn(environment(), worker="d-9", seed=77, evaluation_seed=5) == asked
    assert await drawn(environment(), evaluation_seed=6) != asked
    trained = await drawn(environment(), seed=5)
    assert not {tuple(one) for one in trained} & {tuple(one) for one in asked}


class Noting(Drawing):
    """Notes whether each rollout answers an evaluation."""

    def __init__(self) -> None:
        self.noted: list[bool] = []

    def score(self, task: int, completion: Completion) -> float:
        self.noted.append(EVALUATING.get())
        return super().score(task, completion)


async def test_a_rollout_knows_whether_it_answers_an_evaluation() -> None:
    environment = Noting()
    await drawn(environment, evaluation_seed=5)
    await drawn(environment)
    assert environment.noted == [True] * 4 + [False] * 4


async def test_an_environment_may_hold_tasks_out_for_the_evaluation() -> None:
    prompts = [bytes(one).decode() for one in await drawn(HeldOut(), evaluation_seed=5)]
    assert [prompt[:3] for prompt in prompts] == ["700", "701", "702", "703"]
    assert [bytes(one)[:3] for one in await drawn(HeldOut())] != [b"700", b"701", b"702", b"703"]


class Hanging:
    """Its first rollout never ends by itself; it may ignore the first cancellation."""

    def __init__(self, *, stubborn: bool = False) -> None:
        self.stubborn = stubborn
        self.begun = 0
        self.let_go = asyncio.Event()

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        self.begun += 1
        if self.begun == 1:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                if not self.stubborn:
                    raise
                await self.let_go.wait()
        return [Trajectory.of(one, 0.0) for one in await policy.complete("x", n=size)]


def evaluating(environment: Hanging, source: FakeTasks, seed: int | None = 5) -> tuple[Rollouts, FakeOutlet]:
    """Return the one slot of a worker that answers an evaluation, or the training if there is no seed."""
    source.left = [LeasedTask(f"t{n}", None, 1, 4.0, 1, index=n) for n in range(2)]
    section = EnvironmentConfig(entry="a:B", group_size=2, concurrency=1, tasks="submitted")
    outlet = FakeOutlet(2)
    made = Rollouts(
        "d-1", section, environment, ScriptedPolicy("x"), outlet, tasks=source, evaluation_seed=seed
    )
    return made, outlet


@pytest.mark.parametrize("state", [TaskState.EXPIRED, TaskState.CANCELLED])
async def test_a_task_of_an_evaluation_that_has_ended_frees_its_slot(state: TaskState) -> None:
    environment, source = Hanging(), FakeTasks()
    rollouts, outlet = evaluating(environment, source)
    async with asyncio.timeout(30):
        running = asyncio.create_task(rollouts.run())
        await until(lambda: environment.begun == 1)
        source.ends["t0"].set_result(TaskStatus(id="t0", state=state, reason="too late"))
        await running
    assert source.back == {"t0": f"its task has ended: {state}, too late"}
    assert answers(outlet) == {"t1": 1}


async def test_a_rollout_that_ignores_its_cancellation_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(rollouts_module, "CANCEL_S", 0.0)
    environment, source = Hanging(stubborn=True), FakeTasks()
    rollouts, _ = evaluating(environment, source)
    async with asyncio.timeout(30):
        running = asyncio.create_task(rollouts.run())
        await until(lambda: environment.begun == 1)
        source.ends["t0"].set_result(TaskStatus(id="t0", state=TaskState.EXPIRED))
        await until(lambda: "rollout ignores its cancellation" in caplog.text)
        assert "env=d task=t0; let CancelledError pass" in caplog.text
        environment.let_go.set()
        await running


async def test_a_task_of_the_training_that_has_ended_is_still_answered() -> None:
    environment, source = Hanging(), FakeTasks()
    environment.begun = 1
    source.ends["t0"].set_result(TaskStatus(id="t0", state=TaskState.EXPIRED))
    rollouts, outlet = evaluating(environment, source, seed=None)
    await rollouts.run()
    assert answers(outlet) == {"t0": 1, "t1": 1}
