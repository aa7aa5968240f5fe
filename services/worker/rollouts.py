"""Rollouts of one worker: one per slot at a time, each with a permit.

Every permit is settled exactly once: a group is sent, or the permit is given back. Whatever the user's code does
(raise, exit, hang, cancel itself, return nonsense) costs that rollout only. After `failure_limit` failures in a row,
over all slots, the worker ends, because the environment will not recover. Errors of the broker (draining, fenced) are
not the environment's fault and pass through.

A worker that reaches no engine takes no permit, so that workers of other hosts get it. Rollouts that fail for it count
neither against the environment.

A worker takes a submitted task with a permit in hand, and settles it with a group or hands it back with the reason. A
failed task counts against the task, never against the worker; the broker limits its deliveries.

The tasks of an evaluation have their own numbers: the generator of a task is seeded with `evaluation.seed` in place of
the run's, and an environment may hold tasks out for them (`rollout_eval`). Once such a task has ended, at its deadline
or because it was cancelled, nobody wants its answer: its rollout is cancelled, and the slot is free for the next point.
A rollout of the training goes on, because a late group still teaches.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from typing import Any, Final, Protocol

from rolloutmq.bus.producer.credit import Permit
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import (
    DrainingError,
    EnvironmentFailedError,
    RolloutMQError,
    TeacherFailedError,
    TeacherRefusedError,
    UsageError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.tasks import GIVEN, TaskStatus
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder
from rolloutmq.services.rewards.raters import EVALUATING
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.group_members import GroupMembers, drawn
from rolloutmq.services.worker.openai.call_trace import RolloutTracer
from rolloutmq.services.worker.policy import GreedyPolicy, Policy
from rolloutmq.services.worker.trajectory import TurnMismatchError, group_of
from rolloutmq.services.worker.user_code.failures import UserFiles, failure_of, first_error, one_line
from rolloutmq.services.worker.user_code.methods import awaited

logger = logging.getLogger(__name__)

TRACEBACK_EVERY_S: Final = 5.0
"""Seconds between two logged tracebacks: a broken environment may fail a thousand times a second."""
CANCEL_S: Final = 5.0
"""Seconds after which the log says that a rollout ignores its cancellation."""
NAMING_S: Final = 5.0
"""Seconds to wait for the texts of tokens that an error names."""


class GroupSink(Protocol):
    """The part of `Producer` that rollouts use."""

    @property
    def session(self) -> int:
        """Number of the session, issued by the broker."""
        ...

    async def acquire(self) -> Permit:
        """Wait for a permit; DrainingError if no rollout may start any more."""
        ...

    async def send(self, group: Group, *, permit: Permit) -> None:
        """Take over a group for delivery."""
        ...

    def abandon(self, permit: Permit) -> None:
        """Give back the permit of a failed rollout."""
        ...


class Tasks(Protocol):
    """The part of `TaskTaker` that rollouts use."""

    async def take(
        self, count: int = 1, *, wait: bool = True, until: asyncio.Event | None = None
    ) -> list[LeasedTask]:
        """Take tasks; with `wait`, wait for the first one until the event is set."""
        ...

    async def hand_back(self, task_id: str, reason: str, *, tried: bool = True) -> None:
        """Give back a failed task with the reason."""
        ...

    async def ended(self, task_id: str) -> TaskStatus:
        """Wait until a task has ended, and return its status."""
        ...


class Teacher(Protocol):
    """The part of a teacher client that rollouts use; see `services.worker.teacher_client`."""

    async def teach(self, group: Group) -> Group:
        """Return the group with the columns of the teacher. Waits as long as the teacher takes.

        Raises:
            TeacherRefusedError, TeacherFailedError: The teacher does not accept the group, or failed on it
                repeatedly.
        """
        ...


class Reach(Protocol):
    """Whether the policy can be asked from this host; see `services.worker.openai.reach`."""

    @property
    def is_lost(self) -> bool:
        """Whether no engine has been within reach for a while."""
        ...

    async def regained(self) -> None:
        """Wait until one is; leave the permits to others meanwhile."""
        ...


OnFailure = Callable[[BaseException, str], None]
"""Called with the error of a rollout, while its traceback has the frames, and with what to say of it."""


class Rollouts:
    """Runs the rollouts of one worker in one event loop.

    Attributes:
        in_hand: Running rollouts.
        produced: Groups handed to the producer.
        abandoned: Failed rollouts.
        late_members: Sequences missing when their group closed.
        untaught: Abandoned groups that the teacher refused or failed on.
        error: Last failure, in one line.
    """

    def __init__(
        self,
        worker: str,
        config: EnvironmentConfig,
        environment: Environment,
        policy: Policy,
        outlet: GroupSink,
        *,
        seed: int = 0,
        clock: Callable[[], float] = time.time,
        tasks: Tasks | None = None,
        draining: asyncio.Event | None = None,
        teacher: Teacher | None = None,
        evaluation_seed: int | None = None,
        on_failure: OnFailure | None = None,
        files: UserFiles | None = None,
        tracer: RolloutTracer | None = None,
        latencies: LatencyRecorder | None = None,
        reach: Reach | None = None,
    ) -> None:
        """Prepare the slots.

        `evaluation_seed` makes them answer the tasks of an evaluation, seeded with it. `on_failure` is called for each
        failed rollout. `files` tell the user's frames, for the place of a rollout that took too long. `tracer`
        traces the calls of sampled groups. `latencies` gets the duration of each rollout that made a group. Without a
        `reach` the policy is always within reach.
        """
        self._reach = reach
        self._tracer = tracer
        self._latencies = latencies
        self.worker = worker
        self.env = worker.rpartition("-")[0] or worker
        self.config = config
        self._environment = environment
        self._policy = policy
        self._outlet = outlet
        self._tasks = tasks
        self._draining = draining
        self._teacher = teacher
        self._on_failure = on_failure
        self._files = files
        self._evaluates = evaluation_seed is not None
        self._seed = f"evaluation {evaluation_seed}" if self._evaluates else str(seed)
        self._clock = clock
        self._life = secrets.token_hex(4)
        self._numbers = count(1)
        self._tracebacks = RateLimitedLog(TRACEBACK_EVERY_S)
        self._failures = 0
        self._taking = WaitClock()
        self.in_hand = 0
        self.produced = 0
        self.abandoned = 0
        self.late_members = 0
        self.untaught = 0
        self.error = ""

    @property
    def taking_s(self) -> float:
        """Seconds that all slots have waited for submitted tasks, current waits included."""
        return self._taking.total_s

    async def run(self) -> None:
        """Run rollouts until the sink drains and all running rollouts are handed over.

        On cancellation, running rollouts are abandoned.

        Raises:
            EnvironmentFailedError: Too many rollouts in a row failed.
            TokenizerMismatchError: The teacher has another tokenizer than the policy.
            GivenUpError: The sink accepts nothing more, for example because a newer worker has the same name.
        """
        try:
            async with asyncio.TaskGroup() as slots:
                for slot in range(self.config.concurrency):
                    slots.create_task(self._slot(), name=f"{self.worker} slot {slot}")
        except ExceptionGroup as failed:
            first, *others = failed.exceptions
            for other in others:
                if not isinstance(other, RolloutMQError):
                    logger.error("another slot failed", exc_info=other)
            raise first from first.__cause__

    async def _slot(self) -> None:
        EVALUATING.set(self._evaluates)  # in the context of this slot alone
        while True:
            await self._within_reach()
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
            await asyncio.sleep(0)  # lets other slots run even if the environment never awaits

    async def _within_reach(self) -> None:
        """Wait until an engine is within reach, or the worker drains."""
        if self._reach is None or not self._reach.is_lost:
            return
        waits: list[asyncio.Task[Any]] = [asyncio.create_task(self._reach.regained())]
        if self._draining is not None:
            waits.append(asyncio.create_task(self._draining.wait()))
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for one in waits:
                one.cancel()

    async def _task(self, permit: Permit) -> LeasedTask | None:
        """Take a submitted task, as configured. If a task is required and there is none, give the permit back."""
        if self._tasks is None or self.config.tasks == "own":
            return None
        only = self.config.tasks == "submitted"
        taken: list[LeasedTask] = []
        try:
            with self._taking.wait():
                taken = await self._tasks.take(wait=only, until=self._draining if only else None)
        finally:
            if only and not taken:
                self._outlet.abandon(permit)
        return taken[0] if taken else None

    async def _settled(self, permit: Permit, task: LeasedTask | None) -> None:
        """Do one rollout and settle its permit and its task."""
        attempt = Attempt(next(self._numbers), task, known=permit.policy)
        try:
            group = await self._traced(attempt)
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
            raise EnvironmentFailedError(self.env, self._failures, self.error) from attempt.raised

    async def _traced(self, attempt: "Attempt") -> Group | None:
        """Run the user's code once, and trace its calls if the group is sampled."""
        if self._tracer is None:
            return await self._group(attempt)
        with self._tracer.rollout(self._group_id(attempt)):
            return await self._group(attempt)

    def _group_id(self, attempt: "Attempt") -> str:
        return f"{self.worker}/{self._life}-{attempt.number}"

    async def _group(self, attempt: "Attempt") -> Group | None:
        """Run the user's code once; None if it failed. All errors of user code end here."""
        rng = self._generator(attempt)
        limit_s = self.config.rollout_timeout_s
        started_at = self._clock()
        timer = asyncio.timeout(limit_s)
        try:
            async with timer, self._wanted(attempt, timer):
                returned = await self._rolled_out(attempt, rng)
            group = group_of(
                self._group_id(attempt),
                returned,
                started_at=started_at,
                finished_at=self._clock(),
                task=attempt.task.id if attempt.task else "",
                members=attempt.about(returned),
                known=attempt.known,
            )
            self._measured(group)
            return group
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            self._failed(attempt, error, "the environment cancelled its own task")
        except TimeoutError as error:
            late = attempt.ended or self._late(error)
            self._failed(attempt, error, late if timer.expired() else one_line(error))
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - user code may raise anything
            await self._name_tokens(error)
            self._failed(attempt, error, one_line(error))
        return None

    def _measured(self, group: Group) -> None:
        """Count the duration of a rollout."""
        if self._latencies is not None:
            key = LatencyKey(Hop.ROLLOUT, self.env, Split.EVAL if self._evaluates else Split.TRAIN)
            seconds = group.finished_at - group.started_at
            self._latencies.add(key, seconds, tokens=group.tokens, source=group.group_id)

    def _late(self, error: TimeoutError) -> str:
        """Say that a rollout took too long, and where its code and its task were."""
        text = f"took longer than rollout_timeout_s ({self.config.rollout_timeout_s:g} s)"
        failure = None if self._files is None else failure_of(error, self._files)
        if failure is None or not failure.where:
            return text
        return f"{text}, at {failure.where}{f' with task {failure.task}' if failure.task else ''}"

    async def _name_tokens(self, error: BaseException) -> None:
        """Add the texts of the tokens to an error about turns that do not continue each other, if a server answers."""
        mismatch = first_error(error)
        if not isinstance(mismatch, TurnMismatchError):
            return
        with suppress(
            Exception
        ):  # a policy of one's own may lack `detokenize`; the error is told without texts
            async with asyncio.timeout(NAMING_S):
                tokens = {mismatch.wanted} if mismatch.found is None else {mismatch.wanted, mismatch.found}
                texts = [(token, await self._policy.detokenize([token])) for token in tokens]
                mismatch.name_tokens(dict(texts))

    @asynccontextmanager
    async def _wanted(self, attempt: "Attempt", timer: asyncio.Timeout) -> AsyncIterator[None]:
        """End the time of a rollout once the task of an evaluation that it answers has ended."""
        if attempt.task is None or self._tasks is None or not self._evaluates:
            yield
            return
        watch = self._ended(self._tasks, attempt, attempt.task.id, timer)
        watcher = asyncio.create_task(watch, name=f"end of {attempt.task.id}")
        try:
            yield
        finally:
            watcher.cancel()

    async def _ended(self, tasks: Tasks, attempt: "Attempt", task_id: str, timer: asyncio.Timeout) -> None:
        try:
            status = await tasks.ended(task_id)
        except RolloutMQError as error:  # the slot hears of the same trouble, and ends the worker
            logger.debug("end of a task not awaited task=%s error=%s", task_id, error)
            return
        attempt.ended = f"its task has ended: {status.state}, {status.reason or 'without a reason'}"
        if not timer.expired():
            timer.reschedule(asyncio.get_running_loop().time())
        await asyncio.sleep(CANCEL_S)
        logger.warning(
            "rollout ignores its cancellation and keeps its evaluation slot env=%s task=%s; let CancelledError pass",
            self.env,
            task_id,
        )

    def _generator(self, attempt: "Attempt") -> random.Random:
        """Return the generator of a rollout. That of a numbered task is the same in every worker and life."""
        task = attempt.task
        if task is not None and task.index != GIVEN:
            return random.Random(f"{self._seed}/{self.env}/task {task.index}")
        return random.Random(f"{self._seed}/{self.worker}/{self._outlet.session}/{attempt.number}")

    async def _rolled_out(self, attempt: "Attempt", rng: random.Random) -> Any:
        """Call the method of the environment that fits the task and the configuration."""
        environment: Any = self._environment
        config, task = self.config, attempt.task
        size = (task.size if task else 0) or config.group_size
        index = task.index if task else GIVEN
        given = task is not None and index == GIVEN
        policy = GreedyPolicy(self._policy) if task and task.greedy else self._policy
        if config.group_deadline_s:
            if task is not None and given:
                of = (
                    environment.submitted(task.payload) if hasattr(environment, "submitted") else task.payload
                )
            else:
                of = await drawn(environment, rng, index)
            attempt.members = GroupMembers(environment, policy, of, size, rng)
            least = min(size, config.min_group_size or size)
            returned = await attempt.members.closed(least, config.group_deadline_s)
            self.late_members += attempt.members.late
            return returned
        if task is not None and given:
            return await awaited("rollout_task", environment.rollout_task(policy, task.payload, size, rng))
        if self._evaluates and hasattr(environment, "rollout_eval"):
            return await awaited("rollout_eval", environment.rollout_eval(policy, index, size, rng))
        if index != GIVEN and hasattr(environment, "rollout_at"):
            return await awaited("rollout_at", environment.rollout_at(policy, index, size, rng))
        return await awaited("rollout", environment.rollout(policy, size, rng))

    async def _taught(self, teacher: Teacher, group: Group, attempt: "Attempt") -> Group | None:
        """Add the columns of the teacher, however long it takes; None if the teacher gives none."""
        try:
            return await teacher.teach(group)
        except (TeacherRefusedError, TeacherFailedError) as error:
            self.untaught += 1
            self._failed(attempt, error, one_line(error))
            return None

    async def _sent(self, group: Group, permit: Permit, attempt: "Attempt") -> None:
        try:
            await self._outlet.send(group, permit=permit)
        except UsageError as error:  # too large, or a value that cannot be encoded
            self._failed(attempt, error, one_line(error))

    def _failed(self, attempt: "Attempt", error: BaseException, why: str) -> None:
        self._failures += attempt.task is None and not (self._reach is not None and self._reach.is_lost)
        self.error = attempt.error = why
        attempt.raised = error
        if self._on_failure is not None:
            self._on_failure(error, why)
        suppressed = self._tracebacks.due(time.monotonic())
        if suppressed is not None:
            logger.error(
                "rollout abandoned env=%s task=%s in_a_row=%d unlogged=%d error=%s",
                self.env,
                attempt.task.id if attempt.task else "",
                self._failures,
                suppressed,
                why,
                exc_info=None if isinstance(error, RolloutMQError) else error,
            )


@dataclass(slots=True)
class Attempt:
    """One rollout: its number in this life, its submitted task if any, and its error if it failed."""

    number: int
    task: LeasedTask | None = None
    error: str = ""
    raised: BaseException | None = None
    ended: str = ""
    """Why nobody waits for its answer any more."""
    members: GroupMembers | None = None
    known: PolicyVersion | None = None
    """Newest version when it began."""

    def about(self, returned: Any) -> dict[str, int] | None:
        """Return the content of the column `members`, or None if the group was not rolled out by members."""
        if self.members is None:
            return None
        return {"wanted": self.members.wanted, "got": len(returned)}


class WaitClock:
    """Adds up the time of waits, which may overlap."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._waiting = 0
        self._counted_at = clock()
        self._total_s = 0.0

    @contextmanager
    def wait(self) -> Iterator[None]:
        """Count the block as a wait."""
        self._count()
        self._waiting += 1
        try:
            yield
        finally:
            self._count()
            self._waiting -= 1

    @property
    def total_s(self) -> float:
        """Seconds of all waits, current ones included."""
        self._count()
        return self._total_s

    def _count(self) -> None:
        now = self._clock()
        self._total_s += self._waiting * (now - self._counted_at)
        self._counted_at = now


class RateLimitedLog:
    """Lets one event through per interval and counts the others. Pure: the caller passes the clock."""

    def __init__(self, every_s: float) -> None:
        self._every_s = every_s
        self._next = float("-inf")
        self._suppressed = 0

    def due(self, now: float) -> int | None:
        """Return how many events were suppressed since the last one, or None to suppress this one too."""
        if now < self._next:
            self._suppressed += 1
            return None
        suppressed, self._suppressed = self._suppressed, 0
        self._next = now + self._every_s
        return suppressed
