"""The ledger model: the state of every accepted group, recomputed from snapshots and events alone.

It is a model of its own, simpler than the broker: it decides nothing, and knows no clocks, bytes or credits. Every
event is checked against the events before it. A contradiction is reported as a `Problem` and then applied, so
one does not hide the next.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Carved,
    Committed,
    Dropped,
    Event,
    Forgot,
    GroupSnapshot,
    GroupState,
    Leased,
    LeaseSnapshot,
    LedgerSnapshot,
    Lost,
    Numbers,
    Opened,
    Requeued,
    RetainedBatchSnapshot,
    Rewound,
    RewoundBatchSnapshot,
    SessionSnapshot,
    Settles,
    Skipped,
    WasReset,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.history import JournalHistory, unlogged
from rolloutmq.services.broker.journal.inspect.packed import PackedGroups

Stream = tuple[str, Split]
"""A consumer group and a split."""

Shards = tuple[tuple[int, ...], ...]
"""Orders of the groups of each rank."""


LIVE: Final = frozenset({GroupState.QUEUED, GroupState.LEASED})


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """A contradiction; without a group, it is about the journal itself."""

    what: str
    group_id: str = ""
    order: int = 0

    def __str__(self) -> str:
        if not self.group_id:
            return self.what
        order = f" (order {self.order})" if self.order else ""
        return f"group {self.group_id}{order} {self.what}"


class OpenLease(msgspec.Struct):
    """An open lease."""

    stream: Stream
    shards: Shards
    again: bool
    settles: dict[int, Settle]

    def orders(self) -> Iterator[int]:
        return (order for shard in self.shards for order in shard)


class UncommittedBatch(msgspec.Struct):
    """A settled batch that waits for its checkpoint, without its dead groups."""

    split: Split
    version: PolicyVersion
    stepped: bool
    shards: Shards

    def orders(self) -> Iterator[int]:
        return (order for shard in self.shards for order in shard)


class RewoundBatch(msgspec.Struct):
    """A batch on the rewind queue. One that was lost before may return split into single groups."""

    orders: list[int]
    lost: bool = False


IMPOSSIBLE: Final = (ArithmeticError, AssertionError, LookupError, TypeError, ValueError)
"""Errors of a record that decodes and has a right checksum, and that no broker writes: somebody forged it."""


class SnapshotModel:
    """State of every named group, and the containers they are in."""

    def __init__(self) -> None:
        self.states: dict[int, GroupState] = {}
        self.ids: dict[int, str] = {}
        self.known = PackedGroups()
        """Acceptance and address of each group the broker still needs."""
        self.before: Counter[GroupState] = Counter()
        """Counted groups without a name: they ended before the history begins."""
        self.reasons: Counter[str] = Counter()
        self.accepted = self.rewound = self.forgotten = 0
        self.highest = 0
        """Highest order given."""
        self.last_segment = 0
        """Highest segment in the events."""
        self.leases: dict[int, OpenLease] = {}
        self.uncommitted: defaultdict[str, deque[UncommittedBatch]] = defaultdict(deque)
        self.rewind_queues: defaultdict[Stream, deque[RewoundBatch]] = defaultdict(deque)
        self.came_back: set[int] = set()
        """Groups of lost leases: a trainer may have trained on them without a settlement."""
        self.sessions: dict[int, SessionSnapshot] = {}
        self.problems: list[Problem] = []
        self._ids: set[str] = set()

    def open(self, snapshot: Iterable[AnyEvent]) -> None:
        """Apply the records of a snapshot. An impossible one is a problem, and the others count."""
        for item in snapshot:
            try:
                self._open(item)
            except IMPOSSIBLE as error:
                self._report(f"a record of a snapshot, {type(item).__name__}, contradicts itself: {error}")

    def _open(self, item: AnyEvent) -> None:
        match item:
            case Numbers():
                self.highest = item.next_order - 1
            case GroupSnapshot():
                self._name(item.accepted, GroupState.QUEUED)
                if item.deliveries or item.failures:
                    self.came_back.add(item.accepted.order)
            case SessionSnapshot():
                self.sessions[item.number] = item
            case LeaseSnapshot():
                self._open_lease(item)
            case RetainedBatchSnapshot():
                self._open_kept(item)
            case RewoundBatchSnapshot():
                orders = [order for shard in item.shards for order in shard]
                self.rewind_queues[item.group, item.split].append(RewoundBatch(orders, lost=True))
            case LedgerSnapshot():
                self._balance(item)

    def _open_lease(self, item: LeaseSnapshot) -> None:
        settles = {rank: part[2] for rank, part in enumerate(item.parts) if part[2] is not None}
        lease = OpenLease((item.group, item.split), item.shards, item.rewound, settles)
        self.leases[item.number] = lease
        self._put(lease.orders(), GroupState.LEASED)

    def _open_kept(self, item: RetainedBatchSnapshot) -> None:
        self.uncommitted[item.group].append(
            UncommittedBatch(item.split, item.version, item.stepped, item.shards)
        )
        for shard, states in zip(item.shards, item.states, strict=True):
            for order, state in zip(shard, states, strict=True):
                self._put((order,), GroupState(state))

    def _balance(self, ledger: LedgerSnapshot) -> None:
        """Adopt the counts, which follow the groups; groups without a name ended before."""
        self.accepted, self.rewound, self.forgotten = ledger.accepted, ledger.rewound, ledger.forgotten
        self.reasons = Counter({why: n for why, n in ledger.reasons.items() if _is_of_state(why)})
        named = Counter(self.states.values())
        for state in GroupState:
            counted = ledger.counts.get(state.value, 0)
            self.before[state] = counted - named[state]
            if counted < named[state] or (state in LIVE and counted != named[state]):
                self._report(
                    f"a snapshot names {named[state]} groups that are {state}, its ledger counts {counted}"
                )
        if ledger.accepted != sum(ledger.counts.values()):
            self._report(f"the ledger of a snapshot has {ledger.accepted} accepted, which is not the sum")

    def counts(self) -> dict[GroupState, int]:
        """Return how many groups are in each state."""
        named = Counter(self.states.values())
        return {state: self.before[state] + named[state] for state in GroupState}

    def places(self) -> dict[int, str]:
        """Return the place of each group the broker still needs."""
        waiting = self.waiting()
        held = {
            order for batches in self.uncommitted.values() for batch in batches for order in batch.orders()
        }
        return {
            order: "on the rewind queue" if order in waiting else self.states[order].value
            for order in self.known
            if self.states[order] in LIVE or order in held
        }

    def waiting(self) -> set[int]:
        """Return the groups on a rewind queue."""
        return {order for queue in self.rewind_queues.values() for batch in queue for order in batch.orders}

    def knows(self, group_id: str) -> bool:
        """Return whether a group of this id was ever named."""
        return group_id in self._ids

    def _name(self, accepted: Accepted, state: GroupState) -> None:
        order = accepted.order
        self.states[order] = state
        self.ids[order] = accepted.header.group_id
        self._ids.add(accepted.header.group_id)
        self.known[order] = accepted
        self.highest = max(self.highest, order)
        if accepted.place is not None:
            self.last_segment = max(self.last_segment, accepted.place.segment)

    def _put(self, orders: Iterable[int], state: GroupState) -> None:
        for order in orders:
            self.states[order] = state

    def _report(self, what: str, order: int = 0) -> None:
        self.problems.append(Problem(what, self.ids.get(order, "?") if order else "", order))


def _is_of_state(reason: str) -> bool:
    """Return whether a reason belongs to an end state; the ledger has other reasons too."""
    return reason.partition("(")[0] in {state.value for state in GroupState}


DAMAGED: Final = "damaged"
"""Reason of a dead group whose record could not be read."""
ENDED: Final = frozenset({GroupState.DEAD, GroupState.DISCARDED})


class LedgerModel(SnapshotModel):
    """A ledger kept event by event."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: set[int] = set()
        """Sessions opened since the beginning of the history."""
        self.damaged: set[int] = set()
        """Groups lost since the beginning of the history, since their records were damaged or gone."""
        self._numbers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Order of each sequence number of a session."""
        self._apply: Mapping[type[Event], Callable[[Any], object]] = {
            Accepted: self.accept,
            Opened: lambda event: self.opened.add(event.number),
            Skipped: self._skip,
            Leased: self._lease,
            Carved: self._carve,
            Settles: lambda event: self._settle(event.settle),
            Lost: self._lose,
            Dropped: self._drop,
            Committed: self._commit,
            Forgot: self._let_go,
            Rewound: self._rewind,
            Requeued: self._requeue,
            WasReset: lambda _: self._reset(),
        }

    def apply(self, event: AnyEvent) -> None:
        """Apply an event; most events are not about groups. An impossible one is a problem, and the others count."""
        change = self._apply.get(type(event))
        if change is None:
            return
        try:
            change(event)
        except IMPOSSIBLE as error:
            self._report(f"an event, {type(event).__name__}, contradicts itself or those before it: {error}")

    def accept(self, accepted: Accepted) -> None:
        """Count a new group as queued."""
        order = accepted.order
        if order in self.states or (self.before.total() and order <= self.highest):
            self._report("was accepted as an order that was given before", order)
            return
        self._name(accepted, GroupState.QUEUED)
        self.accepted += 1
        numbers, number = self._numbers[accepted.session], accepted.header.seq
        previous = numbers.get(number)
        if previous is not None and self.states[previous] not in ENDED:  # a dead one may be queued again
            self._report(f"is number {number} of session {accepted.session} for a second time", order)
        numbers[number] = order

    def _skip(self, event: Skipped) -> None:
        if not self.before.total() and event.group_id not in self._ids:
            self._report(f"group {event.group_id} was taken for one that is here already, and none is")

    def _lease(self, event: Leased) -> None:
        lease = OpenLease((event.group, event.split), event.shards, event.again, {})
        if event.again:
            self._take_rewound(lease, window=event.window > 0)
        else:
            waiting = self.waiting()
            for order in lease.orders():
                if order in waiting:
                    self._report(
                        f"was leased as {event.number} from the rewind queue as if it were new", order
                    )
        for order in lease.orders():
            self._expect(order, GroupState.QUEUED, f"was leased as {event.number}")
        self._put(lease.orders(), GroupState.LEASED)
        self.leases[event.number] = lease

    def _take_rewound(self, lease: OpenLease, *, window: bool) -> None:
        """Take a batch from the head of the rewind queue; a lost one may be split.

        In a window one group of a lost batch may come before its turn: it may be at fault.
        """
        queue = self.rewind_queues[lease.stream]
        wanted = set(lease.orders())
        while queue and not queue[0].orders:
            queue.popleft()
        head = queue[0] if queue else RewoundBatch([])
        if wanted == set(head.orders) or (head.lost and wanted < set(head.orders)):
            head.orders = [order for order in head.orders if order not in wanted]
            return
        early = (batch for batch in queue if batch.lost and wanted <= set(batch.orders))
        if window and len(wanted) == 1 and (found := next(early, None)) is not None:
            found.orders = [order for order in found.orders if order not in wanted]
            return
        for order in sorted(wanted ^ set(head.orders)):
            self._report("is not the same in the batch that came again and in the one that was due", order)
        for batch in queue:
            batch.orders = [order for order in batch.orders if order not in wanted]

    def _carve(self, event: Carved) -> None:
        """Take groups out of the leases of a window; they become one lease."""
        own, sources = set(event.orders), []
        for number, lease in list(self.leases.items()):
            if own.isdisjoint(lease.orders()):
                continue
            sources.append(lease)
            lease.shards = tuple(tuple(one for one in shard if one not in own) for shard in lease.shards)
            if not any(lease.shards):
                del self.leases[number]
        for order in event.orders:
            self._expect(order, GroupState.LEASED, f"was settled with lease {event.number}")
        if not sources:
            self._report(f"lease {event.number} has groups of no open lease")
            return
        again = {lease.again for lease in sources}
        if len(again) > 1:
            self._report(f"lease {event.number} has groups of the rewind queue, and others")
        self.leases[event.number] = OpenLease(sources[0].stream, (event.orders,), sources[0].again, {})

    def _settle(self, settle: Settle) -> None:
        lease = self.leases.get(settle.lease)
        if lease is None or settle.rank >= len(lease.shards):
            self._report(f"rank {settle.rank} settled lease {settle.lease}, which is not open")
            return
        lease.settles[settle.rank] = settle
        if len(lease.settles) == len(lease.shards):
            del self.leases[settle.lease]
            self._apply_settle(settle.lease, lease)

    def _apply_settle(self, number: int, lease: OpenLease) -> None:
        shards: list[tuple[int, ...]] = []
        stepped = False
        for rank, shard in enumerate(lease.shards):
            outcomes = self._outcomes(number, shard, lease.settles[rank])
            for order, outcome in outcomes.items():
                self._expect(order, GroupState.LEASED, f"was settled with lease {number}")
                stepped |= outcome is GroupState.TRAINED
                self._end(order, outcome, "rejected" if outcome is GroupState.DEAD else "")
            shards.append(tuple(order for order in shard if outcomes.get(order) is not GroupState.DEAD))
        version = max(settle.version for settle in lease.settles.values())
        if any(shards):
            held = UncommittedBatch(lease.stream[1], version, stepped, tuple(shards))
            self.uncommitted[lease.stream[0]].append(held)

    def _outcomes(self, number: int, shard: tuple[int, ...], settle: Settle) -> dict[int, GroupState]:
        named: defaultdict[str, list[GroupState]] = defaultdict(list)
        for ids, state in (
            (settle.trained, GroupState.TRAINED),
            (settle.filtered, GroupState.FILTERED),
            ([rejected.group_id for rejected in settle.rejected], GroupState.DEAD),
        ):
            for group_id in ids:
                named[group_id].append(state)
        outcomes = {}
        for order in shard:
            left = named[self.ids.get(order, "")]
            if left:
                outcomes[order] = left.pop(0)
            else:
                self._report(f"was left out when lease {number} was settled", order)
        for group_id in (name for name, left in named.items() if left):
            self._report(f"lease {number} settled group {group_id}, which was not in it")
        return outcomes

    def _lose(self, event: Lost) -> None:
        lease = self.leases.pop(event.lease, None)
        if lease is None:
            self._report(f"lease {event.lease} was lost, and was not open")
            return
        orders = list(lease.orders())
        for order in orders:
            self._expect(order, GroupState.LEASED, f"was lost with lease {event.lease}")
        self._put(orders, GroupState.QUEUED)
        self.came_back.update(orders)
        if lease.again or event.recalled:
            self.rewind_queues[lease.stream].appendleft(RewoundBatch(orders, lost=True))

    def _drop(self, event: Dropped) -> None:
        order, state, reason = event.order, GroupState(event.state), event.reason
        if self.states.get(order) is state:
            return
        if self.states.get(order) not in LIVE:
            self._expect(order, GroupState.QUEUED, f"was dropped as {state.value}({reason})")
        self._leave(order)
        self._end(order, state, reason)
        if state is GroupState.DEAD and reason == DAMAGED:
            self.damaged.add(order)

    def _leave(self, order: int) -> None:
        """Remove a group from its lease or from the rewind queue, if it is in one."""
        if self.states.get(order) is GroupState.LEASED:
            for lease in self.leases.values():
                lease.shards = tuple(tuple(one for one in shard if one != order) for shard in lease.shards)
        for queue in self.rewind_queues.values():
            for batch in queue:
                if order in batch.orders:
                    batch.orders.remove(order)

    def _end(self, order: int, state: GroupState, reason: str) -> None:
        self._put((order,), state)
        if reason:
            self.reasons[f"{state.value}({reason})"] += 1
        if state not in {GroupState.TRAINED, GroupState.FILTERED}:
            self.known.forget(order)

    def _commit(self, event: Committed) -> None:
        batches = self.uncommitted[event.group]
        while batches and batches[0].version.step <= event.version.step:
            self._cover(batches.popleft())

    def _cover(self, batch: UncommittedBatch) -> None:
        for order in batch.orders():
            if self.states.get(order) is GroupState.TRAINED:
                self._put((order,), GroupState.COMMITTED)
            self.known.forget(order)

    def _let_go(self, event: Forgot) -> None:
        batches = self.uncommitted[event.group]
        for _ in range(min(event.batches, len(batches))):
            self._forget(batches.popleft())

    def _forget(self, batch: UncommittedBatch) -> None:
        for order in batch.orders():
            self.forgotten += self.states.get(order) is GroupState.TRAINED
            self.known.forget(order)

    def _rewind(self, event: Rewound) -> None:
        """Commit the batches before the version; a batch without a step is before it if a later step is."""
        batches = list(self.uncommitted.pop(event.group, ()))
        cut = max(
            (i + 1 for i, b in enumerate(batches) if b.stepped and b.version.step <= event.version.step),
            default=0,
        )
        for batch in batches[:cut]:
            self._cover(batch)
        for batch in reversed(batches[cut:]):
            orders = list(batch.orders())
            self._put(orders, GroupState.QUEUED)
            self.rewound += len(orders)
            self.rewind_queues[event.group, batch.split].appendleft(RewoundBatch(orders))

    def _requeue(self, event: Requeued) -> None:
        """Count a dead group as discarded; it was accepted again under another order."""
        if event.order in self.states:
            self._expect(event.order, GroupState.DEAD, "was requeued")
        else:
            self.before[GroupState.DEAD] -= 1
        self._end(event.order, GroupState.DISCARDED, "requeued")

    def _reset(self) -> None:
        for order, state in self.states.items():
            if state in LIVE:
                self._end(order, GroupState.DISCARDED, "reset")
        for batches in self.uncommitted.values():
            for batch in batches:
                self._forget(batch)
        self.leases.clear()
        self.uncommitted.clear()
        self.rewind_queues.clear()

    # Comparison with later snapshots.

    def unnoticed(self, later: SnapshotModel) -> list[Accepted]:
        """Return the groups in a new life's snapshot without an event: the previous life accepted them last."""
        return [later.known[order] for order in sorted(later.known) if order > self.highest]

    def moved(self, later: SnapshotModel) -> None:
        """Adopt the present addresses of the groups from a snapshot."""
        self.known.renew(later.known)
        self.last_segment = max(self.last_segment, later.last_segment)

    def adopt(self, later: SnapshotModel) -> None:
        """Adopt a snapshot that differs."""
        self.leases, self.uncommitted, self.rewind_queues = (
            later.leases,
            later.uncommitted,
            later.rewind_queues,
        )
        self.accepted, self.rewound, self.forgotten = later.accepted, later.rewound, later.forgotten
        self.reasons, self.known = later.reasons, later.known
        self.came_back |= later.came_back
        for order, accepted in list(later.known.items()):
            self._name(accepted, later.states[order])
        named = Counter(self.states.values())
        self.before = Counter({state: count - named[state] for state, count in later.counts().items()})

    def _expect(self, order: int, state: GroupState, event: str) -> None:
        found = self.states.get(order)
        if found is None:
            self._report(f"{event}, and was never accepted", order)
        elif found is not state:
            self._report(f"{event} while it was {found.value}", order)


def remaining_ids(journal: Path) -> list[str]:
    """Return the ids of the groups queued, leased, or retained for a checkpoint or a resume.

    Args:
        journal: The directory. For a live broker, the answer is a moment old.
    """
    model = LedgerModel()
    for log in JournalHistory(journal).logs():
        model = LedgerModel()
        model.open(log.snapshot)
        for commit in log.commits:
            for event in commit.events:
                model.apply(event)
    for accepted in unlogged(journal, model.highest, model.last_segment):
        model.accept(accepted)
    return [model.ids[order] for order in sorted(model.places())]
