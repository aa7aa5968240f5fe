"""The trainer's side of the bus: pull a step's batch under a lease, train, settle.

A pulled batch is leased: it stays this consumer's while heartbeats come and progress is made, and is over when it is
settled. If the lease is lost (the broker heard nothing for too long, or came back in another life), settling raises
LeaseLostError, and what was computed from the batch is void. Heartbeats run in the event loop: a loop that is blocked
for longer than the broker's `silence_s` loses its lease, so a trainer that computes in its main thread uses
`Consumer.blocking`, whose loop has a thread of its own.

A policy version's `step` counts optimizer steps; the batch of step `s` is what version `s` will have learned from.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any, Self, overload

import msgspec

from rolloutmq.bus.ahead import Ahead
from rolloutmq.bus.batch import Batch, StepSize, step_size
from rolloutmq.bus.blocking import Facade
from rolloutmq.bus.downlink import Downlink
from rolloutmq.bus.endpoint import Where
from rolloutmq.bus.pulling import Puller
from rolloutmq.schemas import delivery as wire
from rolloutmq.schemas.delivery import (
    RegisterConsumer,
    Rejected,
    Release,
    RunInfo,
    Settle,
    Settled,
    Wait,
)
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import (
    EndOfReplayError,
    LeaseLostError,
    UsageError,
    WireError,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PulledBatch(Batch):
    """A batch of an asynchronous consumer."""

    consumer: "Consumer"

    async def ack(self, version: PolicyVersion | None = None) -> Settled:
        """Settle with every group trained; `version` is the policy after the step, by default one step on."""
        return await self.consumer.settle(self, version=version)


class Consumer:
    """One rank of a trainer. Made by `Consumer.open`, or by `Consumer.blocking` for threads.

    Pulls and settles are for one task at a time.
    """

    def __init__(
        self, where: Where, register: RegisterConsumer, size: StepSize, split: Split, *, ahead: bool
    ) -> None:
        self.version = register.resume or PolicyVersion(0, register.info.starting_step)
        """The policy after the last settled step; from it, iteration goes on."""
        self._link = Downlink(where, register)
        self._puller = Puller(self._link, size, split)
        self._leased: Batch | None = None
        self._pulls_ahead = ahead
        self._ahead = Ahead(self._pull_at_once, self._give_back)
        self._link.idle = lambda: self._ahead.holds

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: Where,
        *,
        sequences: int = 0,
        tokens: int = 0,
        consumer: str = "trainer-0",
        group: str = "trainer",
        rank: int = 0,
        world_size: int = 1,
        split: Split = Split.TRAIN,
        info: RunInfo | None = None,
        resume: PolicyVersion | None = None,
        ahead: bool = False,
    ) -> AsyncIterator["Consumer"]:
        """Register a consumer; what it holds is given back when the block is left.

        Waits for the broker as long as it takes.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            sequences: Sequences of one step, over all ranks; or else
            tokens: Most tokens of one step, over all ranks. A group that has more of either comes alone: `Batch.over`.
            consumer: Name of this rank's consumer.
            group: Name of the trainer, which all its ranks share.
            rank: This rank.
            world_size: Number of ranks.
            split: Which stream to pull from.
            info: What the run is. `batch_sequences` is filled in if it is zero; with `tokens` it is a first guess.
            resume: Checkpoint that the trainer starts from: every batch of a later step comes again.
            ahead: Ask for the next step's batch together with each settlement, so that the broker answers both at
                once; the next `pull` has it already. What is not wanted any more is given back. Takes the memory of
                two batches.

        Raises:
            UsageError: Neither `sequences` nor `tokens` is given, or both.
            RefusedError: The broker does not take this consumer.
        """
        size = step_size(sequences, tokens)
        about = info or RunInfo()
        if not about.batch_sequences:
            about = msgspec.structs.replace(about, batch_sequences=sequences)
        register = RegisterConsumer(
            consumer=consumer, group=group, rank=rank, world_size=world_size, info=about, resume=resume
        )
        made = cls(where, register, size, split, ahead=ahead)
        beat: asyncio.Task[None] | None = None
        try:
            await made._link.connect()
            beat = asyncio.create_task(made._link.beat(), name=f"heartbeat of {consumer}")
            yield made
        finally:
            if beat is not None:
                beat.cancel()
                await asyncio.wait({beat})
            await made._ahead.cancel()
            await made._link.close()
            made._puller.close()

    @staticmethod
    def blocking(where: Where, **options: Any) -> "BlockingConsumer":
        """Like `open`, with the same options, for code without an event loop: `with Consumer.blocking(...) as c`."""
        return BlockingConsumer(lambda: Consumer.open(where, **options), "rolloutmq consumer")

    @property
    def info(self) -> RunInfo:
        """What the run is, as the broker has it."""
        return self._link.registered.info if self._link.registered else self._link.register.info

    @property
    def epoch(self) -> int:
        """Life of the broker at which the consumer is registered."""
        return self._link.registered.epoch if self._link.registered else 0

    @property
    def wait(self) -> Wait:
        """Why the last pull had to wait."""
        return self._puller.wait

    def progress(self) -> None:
        """Show that the trainer advances; its lease is lost without it after `lease_s`. Pulls and settles do so too."""
        self._link.progress += 1

    @overload
    async def pull(self, step: int, version: PolicyVersion, wait_s: None = None) -> PulledBatch: ...
    @overload
    async def pull(self, step: int, version: PolicyVersion, wait_s: float) -> PulledBatch | None: ...

    async def pull(
        self, step: int, version: PolicyVersion, wait_s: float | None = None
    ) -> PulledBatch | None:
        """Wait for this rank's part of one step.

        Cancelled: if a batch was leased, the next pull of the same step gets it.

        Args:
            step: The optimizer step that the batch is for.
            version: The policy that will learn from it, for staleness.
            wait_s: Longest time to wait while the broker is there; None waits for ever.

        Returns:
            The batch, or None if there was none in time: `wait` says why. Only with several ranks may it be without
            groups, if the step has too few for all ranks or none of this rank's decodes. It is settled all the same.

        Raises:
            RefusedError: The pull contradicts what other ranks asked.
            EndOfReplayError: The broker serves a recorded run, and this was all of it.
        """
        until = math.inf if wait_s is None else time.monotonic() + wait_s
        while True:
            batch = await self._ahead.take(step, version)
            if batch is None or batch.life != self._link.life:
                batch = await self._puller.pull(step, version, until)
            if batch is None:
                return None
            self._leased = batch
            if batch.groups or not batch.rejected or self._link.register.world_size > 1:
                return PulledBatch(**batch.content, consumer=self)
            logger.error("no group of the batch decodes, pulling again step=%d", step)
            await self.settle(batch)

    async def _pull_at_once(self, step: int, version: PolicyVersion) -> Batch | None:
        return await self._puller.pull(step, version, time.monotonic())

    async def _give_back(self) -> None:
        await self._link.ask(Release(consumer=self._link.register.consumer, reason="pulled ahead"))

    async def settle(
        self,
        batch: Batch,
        *,
        version: PolicyVersion | None = None,
        trained: Iterable[str] | None = None,
        filtered: Iterable[str] = (),
        rejected: Iterable[Rejected] = (),
    ) -> Settled:
        """End the lease of a batch, after the optimizer step; waits for the broker as long as it takes.

        Groups that did not decode are reported as rejected by themselves. Cancelled: it may have been settled or not;
        settling again with the same arguments finds out.

        Args:
            batch: What `pull` returned.
            version: Policy after the step. Default: one step after the pulled one; the same if nothing was trained,
                unless there are other ranks that may have, and nothing was filtered either.
            trained: Ids of the groups that were learned from. Default: all that are in no other list.
            filtered: Ids of groups without a signal.
            rejected: Groups that could not be used at all.

        Raises:
            LeaseLostError: The step went back to the queue; what was computed from it is void.
            RefusedError: The lists do not match the batch.
        """
        self.progress()
        out, bad = tuple(filtered), (*batch.rejected, *rejected)
        if trained is None:
            gone = {*out, *(each.group_id for each in bad)}
            trained = [group.group_id for group in batch.groups if group.group_id not in gone]
        used = tuple(trained)
        if version is None:
            others = self._link.register.world_size > 1 and not out
            version = msgspec.structs.replace(batch.version, step=batch.version.step + bool(used or others))
        message = Settle(
            consumer=self._link.register.consumer,
            lease=batch.lease,
            generation=batch.generation,
            rank=self._link.register.rank,
            version=version,
            trained=used,
            filtered=out,
            rejected=bad,
        )
        if self._pulls_ahead:
            self._ahead.begin(version.step + 1, version)
        try:
            reply, _ = await self._link.ask(message, lease=(batch.lease, batch.life))
        except LeaseLostError:
            self._forget(batch)
            await self._ahead.drop()
            raise
        if not isinstance(reply, Settled):
            raise _unexpected(reply, message)
        self._forget(batch)
        self.version = version
        self.progress()
        return reply

    def _forget(self, batch: Batch) -> None:
        if self._leased is not None and self._leased.lease == batch.lease:
            self._leased = None

    async def commit(self, version: PolicyVersion) -> None:
        """Say that a durable checkpoint covers every step up to `version`; waits for the broker as long as it takes."""
        about = self._link.register
        commit = wire.Commit(consumer=about.consumer, group=about.group, run=about.info.run, version=version)
        await self._link.ask(commit)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> PulledBatch:
        """Pull the next step; ends with a replay only. The batch before must have been settled, or lost."""
        if self._leased is not None:
            raise UsageError(f"the batch of step {self._leased.step} was not settled: `await batch.ack()`")
        try:
            return await self.pull(self.version.step + 1, self.version)
        except EndOfReplayError:
            raise StopAsyncIteration from None


def _unexpected(reply: wire.Reply, request: wire.Request) -> WireError:
    return WireError(f"the broker answered {type(reply).__name__} to {type(request).__name__}")


@dataclass(frozen=True, slots=True, eq=False)
class BlockingBatch(Batch):
    """A batch of a blocking consumer."""

    consumer: "BlockingConsumer"

    def ack(self, version: PolicyVersion | None = None) -> Settled:
        """Settle with every group trained; see `PulledBatch.ack`."""
        return self.consumer.settle(self, version=version)


class BlockingConsumer(Facade[Consumer]):
    """`Consumer` for code without an event loop: the same names, and every call blocks until it is done.

    Heartbeats go on in a thread of their own while the caller computes.
    """

    @overload
    def pull(self, step: int, version: PolicyVersion, wait_s: None = None) -> BlockingBatch: ...
    @overload
    def pull(self, step: int, version: PolicyVersion, wait_s: float) -> BlockingBatch | None: ...

    def pull(self, step: int, version: PolicyVersion, wait_s: float | None = None) -> BlockingBatch | None:
        """See `Consumer.pull`. Ctrl-C ends it; the next pull of the same step gets what was leased meanwhile."""
        if wait_s is None:
            return self._blocking_batch(self._run(self._object.pull(step, version)))
        batch = self._run(self._object.pull(step, version, wait_s))
        return None if batch is None else self._blocking_batch(batch)

    def _blocking_batch(self, batch: PulledBatch) -> BlockingBatch:
        return BlockingBatch(**batch.content, consumer=self)

    def settle(
        self,
        batch: Batch,
        *,
        version: PolicyVersion | None = None,
        trained: Iterable[str] | None = None,
        filtered: Iterable[str] = (),
        rejected: Iterable[Rejected] = (),
    ) -> Settled:
        """See `Consumer.settle`."""
        return self._run(
            self._object.settle(batch, version=version, trained=trained, filtered=filtered, rejected=rejected)
        )

    def commit(self, version: PolicyVersion) -> None:
        """See `Consumer.commit`."""
        self._run(self._object.commit(version))

    def progress(self) -> None:
        """See `Consumer.progress`. Never waits."""
        self._object.progress()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> BlockingBatch:
        """See `Consumer.__anext__`."""
        try:
            return self._blocking_batch(self._run(self._object.__anext__()))
        except StopAsyncIteration:
            raise StopIteration from None

    @property
    def info(self) -> RunInfo:
        """See `Consumer.info`."""
        return self._object.info

    @property
    def version(self) -> PolicyVersion:
        """See `Consumer.version`."""
        return self._object.version

    @property
    def wait(self) -> Wait:
        """See `Consumer.wait`."""
        return self._object.wait
