"""Hops of groups: how long each part of their way took, followed through the events of the journal. Pure.

    rollout   begin to end of the rollout, by the clock of its worker
    send      end of the rollout to acceptance by the broker: ratings, spool, shared memory or socket
    queue     acceptance to the first time that a trainer was handed the group
    train     handed out to settled: the wait in the trainer, its step, and the settlement
    commit    settled to covered by a checkpoint

The journal records an event when it commits it, so each hop after the acceptance is exact to one commit of the journal.
A hop whose beginning the history does not show is left out, such as the first hop of a group that was leased before the
oldest event log. `send` compares the clocks of two processes; on one host they are the same.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from math import isfinite
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.statistics.histogram import LONGEST_S, Histogram, HistogramBuilder
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Carved,
    Committed,
    Dropped,
    Event,
    Forgot,
    GroupSnapshot,
    Leased,
    LeaseSnapshot,
    Lost,
    Pulled,
    RetainedBatchSnapshot,
    Rewound,
    Settles,
    WasReset,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent

BLOCK: Final = 1024
"""Durations that enter a histogram at once."""


class HopKey(NamedTuple):
    """What a histogram is about."""

    env: str
    hop: Hop
    split: Split = Split.TRAIN


class Slowest(NamedTuple):
    """The slowest group of a hop: where `rolloutmq explain` goes on."""

    seconds: float
    group_id: str


class FollowedGroup(NamedTuple):
    """An accepted group that may still be handed out."""

    env: str
    split: Split
    group_id: str
    accepted_at: float


class _Batch(NamedTuple):
    """A settled batch that waits for its checkpoint, without its rejected groups.

    Attributes:
        step: Step of the policy after it.
        stepped: The trainer took a step with it.
        at: When it was settled; None if the history does not show it.
        orders: Its groups.
    """

    step: int
    stepped: bool
    at: float | None
    orders: tuple[int, ...]


class _Lease:
    """An open lease: the groups of each rank, and the settlements of the ranks that have settled."""

    def __init__(self, group: str, shards: Iterable[tuple[int, ...]]) -> None:
        self.group = group
        self.shards = tuple(shards)
        self.settles: dict[int, Settle] = {}

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(order for shard in self.shards for order in shard)


class HopFollower:
    """Follows the groups of a run, event by event. It remembers a group until a checkpoint covers it."""

    def __init__(self) -> None:
        self._groups: dict[int, FollowedGroup] = {}
        self._handed_at: dict[int, float] = {}
        self._new: set[int] = set()
        """Groups that were never handed out."""
        self._leases: dict[int, _Lease] = {}
        self._settled: dict[str, deque[_Batch]] = {}
        self._pending: dict[HopKey, list[float]] = {}
        self._builders: dict[HopKey, HistogramBuilder] = {}
        self._slowest: dict[HopKey, Slowest] = {}
        self._changes: Mapping[type[Event], Callable[[float, Any], object]] = {
            Accepted: lambda _, event: self._accept(event),
            GroupSnapshot: lambda _, event: self._know(event.accepted, new=not event.deliveries),
            Leased: lambda _, event: self._lease(event),
            LeaseSnapshot: lambda _, event: self._know_lease(event),
            RetainedBatchSnapshot: lambda _, event: self._know_batch(event),
            Carved: lambda _, event: self._carve(event),
            Pulled: self._hand_out,
            Settles: self._settle,
            Lost: lambda _, event: self._leases.pop(event.lease, None),
            Dropped: lambda _, event: self._forget((event.order,)),
            Committed: self._commit,
            Forgot: lambda _, event: self._let_go(event),
            Rewound: lambda _, event: self._rewind(event),
            WasReset: lambda *_: self._reset(),
        }

    def apply(self, at: float, event: AnyEvent) -> None:
        """Apply an event, or a record of a snapshot, that was committed at this wall-clock time."""
        change = self._changes.get(type(event))
        if change is not None:
            change(at, event)

    def histograms(self) -> dict[HopKey, Histogram]:
        """Return what was followed so far, by environment and hop."""
        for key, durations_s in self._pending.items():
            self._builders.setdefault(key, HistogramBuilder()).add(durations_s)
        self._pending.clear()
        return {key: builder.histogram() for key, builder in sorted(self._builders.items(), key=_place)}

    def slowest(self) -> dict[HopKey, Slowest]:
        """Return the slowest group of each hop."""
        return dict(self._slowest)

    def _accept(self, accepted: Accepted) -> None:
        header = accepted.header
        group = self._know(accepted, new=True)
        if accepted.requeued:  # a dead group that an operator queued again: its rollout counted once
            return
        if header.started_at and header.finished_at:  # 0 is unknown: the group was built without times
            self._add(group, Hop.ROLLOUT, header.finished_at - header.started_at)
            self._add(group, Hop.SEND, accepted.at - header.finished_at)

    def _know(self, accepted: Accepted, *, new: bool) -> FollowedGroup:
        group = FollowedGroup(accepted.env, accepted.split, accepted.header.group_id, accepted.at)
        if accepted.order not in self._groups:
            self._groups[accepted.order] = group
            if new:
                self._new.add(accepted.order)
        return group

    def _lease(self, event: Leased) -> None:
        self._leases[event.number] = _Lease(event.group, event.shards)

    def _know_lease(self, event: LeaseSnapshot) -> None:
        lease = self._leases[event.number] = _Lease(event.group, event.shards)
        lease.settles = {
            rank: settle for rank, (_, _, settle) in enumerate(event.parts) if settle is not None
        }

    def _know_batch(self, event: RetainedBatchSnapshot) -> None:
        orders = tuple(order for shard in event.shards for order in shard)
        batch = _Batch(event.version.step, event.stepped, None, orders)
        self._settled.setdefault(event.group, deque()).append(batch)

    def _carve(self, event: Carved) -> None:
        moved = set(event.orders)
        for number, lease in list(self._leases.items()):
            if moved.isdisjoint(lease.orders):
                continue
            self._leases[event.number] = _Lease(lease.group, (event.orders,))
            lease.shards = tuple(tuple(one for one in shard if one not in moved) for shard in lease.shards)
            if not lease.orders:
                del self._leases[number]

    def _hand_out(self, at: float, event: Pulled) -> None:
        for order in self._part(event.lease, event.rank):
            self._handed_at[order] = at
            if order in self._new and (group := self._groups.get(order)) is not None:
                self._new.discard(order)
                self._add(group, Hop.QUEUE, at - group.accepted_at)

    def _settle(self, at: float, event: Settles) -> None:
        settle = event.settle
        for order in self._part(settle.lease, settle.rank):
            handed_at, group = self._handed_at.pop(order, None), self._groups.get(order)
            if handed_at is not None and group is not None:
                self._add(group, Hop.TRAIN, at - handed_at)
        lease = self._leases.get(settle.lease)
        if lease is None:
            return
        lease.settles[settle.rank] = settle
        if len(lease.settles) == len(lease.shards):
            del self._leases[settle.lease]
            self._retain(at, lease)

    def _retain(self, at: float, lease: _Lease) -> None:
        """Keep a settled batch for its checkpoint without its rejected groups, as the broker does."""
        rejected = {
            order
            for rank, shard in enumerate(lease.shards)
            for order in self._rejected(shard, lease.settles[rank])
        }
        self._forget(rejected)
        orders = tuple(order for order in lease.orders if order not in rejected)
        if orders:
            step = max(settle.version.step for settle in lease.settles.values())
            stepped = any(settle.trained for settle in lease.settles.values())
            self._settled.setdefault(lease.group, deque()).append(_Batch(step, stepped, at, orders))

    def _rejected(self, shard: tuple[int, ...], settle: Settle) -> Iterator[int]:
        """Yield the rejected groups of a shard. Of groups of one id, the first ones are trained or filtered."""
        taken = Counter((*settle.trained, *settle.filtered))
        rejected = {one.group_id for one in settle.rejected}
        for order in shard if rejected else ():
            group = self._groups.get(order)
            if group is None or group.group_id not in rejected:
                continue
            if taken[group.group_id]:
                taken[group.group_id] -= 1
            else:
                yield order

    def _commit(self, at: float, event: Committed) -> None:
        batches = self._settled.get(event.group)
        while batches and batches[0].step <= event.version.step:
            batch = batches.popleft()
            for order in batch.orders:
                if batch.at is not None and (group := self._groups.get(order)) is not None:
                    self._add(group, Hop.COMMIT, at - batch.at)
            self._forget(batch.orders)

    def _let_go(self, event: Forgot) -> None:
        batches = self._settled.get(event.group, deque())
        for _ in range(min(event.batches, len(batches))):
            self._forget(batches.popleft().orders)

    def _rewind(self, event: Rewound) -> None:
        """Let go of what the checkpoint covers; the time until the trainer came back is no commit of it.

        A batch without a step is covered only if a step up to the checkpoint follows it; else it comes again.
        """
        batches = list(self._settled.pop(event.group, ()))
        steps = (at for at, one in enumerate(batches, 1) if one.stepped and one.step <= event.version.step)
        for batch in batches[: max(steps, default=0)]:
            self._forget(batch.orders)

    def _reset(self) -> None:
        for kept in (self._groups, self._handed_at, self._new, self._leases, self._settled):
            kept.clear()

    def _part(self, lease: int, rank: int) -> tuple[int, ...]:
        found = self._leases.get(lease)
        return found.shards[rank] if found is not None and rank < len(found.shards) else ()

    def _forget(self, orders: Iterable[int]) -> None:
        for order in orders:
            self._groups.pop(order, None)
            self._handed_at.pop(order, None)
            self._new.discard(order)

    def _add(self, group: FollowedGroup, hop: Hop, seconds: float) -> None:
        """Count a duration. The clock of a producer may say anything: what no histogram has a bucket for is bounded."""
        if not isfinite(seconds):
            return
        seconds = min(max(seconds, 0.0), LONGEST_S)
        key = HopKey(group.env, hop, group.split)
        waiting = self._pending.setdefault(key, [])
        waiting.append(seconds)
        if len(waiting) >= BLOCK:
            self._builders.setdefault(key, HistogramBuilder()).add(waiting)
            waiting.clear()
        slowest = self._slowest.get(key)
        if slowest is None or seconds > slowest.seconds:
            self._slowest[key] = Slowest(seconds, group.group_id)


def _place(entry: tuple[HopKey, object]) -> tuple[str, Split, int]:
    key = entry[0]
    return key.env, key.split, list(Hop).index(key.hop)


def merged(histograms: Mapping[HopKey, Histogram]) -> dict[Hop, Histogram]:
    """Return the histogram of each hop over all environments, of groups for training alone."""
    found: dict[Hop, Histogram] = {}
    for key, one in histograms.items():
        if key.split is Split.TRAIN:
            found[key.hop] = found.get(key.hop, Histogram()).merged(one)
    return {hop: found[hop] for hop in Hop if hop in found}
