"""Evaluation by the trainer of a run: when a point is due, and who waits for it.

    before the first step   the trainer waits for the point, so it belongs to one policy
    every N steps           the point runs in a thread while training goes on, and says which policies answered
    after the last step     the trainer waits again

All points together take at most `evaluation.max_share` of the run's time, the last point included: a point in between
that would exceed it waits until it fits. A point costs the time from its first rollout to its last answer, although
training goes on meanwhile: the workers and the inference servers have less time for it. Cost and time are those of all
lives of the run, without the time between them. A postponed point is a line of `evaluations.jsonl`, for the report.

The leading rank evaluates. At both ends the other ranks wait with it, a moment at a time, so that none of them takes
another for hung. An evaluation that fails is logged, and the training continues.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.blocking import LoopThread, StartedCall
from rolloutmq.bus.evaluation.client import PointRequest
from rolloutmq.bus.evaluation.log import record, recorded
from rolloutmq.bus.rundir import read_lives
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas.config.evaluation import EvaluationConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.files import PostponedPoint, RunLayout
from rolloutmq.schemas.lives import seconds_of
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.requests import TrainerPause
from rolloutmq.trainer.process import Stop, StoppedError
from rolloutmq.trainer.ranks import Ranks

logger = logging.getLogger(__name__)

MOMENT_S: Final = 0.2
"""Time that the ranks wait for a point before they ask each other again."""
NO_LIMIT: Final = 1.0
"""`max_share` of which no point is postponed."""


class Schedule:
    """Decides when a point is due. Pure.

    Args:
        config: The section.
        last_step: Step of the last recorded point that still counts; None if there is none.
        spent: Seconds of each point before, in this run.

    Attributes:
        spent_s: Time of all points.
    """

    def __init__(self, config: EvaluationConfig, last_step: int | None, spent: Sequence[float] = ()) -> None:
        self._config = config
        self._last_step = last_step
        self._postponed = -1
        self._expected_s = spent[-1] if spent else 0.0
        self.spent_s = sum(spent)

    def began(self, step: int) -> None:
        """Note that a point begins at a step."""
        self._last_step = step

    def ended(self, seconds: float) -> None:
        """Note the time that a point took; the next one is expected to take as long."""
        self.spent_s += seconds
        self._expected_s = seconds

    def due_at_first(self) -> bool:
        """Return whether to evaluate before the next step: nothing is recorded yet."""
        return self._last_step is None

    def due_at_last(self, step: int) -> bool:
        """Return whether to evaluate after the last step."""
        return self._last_step != step

    def due(self, step: int) -> bool:
        """Return whether `every` asks for a point at this step, whatever it would cost."""
        every = self._config.every
        return bool(every) and step // every > (self._last_step or 0) // every

    def fits(self, wall_s: float) -> bool:
        """Return whether one more point, and the last one after it, would stay within the share of the wall time."""
        share = self._config.max_share
        return share >= NO_LIMIT or self.spent_s + 2 * self._expected_s <= share * wall_s

    def postpone(self, step: int, wall_s: float, *, busy: bool) -> PostponedPoint | None:
        """Return what to record of a point that does not begin now; None if that was recorded before.

        Args:
            step: The present step.
            wall_s: Time of the run.
            busy: The point before is still under way.
        """
        number = step // self._config.every
        told, self._postponed = self._postponed == number, number
        if told:
            return None
        return PostponedPoint(
            at=time.time(),
            step=step,
            every=self._config.every,
            max_share=None if busy else self._config.max_share,
            point_s=self._expected_s,
            spent_s=self.spent_s,
            wall_s=wall_s,
        )


class PointWait:
    """What the trainer does while it waits for a point: call it again and again, inside of its block.

    Args:
        supply: Called each time.
        waited: Gets the seconds of the wait so far, as it goes on; nothing if there was no wait.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        supply: Callable[[], object],
        waited: Callable[[TrainerPause, float], object],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._supply, self._waited, self._clock = supply, waited, clock
        self._counted_at: float | None = None

    def __enter__(self) -> Self:
        self._counted_at = None
        return self

    def __exit__(self, *_: object) -> None:
        if self._counted_at is not None:
            self._count()

    def __call__(self) -> None:
        self._count()
        self._supply()

    def _count(self) -> None:
        now = self._clock()
        if self._counted_at is not None:
            self._waited(TrainerPause.EVALUATION, now - self._counted_at)
        self._counted_at = now


class Evaluation:
    """Evaluates for one incarnation of the trainer. Without `[evaluation]` it does nothing.

    Args:
        config: Configuration of the run.
        layout: The run directory.
        version: Policy at which the trainer begins.
        ranks: The ranks that take part; only the leading one evaluates.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        version: PolicyVersion,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._ranks = ranks
        self._clock = clock
        self._request = PointRequest(config) if config.evaluation.enabled else None
        points = list(recorded(layout.evaluations)) if self._request else []
        steps = [done.version.step for done in points if done.rollouts]
        last = max((step for step in steps if step <= version.step), default=None)
        # Without a launcher nobody knows the time of earlier lives: then their points do not count either.
        lives = read_lives(layout)
        self._began_at = clock() - seconds_of(lives, time.time())
        self._schedule = Schedule(config.evaluation, last, [done.seconds for done in points] if lives else ())
        self._loop: LoopThread | None = None
        self._running: StartedCall[EvaluationDone] | None = None

    def before_first(self, version: PolicyVersion, stop: Stop, meanwhile: Callable[[], object]) -> None:
        """Wait for a point before the first step, unless there is one. All ranks call it; see `_wait`."""
        self._at_an_end(self._schedule.due_at_first(), version, stop, meanwhile)

    def after_last(self, version: PolicyVersion, stop: Stop, meanwhile: Callable[[], object]) -> None:
        """Wait for a point after the last step, unless there is one. All ranks call it; see `_wait`."""
        self._at_an_end(self._schedule.due_at_last(version.step), version, stop, meanwhile)

    def after_step(self, version: PolicyVersion) -> None:
        """Start a point if one is due and fits; never waits."""
        if self._request is None or not self._ranks.leads:
            return
        idle = self._is_over(0.0)
        if not self._schedule.due(version.step):
            return
        wall_s = self._wall_s()
        if idle and self._schedule.fits(wall_s):
            self._start(version, awaited=False)
        elif line := self._schedule.postpone(version.step, wall_s, busy=not idle):
            self._tell_postponed(line)

    def _tell_postponed(self, line: PostponedPoint) -> None:
        try:
            record(self._layout.evaluations, line)
        except OSError as error:  # a full disk: the training does not depend on it
            logger.warning("postponed evaluation not recorded error=%s", error)
        logger.info(
            "evaluation postponed step=%d spent_s=%.1f wall_s=%.0f: %s",
            *(line.step, line.spent_s, line.wall_s),
            "the point before is still under way"
            if line.max_share is None
            else f"it would exceed evaluation.max_share = {line.max_share:g}",
        )

    def close(self) -> None:
        """End the point under way, without its result, and the thread. May be called twice."""
        if self._running is not None:
            self._running.cancel()
        if self._loop is not None:
            self._loop.close()
        self._loop = self._running = None

    def _wall_s(self) -> float:
        return self._clock() - self._began_at

    def _at_an_end(
        self, due: bool, version: PolicyVersion, stop: Stop, meanwhile: Callable[[], object]
    ) -> None:
        if self._request is None or not self._ranks.most(int(due and self._ranks.leads)):
            return
        self._wait(stop, meanwhile)  # for a point of the steps before, whose answers must not mix with these
        if self._ranks.leads:
            self._start(version, awaited=True)
        self._wait(stop, meanwhile)

    def _start(self, version: PolicyVersion, *, awaited: bool) -> None:
        assert self._request is not None
        self._loop = self._loop or LoopThread("evaluation")
        self._schedule.began(version.step)
        completed = partial(self._completed, awaited=awaited)
        waiter = SegmentOwner.current() if awaited else None
        asking = self._request.answered(
            self._layout, version, awaited=awaited, waiter=waiter, completed=completed
        )
        logger.info("evaluation begins step=%d waits=%s", version.step, awaited)
        self._running = self._loop.start(asking)

    def _completed(self, done: EvaluationDone, *, awaited: bool) -> EvaluationDone:
        """Add the cost so far; runs in the thread of the evaluation."""
        self._schedule.ended(done.seconds)
        spent_s, wall_s = self._schedule.spent_s, self._wall_s()
        return replace(
            done, total_s=spent_s, share=min(1.0, spent_s / wall_s) if wall_s > 0 else None, waited=awaited
        )

    def _wait(self, stop: Stop, meanwhile: Callable[[], object]) -> None:
        """Wait for the point under way, with all ranks; `meanwhile` is called again and again.

        Raises:
            StoppedError: This rank or another one was asked to end.
        """
        while True:
            meanwhile()
            left = 0 if self._is_over(MOMENT_S) else 1
            worst = self._ranks.most(2 if stop.asked else left)
            if worst == 2:
                raise StoppedError
            if worst == 0:
                return

    def _is_over(self, wait_s: float) -> bool:
        """Return whether no point is under way, after at most `wait_s`; log the result of one that has ended."""
        if self._running is None:
            return True
        if not self._running.wait(wait_s):
            return False
        try:
            _log(self._running.result())
        except RolloutMQError as error:
            logger.warning("evaluation failed, training continues error=%s", error)
        except Exception:  # the training does not depend on it
            logger.exception("evaluation failed, training continues")
        self._running = None
        return True


def _log(done: EvaluationDone) -> None:
    total = done.all
    logger.info(
        "evaluation done point=%s oldest=%d.%d newest=%d.%d answered=%d of=%d failed=%d missing=%d greedy=%s mean=%s "
        "pass_k=%s k=%d seconds=%.1f share=%s %s",
        *(done.id, *msgspec.structs.astuple(done.oldest), *msgspec.structs.astuple(done.newest)),
        *(
            total.answered,
            total.tasks,
            total.failed,
            total.missing,
            total.greedy,
            total.mean,
            total.pass_k,
            total.k,
        ),
        *(done.seconds, done.share, done.why),
    )
