"""Batcher: generates waiting requests together, in one thread, so that the event loop stays free.

Requests are served in order of arrival. Requests that arrive during a batch join the next one, as many as fit. A
cancelled request is not started, or leaves its batch at the next step. If the weights cannot be read, the whole batch
fails with the reason and its callers retry: no result may come from half-written weights. If a batch fails for another
reason, its requests are repeated one by one, so that a bad request costs no other; errors of the weights themselves are
not repeated.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Final, Generic, Protocol, Self, TypeVar

from rolloutmq.schemas.errors import ClosedError, RetryableError, WeightsMismatchError
from rolloutmq.services.inference.openai.requests import ApiError

logger = logging.getLogger(__name__)
OF_THE_WEIGHTS: Final = (FloatingPointError, WeightsMismatchError)
"""Errors of the weights, not of a request: no finite numbers, or another model."""
_T = TypeVar("_T")


class BatchWork(Protocol):
    """A job for the batcher; results are stored in it."""

    cancelled: bool

    @property
    def rows(self) -> int:
        """Number of sequences."""
        ...


_J = TypeVar("_J", bound=BatchWork)


class Batcher(Generic[_J]):
    """A queue of jobs and the thread that works on them. An async context; `run` is its one task.

    Args:
        generate: Called in the thread with jobs of at most `max_rows` sequences together.
        max_waiting: Longest queue; further jobs are refused.
    """

    def __init__(
        self,
        generate: Callable[[Sequence[_J], Callable[[list[_J]], None]], None],
        *,
        max_rows: int,
        max_waiting: int,
    ) -> None:
        self._generate = generate
        self._max_rows = max_rows
        self._max_waiting = max_waiting
        self._waiting: deque[_J] = deque()
        self._futures: dict[_J, asyncio.Future[None]] = {}
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="generate")
        self._closed = False
        self._complaint = ""
        self._worked_s = 0.0
        self._working_since: float | None = None

    @property
    def busy_s(self) -> float:
        """Seconds spent generating so far, including the running batch."""
        since = self._working_since
        return self._worked_s + (time.monotonic() - since if since is not None else 0.0)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Refuse the waiting jobs, cancel the running batch, and wait for the thread."""
        self._closed = True
        self._waiting.clear()
        for job, future in self._futures.items():
            job.cancelled = True
            if not future.done():
                future.set_exception(ClosedError())
        await asyncio.to_thread(self._thread.shutdown)

    async def sample(self, job: _J) -> None:
        """Wait until the job has its results. Cancelling the call removes the job from its batch.

        Raises:
            ApiError: The queue is full, or generation failed.
            RetryableError: The weights could not be read.
            ClosedError: The server is shutting down.
        """
        if self._closed:
            raise ClosedError
        if len(self._waiting) >= self._max_waiting:
            raise ApiError(
                503, f"the queue is full ({len(self._waiting)} requests); try again later", "overloaded"
            )
        future = self._futures[job] = asyncio.get_running_loop().create_future()
        self._waiting.append(job)
        self._arrived.set()
        try:
            await future
        finally:
            del self._futures[job]
            if not future.done() or future.cancelled():
                self._forget(job)

    def _forget(self, job: _J) -> None:
        job.cancelled = True
        if job in self._waiting:
            self._waiting.remove(job)

    async def call(self, work: Callable[[], _T]) -> _T:
        """Run a function in the thread, between two batches."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    async def run(self) -> None:
        """Generate batch after batch until cancelled."""
        while True:
            await self._arrived.wait()
            if batch := self._take():
                await self._work(batch)
            else:
                self._arrived.clear()

    def _take(self) -> list[_J]:
        batch, rows = [], 0
        while self._waiting and rows + self._waiting[0].rows <= self._max_rows:
            rows += self._waiting[0].rows
            batch.append(self._waiting.popleft())
        return batch

    async def _work(self, batch: list[_J]) -> None:
        loop = asyncio.get_running_loop()

        def on_done(jobs: list[_J]) -> None:
            loop.call_soon_threadsafe(self._deliver, jobs)

        again: list[_J] = []
        self._working_since = time.monotonic()
        try:
            await loop.run_in_executor(self._thread, self._generate, batch, on_done)
        except RetryableError as error:
            self._complain(str(error))
            self._fail(batch, error)
        except Exception as error:
            logger.exception("batch failed jobs=%d", len(batch))
            again = batch if len(batch) > 1 and not isinstance(error, OF_THE_WEIGHTS) else []
            if not again:
                self._fail(batch, ApiError(500, "generation failed; see the log of the server", "failed"))
        else:
            self._complain("")
        finally:
            self._worked_s, self._working_since = self.busy_s, None
        for job in again:
            if self._awaits(job):
                await self._work([job])

    def _awaits(self, job: _J) -> bool:
        """Return whether a caller still waits for the job."""
        future = self._futures.get(job)
        return future is not None and not future.done()

    def _complain(self, why: str) -> None:
        """Log that generation fails or has recovered, once per change."""
        if why != self._complaint:
            if why:
                logger.warning("generation failing error=%s", why)
            else:
                logger.warning("generation recovered")
        self._complaint = why

    def _deliver(self, jobs: list[_J]) -> None:
        for job in jobs:
            future = self._futures.get(job)
            if future is not None and not future.done():
                future.set_result(None)

    def _fail(self, jobs: list[_J], error: Exception) -> None:
        for job in jobs:
            future = self._futures.get(job)
            if future is not None and not future.done():
                future.set_exception(error)
