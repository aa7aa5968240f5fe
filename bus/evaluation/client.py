"""Evaluate the policy of a run: one call asks one point, and records it.

    scores = rolloutmq.evaluate("runs/mine")                     # blocks
    scores = await rolloutmq.evaluate_async("runs/mine", samples=4)

The workers of the run answer, beside their rollouts for the training; the policy is whatever they sample from. A point
is a line of `evaluations.jsonl` and an event on `telemetry.evaluation.<run>`. One run has one point at a time: a lock
keeps the second caller waiting. A caller that was killed has left its tasks in `evaluation.json`, and the next one
cancels them.
"""

import asyncio
import fcntl
import logging
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.blocking import LoopThread
from rolloutmq.bus.consumer.batch import given_version
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.evaluation.log import record
from rolloutmq.bus.evaluation.plan import PlannedTask, plan
from rolloutmq.bus.evaluation.point import PointRun
from rolloutmq.bus.evaluation.scores import PointScores
from rolloutmq.bus.files import private_fd
from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.bus.rundir import FILE_POLL_S, load_run, read_json, write_json
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.transport.endpoint import resolve
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.config.evaluation import DEADLINE_MAX_S
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import OpenPoint, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.replies import RunInfo

logger = logging.getLogger(__name__)

CLOSING_S: Final = 10.0
"""Time beyond the deadline in which a call must end, in seconds."""
CONSUMER: Final = "evaluator"
"""Name of the consumer and of its group. The lock leaves one at a time; a killed one is fenced by the next."""


def evaluate(
    run_dir: str | Path,
    *,
    version: PolicyVersion | None = None,
    environments: Sequence[str] | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    greedy: bool | None = None,
    deadline_s: float | None = None,
) -> EvaluationDone:
    """Evaluate the policy of a run, and record the point. Blocks until it is done, about `deadline_s` at most.

    `evaluate_async` has the same arguments and errors.
    """
    loop = LoopThread("rolloutmq evaluation")
    try:
        return loop.run(
            evaluate_async(
                run_dir,
                version=version,
                environments=environments,
                tasks=tasks,
                samples=samples,
                greedy=greedy,
                deadline_s=deadline_s,
            )
        )
    finally:
        loop.close()


async def evaluate_async(
    run_dir: str | Path,
    *,
    version: PolicyVersion | None = None,
    environments: Sequence[str] | None = None,
    tasks: int | None = None,
    samples: int | None = None,
    greedy: bool | None = None,
    deadline_s: float | None = None,
) -> EvaluationDone:
    """Evaluate the policy of a run, and record the point.

    To give a point to one policy, call it while the weights rest: then `EvaluationDone.one_policy` is true. During
    training the point says which policies answered. What is not answered by the deadline is missing in the scores.
    Cancelled: the open tasks are cancelled, and nothing is recorded.

    Args:
        run_dir: Run directory. Its configuration needs `evaluation.enabled`, with which the workers answer.
        version: Policy that the point is for. None: the trainer's policy, as the broker knows it.
        environments: Environments to ask; None, here and below: as `[evaluation]` says.
        tasks: Tasks of each environment.
        samples: Sampled answers to each task; 0 for none.
        greedy: Whether each task is also answered greedily.
        deadline_s: Longest wait for the answers, in seconds. It includes the wait for another evaluation of the run
            and for the broker. The call ends at most 10 s later.

    Raises:
        ConfigError: The run has no evaluation, or nothing would be asked.
        UsageError: An argument is out of range, or there is no such environment.
        MissingError: The directory holds no run.
        RefusedError: The broker does not accept the tasks.
        WaitTimeoutError: Another evaluation did not end, or the broker did not answer, until the deadline.
    """
    config, layout = load_run(Path(run_dir))
    asked = PointRequest(config, environments, tasks, samples, greedy, deadline_s)
    return await asked.answered(layout, given_version("version", version))


class PointRequest:
    """What a point asks: the section `[evaluation]`, and what a caller gives in its place."""

    def __init__(
        self,
        config: RunConfig,
        environments: Sequence[str] | None = None,
        tasks: int | None = None,
        samples: int | None = None,
        greedy: bool | None = None,
        deadline_s: float | None = None,
    ) -> None:
        section = config.evaluation
        if not section.enabled:
            raise ConfigError("evaluation.enabled", "must be true, or no worker answers (got false)")
        self.config = config
        self.environments = tuple(config.evaluated if environments is None else environments)
        self.tasks = _at_least("tasks", section.tasks if tasks is None else tasks, 1)
        self.samples = _at_least("samples", section.samples if samples is None else samples, 0)
        self.greedy = section.greedy if greedy is None else greedy
        self.deadline_s = section.deadline_s if deadline_s is None else deadline_s
        if len(set(self.environments)) < len(self.environments):
            raise UsageError(
                f"environments: must name each environment once (got {', '.join(self.environments)})"
            )
        if unknown := [name for name in self.environments if name not in config.evaluated]:
            known = ", ".join(config.evaluated)
            raise UsageError(
                f"environments: {unknown[0]} is not evaluated (evaluated: {known}); name one of them"
            )
        if not (self.environments and (self.samples or self.greedy)):
            raise UsageError("samples: must be at least 1 with greedy=False, and an environment named")
        if not (isinstance(self.deadline_s, int | float) and 0 < self.deadline_s <= DEADLINE_MAX_S):
            raise UsageError(
                f"deadline_s: must be seconds above 0, at most {DEADLINE_MAX_S:g} (got {self.deadline_s!r})"
            )

    async def answered(
        self,
        layout: RunLayout,
        version: PolicyVersion | None = None,
        *,
        awaited: bool = True,
        waiter: SegmentOwner | None = None,
        completed: Callable[[EvaluationDone], EvaluationDone] = lambda done: done,
    ) -> EvaluationDone:
        """Ask one point, record it and return it; see `evaluate_async`.

        Args:
            layout: The run directory.
            version: Policy that the point is for.
            awaited: Somebody waits for it: a long wait is logged as a warning.
            waiter: The trainer that takes no step meanwhile, for `rolloutmq status` and `top`.
            completed: Adds what only the caller knows, before the point is recorded.
        """
        began = time.monotonic()
        limit = asyncio.timeout(self.deadline_s + CLOSING_S)
        try:
            async with limit, _alone(layout):
                # Before the tasks: a socket that has just connected would drop the event.
                found = await resolve(layout.root, self.deadline_s)
                with Publisher(found.publish, keys=keys_of(found)) as events:
                    until = began + self.deadline_s
                    done = completed(await self._point(layout, version, waiter, until, awaited=awaited))
                    record(layout.evaluations, done)
                    events.publish(topics.telemetry("evaluation", done.run), done)
        except TimeoutError as error:
            if not limit.expired():
                raise
            problem = f"another evaluation of the run, or no answer from the broker of {layout.root}"
            raise WaitTimeoutError("evaluate", time.monotonic() - began, problem) from error
        return done

    async def _point(
        self,
        layout: RunLayout,
        version: PolicyVersion | None,
        waiter: SegmentOwner | None,
        until: float,
        *,
        awaited: bool,
    ) -> EvaluationDone:
        run = self.config.run.name
        async with (
            TaskClient.open(layout.root) as tasks,
            Consumer.open(
                layout.root,
                sequences=1,
                consumer=CONSUMER,
                group=CONSUMER,
                split=Split.EVAL,
                info=RunInfo(run=run),
            ) as consumer,
        ):
            version = consumer.version if version is None else version
            name = f"eval-{version.incarnation}.{version.step}-{secrets.token_hex(4)}"
            planned = self._plan(name)
            await _cancel_left(tasks, layout)
            write_json(layout.evaluation, OpenPoint(name, tuple(task.id for task in planned), waiter))
            scores = PointScores(planned, self.config.evaluation.pass_score, self._pass_scores())
            began = time.monotonic()
            left_s = max(0.01, until - began)
            point = PointRun(name, tasks, consumer, planned, scores, left_s, awaited=awaited)
            why = await point.run()
            passed_s = time.monotonic() - began
        layout.evaluation.unlink(missing_ok=True)
        return self._done(name, version, scores, why, passed_s)

    def _pass_scores(self) -> dict[str, float]:
        given = {name: self.config.environment[name].pass_score for name in self.environments}
        return {name: score for name, score in given.items() if score is not None}

    def _plan(self, name: str) -> list[PlannedTask]:
        return plan(name, self.environments, tasks=self.tasks, samples=self.samples, greedy=self.greedy)

    def _done(
        self, name: str, version: PolicyVersion, scores: PointScores, why: str, passed_s: float
    ) -> EvaluationDone:
        now = time.time()
        # Before the first rollout the workers may still have been starting: that time is not the evaluation's.
        since_first_s = now - scores.started_at if scores.started_at is not None else passed_s
        return EvaluationDone(
            run=self.config.run.name,
            id=name,
            at=now,
            version=version,
            oldest=scores.oldest or version,
            newest=scores.newest or version,
            all=scores.of_all(),
            environments=scores.of_environments(),
            rollouts=scores.rollouts,
            sequences=scores.sequences,
            tokens=scores.tokens,
            seconds=min(passed_s, max(0.0, since_first_s)),
            why=why,
            seed=self.config.evaluation.seed,
        )


def _at_least(name: str, value: int, least: int) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise UsageError(f"{name}: must be a number of at least {least} (got {value!r})")
    return value


async def _cancel_left(tasks: TaskClient, layout: RunLayout) -> None:
    """Cancel the tasks of a caller that was killed: workers would answer them first, and nobody would hear it."""
    left: OpenPoint | None = None
    with suppress(msgspec.DecodeError, OSError):
        left = read_json(layout.evaluation, OpenPoint)
    if left is not None and left.tasks:
        logger.info("cancelling the tasks of an unfinished point point=%s tasks=%d", left.id, len(left.tasks))
        await tasks.cancel(left.tasks, "its evaluation was killed")


@asynccontextmanager
async def _alone(layout: RunLayout) -> AsyncIterator[None]:
    """Hold the lock of the evaluation within the block. Waits without a limit; a wait of some seconds is logged."""
    lock = private_fd(layout.evaluation_lock, os.O_RDWR | os.O_CREAT)
    log = WaitLog()
    try:
        while True:
            with suppress(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            if log.is_due("lock", now := time.monotonic()):
                logger.warning("waiting for another evaluation of this run waited_s=%.0f", log.waited_s(now))
            await asyncio.sleep(FILE_POLL_S)
        yield
    finally:
        os.close(lock)
