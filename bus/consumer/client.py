"""The consumer: the trainer's client, which pulls batches under a lease and settles them.

The lease lasts until the batch is settled, as long as the consumer sends heartbeats and makes progress. A lease is lost
if the broker hears nothing for too long, or restarts without its state. Settling then raises LeaseLostError and the
work of the step is void.

Heartbeats run in the event loop: a loop blocked for longer than `broker.silence_s` loses its lease. A trainer that
computes in its main thread therefore uses `Consumer.blocking`, whose loop has its own thread.

`PolicyVersion.step` counts optimizer steps: version `s` has learned from the batch of step `s`.
"""

import asyncio
import logging
import math
import time
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, SupportsIndex, overload

import msgspec

from rolloutmq.bus.blocking import Facade, OfOneProcess, with_arguments_of
from rolloutmq.bus.consumer.batch import Batch, StepSize, checked_version, given_version, step_size
from rolloutmq.bus.consumer.connection import ConsumerConnection
from rolloutmq.bus.consumer.figures import Figure, FigureQueue
from rolloutmq.bus.consumer.prefetch import Prefetch
from rolloutmq.bus.consumer.puller import BatchPuller, wrong_reply
from rolloutmq.bus.encoding.codec import require_encodable
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.schemas.errors import (
    EndOfReplayError,
    LeaseLostError,
    UsageError,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Rejected, RunInfo, Settled, Wait
from rolloutmq.schemas.wire.requests import RegisterConsumer, Release, Settle, TrainerPause

logger = logging.getLogger(__name__)

_PASS_GROUPS: Final = "pass its `groups`, and settle it where it was pulled"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class LeasedBatch(OfOneProcess, Batch):
    """A batch of a `Consumer`."""

    INSTEAD = _PASS_GROUPS

    consumer: "Consumer"

    async def ack(self, version: PolicyVersion | None = None, *, timeout_s: float | None = None) -> Settled:
        """Settle the batch with every group trained; see `Consumer.settle`.

        Args:
            version: Policy after the step. None: one step after the pulled version.
            timeout_s: Longest wait in seconds; None waits without a limit.
        """
        return await self.consumer.settle(self, version=version, timeout_s=timeout_s)


class Consumer(OfOneProcess):
    """Pulls and settles batches for one rank of a trainer.

    Open one with `Consumer.open`, or with `Consumer.blocking` in code without an event loop. `async for batch in
    consumer` pulls step after step; settle each batch before the next. Only one task may pull or settle at a time.
    """

    def __init__(
        self,
        where: Where,
        register: RegisterConsumer,
        size: StepSize,
        split: Split,
        *,
        ahead: bool,
        views: bool,
    ) -> None:
        self.version = register.resume or PolicyVersion(0, register.info.starting_step)
        """Policy after the last settled step; iteration continues from it. At first that of `resume`, or of the run."""
        self._link = ConsumerConnection(where, register)
        self._puller = BatchPuller(self._link, size, split, self._batch, views=views)
        self._figures = FigureQueue(self._link)
        self._leased: Batch | None = None
        self._before: PolicyVersion | None = None
        """Policy before the last settlement, if other ranks had yet to settle."""
        self._lost: int | None = None
        """Step whose loss `settle` has told, until its next batch."""
        self._pulls_ahead = ahead
        self._ahead = Prefetch(self._pull_at_once, self._give_back)
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
        views: bool = False,
        timeout_s: float | None = None,
    ) -> AsyncIterator["Consumer"]:
        """Register a consumer; leaving the block returns its leased batch to the queue.

        Waits for the broker. Cancelled: nothing stays registered.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            sequences: Sequences of one step, over all ranks. Give either this or `tokens`.
            tokens: Most tokens of one step, over all ranks. A group larger than a step is delivered alone:
                `Batch.over`.
            consumer: Name of this rank's consumer. A newer consumer of the same name fences the older one.
            group: Name of the trainer; all its ranks share it.
            rank: This rank, from 0.
            world_size: Number of ranks.
            split: Queue to pull from: train or eval.
            info: Description of the run. With split train `batch_sequences` is filled in if it is zero; with `tokens`
                it is a first estimate.
            resume: Checkpoint of a resumed trainer: the broker rewinds every batch of a later step.
            ahead: Request the next batch together with each settlement: one round trip, and at durability `disk` one
                disk wait, for both. An unwanted batch is given back. Uses the memory of two batches.
            views: Do not copy groups of producers on this host: their arrays are views of the producers' memory, valid
                until the batch is settled or its lease is lost. Then they may show other groups; copy what is needed
                longer. Not with `ahead`: a batch may lose its lease before it is pulled. The memory is read-only: code
                that writes to it all the same, such as an in-place operation of torch, is killed by SIGSEGV.
            timeout_s: Longest wait when opening, in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: The consumer is not registered after `timeout_s`.
            UsageError: Neither or both of `sequences` and `tokens` are given, both `ahead` and `views` are, or an
                argument is out of range.
            RefusedError: The broker does not accept this consumer.
        """
        size, limit_s = step_size(sequences, tokens), time_limit("timeout_s", timeout_s)
        resume = given_version("resume", resume)
        about = info or RunInfo()
        if not about.batch_sequences and split is Split.TRAIN:
            about = msgspec.structs.replace(about, batch_sequences=sequences)
        register = RegisterConsumer(
            consumer=consumer, group=group, rank=rank, world_size=world_size, info=about, resume=resume
        )
        require_encodable(register)
        if not isinstance(split, Split):
            raise UsageError(f"split: must be Split.TRAIN or Split.EVAL (got {split!r})")
        if views and ahead:
            raise UsageError(
                "views: a batch pulled ahead may lose its lease, and its memory, before it is returned "
                "(got ahead=True); use one of both"
            )
        made = cls(where, register, size, split, ahead=ahead, views=views)
        beat: asyncio.Task[None] | None = None
        try:
            opening = f"opening of consumer {consumer}"
            await within(limit_s, opening, made._link.connect(), lambda: made._link.problem)
            made._continue_from(resume)
            beat = asyncio.create_task(made._link.beat(), name=f"heartbeat of {consumer}")
            yield made
        finally:
            if (
                not made._link.forked
            ):  # a forked child has copies of the sockets, and no right to release the lease
                await made._close(beat)

    async def _close(self, beat: "asyncio.Task[None] | None") -> None:
        if beat is not None:
            beat.cancel()
            await asyncio.wait({beat})
        await self._ahead.cancel()
        await self._figures.close()
        await self._link.close()
        self._puller.close()

    @staticmethod
    @with_arguments_of(lambda: Consumer.open)
    def blocking(where: Where, **options: Any) -> "BlockingConsumer":
        """Return a blocking consumer with the options of `open`: `with Consumer.blocking(...) as consumer`."""
        return BlockingConsumer(lambda: Consumer.open(where, **options), "rolloutmq consumer")

    @property
    def info(self) -> RunInfo:
        """Description of the run, as the broker knows it."""
        return self._link.registered.info if self._link.registered else self._link.register.info

    def _continue_from(self, resume: PolicyVersion | None) -> None:
        """Without a checkpoint continue from the run's policy: the trainer may be another life of an earlier one."""
        if resume is None and self._link.registered is not None:
            self.version = max(self.version, self._link.registered.policy)

    @property
    def epoch(self) -> int:
        """Epoch of the consumer's broker; 0 before the registration."""
        return self._link.registered.epoch if self._link.registered else 0

    @property
    def wait(self) -> Wait:
        """Reason of the last pull's waiting; `Wait.NONE` if it did not wait."""
        return self._puller.wait

    def progress(self) -> None:
        """Report that the trainer advances. Never waits.

        The broker redelivers the batch after `broker.lease_s` without progress. Pulling and settling count as progress
        too.
        """
        self._link.progress += 1

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """Count seconds in which this trainer asked for no batch, for `trainer_waits_s`, the report and the page.

        Never waits; the next heartbeat tells them. The broker counts the waits of a pull by itself.

        Raises:
            UsageError: The reason is none, or the seconds are negative or not finite.
        """
        if not isinstance(reason, TrainerPause):
            raise UsageError(f"reason: must be a TrainerPause (got {reason!r})")
        if not (math.isfinite(seconds) and seconds >= 0):
            raise UsageError(f"seconds: must be finite and at least 0 (got {seconds})")
        self._link.waited(reason, float(seconds))

    def log(self, step: SupportsIndex, /, **figures: Figure) -> None:
        """Log figures of learning, such as `loss` or `kl`, for `top`, `metrics.jsonl` and the report. Never waits.

        They leave in the background; without a broker the newest 1,024 steps are kept. Rewards, tokens, staleness and
        settlements need no log: the broker reports them. Of several ranks, those of rank 0 count.

        Args:
            step: Optimizer step, `batch.step`: the summary counts each settled step once, as it was last logged.
            figures: At most 64 numbers by name. One that is infinite or not a number is left out, and its name is
                reported.

        Raises:
            UsageError: The step is no integer from 0, there are more figures, a name is invalid, or a value is no
                number.
        """
        self._figures.put(self._figures.checked(self.version, step, figures))

    @overload
    async def pull(
        self, step: int, version: PolicyVersion, wait_s: None = None, *, timeout_s: float | None = None
    ) -> LeasedBatch: ...
    @overload
    async def pull(
        self, step: int, version: PolicyVersion, wait_s: float, *, timeout_s: float | None = None
    ) -> LeasedBatch | None: ...

    async def pull(
        self,
        step: int,
        version: PolicyVersion,
        wait_s: float | None = None,
        *,
        timeout_s: float | None = None,
    ) -> LeasedBatch | None:
        """Wait for this rank's shard of one step.

        Cancelled: the next pull of the same step returns the batch if one was leased.

        Args:
            step: Optimizer step of the batch.
            version: Learning policy; staleness counts from it.
            wait_s: Longest wait in seconds while the broker is alive; None waits without a limit.
            timeout_s: Longest wait in seconds, also for a broker that is away; None waits for it without a limit.

        Returns:
            The batch, or None if there was none in time; `wait` is the reason. With several ranks a batch may have no
            groups: the step has fewer groups than ranks, or none of this rank's decodes. Settle it nevertheless.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            LeaseLostError: This rank settled a step, another one was lost before it had: the step went back to the
                queue. `version` is again the policy before it. Raised once.
            RefusedError: The pull contradicts that of another rank.
            EndOfReplayError: Every batch of the replayed run was delivered.
            ConsumerFencedError: Another process registered under the name of this consumer.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child of the one that opened the consumer.
        """
        limit_s, longest_s = time_limit("timeout_s", timeout_s), time_limit("wait_s", wait_s)
        until = math.inf if longest_s is None else time.monotonic() + longest_s
        return await within(limit_s, "pull", self._pull(step, version, until), self._pull_problem)

    def _pull_problem(self) -> str:
        return f"{self._link.problem}, and no batch came; the broker's last reason is {self.wait.value}"

    async def _pull(self, step: int, version: PolicyVersion, until: float) -> LeasedBatch | None:
        while True:
            try:
                batch = await self._ahead.take(step, version)
                if batch is None or batch.life != self._link.life:
                    batch = await self._puller.pull(step, version, until)
            except LeaseLostError:
                self._note_loss(step)
                raise
            if batch is None:
                return None
            self._leased, self._lost = batch, None
            if batch.groups or not batch.rejected or self._link.register.world_size > 1:
                return batch
            logger.error("batch undecodable, pulling again step=%d", step)
            await self.settle(batch)

    def _note_loss(self, step: int) -> None:
        if step != self._lost:  # otherwise a restarted broker repeats what `settle` has told
            self.version, self._before = self._before or self.version, None
        self._lost = None

    def _batch(self, *values: Any) -> LeasedBatch:
        return LeasedBatch.received(*values, self)

    async def _pull_at_once(self, step: int, version: PolicyVersion) -> LeasedBatch | None:
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
        timeout_s: float | None = None,
    ) -> Settled:
        """Report the outcome of every group after the optimizer step, which ends the lease.

        Waits for the broker. Cancelled or late: the batch may or may not be settled; repeat the call with the
        same arguments. Undecodable groups are reported as rejected automatically.

        Args:
            batch: The result of `pull`.
            version: Policy after the step. None: one step after the pulled version, or the pulled version if no group
                was trained. With several ranks and nothing filtered it is one step after, since other ranks may have
                trained.
            trained: Ids of the groups used by the step. None: all groups in no other list.
            filtered: Ids of groups without a learning signal.
            rejected: Unusable groups, with the reason; they become dead letters.
            timeout_s: Longest wait in seconds; None waits without a limit.

        Returns:
            `Settled`; its `commit_wanted` asks for a checkpoint soon, and `provisional` says that other ranks have yet
            to settle.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            LeaseLostError: The step went back to the queue; its work is void.
            UsageError: `version` is no `PolicyVersion`, or a list has what the wire cannot carry, such as a reason of
                more than 512 characters or with a lone surrogate.
            RefusedError: The lists do not match the batch, or `version` is more than one step after it.
            ConsumerFencedError: Another process registered under the name of this consumer.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child of the one that opened the consumer.
        """
        limit_s = time_limit("timeout_s", timeout_s)
        version = given_version("settle.version", version)
        self.progress()
        out, named = tuple(filtered), tuple(rejected)
        bad = (*batch.rejected, *named)
        is_whole = trained is None and not out and not named
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
        if not is_whole:  # otherwise all of it came over the wire
            require_encodable(message)
        if self._pulls_ahead:
            self._ahead.begin(version.step + 1, version)
        try:
            asked = self._link.ask(message, lease=(batch.lease, batch.life))
            reply, _ = await within(limit_s, "settle", asked, lambda: self._link.problem)
        except LeaseLostError:
            self._lost = batch.step
            self._forget(batch)
            await self._ahead.drop()
            raise
        if not isinstance(reply, Settled):
            raise wrong_reply(reply, message)
        self._forget(batch)
        self._before = batch.version if reply.provisional else None
        self.version = version
        self.progress()
        return reply

    def _forget(self, batch: Batch) -> None:
        if self._leased is not None and self._leased.lease == batch.lease:
            self._leased = None

    async def commit(self, version: PolicyVersion, *, timeout_s: float | None = None) -> None:
        """Report that a durable checkpoint covers every step up to `version`; the broker may delete their groups.

        Waits for the broker. Cancelled or late: repeat the call.

        Args:
            version: Policy of the checkpoint. It may be ahead of the last settlement: a step stands whose lease was
                lost, and its groups are settled when they come again.
            timeout_s: Longest wait in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            UsageError: `version` is no `PolicyVersion`.
            RefusedError: The broker does not accept the commit.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child of the one that opened the consumer.
        """
        limit_s = time_limit("timeout_s", timeout_s)
        version = checked_version("commit.version", version)
        await within(limit_s, "commit", self._link.commit(version), lambda: self._link.problem)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> LeasedBatch:
        """Pull the batch of the next step, without a time limit.

        Iteration ends after the last step of the run (`trainer.steps`, or `RunInfo.total_steps`), and with a replay.

        Raises:
            UsageError: The previous batch is not settled.
        """
        if self._leased is not None:
            raise UsageError(
                f"batch: the one of step {self._leased.step} is not settled; "
                "call its `ack()`, or `settle()` of the consumer, before the next"
            )
        if 0 < self.info.total_steps <= self.version.step:
            raise StopAsyncIteration
        try:
            return await self.pull(self.version.step + 1, self.version)
        except EndOfReplayError:
            raise StopAsyncIteration from None


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class BlockingBatch(OfOneProcess, Batch):
    """A batch of a `BlockingConsumer`."""

    INSTEAD = _PASS_GROUPS

    consumer: "BlockingConsumer"

    def ack(self, version: PolicyVersion | None = None, *, timeout_s: float | None = None) -> Settled:
        """Settle the batch with every group trained; blocks. See `LeasedBatch.ack`."""
        return self.consumer.settle(self, version=version, timeout_s=timeout_s)


class BlockingConsumer(Facade[Consumer]):
    """`Consumer` for code without an event loop: the same names, and every call blocks until it is done.

    Heartbeats run in another thread while the caller computes. Open it with `with Consumer.blocking(...) as consumer`;
    `for batch in consumer` pulls step after step.
    """

    @overload
    def pull(
        self, step: int, version: PolicyVersion, wait_s: None = None, *, timeout_s: float | None = None
    ) -> BlockingBatch: ...
    @overload
    def pull(
        self, step: int, version: PolicyVersion, wait_s: float, *, timeout_s: float | None = None
    ) -> BlockingBatch | None: ...

    def pull(
        self,
        step: int,
        version: PolicyVersion,
        wait_s: float | None = None,
        *,
        timeout_s: float | None = None,
    ) -> BlockingBatch | None:
        """Wait for this rank's shard of one step; see `Consumer.pull`.

        Ctrl-C ends it; the next pull of the same step returns the batch if one was leased.
        """
        if wait_s is None:
            return self._blocking_batch(self._run(self._object.pull(step, version, timeout_s=timeout_s)))
        batch = self._run(self._object.pull(step, version, wait_s, timeout_s=timeout_s))
        return None if batch is None else self._blocking_batch(batch)

    def _blocking_batch(self, batch: LeasedBatch) -> BlockingBatch:
        return BlockingBatch(**batch.content, consumer=self)

    def settle(
        self,
        batch: Batch,
        *,
        version: PolicyVersion | None = None,
        trained: Iterable[str] | None = None,
        filtered: Iterable[str] = (),
        rejected: Iterable[Rejected] = (),
        timeout_s: float | None = None,
    ) -> Settled:
        """See `Consumer.settle`."""
        settling = self._object.settle(
            batch,
            version=version,
            trained=trained,
            filtered=filtered,
            rejected=rejected,
            timeout_s=timeout_s,
        )
        return self._run(settling)

    def commit(self, version: PolicyVersion, *, timeout_s: float | None = None) -> None:
        """See `Consumer.commit`."""
        self._run(self._object.commit(version, timeout_s=timeout_s))

    def progress(self) -> None:
        """See `Consumer.progress`. Never waits."""
        self._object.progress()

    def waited(self, reason: TrainerPause, seconds: float) -> None:
        """See `Consumer.waited`. Never waits."""
        self._object.waited(reason, seconds)

    def log(self, step: SupportsIndex, /, **figures: Figure) -> None:
        """See `Consumer.log`. Never waits."""
        queue, version = self._object._figures, self._object.version
        self._post(partial(queue.put, queue.checked(version, step, figures)))

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
    def epoch(self) -> int:
        """See `Consumer.epoch`."""
        return self._object.epoch

    @property
    def version(self) -> PolicyVersion:
        """See `Consumer.version`."""
        return self._object.version

    @property
    def wait(self) -> Wait:
        """See `Consumer.wait`."""
        return self._object.wait
