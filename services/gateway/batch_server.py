"""Batches for a trainer without acknowledgements: a completely delivered batch counts as settled.

A batch is leased from the broker on request. It is settled as trained as soon as the last byte of the reply is on its
way; until then it stays leased, and the next request gets the same batch. The protocol has no acknowledgement, and
waiting for the next request would deliver a batch twice whenever this process dies. `in_doubt` records batches that
were delivered but not settled, because this process died or the lease was lost. When the broker leases their groups
again, in whatever batches, the gateway settles them without a second delivery.
"""

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Container, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Final

from rolloutmq.bus.consumer.client import Consumer, LeasedBatch
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.schemas.errors import LeaseLostError, RolloutMQError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.gateway.atropos_wire import Registration

logger = logging.getLogger(__name__)

PULL_S: Final = 5.0
"""Below the trainer's time-out of ten seconds: while the broker is away, the trainer gets an empty reply."""
CONSUMER: Final = "gateway"


class BatchOffer:
    """One batch under delivery."""

    def __init__(self, batch: LeasedBatch, groups: Sequence[Group]) -> None:
        self.batch = batch
        self.groups = groups
        """Groups of the batch the trainer does not have yet."""
        self.delivered = False
        """Set once all of it was sent."""


class BatchServer:
    """Consumer for the run's trainer.

    Args:
        where: Run directory.
        went: Returns the groups delivered but not settled, also by an earlier life.
        settled: Called with the groups of a batch once settled.
    """

    def __init__(
        self,
        where: Where,
        went: Callable[[], Container[str]] = frozenset,
        settled: Callable[[Iterable[str]], None] = lambda _: None,
    ) -> None:
        self.leased_at = float("-inf")
        """Arrival of the last batch, monotonic: older broker counts may include its groups."""
        self._where = where
        self._went = went
        self._settled = settled
        self._turn = asyncio.Lock()
        self._stack: AsyncExitStack | None = None
        self._consumer: Consumer | None = None
        self._version = PolicyVersion()
        self._held: LeasedBatch | None = None
        self._settling: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Return whether a trainer has registered."""
        return self._consumer is not None

    async def open(self, trainer: Registration, step: int) -> None:
        """Register with the broker, without a time limit; batches are for the steps after `step`."""
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
        """Return the batch if it was not delivered."""
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
        """Keep the lease of an incompletely delivered batch: its trainer may be slow to return."""
        if self._held is not None and self._consumer is not None:
            self._consumer.progress()

    @asynccontextmanager
    async def next(self) -> AsyncIterator[BatchOffer | None]:
        """Yield the next batch, or None if there is none now. It is settled if delivered.

        One request at a time: while another one is still reading, the result is None in good time.
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
        """Return the leased, undelivered groups."""
        return self._held.groups if self._held is not None else ()

    async def _take(self) -> BatchOffer | None:
        if self._consumer is None:
            return None
        try:
            async with asyncio.timeout(PULL_S):
                if self._settling is not None:
                    await asyncio.shield(self._settling)
                    self._settling = None
                groups = await self._hold()
        except TimeoutError:
            logger.warning("broker slow or away, replying without a batch")
            return None
        return BatchOffer(self._held, groups) if self._held is not None else None

    async def _hold(self) -> list[Group]:
        """Lease a batch, unless one is held; return its groups that the trainer does not have yet."""
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
            logger.info("step delivered by an earlier gateway step=%d", self._held.step)
            await self._settle(self._held)
            self._held = None
            self._version = PolicyVersion(0, self._version.step + 1)

    async def _settle(self, batch: LeasedBatch) -> None:
        try:
            version = PolicyVersion(0, batch.step)
            await batch.consumer.settle(batch, version=version)
            # This trainer never resumes from a checkpoint and asks again: keep nothing for a rewind.
            await batch.consumer.commit(version)
            self._settled(group.group_id for group in batch.groups)
        except LeaseLostError:
            logger.warning("lease lost, groups are redelivered and settled then step=%d", batch.step)
        except RolloutMQError as error:
            logger.error("step not settled step=%d error=%s", batch.step, error)


def info_of(trainer: Registration, step: int) -> RunInfo:
    """Return the run info sent to the broker."""
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


def registration_of(info: RunInfo, batch_sequences: int = 0) -> Registration:
    """Return the registration equivalent to a trainer on the bus; unknown numbers are -1.

    `batch_sequences` counts for a trainer that announced no batch size, because its batches are counted in tokens.
    """
    return Registration(
        wandb_group=info.tracking_group,
        wandb_project=info.tracking_project,
        batch_size=info.batch_sequences or batch_sequences or -1,
        max_token_len=info.max_tokens or -1,
        checkpoint_dir=info.checkpoint_dir,
        save_checkpoint_interval=info.checkpoint_interval or -1,
        starting_step=info.starting_step,
        num_steps=info.total_steps or -1,
    )
