"""The prefetch of a consumer: the pull of the next batch, sent together with the settlement of the previous one.

The broker answers both at once: at durability `disk` that is one disk wait for each step instead of two, and the batch
arrives while the trainer works between two steps. The prefetch does not wait for a batch. If there is none yet, the
next `pull` asks as usual, and only then the trainer counts as waiting.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

from rolloutmq.bus.consumer.batch import Batch
from rolloutmq.schemas.errors import RolloutMQError
from rolloutmq.schemas.wire.envelope import PolicyVersion

logger = logging.getLogger(__name__)


B = TypeVar("B", bound=Batch)


class Prefetch(Generic[B]):
    """At most one prefetched batch of one consumer.

    Args:
        pull: Asks once for the batch of a step; returns None if there is none.
        give_back: Releases the leased batch at the broker.
    """

    def __init__(
        self,
        pull: Callable[[int, PolicyVersion], Awaitable[B | None]],
        give_back: Callable[[], Awaitable[object]],
    ) -> None:
        self._pull = pull
        self._give_back = give_back
        self._asked: tuple[int, PolicyVersion] | None = None
        self._task: asyncio.Task[B | None] | None = None

    @property
    def holds(self) -> bool:
        """Whether a prefetched batch may be leased."""
        return self._task is not None

    def begin(self, step: int, version: PolicyVersion) -> None:
        """Start the pull of a step in the next turn of the loop, unless it is already running."""
        if self._asked != (step, version):
            if self._task is not None:
                self._task.cancel()
            self._asked = step, version
            self._task = asyncio.ensure_future(self._pull(step, version))

    async def take(self, step: int, version: PolicyVersion) -> B | None:
        """Return the prefetched batch if it is of this step and version; otherwise None.

        Cancelled: the next pull of the same step gets the leased batch.

        Raises:
            RolloutMQError: The error of the pull.
        """
        if self._asked != (step, version):
            await self.drop()
            return None
        task, self._task, self._asked = self._task, None, None
        return None if task is None else await task

    async def drop(self) -> None:
        """Give the prefetched batch back, if there is one."""
        if self._task is not None:
            await self.cancel()
            try:
                await self._give_back()
            except RolloutMQError as error:
                logger.warning("prefetched batch not given back error=%s", error)

    async def cancel(self) -> None:
        """End the pull; its lease stays."""
        task, self._task, self._asked = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, RolloutMQError):
                raise error
