"""The connection of a trainer's adapter to the bus: its feeds, in a thread of their own.

    connection = FeedConnection("runs/mine", name="skyrl", batch_sequences=256, deadline_s=1800.0, timeout_s=60.0)
    connection.join(version, info)
    connection.run(connection.training.settle(trained, filtered, version))

Heartbeats go on there while the trainer computes, and any number of requests may wait at once.

The training begins with `join` alone. An evaluation has a feed of its own, which the first one opens: its tasks are of
the split `eval`, so it takes neither a group from the training nor the place of its consumer. A process that only
evaluates leaves a live training alone. A closed connection stays closed.
"""

import asyncio
import logging
import re
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from contextlib import AsyncExitStack
from typing import Any, Final, TypeGuard, TypeVar

from rolloutmq.bus.blocking import LoopThread
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.transport.endpoint import Where, resolve
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.errors import ClosedError, RolloutMQError, UsageError, WaitTimeoutError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.trainer.integrations.checkpoints import COMMIT_S, commit
from rolloutmq.trainer.integrations.task_feed.feed import Feed

logger = logging.getLogger(__name__)

T = TypeVar("T")

NAME_CHARS: Final = 40
"""Longest name of a training: task ids begin with it."""
DEADLINE_S: Final = 1e9
"""Longest deadline that the broker accepts."""
_NAME: Final = re.compile(r"[A-Za-z0-9_-]+")
EVALUATED: Final = PolicyVersion(0, 1 << 62)
"""Version that covers every evaluated group: nobody resumes an evaluation."""


def find_problem(
    name: object, environments: object, deadline_s: object, timeout_s: object
) -> tuple[str, str] | None:
    """Return which of these settings is wrong, and why; None if all are right.

    The settings of other projects are not typed, so anything may come.
    """
    if not (isinstance(name, str) and len(name) <= NAME_CHARS and _NAME.fullmatch(name)):
        return "name", f"must be 1 to {NAME_CHARS} letters, digits, - or _ (got {name!r})"
    if environments is not None and not isinstance(environments, Mapping):
        return "environments", f"must name an environment of the run for each key (got {environments!r})"
    for key, named in (environments or {}).items():
        if not (isinstance(named, str) and named):
            return f"environments.{key}", f"must be the name of an environment of the run (got {named!r})"
    if not (_is_number(deadline_s) and 0 < deadline_s <= DEADLINE_S):
        return (
            "deadline_s",
            f"must be seconds, more than 0 and at most {DEADLINE_S:,.0f} (got {deadline_s!r})",
        )
    if not (_is_number(timeout_s) and timeout_s >= 0):
        return "timeout_s", f"must be seconds, at least 0 (got {timeout_s!r})"
    return None


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)


class FeedConnection:
    """The feeds of one trainer. Any thread may call.

    Args:
        where: Run directory, or address of the broker's `serve` socket.
        name: Name of the training at the broker, and first part of its task ids.
        batch_sequences: Sequences of one optimizer step.
        deadline_s: Longest time from a request to its group, in seconds.
        timeout_s: Longest wait for the broker when a feed is opened, in seconds.
    """

    def __init__(
        self, where: Where, *, name: str, batch_sequences: int, deadline_s: float, timeout_s: float
    ) -> None:
        self._where = where
        self._name = name
        self._batch_sequences = batch_sequences
        self._deadline_s = deadline_s
        self._timeout_s = timeout_s
        self._starting = threading.Lock()
        self._loop: LoopThread | None = None
        self._closed = False
        self._stack = AsyncExitStack()
        self._training: Feed | None = None
        self._evaluation: Feed | None = None
        self._joining = asyncio.Lock()
        self._evaluating = asyncio.Lock()

    # Life

    @property
    def joined(self) -> bool:
        """Whether the training has begun, and the connection is open."""
        return self._training is not None

    @property
    def training(self) -> Feed:
        """The feed of the training.

        Raises:
            ClosedError: The connection is closed.
            UsageError: The training has not begun.
        """
        if self._closed:
            raise ClosedError
        if self._training is None:
            raise UsageError(f"training {self._name}: has not joined the bus; join it first")
        return self._training

    @property
    def error(self) -> RolloutMQError | None:
        """Why the training gets no further group; None while it does."""
        return None if self._training is None else self._training.error

    def join(
        self,
        resume: PolicyVersion | None,
        info: RunInfo | None = None,
        content_key: Callable[[str], str] | None = None,
        find_fault: Callable[[Group], str] | None = None,
    ) -> None:
        """Begin the training. Blocks until the broker has answered. Does nothing if it has begun.

        Args:
            resume: Policy from which the trainer continues; its incarnation is larger in each life.
            info: Description of the run.
            content_key, find_fault: See `Feed`.

        Raises:
            WaitTimeoutError: There is no broker; tells where it was looked for.
            RefusedError: The broker does not accept this trainer.
            ClosedError: The connection is closed.
        """
        self.run(self._join(resume, info, content_key, find_fault))

    async def _join(
        self,
        resume: PolicyVersion | None,
        info: RunInfo | None,
        content_key: Callable[[str], str] | None,
        find_fault: Callable[[Group], str] | None,
    ) -> None:
        async with self._joining:  # a second feed would take the place of the first
            if self._training is not None:
                return
            opening = Feed.open(
                self._where,
                training=self._name,
                batch_sequences=self._batch_sequences,
                deadline_s=self._deadline_s,
                resume=resume,
                resumed=resume is not None and resume > PolicyVersion(),
                content_key=content_key,
                find_fault=find_fault,
                info=info,
                timeout_s=self._timeout_s,
            )
            feed = await self._stack.enter_async_context(opening)
            found = await resolve(self._where)
            events = self._stack.enter_context(Publisher(found.publish, keys=keys_of(found)))
            feed.on_step = lambda event: events.publish(topics.STEP, event)
            self._training = feed

    def close(self) -> None:
        """Leave the bus; groups that are not settled return to the queue. Blocks. May be called twice."""
        with self._starting:
            loop, self._loop, self._closed = self._loop, None, True
        if loop is None:
            return
        try:
            loop.run(self._stack.aclose())
        finally:
            loop.close()
            self._training = self._evaluation = None

    def environments(self) -> tuple[str, ...]:
        """Return the names of the environments that a task may be for; none means any. Blocks.

        Raises:
            WaitTimeoutError: There is no broker; tells where it was looked for.
            ClosedError: The connection is closed.
        """
        return self.run(self._environments())

    async def _environments(self) -> tuple[str, ...]:
        async with TaskClient.open(self._where, timeout_s=self._timeout_s) as tasks:
            return await tasks.environments()

    # Calls in the thread of the feeds

    def _thread(self) -> LoopThread:
        with self._starting:
            if self._closed:
                raise ClosedError
            self._loop = self._loop or LoopThread(f"rolloutmq {self._name}")
            return self._loop

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and block until it ends.

        Raises:
            ClosedError: The connection is closed.
        """
        return self._begun(work).run(work)

    def future(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Begin a coroutine there, and return at once.

        Raises:
            ClosedError: The connection is closed.
        """
        return self._begun(work).future(work)

    def _begun(self, work: Coroutine[Any, Any, Any]) -> LoopThread:
        try:
            return self._thread()
        except BaseException:
            work.close()
            raise

    def call(self, function: Callable[[], T]) -> T:
        """Run a function that does not wait there, and return its result.

        Raises:
            ClosedError: The connection is closed.
        """
        return self._thread().call(function)

    # Outcome

    def commit(self, version: PolicyVersion) -> None:
        """Report a durable checkpoint: the broker may delete the groups of its steps. Blocks for at most `COMMIT_S`.

        Raises:
            RefusedError: The broker does not accept the commit.
            ClosedError: The connection is closed.
        """
        consumer = self.training.consumer
        commit(lambda made, timeout_s: self.run(consumer.commit(made, timeout_s=timeout_s)), version)

    async def evaluation(self) -> Feed:
        """Return the feed of evaluations; opens it first. Runs in the thread of the feeds."""
        async with self._evaluating:
            if self._evaluation is None:
                opening = Feed.open(
                    self._where,
                    training=self._name,
                    batch_sequences=1,
                    deadline_s=self._deadline_s,
                    split=Split.EVAL,
                    timeout_s=self._timeout_s,
                )
                self._evaluation = await self._stack.enter_async_context(opening)
            return self._evaluation

    async def evaluated(self) -> None:
        """Settle and commit all groups of evaluations that were handed out. Runs in the thread of the feeds.

        Waits for the broker, for at most twice `COMMIT_S`; the next evaluation settles what is left.
        """
        feed = await self.evaluation()
        async with self._evaluating:
            try:
                if await feed.settle(feed.keys(), (), timeout_s=COMMIT_S) is not None:
                    await feed.consumer.commit(EVALUATED, timeout_s=COMMIT_S)
            except WaitTimeoutError as error:
                logger.warning("evaluation not reported training=%s error=%s", self._name, error)
