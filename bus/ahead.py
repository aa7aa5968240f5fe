"""A pull that is made before anybody asks for its batch: together with the settlement of the one before.

The broker then answers both at once, which at durability `disk` is one wait for the disk a step in place of two, and
the next batch is taken in while the trainer does what it does between two steps. The pull waits for nothing: if there
is no batch yet, the next `pull` asks as usual, and only then the trainer is said to wait.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from rolloutmq.bus.batch import Batch
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import RolloutMQError

logger = logging.getLogger(__name__)


class Ahead:
    """At most one pull of one consumer that is ahead of it.

    Args:
        pull: Asks once for the batch of a step; returns None if there is none.
        give_back: Has the broker take back what is leased.
    """

    def __init__(
        self,
        pull: Callable[[int, PolicyVersion], Awaitable[Batch | None]],
        give_back: Callable[[], Awaitable[object]],
    ) -> None:
        self._pull = pull
        self._give_back = give_back
        self._asked: tuple[int, PolicyVersion] | None = None
        self._task: asyncio.Task[Batch | None] | None = None

    @property
    def holds(self) -> bool:
        """Whether a batch may be leased that nobody has begun with."""
        return self._task is not None

    def begin(self, step: int, version: PolicyVersion) -> None:
        """Ask for the batch of a step, from the next turn of the loop on; does nothing if that is under way."""
        if self._asked != (step, version):
            if self._task is not None:
                self._task.cancel()
            self._asked = step, version
            self._task = asyncio.ensure_future(self._pull(step, version))

    async def take(self, step: int, version: PolicyVersion) -> Batch | None:
        """Return the batch that was asked for ahead, if it was this one and there is one.

        Cancelled: what is leased is the next pull's of the same step.

        Raises:
            RolloutMQError: What the pull raised.
        """
        if self._asked != (step, version):
            await self.drop()
            return None
        task, self._task, self._asked = self._task, None, None
        return None if task is None else await task

    async def drop(self) -> None:
        """Give back what was asked for ahead, if anything was: it is not wanted any more."""
        if self._task is not None:
            await self.cancel()
            try:
                await self._give_back()
            except RolloutMQError as error:
                logger.warning("a batch that was pulled ahead was not given back error=%s", error)

    async def cancel(self) -> None:
        """End the pull; what it has leased stays leased."""
        task, self._task, self._asked = self._task, None, None
        if task is not None:
            task.cancel()
            await asyncio.wait({task})
            error = None if task.cancelled() else task.exception()
            if error is not None and not isinstance(error, RolloutMQError):
                raise error
