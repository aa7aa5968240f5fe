"""One point under way: submit the tasks, hear of their outcome, and pull the groups that answer them.

    submit at most WINDOW open tasks ──> a task is done ──> pull its group ──> scores
                                    ├──> a worker gave it up: failed
                                    └──> unknown to a broker that restarted without a journal: submitted again

A group is pulled alone, so that no group waits for others. Groups of an earlier point may lie in the queue: they are
pulled and ignored. A group whose lease was lost comes again and is ignored the second time.
"""

import asyncio
import logging
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Final

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.evaluation.plan import PlannedTask
from rolloutmq.bus.evaluation.scores import PointScores
from rolloutmq.bus.log_throttle import LogThrottle, WaitLog
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.schemas.errors import LeaseLostError, RolloutMQError, TasksFullError
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus

logger = logging.getLogger(__name__)

WINDOW: Final = 512
"""Tasks open at once; one request asks for the status of all of them."""
HEAR_S: Final = 1.0
"""Longest wait of one question for the outcome of tasks, and of one pull."""
LOST_S: Final = 5.0
"""A group that answers a task, and that no pull has brought for this long, may be lost with the broker's memory."""
COMMIT_GROUPS: Final = 64
"""Groups after which the broker is told that it need not keep them for a resumed trainer."""
LAST_WORD_S: Final = 2.0
"""Longest time to cancel what is open at the end."""
EVERYTHING: Final = PolicyVersion(0, 1 << 62)
"""Version that covers every settled group: nobody resumes an evaluation."""


class PointRun:
    """Asks the tasks of one point. For one event loop.

    Args:
        name: Id of the point, for the log.
        tasks: Client that submits.
        consumer: Consumer of split `eval` with `sequences=1`.
        planned: The tasks.
        scores: Collects the answers.
        deadline_s: Longest time of the point in seconds, from now.
        awaited: Somebody waits for it: a long wait is logged as a warning.
    """

    def __init__(
        self,
        name: str,
        tasks: TaskClient,
        consumer: Consumer,
        planned: Sequence[PlannedTask],
        scores: PointScores,
        deadline_s: float,
        *,
        awaited: bool,
    ) -> None:
        self._name = name
        self._tasks = tasks
        self._consumer = consumer
        self._pending = deque(planned)
        self._part = WINDOW
        self._scores = scores
        self._deadline_s = deadline_s
        self._total = len(planned)
        self._open: dict[str, PlannedTask] = {}
        self._done: dict[str, PlannedTask] = {}
        """Tasks that are done, and whose groups have not been pulled."""
        self._states: Counter[TaskState] = Counter()
        self._heard_at = time.monotonic()
        self._uncommitted = 0
        self._wait_log = WaitLog() if awaited else None
        self._failures = LogThrottle()

    async def run(self) -> str:
        """Ask all tasks; return why the point ended early, or an empty text. On cancellation, cancel the open tasks.

        Raises:
            RefusedError, ConsumerFencedError: The broker does not accept the tasks or the consumer.
        """
        limit = asyncio.timeout(self._deadline_s)
        try:
            async with limit:
                while self._scores.left:
                    await self._submit()
                    await self._hear()
                    await self._pull()
                    self._tell()
        except TimeoutError:
            if not limit.expired():
                raise
            return f"its deadline of {self._deadline_s:.1f} s passed"
        finally:
            await self._end()
        return ""

    async def _submit(self) -> None:
        """Submit as many tasks as may be open."""
        part: list[PlannedTask] = []
        while self._pending and len(part) < self._part and len(self._open) + len(part) < WINDOW:
            part.append(self._pending.popleft())
        if not part:
            return
        try:
            await self._tasks.submit(self._submitted(part))
        except TasksFullError as error:
            # Some of them may be submitted: to submit those again changes nothing. Fewer at once may have room.
            self._pending.extendleft(reversed(part))
            self._part = max(1, len(part) // 2)
            logger.info("evaluation waits for room among the tasks point=%s error=%s", self._name, error)
            if not self._open and not self._done:
                await asyncio.sleep(min(error.retry_s, HEAR_S))
            return
        self._open |= {task.id: task for task in part}

    def _submitted(self, part: Sequence[PlannedTask]) -> Iterator[Task]:
        for one in part:
            yield Task(
                id=one.id,
                env=one.env,
                split=Split.EVAL,
                size=one.size,
                deadline_s=self._deadline_s,
                index=one.index,
                greedy=one.greedy,
            )

    async def _hear(self) -> None:
        """Sort the open tasks by their outcome; wait for the first one unless there is a group to pull."""
        if not self._open:
            return
        wait_s = 0.0 if self._done else HEAR_S
        found = await self._tasks.results(list(self._open), wait_s, enough=1)
        self._states = Counter(status.state for status in found)
        for status in found:
            if status.over:
                self._take(status, self._open.pop(status.id))

    def _take(self, status: TaskStatus, task: PlannedTask) -> None:
        if not self._scores.expects(task.id):
            return
        if status.state is TaskState.DONE:
            self._heard_at = self._heard_at if self._done else time.monotonic()
            self._done[task.id] = task
        elif status.state is TaskState.UNKNOWN:
            self._pending.append(task)
        elif status.state is TaskState.FAILED:
            self._scores.give_up(task.id)
            if self._failures.is_due("failed", time.monotonic()):
                logger.warning("evaluation task failed task=%s reason=%s", task.id, status.reason)
        else:
            self._scores.lose(task.id)

    async def _pull(self) -> None:
        """Pull the groups of done tasks, as long as they come at once."""
        while self._done:
            version = self._consumer.version
            batch = await self._consumer.pull(version.step + 1, version, HEAR_S)
            if batch is None:
                await self._look_again()
                return
            for group in batch.groups:
                self._done.pop(group.task, None)
                self._scores.answer(
                    group.task,
                    group.columns["scores"].numbers().tolist(),
                    group.tokens,
                    group.oldest,
                    group.newest,
                    group.started_at,
                )
            self._heard_at = time.monotonic()
            with suppress(LeaseLostError):  # it comes again, and its scores are known
                await self._consumer.settle(batch)
            await self._commit(COMMIT_GROUPS)

    async def _look_again(self) -> None:
        """Ask for the done tasks again if their groups do not come: the broker may have lost both."""
        if time.monotonic() - self._heard_at < LOST_S:
            return
        self._heard_at = time.monotonic()
        done, self._done = self._done, {}
        for status in await self._tasks.results(list(done), 0.0):
            self._take(status, done[status.id])

    async def _commit(self, least: int) -> None:
        self._uncommitted += 1
        if self._uncommitted >= least:
            await self._consumer.commit(EVERYTHING)
            self._uncommitted = 0

    def _tell(self) -> None:
        """Log a long wait, with the reason."""
        now = time.monotonic()
        if self._wait_log is not None and self._wait_log.is_due("answers", now):
            logger.warning(
                "waiting for the evaluation point=%s ended=%d of=%d without_worker=%d at_a_worker=%d waited_s=%.0f",
                self._name,
                self._total - self._scores.left,
                self._total,
                self._states[TaskState.QUEUED],
                self._states[TaskState.LEASED],
                self._wait_log.waited_s(now),
            )

    async def _end(self) -> None:
        """Cancel what is open and let the broker forget what was pulled, within `LAST_WORD_S`."""
        with suppress(TimeoutError, RolloutMQError):
            async with asyncio.timeout(LAST_WORD_S):
                if self._open:
                    await self._tasks.cancel(list(self._open), "the evaluation has ended")
                if self._uncommitted:
                    await self._commit(0)
