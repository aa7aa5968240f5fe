"""Rollouts of one worker: as many at once as it has slots, each with a permit, each ending in a group or in nothing.

A permit is settled exactly once: by sending a group, or by giving it back. Whatever the user's code does (raise, exit,
hang, cancel itself, return nonsense), it costs that rollout and no more; only `failure_limit` of them in a row, over
all slots, end the worker, since then nothing will ever come of it. What the broker says (draining, fenced) is not the
environment's doing and passes through.

A task that a trainer submitted is taken with a permit in hand, and settled by its group or handed back with the reason.
A failure of it is the task's: it ends the task after as many deliveries as the broker allows, never the worker.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol

from rolloutmq.bus.credit import Permit
from rolloutmq.bus.taking import LeasedTask
from rolloutmq.schemas.config import EnvironmentConfig
from rolloutmq.schemas.errors import (
    DrainingError,
    EnvironmentFailedError,
    RolloutMQError,
    UsageError,
)
from rolloutmq.schemas.teaching import TeacherFailedError, TeacherRefusedError
from rolloutmq.schemas.trajectory import Group
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.members import Members, drawn
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import group_of

logger = logging.getLogger(__name__)

TRACEBACK_EVERY_S: Final = 5.0
"""A failing environment may fail a thousand times a second: one traceback in so many seconds tells as much."""
ERROR_CHARS: Final = 500
"""Longest one-line error that is reported."""


class Outlet(Protocol):
    """What a rollout needs of a `Producer`."""

    @property
    def session(self) -> int:
        """Number of the session, issued by the broker."""
        ...

    async def acquire(self) -> Permit:
        """Wait until another rollout may begin; DrainingError if none may any more."""
        ...

    async def send(self, group: Group, *, permit: Permit) -> None:
        """Take the group over; from here on it is the producer's to deliver."""
        ...

    def abandon(self, permit: Permit) -> None:
        """Give a permit back that came to nothing."""
        ...


class Tasks(Protocol):
    """What a rollout needs of a `TaskTaker`."""

    async def take(
        self, count: int = 1, *, wait: bool = True, until: asyncio.Event | None = None
    ) -> list[LeasedTask]:
        """Take tasks, if told so after waiting for the first one until the event is set."""
        ...

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        """Give a task back that came to nothing."""
        ...


class Teacher(Protocol):
    """What a rollout needs of a teacher; see `services.worker.teacher`."""

    async def teach(self, group: Group) -> Group:
        """Return the group with what the teacher says of it. Waits as long as it takes.

        Raises:
            TeacherRefusedError, TeacherFailedError: It will not, or cannot; the group comes to nothing.
        """
        ...


class Rollouts:
    """Runs the rollouts of one worker in one event loop.

    Attributes:
        in_hand: Rollouts under way.
        produced: Groups handed to the producer.
        abandoned: Rollouts that came to nothing.
        late_members: Sequences that groups were closed without.
        untaught: Groups among the abandoned that the teacher refused, or failed on too often.
        error: The last reason why one did, in one line.
    """

    def __init__(
        self,
        worker: str,
        config: EnvironmentConfig,
        environment: Environment,
        policy: Policy,
        outlet: Outlet,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        tasks: Tasks | None = None,
        draining: asyncio.Event | None = None,
        teacher: Teacher | None = None,
    ) -> None:
        self.worker = worker
        self.env = worker.rpartition("-")[0] or worker
        self.config = config
        self._environment = environment
        self._policy = policy
        self._outlet = outlet
        self._tasks = tasks
        self._draining = draining
        self._teacher = teacher
        self._seed = seed
        self._clock = clock
        self._life = secrets.token_hex(4)
        self._numbers = count(1)
        self._tracebacks = Occasionally(TRACEBACK_EVERY_S)
        self._failures = 0
        self.in_hand = 0
        self.produced = 0
        self.abandoned = 0
        self.late_members = 0
        self.untaught = 0
        self.error = ""

    async def run(self) -> None:
        """Roll out until the outlet drains and what was in hand is handed over.

        Cancelled: what is in hand is abandoned.

        Raises:
            EnvironmentFailedError: Too many rollouts in a row came to nothing.
            TokenizerMismatchError: The teacher is of another tokenizer than the policy.
            GivenUpError: The outlet can take no more, for example because a newer worker has its name.
        """
        try:
            async with asyncio.TaskGroup() as slots:
                for slot in range(self.config.concurrency):
                    slots.create_task(self._slot(), name=f"{self.worker} slot {slot}")
        except ExceptionGroup as failed:
            first, *others = failed.exceptions
            for other in others:
                if not isinstance(other, RolloutMQError):
                    logger.error("another slot failed as well", exc_info=other)
            raise first from None

    async def _slot(self) -> None:
        while True:
            try:
                permit = await self._outlet.acquire()
            except DrainingError:
                return
            task = await self._task(permit)
            if not permit.is_open:
                return
            self.in_hand += 1
            try:
                await self._settled(permit, task)
            finally:
                self.in_hand -= 1
            await asyncio.sleep(0)  # an environment that never waits must not keep the others waiting

    async def _task(self, permit: Permit) -> LeasedTask | None:
        """Take a submitted task, as configured; without one where there must be one, the permit goes back."""
        if self._tasks is None or self.config.tasks == "own":
            return None
        only = self.config.tasks == "submitted"
        taken: list[LeasedTask] = []
        try:
            taken = await self._tasks.take(wait=only, until=self._draining if only else None)
        finally:
            if only and not taken:
                self._outlet.abandon(permit)
        return taken[0] if taken else None

    async def _settled(self, permit: Permit, task: LeasedTask | None) -> None:
        """Do one rollout and settle its permit, and its task."""
        attempt = Attempt(next(self._numbers), task)
        try:
            group = await self._group(attempt)
            if group is not None and self._teacher is not None:
                group = await self._taught(self._teacher, group, attempt)
            if group is not None:
                await self._sent(group, permit, attempt)
        finally:
            if permit.is_open:
                self.abandoned += 1
                self._outlet.abandon(permit)
            else:
                self.produced += 1
                self._failures = 0
            if attempt.members is not None:
                await attempt.members.end(self.config.rollout_timeout_s)
        if attempt.error and task is not None and self._tasks is not None:
            await self._tasks.hand_back(task.id, attempt.error)
        if self._failures >= self.config.failure_limit:
            raise EnvironmentFailedError(self.env, self._failures, self.error)

    async def _group(self, attempt: "Attempt") -> Group | None:
        """Run the user's code once; None if nothing came of it. The border behind which anything may happen."""
        number = attempt.number
        rng = random.Random(f"{self._seed}/{self.worker}/{self._outlet.session}/{number}")
        limit_s = self.config.rollout_timeout_s
        started_at = self._clock()
        timer = asyncio.timeout(limit_s)
        try:
            async with timer:
                returned = await self._rolled_out(attempt, rng)
            return group_of(
                f"{self.worker}/{self._life}-{number}",
                returned,
                started_at=started_at,
                finished_at=self._clock(),
                task=attempt.task.id if attempt.task else "",
                members=attempt.about(returned),
            )
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failed(attempt, error, "the environment cancelled itself")
        except TimeoutError as error:
            late = f"took longer than {limit_s:g} s" if timer.expired() else one_line(error)
            self._failed(attempt, error, late)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the user's code: it costs the rollout only
            self._failed(attempt, error, one_line(error))
        return None

    async def _rolled_out(self, attempt: "Attempt", rng: random.Random) -> Any:
        """Call the method of the environment that fits the task and the configuration."""
        environment: Any = self._environment
        config, task = self.config, attempt.task
        size = (task.size if task else 0) or config.group_size
        if config.group_deadline_s:
            if task is not None:
                of = (
                    environment.submitted(task.payload) if hasattr(environment, "submitted") else task.payload
                )
            else:
                of = await drawn(environment, rng)
            attempt.members = Members(environment, self._policy, of, size, rng)
            least = min(size, config.min_group_size or size)
            returned = await attempt.members.closed(least, config.group_deadline_s)
            self.late_members += attempt.members.late
            return returned
        if task is not None:
            return await environment.rollout_task(self._policy, task.payload, size, rng)
        return await environment.rollout(self._policy, size, rng)

    async def _taught(self, teacher: Teacher, group: Group, attempt: "Attempt") -> Group | None:
        """Have the teacher say what it thinks of the group, however long it takes; None if it will not."""
        try:
            return await teacher.teach(group)
        except (TeacherRefusedError, TeacherFailedError) as error:
            self.untaught += 1
            self._failed(attempt, error, one_line(error))
            return None

    async def _sent(self, group: Group, permit: Permit, attempt: "Attempt") -> None:
        try:
            await self._outlet.send(group, permit=permit)
        except UsageError as error:  # too large, or a value that cannot travel
            self._failed(attempt, error, one_line(error))

    def _failed(self, attempt: "Attempt", error: BaseException, why: str) -> None:
        self._failures += attempt.task is None
        self.error = attempt.error = why
        unsaid = self._tracebacks.due(time.monotonic())
        if unsaid is not None:
            logger.error(
                "rollout abandoned env=%s task=%s in_a_row=%d unlogged=%d error=%s",
                self.env,
                attempt.task.id if attempt.task else "",
                self._failures,
                unsaid,
                why,
                exc_info=None if isinstance(error, RolloutMQError) else error,
            )


@dataclass(slots=True)
class Attempt:
    """One rollout: its number in this life, its task if that was submitted, and why it came to nothing, if it did."""

    number: int
    task: LeasedTask | None = None
    error: str = ""
    members: Members | None = None

    def about(self, returned: Any) -> dict[str, int] | None:
        """Return what the group says of its members, if they were rolled out one by one."""
        if self.members is None:
            return None
        return {"wanted": self.members.wanted, "got": len(returned)}


class Occasionally:
    """Lets one event through in an interval and counts the others. Pure: the clock is passed in."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = float("-inf")
        self._unsaid = 0

    def due(self, now: float) -> int | None:
        """Return how many were held back since the last one, or None if this one is held back too."""
        if now < self._next:
            self._unsaid += 1
            return None
        unsaid, self._unsaid = self._unsaid, 0
        self._next = now + self._every_s
        return unsaid


def one_line(error: BaseException) -> str:
    """Describe an error in one short line that can travel, whatever its text is; of a group of errors, the first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text = " ".join(str(error).split()).encode(errors="replace").decode()
    kind = type(error).__name__
    if not isinstance(error, RolloutMQError):
        text = f"{kind}: {text}" if text else kind
    return text[:ERROR_CHARS]
