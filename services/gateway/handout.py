"""Batches for a trainer that says nothing of what became of them: what is handed out, whole, is settled.

A batch is leased from the broker when it is asked for. It is settled as trained as soon as the last byte of the answer
is on its way; until then it stays leased, and who asks next gets the same one. There is no better moment: the protocol
knows no acknowledgement, and to wait for the next question would hand a batch out twice whenever this process dies.
What went and was not settled, because this process died or because the lease was lost, is known from `doubts`; when the
broker leases it again, with whatever other groups, it is settled and not handed out a second time.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from rolloutmq.bus.consumer import Consumer, PulledBatch
from rolloutmq.bus.endpoint import Where
from rolloutmq.schemas.delivery import RunInfo
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import LeaseLostError, RolloutMQError
from rolloutmq.schemas.trajectory import Group
from rolloutmq.services.gateway.contract import Registration

logger = logging.getLogger(__name__)

PULL_S: Final = 5.0
"""A trainer gives up after ten seconds; where the broker is away, it is told that there is nothing yet."""
CONSUMER: Final = "gateway"


class Offer:
    """One batch that is being handed out."""

    def __init__(self, batch: PulledBatch, groups: Sequence[Group]) -> None:
        self.batch = batch
        self.groups = groups
        """What of the batch the trainer does not have yet."""
        self.delivered = False
        """Set by whoever has sent all of it."""


class Handout:
    """The consumer of the run's trainer.

    Args:
        where: Run directory.
        went: Returns the groups that were delivered and are not settled, also by an earlier life.
        settled: Called with the groups of a batch when they are.
    """

    def __init__(
        self,
        where: Where,
        went: Callable[[], Container[str]] = frozenset,
        settled: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self.leased_at = float("-inf")
        """When the last batch came, monotonic: what the broker counted before may have its groups in it."""
        self._where = where
        self._went = went
        self._settled = settled
        self._turn = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._consumer: Consumer | None = None
        self._version = PolicyVersion()
        self._held: PulledBatch | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether a trainer has registered."""
        return self._consumer is not None

    async def open(self, trainer: Registration, step: int) -> None:
        """Register with the broker, waiting as long as it takes; batches are for the steps after `step`."""
        async with self._turn:
            await self._shut()
            stack = AsyncExitStack()
            self._consumer = await stack.enter_async_context(
                Consumer.open(
                    self._where, sequences=trainer.batch_size, consumer=CONSUMER, info=info_of(trainer, step)
                )
            )
            self._stack, self._version = stack, PolicyVersion(0, step)

    async def close(self) -> None:
        """Give back what was not handed out."""
        async with self._turn:
            await self._shut()

    async def _shut(self) -> None:
        if self._settling is not None:
            await asyncio.wait({self._settling}, timeout=PULL_S)
            self._settling.cancel()
            await asyncio.wait({self._settling})
        self._settling = self._held = self._consumer = None
        stack, self._stack = self._stack, None
        if stack is not None:
            await stack.aclose()

    def keep(self) -> None:
        """Keep the lease of a batch that was not handed out whole: its trainer may be slow to come back."""
        if self._held is not None and self._consumer is not None:
            self._consumer.progress()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[Offer | None]:
        """Yield the next batch, or None where there is none now. It is settled if it was delivered.

        One at a time: who asks while another is still reading is told in good time that there is nothing.
        """
        if not await self._my_turn():
            yield None
            return
        try:
            offer = await self._take()
            yield offer
            if offer is not None and offer.delivered:
                self._held = None
                self._version = PolicyVersion(0, self._version.step + 1)
                self._settling = asyncio.create_task(self._settle(offer.batch), name="settlement")
        finally:
            self._turn.release()

    async def _my_turn(self) -> bool:
        try:
            async with asyncio.timeout(PULL_S):
                return await self._turn.acquire()
        except TimeoutError:
            return False

    def held(self) -> Sequence[Group]:
        """Return the groups that are leased, and not handed out."""
        return self._held.groups if self._held is not None else ()

    async def _take(self) -> Offer | None:
        if self._consumer is None:
            return None
        try:
            async with asyncio.timeout(PULL_S):
                if self._settling is not None:
                    await asyncio.shield(self._settling)
                    self._settling = None
                groups = await self._hold()
        except TimeoutError:
            logger.warning("the broker is slow or away: the trainer is told that there is nothing")
            return None
        return Offer(self._held, groups) if self._held is not None else None

    async def _hold(self) -> list[Group]:
        """Lease a batch, unless one is held; return those of its groups that the trainer does not have yet."""
        assert self._consumer is not None
        while True:
            if self._held is None:
                self._held = await self._consumer.pull(self._version.step + 1, self._version, 0.0)
                if self._held is None:
                    return []
                self.leased_at = time.monotonic()
            went = self._went()
            groups = [group for group in self._held.groups if group.group_id not in went]
            if groups or not self._held.groups:
                return groups
            logger.info("step %d went to the trainer before this gateway was started", self._held.step)
            await self._settle(self._held)
            self._held = None
            self._version = PolicyVersion(0, self._version.step + 1)

    async def _settle(self, batch: PulledBatch) -> None:
        try:
            version = PolicyVersion(0, batch.step)
            await batch.consumer.settle(batch, version=version)
            # This trainer never comes back to a checkpoint and asks for a batch again: nothing is kept for that.
            await batch.consumer.commit(version)
            self._settled(group.group_id for group in batch.groups)
        except LeaseLostError:
            logger.warning(
                "the lease of step %d was lost: its groups come again, and only then end", batch.step
            )
        except RolloutMQError as error:
            logger.error("step %d could not be settled error=%s", batch.step, error)


def info_of(trainer: Registration, step: int) -> RunInfo:
    """Return what the broker is told of the run."""
    return RunInfo(
        tracking_project=trainer.wandb_project,
        tracking_group=trainer.wandb_group,
        batch_sequences=max(0, trainer.batch_size),
        max_tokens=max(0, trainer.max_token_len),
        checkpoint_dir=trainer.checkpoint_dir,
        checkpoint_interval=max(0, trainer.save_checkpoint_interval),
        starting_step=max(0, step),
        total_steps=max(0, trainer.num_steps),
    )


def registration_of(info: RunInfo) -> Registration:
    """Return what a trainer would have said that registered over the bus; what it did not tell is -1."""
    return Registration(
        wandb_group=info.tracking_group,
        wandb_project=info.tracking_project,
        batch_size=info.batch_sequences or -1,
        max_token_len=info.max_tokens or -1,
        checkpoint_dir=info.checkpoint_dir,
        save_checkpoint_interval=info.checkpoint_interval or -1,
        starting_step=info.starting_step,
        num_steps=info.total_steps or -1,
    )
