"""Rollouts of one environment without a broker: those of a worker, one after the other, and as many as asked.

`services.worker.rollouts` does them, so the environment meets what it meets in a run: numbered tasks of its curriculum
or of the evaluation, members, a time-out, and the checks of what it returns. In place of the broker there are permits
for so many rollouts, and callbacks in place of its log. A test may have a producer there, with a real broker.
"""

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, Final

from rolloutmq.bus.producer.credit import Credit, Permit
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import DrainingError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.tasks import GIVEN, TaskStatus
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.rollouts import GroupSink, OnFailure, Rollouts

NEVER_S: Final = 1e9
"""A time-out that nobody lives to see."""


@dataclass(frozen=True)
class Plan:
    """What to roll out.

    Attributes:
        count: Number of rollouts.
        seed: Seed of the tasks, as `run.seed`.
        size: Sequences of a rollout; 0 for `group_size`.
        timeout_s: Time-out of each rollout, in seconds.
        payloads: Submitted tasks to answer, in turn; empty: the environment's own tasks, or numbers of its task space
            if it has a curriculum or only answers the evaluation.
        ends_with_failure: Whether the first failed rollout is the last one.
    """

    count: int
    seed: int = 0
    size: int = 0
    timeout_s: float = NEVER_S
    payloads: Sequence[Any] = field(default=())
    ends_with_failure: bool = False


async def roll_out(
    name: str,
    config: RunConfig,
    environment: Any,
    policy: Policy,
    plan: Plan,
    *,
    on_group: Callable[[Group], None],
    on_failure: OnFailure,
    outlet: GroupSink | None = None,
) -> None:
    """Enter the environment and do the rollouts of a plan; each ends in one of the callbacks.

    Args:
        name: Name of the environment.
        config: Configuration of the run.
        environment: Its instance.
        policy: Answers.
        plan: What to roll out.
        on_group: Called with each finished group.
        on_failure: Called with the error of each failed rollout, in its `except` block.
        outlet: Gives the permits and gets the groups, too; None: nobody gets them, and there is always a permit.

    Raises:
        Exception: What the environment raises when it is entered or left.
    """
    tasks = _tasks(name, config, plan)
    section = _section(config.environment[name], plan, submitted=tasks is not None)
    async with AsyncExitStack() as stack:
        entered: Any = environment
        if isinstance(entered, AbstractAsyncContextManager):
            await stack.enter_async_context(entered)
        await Rollouts(
            f"{name}-0",
            section,
            environment,
            policy,
            _Counted(outlet or _Nowhere(), plan, on_group),
            seed=plan.seed,
            tasks=tasks,
            evaluation_seed=config.evaluation.seed if is_of_evaluation(name, config) else None,
            on_failure=on_failure,
        ).run()


def is_of_evaluation(name: str, config: RunConfig) -> bool:
    """Return whether the environment does nothing but answer the evaluation."""
    return name in config.evaluated and config.environment[name].split == "eval"


def _section(section: EnvironmentConfig, plan: Plan, *, submitted: bool) -> EnvironmentConfig:
    update: dict[str, Any] = {
        "concurrency": 1,
        "failure_limit": plan.count + 1,
        "rollout_timeout_s": plan.timeout_s,
        "tasks": "submitted" if submitted else "own",
    }
    if plan.size:
        update |= {"group_size": plan.size, "min_group_size": min(section.min_group_size, plan.size)}
    return section.model_copy(update=update)


def _tasks(name: str, config: RunConfig, plan: Plan) -> "_Tasks | None":
    """Return the tasks that a worker would get from elsewhere; None if it draws its own."""
    if plan.payloads:
        return _Tasks([(GIVEN, plan.payloads[at % len(plan.payloads)]) for at in range(plan.count)])
    if is_of_evaluation(name, config):
        return _Tasks([(at % config.evaluation.tasks, None) for at in range(plan.count)])
    if name in config.curriculum:
        rng, count = random.Random(f"{plan.seed}/{name}"), max(1, config.environment[name].task_count)
        return _Tasks([(rng.randrange(count), None) for _ in range(plan.count)])
    return None


class _Nowhere:
    """A `GroupSink` without a broker: permits without a limit, and groups for nobody."""

    session = 1

    def __init__(self) -> None:
        self._credit = Credit()
        self._credit.start_limit = sys.maxsize

    async def acquire(self) -> Permit:
        permit = self._credit.begin()
        assert permit is not None
        return permit

    async def send(self, group: Group, *, permit: Permit) -> None:  # noqa: ARG002
        self._credit.arrive(permit)

    def abandon(self, permit: Permit) -> None:
        self._credit.abandon(permit)


class _Counted:
    """The permits of another `GroupSink`, for as many rollouts as planned."""

    def __init__(self, outlet: GroupSink, plan: Plan, on_group: Callable[[Group], None]) -> None:
        self._outlet = outlet
        self._left = plan.count
        self._ends_with_failure = plan.ends_with_failure
        self._on_group = on_group

    @property
    def session(self) -> int:
        return self._outlet.session

    async def acquire(self) -> Permit:
        if self._left <= 0:
            raise DrainingError
        permit = await self._outlet.acquire()
        self._left -= 1
        return permit

    async def send(self, group: Group, *, permit: Permit) -> None:
        await self._outlet.send(group, permit=permit)
        self._on_group(group)

    def abandon(self, permit: Permit) -> None:
        self._outlet.abandon(permit)
        if self._ends_with_failure:
            self._left = 0


class _Tasks:
    """Tasks by index and payload, each given out once."""

    def __init__(self, tasks: Sequence[tuple[int, Any]]) -> None:
        self._left = [
            LeasedTask(f"task-{at + 1}", payload, size=0, left_s=0.0, deliveries=1, index=index)
            for at, (index, payload) in enumerate(tasks)
        ]

    async def take(
        self,
        count: int = 1,
        *,
        wait: bool = True,  # noqa: ARG002
        until: asyncio.Event | None = None,  # noqa: ARG002
    ) -> list[LeasedTask]:
        taken, self._left = self._left[:count], self._left[count:]
        return taken

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        pass

    async def ended(self, task_id: str) -> TaskStatus:  # noqa: ARG002
        await asyncio.Event().wait()
        raise AssertionError  # no such task ends early
