"""What a snapshot says: where every group is that still exists, and how many there were."""

from collections import Counter, defaultdict, deque
from collections.abc import Iterable, Iterator
from typing import Final

import msgspec

from rolloutmq.schemas.delivery import Settle
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.facts import (
    Accepted,
    GroupItem,
    KeptItem,
    LeaseItem,
    LedgerItem,
    Numbers,
    ReturningItem,
    SessionItem,
)
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.ledger import State

Stream = tuple[str, Split]
"""A consumer group and a split."""
Shards = tuple[tuple[int, ...], ...]
"""Orders of the groups of each rank."""

LIVE: Final = frozenset({State.QUEUED, State.LEASED})


class Problem(msgspec.Struct, frozen=True, omit_defaults=True):
    """Something that does not add up; without a group, it is about the journal itself."""

    what: str
    group_id: str = ""
    order: int = 0

    def __str__(self) -> str:
        if not self.group_id:
            return self.what
        order = f" (order {self.order})" if self.order else ""
        return f"group {self.group_id}{order} {self.what}"


class Loan(msgspec.Struct):
    """An open lease."""

    stream: Stream
    shards: Shards
    again: bool
    settles: dict[int, Settle]

    def orders(self) -> Iterator[int]:
        return (order for shard in self.shards for order in shard)


class Held(msgspec.Struct):
    """A settled batch that waits for its checkpoint, without its dead groups."""

    split: Split
    version: PolicyVersion
    stepped: bool
    shards: Shards

    def orders(self) -> Iterator[int]:
        return (order for shard in self.shards for order in shard)


class Back(msgspec.Struct):
    """A batch on the rewind queue. One that was lost before may come apart."""

    orders: list[int]
    lost: bool = False


class Books:
    """State of every group that is named, and the containers that they are in."""

    def __init__(self) -> None:
        self.states: dict[int, State] = {}
        self.ids: dict[int, str] = {}
        self.known: dict[int, Accepted] = {}
        """Where it came from and lies, of each group that the broker still needs."""
        self.before: Counter[State] = Counter()
        """Groups that are counted and have no names: they ended before."""
        self.reasons: Counter[str] = Counter()
        self.accepted = self.rewound = self.forgotten = 0
        self.highest = 0
        """Highest order that was given."""
        self.last_segment = 0
        """Highest segment that is named."""
        self.loans: dict[int, Loan] = {}
        self.kept: defaultdict[str, deque[Held]] = defaultdict(deque)
        self.returning: defaultdict[Stream, deque[Back]] = defaultdict(deque)
        self.came_back: set[int] = set()
        """Groups of which a lease was lost: a trainer may have learned from them without its settlement."""
        self.sessions: dict[int, SessionItem] = {}
        self.problems: list[Problem] = []
        self._ids: set[str] = set()

    def open(self, snapshot: Iterable[AnyFact]) -> None:
        """Take in what the items of a snapshot say."""
        for item in snapshot:
            match item:
                case Numbers():
                    self.highest = item.next_order - 1
                case GroupItem():
                    self._name(item.accepted, State.QUEUED)
                    if item.deliveries or item.failures:
                        self.came_back.add(item.accepted.order)
                case SessionItem():
                    self.sessions[item.number] = item
                case LeaseItem():
                    self._open_lease(item)
                case KeptItem():
                    self._open_kept(item)
                case ReturningItem():
                    orders = [order for shard in item.shards for order in shard]
                    self.returning[item.group, item.split].append(Back(orders, lost=True))
                case LedgerItem():
                    self._balance(item)

    def _open_lease(self, item: LeaseItem) -> None:
        settles = {rank: part[2] for rank, part in enumerate(item.parts) if part[2] is not None}
        loan = Loan((item.group, item.split), item.shards, item.rewound, settles)
        self.loans[item.number] = loan
        self._put(loan.orders(), State.LEASED)

    def _open_kept(self, item: KeptItem) -> None:
        self.kept[item.group].append(Held(item.split, item.version, item.stepped, item.shards))
        for shard, states in zip(item.shards, item.states, strict=True):
            for order, state in zip(shard, states, strict=True):
                self._put((order,), State(state))

    def _balance(self, ledger: LedgerItem) -> None:
        """Take over the counts, which come behind the groups; what is not named ended before."""
        self.accepted, self.rewound, self.forgotten = ledger.accepted, ledger.rewound, ledger.forgotten
        self.reasons = Counter({why: n for why, n in ledger.reasons.items() if _is_of_state(why)})
        named = Counter(self.states.values())
        for state in State:
            counted = ledger.counts.get(state.value, 0)
            self.before[state] = counted - named[state]
            if counted < named[state] or (state in LIVE and counted != named[state]):
                self._doubt(
                    f"a snapshot names {named[state]} groups that are {state}, its ledger counts {counted}"
                )
        if ledger.accepted != sum(ledger.counts.values()):
            self._doubt(f"the ledger of a snapshot has {ledger.accepted} accepted, which is not the sum")

    def counts(self) -> dict[State, int]:
        """Return how many groups are in each state."""
        named = Counter(self.states.values())
        return {state: self.before[state] + named[state] for state in State}

    def places(self) -> dict[int, str]:
        """Return where each group is that the broker still needs."""
        waiting = self.waiting()
        held = {order for kept in self.kept.values() for batch in kept for order in batch.orders()}
        return {
            order: "on the rewind queue" if order in waiting else self.states[order].value
            for order in self.known
            if self.states[order] in LIVE or order in held
        }

    def waiting(self) -> set[int]:
        """Return the groups on a rewind queue."""
        return {order for queue in self.returning.values() for batch in queue for order in batch.orders}

    def knows(self, group_id: str) -> bool:
        """Whether a group of this id was ever named."""
        return group_id in self._ids

    def _name(self, accepted: Accepted, state: State) -> None:
        order = accepted.order
        self.states[order] = state
        self.ids[order] = accepted.header.group_id
        self._ids.add(accepted.header.group_id)
        self.known[order] = accepted
        self.highest = max(self.highest, order)
        if accepted.place is not None:
            self.last_segment = max(self.last_segment, accepted.place.segment)

    def _put(self, orders: Iterable[int], state: State) -> None:
        for order in orders:
            self.states[order] = state

    def _doubt(self, what: str, order: int = 0) -> None:
        self.problems.append(Problem(what, self.ids.get(order, "?") if order else "", order))


def _is_of_state(reason: str) -> bool:
    """Whether a reason is of groups that ended; the ledger has others beside them."""
    return reason.partition("(")[0] in {state.value for state in State}
