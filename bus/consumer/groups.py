"""The group consumer: holds groups until each is settled, in any mix and order.

For trainers that buffer groups and choose their own mini-batches, such as fully asynchronous ones. Groups come as they
are there, in leases of up to `groups`, and one call settles groups of any lease. What one call settles is one batch: a
checkpoint covers it, and a resumed trainer gets it again, as a whole and in order. `Consumer` serves trainers that take
exact batches step by step, and those of several ranks.

A lease may be lost: the broker heard nothing for too long, or restarted without its state. Its groups are queued again
and come again. The consumer returns no group that it still holds, since a settlement goes by id. A group that it
has settled before, perhaps too late, it settles again by itself, with the same outcome. So no group is trained on twice
in the life of a consumer.
"""

import asyncio
import hashlib
import logging
import math
import os
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Self, SupportsIndex, overload

import msgspec

from rolloutmq.bus.blocking import Facade, OfOneProcess, with_arguments_of
from rolloutmq.bus.consumer.batch import Batch, StepSize, checked_version, given_version
from rolloutmq.bus.consumer.connection import ConsumerConnection
from rolloutmq.bus.consumer.figures import Figure, FigureQueue
from rolloutmq.bus.consumer.puller import BatchPuller, wrong_reply
from rolloutmq.bus.encoding.codec import require_encodable
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.time_limit import time_limit, within
from rolloutmq.schemas.errors import EndOfReplayError, UsageError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.printable import printable
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Delivery, Rejected, RunInfo, Settled, Wait
from rolloutmq.schemas.wire.requests import (
    GROUPS_LIMIT,
    WINDOW_LIMIT,
    RegisterConsumer,
    SettleGroups,
)

logger = logging.getLogger(__name__)

REMEMBERED: Final = 1 << 16
"""Most settled groups that are remembered, in case they come again."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldGroup:
    """A group that a `GroupConsumer` holds.

    Attributes:
        group: The decoded group. Its arrays are read-only and stay valid after the settlement.
        delivery: Header, environment, producer and number of deliveries.
        rewound: The group was settled before; the trainer has since resumed from an earlier checkpoint.
        lease, generation: The broker's identifiers of its lease.
        place: Its place in the lease, from 0.
        life: Registration of the consumer that pulled it.
    """

    group: Group
    delivery: Delivery
    rewound: bool
    lease: int
    generation: int
    place: int
    life: int

    @property
    def identity(self) -> "Identity":
        """Id and checksum: the same id with other contents is another group."""
        return self.group.group_id, self.delivery.header.crc

    @property
    def group_id(self) -> str:
        """Id of the group, unique in the run."""
        return self.group.group_id

    def staleness(self, version: PolicyVersion) -> int:
        """Return the optimizer steps from the policy of the group's oldest token to `version`."""
        return version.staleness(self.delivery.header.oldest)


Identity = tuple[str, int]
"""Id and checksum of a group."""
Named = Iterable[str | HeldGroup]
"""Groups, or their ids."""


class GroupConsumer(OfOneProcess):
    """Pulls groups as they come and settles them in any mix.

    Open one with `GroupConsumer.open`, or with `GroupConsumer.blocking` in code without an event loop. `async for group
    in consumer` returns group after group. One task at a time may get groups, while another settles.
    """

    def __init__(
        self, where: Where, register: RegisterConsumer, groups: int, window: int, split: Split
    ) -> None:
        self.version = register.resume or PolicyVersion(0, register.info.starting_step)
        """Policy after the last settlement. At first that of `resume`, or of the run."""
        self._link = ConsumerConnection(where, register)
        self._puller = BatchPuller(self._link, StepSize(groups=groups), split, Batch.received, window)
        self._figures = FigureQueue(self._link)
        self._ready: OrderedDict[Identity, HeldGroup] = OrderedDict()
        """Groups to return, none of them held; one that comes again replaces itself."""
        self._held: defaultdict[str, list[int]] = defaultdict(list)
        """Checksums of the groups that were returned and are not settled, by id."""
        self._outcomes: OrderedDict[Identity, bool] = OrderedDict()
        """Settled groups, with whether they were trained on. A rejected one may be queued again by an operator."""
        self._nonce = os.urandom(16)
        self._settling = asyncio.Lock()
        self._link.idle = lambda: bool(self._ready) and not self._held

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        where: Where,
        *,
        batch_sequences: int,
        window: int = 16,
        groups: int = 16,
        consumer: str = "trainer-0",
        group: str = "trainer",
        split: Split = Split.TRAIN,
        info: RunInfo | None = None,
        resume: PolicyVersion | None = None,
        timeout_s: float | None = None,
    ) -> AsyncIterator["GroupConsumer"]:
        """Register a consumer; leaving the block returns the groups that it holds to the queue.

        Waits for the broker. Cancelled: nothing stays registered.

        The held groups count against the high-water mark and the staleness bound until they are settled. A
        trainer that waits for more than both allow gets none: `wait` is `Wait.UNSETTLED`, and the log says so.

        Args:
            where: Run directory, or address of the broker's `serve` socket.
            batch_sequences: Sequences that one optimizer step learns from. The broker grants rollouts, and sizes its
                reserve, for steps of this size.
            window: The consumer holds at most `window` times `groups` groups, and then has to settle some; 1 to 64.
                A settled batch that comes again comes as a whole, also where it exceeds that.
            groups: Most groups of one lease, 1 to 1024: they come with one round trip if so many are queued.
            consumer: Name of this consumer. A newer consumer of the same name fences the older one.
            group: Name of the trainer.
            split: Queue to pull from: train or eval.
            info: Description of the run. `batch_sequences` is filled in if it is zero.
            resume: Checkpoint of a resumed trainer: the broker rewinds what was settled for a later step.
            timeout_s: Longest wait when opening, in seconds; None waits without a limit.

        Raises:
            WaitTimeoutError: The consumer is not registered after `timeout_s`.
            UsageError: An argument is out of range.
            RefusedError: The broker does not accept this consumer.
        """
        limit_s = time_limit("timeout_s", timeout_s)
        for name, value, most in (
            ("batch_sequences", batch_sequences, 1 << 24),
            ("window", window, WINDOW_LIMIT),
            ("groups", groups, GROUPS_LIMIT),
        ):
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
                raise UsageError(f"{name}: must be a number from 1 to {most} (got {value!r})")
        if not isinstance(split, Split):
            raise UsageError(f"split: must be Split.TRAIN or Split.EVAL (got {split!r})")
        resume = given_version("resume", resume)
        about = info or RunInfo()
        if not about.batch_sequences and split is Split.TRAIN:
            about = msgspec.structs.replace(about, batch_sequences=batch_sequences)
        register = RegisterConsumer(consumer=consumer, group=group, info=about, resume=resume)
        require_encodable(register)
        made = cls(where, register, groups, window, split)
        beat: asyncio.Task[None] | None = None
        try:
            opening = f"opening of consumer {consumer}"
            await within(limit_s, opening, made._link.connect(), lambda: made._link.problem)
            made._continue_from(resume)
            beat = asyncio.create_task(made._link.beat(), name=f"heartbeat of {consumer}")
            yield made
        finally:
            if not made._link.forked:  # a forked child has copies of the sockets, and no right to the leases
                if beat is not None:
                    beat.cancel()
                    await asyncio.wait({beat})
                await made._figures.close()
                await made._link.close()
                made._puller.close()

    @staticmethod
    @with_arguments_of(lambda: GroupConsumer.open)
    def blocking(where: Where, **options: Any) -> "BlockingGroupConsumer":
        """Return a blocking consumer with the options of `open`: `with GroupConsumer.blocking(...) as consumer`."""
        return BlockingGroupConsumer(lambda: GroupConsumer.open(where, **options), "rolloutmq group consumer")

    def _continue_from(self, resume: PolicyVersion | None) -> None:
        """Without a checkpoint continue from the run's policy: the trainer may be another life of an earlier one."""
        if resume is None and self._link.registered is not None:
            self.version = max(self.version, self._link.registered.policy)

    @property
    def info(self) -> RunInfo:
        """Description of the run, as the broker knows it."""
        return self._link.registered.info if self._link.registered else self._link.register.info

    @property
    def wait(self) -> Wait:
        """Reason of the last wait for a group; `Wait.NONE` if there was none."""
        return self._puller.wait

    @property
    def ready(self) -> int:
        """Number of pulled groups that `get` has not returned yet; it returns them without a new lease."""
        return len(self._ready)

    def progress(self) -> None:
        """Report that the trainer advances. Never waits.

        The broker redelivers the held groups after `broker.lease_s` without progress. Getting and settling groups count
        as progress too.
        """
        self._link.progress += 1

    def log(self, step: SupportsIndex, /, **figures: Figure) -> None:
        """Log figures of learning; see `Consumer.log`. Never waits."""
        self._figures.put(self._figures.checked(self.version, step, figures))

    @overload
    async def get(self, wait_s: None = None, *, timeout_s: float | None = None) -> HeldGroup: ...
    @overload
    async def get(self, wait_s: float, *, timeout_s: float | None = None) -> HeldGroup | None: ...

    async def get(self, wait_s: float | None = None, *, timeout_s: float | None = None) -> HeldGroup | None:
        """Return the next group, which is held until it is settled.

        Cancelled: the next call returns the group that was under way.

        Args:
            wait_s: Longest wait in seconds while the broker is alive; None waits without a limit.
            timeout_s: Longest wait in seconds, also for a broker that is away; None waits for it without a limit.

        Returns:
            The group, or None if there was none in time; `wait` is the reason.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            EndOfReplayError: Every batch of the replayed run was delivered.
            ConsumerFencedError: Another process registered under the name of this consumer.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child of the one that opened the consumer.
        """
        limit_s, longest_s = time_limit("timeout_s", timeout_s), time_limit("wait_s", wait_s)
        until = math.inf if longest_s is None else time.monotonic() + longest_s
        return await within(limit_s, "get", self._get(until), self._problem)

    def _problem(self) -> str:
        return f"{self._link.problem}, and no group came; the broker's last reason is {self.wait.value}"

    async def _get(self, until: float) -> HeldGroup | None:
        while True:
            while self._ready:
                held = next(iter(self._ready.values()))
                if held.life == self._link.life and held.identity in self._outcomes:
                    await self._settle_again(held)
                elif held.life == self._link.life:
                    return self._hand_over(held)
                self._ready.pop(held.identity, None)  # of an earlier life: it comes again
            batch = await self._puller.pull(self.version.step + 1, self.version, until)
            if batch is None:
                return None
            for place, (group, delivery) in enumerate(zip(batch.groups, batch.deliveries, strict=True)):
                lease, generation = batch.lease, batch.generation
                held = HeldGroup(group, delivery, batch.rewound, lease, generation, place, batch.life)
                if not self._holds(held):
                    self._ready[held.identity] = held
            await self._reject(batch)

    def _holds(self, held: HeldGroup) -> bool:
        return held.delivery.header.crc in self._held.get(held.group_id, ())

    def _hand_over(self, held: HeldGroup) -> HeldGroup:
        self.progress()
        del self._ready[held.identity]
        self._held[held.group_id].append(held.delivery.header.crc)
        return held

    async def _settle_again(self, held: HeldGroup) -> None:
        names = (held.group_id,)
        if self._outcomes[held.identity]:
            await self._settle(trained=names, steps=0)
        else:
            await self._settle(filtered=names)

    def _let_go(self, group_id: str) -> Identity | None:
        """Forget that a group is held; return which it was. Of one id it is the oldest."""
        checksums = self._held.get(group_id)
        if not checksums:
            return None
        checksum = checksums.pop(0)
        if not checksums:
            del self._held[group_id]
        return group_id, checksum

    async def _reject(self, batch: Batch) -> None:
        """Settle undecodable groups."""
        if batch.rejected:
            await self._settle(rejected=batch.rejected)

    async def settle(
        self,
        trained: Named = (),
        *,
        filtered: Named = (),
        rejected: Iterable[Rejected] = (),
        version: PolicyVersion | None = None,
        timeout_s: float | None = None,
    ) -> Settled:
        """Report the outcome of some of the held groups; the others stay held.

        Waits for the broker. Cancelled or late: the groups may or may not be settled; repeat the call with the same
        arguments.

        Args:
            trained: Groups used by an optimizer step.
            filtered: Groups without a learning signal, or too stale for the loss.
            rejected: Unusable groups, with the reason; they become dead letters.
            version: Policy after the step. None: one step after the last settlement if a group was trained on,
                otherwise the same. It may be several steps on, since a trainer may take steps without a group of the
                run; that is logged, for queued groups are then that much staler.
            timeout_s: Longest wait in seconds; None waits without a limit.

        Returns:
            `Settled`. Its `commit_wanted` asks for a checkpoint soon. `lost` names groups whose lease was
            lost before. When they come again, the consumer settles them by itself, and `get` does not return them.

        Raises:
            WaitTimeoutError: There is no answer after `timeout_s`.
            UsageError: A group is not held: `get` has not returned it, or it is settled. Or `version` is no
                `PolicyVersion`, or a reason has more than 512 characters or a lone surrogate.
            RefusedError: A group is named twice, or `version` is behind the last settlement.
            ConsumerFencedError: Another process registered under the name of this consumer.
            ClosedError: The consumer is closed.
            ForkedError: This process is a forked child of the one that opened the consumer.
        """
        limit_s = time_limit("timeout_s", timeout_s)
        version = given_version("settle.version", version)
        used, unused, bad = _ids(trained), _ids(filtered), tuple(rejected)
        for one in bad:
            require_encodable(one)
        for group_id in (*used, *unused, *(one.group_id for one in bad)):
            if group_id not in self._held:
                shown = printable(group_id[:80])
                raise UsageError(
                    f"group {shown}: is not held by this consumer; settle each group once, after `get`"
                )
        work = self._settle(used, unused, bad, version, steps=bool(used))
        reply = await within(limit_s, "settle", work, lambda: self._link.problem)
        self._outcomes.update(dict.fromkeys(filter(None, map(self._let_go, used)), True))
        self._outcomes.update(dict.fromkeys(filter(None, map(self._let_go, unused)), False))
        for one in bad:
            self._let_go(one.group_id)
        while len(self._outcomes) > REMEMBERED:
            self._outcomes.popitem(last=False)
        if reply.lost:
            logger.warning(
                "groups were settled after their lease was lost groups=%d first=%s",
                len(reply.lost), reply.lost[0],
            )  # fmt: skip
        return reply

    async def _settle(
        self,
        trained: Iterable[str] = (),
        filtered: Iterable[str] = (),
        rejected: Iterable[Rejected] = (),
        version: PolicyVersion | None = None,
        *,
        steps: int = 0,
    ) -> Settled:
        """Settle groups at a policy, or so many steps after the present one."""
        self.progress()
        async with self._settling:  # settlements arrive in the order of their policies
            policy = version or msgspec.structs.replace(self.version, step=self.version.step + steps)
            message = SettleGroups(
                consumer=self._link.register.consumer,
                generation=0,
                key="",
                version=policy,
                trained=tuple(trained),
                filtered=tuple(filtered),
                rejected=tuple(rejected),
            )
            # The same call again is the same request: a cancelled one may have been carried out.
            digest = hashlib.blake2b(msgspec.msgpack.encode(message), key=self._nonce, digest_size=16)
            message = msgspec.structs.replace(message, key=digest.hexdigest())
            reply, _ = await self._link.ask(message)
            if not isinstance(reply, Settled):
                raise wrong_reply(reply, message)
            if (skipped := policy.step - self.version.step - 1) > 0:
                logger.warning(
                    "steps were taken without a group, queued groups are that much staler; if there were none, correct "
                    "the step of `version` skipped=%d version=%s", skipped, policy,
                )  # fmt: skip
            self.version = max(self.version, policy)
        self.progress()
        return reply

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

    async def __anext__(self) -> HeldGroup:
        """Return the next group, without a time limit.

        Iteration ends once the last step of the run (`trainer.steps`, or `RunInfo.total_steps`) is settled, and with a
        replay.
        """
        if 0 < self.info.total_steps <= self.version.step:
            raise StopAsyncIteration
        try:
            return await self.get()
        except EndOfReplayError:
            raise StopAsyncIteration from None


def _ids(groups: Named) -> tuple[str, ...]:
    return tuple(one if isinstance(one, str) else one.group_id for one in groups)


class BlockingGroupConsumer(Facade[GroupConsumer]):
    """`GroupConsumer` for code without an event loop: the same names, and every call blocks until it is done.

    Heartbeats run in another thread while the caller computes. Open it with `with GroupConsumer.blocking(...) as
    consumer`; `for group in consumer` returns group after group.
    """

    @overload
    def get(self, wait_s: None = None, *, timeout_s: float | None = None) -> HeldGroup: ...
    @overload
    def get(self, wait_s: float, *, timeout_s: float | None = None) -> HeldGroup | None: ...

    def get(self, wait_s: float | None = None, *, timeout_s: float | None = None) -> HeldGroup | None:
        """See `GroupConsumer.get`. Ctrl-C ends it; the next call returns the group that was under way."""
        if wait_s is None:
            return self._run(self._object.get(timeout_s=timeout_s))
        return self._run(self._object.get(wait_s, timeout_s=timeout_s))

    def settle(
        self,
        trained: Named = (),
        *,
        filtered: Named = (),
        rejected: Iterable[Rejected] = (),
        version: PolicyVersion | None = None,
        timeout_s: float | None = None,
    ) -> Settled:
        """See `GroupConsumer.settle`."""
        settling = self._object.settle(
            trained, filtered=filtered, rejected=rejected, version=version, timeout_s=timeout_s
        )
        return self._run(settling)

    def commit(self, version: PolicyVersion, *, timeout_s: float | None = None) -> None:
        """See `GroupConsumer.commit`."""
        self._run(self._object.commit(version, timeout_s=timeout_s))

    def progress(self) -> None:
        """See `GroupConsumer.progress`. Never waits."""
        self._object.progress()

    def log(self, step: SupportsIndex, /, **figures: Figure) -> None:
        """See `GroupConsumer.log`. Never waits."""
        queue, version = self._object._figures, self._object.version
        self._post(partial(queue.put, queue.checked(version, step, figures)))

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> HeldGroup:
        """See `GroupConsumer.__anext__`."""
        try:
            return self._run(self._object.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    @property
    def info(self) -> RunInfo:
        """See `GroupConsumer.info`."""
        return self._object.info

    @property
    def version(self) -> PolicyVersion:
        """See `GroupConsumer.version`."""
        return self._object.version

    @property
    def ready(self) -> int:
        """See `GroupConsumer.ready`."""
        return self._object.ready

    @property
    def wait(self) -> Wait:
        """See `GroupConsumer.wait`."""
        return self._object.wait
