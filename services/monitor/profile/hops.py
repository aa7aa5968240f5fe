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

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from enum import StrEnum
from typing import Any, Final, NamedTuple

from rolloutmq.schemas.statistics.histogram import Histogram, HistogramBuilder
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Carved,
    Committed,
    Dropped,
    Event,
    Forgot,
    GroupSnapshot,
    Leased,
    Lost,
    Pulled,
    Rewound,
    Settles,
    WasReset,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent

BLOCK: Final = 1024
"""Durations that enter a histogram at once."""


class Hop(StrEnum):
    """One part of the way of a group, in the order of the way."""

    ROLLOUT = "rollout"
    SEND = "send"
    QUEUE = "queue"
    TRAIN = "train"
    COMMIT = "commit"


class HopKey(NamedTuple):
    """What a histogram is about."""

    env: str
    hop: Hop


class Slowest(NamedTuple):
    """The slowest group of a hop: where `rolloutmq explain` goes on."""

    seconds: float
    group_id: str


class _Group(NamedTuple):
    """An accepted group that may still be handed out."""

    env: str
    group_id: str
    accepted_at: float


class _Batch(NamedTuple):
    """A settled batch that waits for its checkpoint."""

    step: int
    at: float
    orders: tuple[int, ...]


class _Lease:
    """An open lease: the groups of each rank, and the step after the ranks that have settled."""

    def __init__(self, group: str, shards: Iterable[tuple[int, ...]]) -> None:
        self.group = group
        self.shards = tuple(shards)
        self.steps: dict[int, int] = {}

    @property
    def orders(self) -> tuple[int, ...]:
        return tuple(order for shard in self.shards for order in shard)


class HopFollower:
    """Follows the groups of a run, event by event. It remembers a group until a checkpoint covers it."""

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}
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
        return {key: builder.histogram() for key, builder in sorted(self._builders.items())}

    def slowest(self) -> dict[HopKey, Slowest]:
        """Return the slowest group of each hop."""
        return dict(self._slowest)

    def _accept(self, accepted: Accepted) -> None:
        header = accepted.header
        group = self._know(accepted, new=True)
        if header.started_at and header.finished_at:  # 0 is unknown: the group was built without times
            self._add(group, Hop.ROLLOUT, header.finished_at - header.started_at)
            self._add(group, Hop.SEND, accepted.at - header.finished_at)

    def _know(self, accepted: Accepted, *, new: bool) -> _Group:
        group = _Group(accepted.env, accepted.header.group_id, accepted.at)
        if accepted.order not in self._groups:
            self._groups[accepted.order] = group
            if new:
                self._new.add(accepted.order)
        return group

    def _lease(self, event: Leased) -> None:
        self._leases[event.number] = _Lease(event.group, event.shards)

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
        lease.steps[settle.rank] = settle.version.step
        if len(lease.steps) == len(lease.shards):
            del self._leases[settle.lease]
            batch = _Batch(max(lease.steps.values()), at, lease.orders)
            self._settled.setdefault(lease.group, deque()).append(batch)

    def _commit(self, at: float, event: Committed) -> None:
        batches = self._settled.get(event.group)
        while batches and batches[0].step <= event.version.step:
            batch = batches.popleft()
            for order in batch.orders:
                if (group := self._groups.get(order)) is not None:
                    self._add(group, Hop.COMMIT, at - batch.at)
            self._forget(batch.orders)

    def _let_go(self, event: Forgot) -> None:
        batches = self._settled.get(event.group, deque())
        for _ in range(min(event.batches, len(batches))):
            self._forget(batches.popleft().orders)

    def _rewind(self, event: Rewound) -> None:
        """Let go of what the checkpoint covers; the time until the trainer came back is no commit of it."""
        for batch in self._settled.pop(event.group, ()):
            if batch.step <= event.version.step:
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

    def _add(self, group: _Group, hop: Hop, seconds: float) -> None:
        key = HopKey(group.env, hop)
        waiting = self._pending.setdefault(key, [])
        waiting.append(seconds)
        if len(waiting) >= BLOCK:
            self._builders.setdefault(key, HistogramBuilder()).add(waiting)
            waiting.clear()
        slowest = self._slowest.get(key)
        if slowest is None or seconds > slowest.seconds:
            self._slowest[key] = Slowest(seconds, group.group_id)


def merged(histograms: dict[HopKey, Histogram]) -> dict[Hop, Histogram]:
    """Return the histogram of each hop over all environments."""
    found: dict[Hop, Histogram] = {}
    for (_, hop), one in histograms.items():
        found[hop] = found.get(hop, Histogram()).merged(one)
    return {hop: found[hop] for hop in Hop if hop in found}
