"""The ledger recomputed from facts alone: where every accepted group is, one state for each order.

A model of its own, and simpler than the broker: it decides nothing, and knows no clocks, bytes or credits. What a
fact says is held against what the facts before it said, and a contradiction is noted as a `Problem` and then obeyed,
so that one of them does not hide the next.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from typing import Any, Final

from rolloutmq.schemas.delivery import Settle
from rolloutmq.services.broker.journal.books import LIVE, Back, Books, Held, Loan
from rolloutmq.services.broker.journal.facts import (
    Accepted,
    Committed,
    Dropped,
    Fact,
    Forgot,
    Leased,
    Lost,
    Opened,
    Requeued,
    Rewound,
    Settles,
    Skipped,
    WasReset,
)
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.ledger import State

ENDED: Final = frozenset({State.DEAD, State.DISCARDED})


class Accounts(Books):
    """Books that are kept, fact by fact."""

    def __init__(self) -> None:
        super().__init__()
        self.opened: set[int] = set()
        """Sessions that were opened since the beginning."""
        self._numbers: defaultdict[int, dict[int, int]] = defaultdict(dict)
        """Order of each number of a session."""
        self._apply: Mapping[type[Fact], Callable[[Any], object]] = {
            Accepted: self.accept,
            Opened: lambda fact: self.opened.add(fact.number),
            Skipped: self._skip,
            Leased: self._lease,
            Settles: lambda fact: self._settle(fact.settle),
            Lost: self._lose,
            Dropped: self._drop,
            Committed: self._commit,
            Forgot: self._let_go,
            Rewound: self._rewind,
            Requeued: self._requeue,
            WasReset: lambda _: self._reset(),
        }

    def apply(self, fact: AnyFact) -> None:
        """Change what a fact says has changed; most facts are about other things than groups."""
        change = self._apply.get(type(fact))
        if change is not None:
            change(fact)

    def accept(self, accepted: Accepted) -> None:
        """Count a new group as queued."""
        order = accepted.order
        if order in self.states or (self.before.total() and order <= self.highest):
            self._doubt("was accepted as an order that was given before", order)
            return
        self._name(accepted, State.QUEUED)
        self.accepted += 1
        numbers, number = self._numbers[accepted.session], accepted.header.seq
        former = numbers.get(number)
        if former is not None and self.states[former] not in ENDED:  # a dead one may be queued again
            self._doubt(f"is number {number} of session {accepted.session} for a second time", order)
        numbers[number] = order

    def _skip(self, fact: Skipped) -> None:
        if not self.before.total() and fact.group_id not in self._ids:
            self._doubt(f"group {fact.group_id} was taken for one that is here already, and none is")

    def _lease(self, fact: Leased) -> None:
        loan = Loan((fact.group, fact.split), fact.shards, fact.again, {})
        if fact.again:
            self._take_back(loan)
        else:
            waiting = self.waiting()
            for order in loan.orders():
                if order in waiting:
                    self._doubt(f"was leased as {fact.number} from the rewind queue as if it were new", order)
        for order in loan.orders():
            self._expect(order, State.QUEUED, f"was leased as {fact.number}")
        self._put(loan.orders(), State.LEASED)
        self.loans[fact.number] = loan

    def _take_back(self, loan: Loan) -> None:
        """Take a batch from the head of the rewind queue; one that was lost there may come in parts."""
        queue = self.returning[loan.stream]
        wanted = set(loan.orders())
        while queue and not queue[0].orders:
            queue.popleft()
        head = queue[0] if queue else Back([])
        if wanted == set(head.orders) or (head.lost and wanted < set(head.orders)):
            head.orders = [order for order in head.orders if order not in wanted]
            return
        for order in sorted(wanted ^ set(head.orders)):
            self._doubt("is not the same in the batch that came again and in the one that was due", order)
        for batch in queue:
            batch.orders = [order for order in batch.orders if order not in wanted]

    def _settle(self, settle: Settle) -> None:
        loan = self.loans.get(settle.lease)
        if loan is None or settle.rank >= len(loan.shards):
            self._doubt(f"rank {settle.rank} settled lease {settle.lease}, which is not open")
            return
        loan.settles[settle.rank] = settle
        if len(loan.settles) == len(loan.shards):
            del self.loans[settle.lease]
            self._conclude(settle.lease, loan)

    def _conclude(self, number: int, loan: Loan) -> None:
        shards: list[tuple[int, ...]] = []
        stepped = False
        for rank, shard in enumerate(loan.shards):
            fates = self._fates(number, shard, loan.settles[rank])
            for order, fate in fates.items():
                self._expect(order, State.LEASED, f"was settled with lease {number}")
                stepped |= fate is State.TRAINED
                self._end(order, fate, "rejected" if fate is State.DEAD else "")
            shards.append(tuple(order for order in shard if fates.get(order) is not State.DEAD))
        version = max(settle.version for settle in loan.settles.values())
        if any(shards):
            held = Held(loan.stream[1], version, stepped, tuple(shards))
            self.kept[loan.stream[0]].append(held)

    def _fates(self, number: int, shard: tuple[int, ...], settle: Settle) -> dict[int, State]:
        named: defaultdict[str, list[State]] = defaultdict(list)
        for ids, state in (
            (settle.trained, State.TRAINED),
            (settle.filtered, State.FILTERED),
            ([rejected.group_id for rejected in settle.rejected], State.DEAD),
        ):
            for group_id in ids:
                named[group_id].append(state)
        fates = {}
        for order in shard:
            left = named[self.ids.get(order, "")]
            if left:
                fates[order] = left.pop(0)
            else:
                self._doubt(f"was left out when lease {number} was settled", order)
        for group_id in (name for name, left in named.items() if left):
            self._doubt(f"lease {number} settled group {group_id}, which was not in it")
        return fates

    def _lose(self, fact: Lost) -> None:
        loan = self.loans.pop(fact.lease, None)
        if loan is None:
            self._doubt(f"lease {fact.lease} was lost, and was not open")
            return
        orders = list(loan.orders())
        for order in orders:
            self._expect(order, State.LEASED, f"was lost with lease {fact.lease}")
        self._put(orders, State.QUEUED)
        self.came_back.update(orders)
        if loan.again or fact.recalled:
            self.returning[loan.stream].appendleft(Back(orders, lost=True))

    def _drop(self, fact: Dropped) -> None:
        order, state, reason = fact.order, State(fact.state), fact.reason
        if self.states.get(order) is state:
            return
        if self.states.get(order) not in LIVE:
            self._expect(order, State.QUEUED, f"was dropped as {state.value}({reason})")
        self._leave(order)
        self._end(order, state, reason)

    def _leave(self, order: int) -> None:
        """Take a group out of its lease or of the rewind queue, if it is in one."""
        if self.states.get(order) is State.LEASED:
            for loan in self.loans.values():
                loan.shards = tuple(tuple(one for one in shard if one != order) for shard in loan.shards)
        for queue in self.returning.values():
            for batch in queue:
                if order in batch.orders:
                    batch.orders.remove(order)

    def _end(self, order: int, state: State, reason: str) -> None:
        self._put((order,), state)
        if reason:
            self.reasons[f"{state.value}({reason})"] += 1
        if state not in {State.TRAINED, State.FILTERED}:
            self.known.pop(order, None)

    def _commit(self, fact: Committed) -> None:
        kept = self.kept[fact.group]
        while kept and kept[0].version.step <= fact.version.step:
            self._cover(kept.popleft())

    def _cover(self, batch: Held) -> None:
        for order in batch.orders():
            if self.states.get(order) is State.TRAINED:
                self._put((order,), State.COMMITTED)
            self.known.pop(order, None)

    def _let_go(self, fact: Forgot) -> None:
        kept = self.kept[fact.group]
        for _ in range(min(fact.batches, len(kept))):
            self._forget(kept.popleft())

    def _forget(self, batch: Held) -> None:
        for order in batch.orders():
            self.forgotten += self.states.get(order) is State.TRAINED
            self.known.pop(order, None)

    def _rewind(self, fact: Rewound) -> None:
        """Cover what lies before the version; a batch that was no step is before it if a step that is follows."""
        kept = list(self.kept.pop(fact.group, ()))
        cut = max(
            (i + 1 for i, b in enumerate(kept) if b.stepped and b.version.step <= fact.version.step),
            default=0,
        )
        for batch in kept[:cut]:
            self._cover(batch)
        for batch in reversed(kept[cut:]):
            orders = list(batch.orders())
            self._put(orders, State.QUEUED)
            self.rewound += len(orders)
            self.returning[fact.group, batch.split].appendleft(Back(orders))

    def _requeue(self, fact: Requeued) -> None:
        """Count a dead group as discarded; it was accepted again under another order."""
        if fact.order in self.states:
            self._expect(fact.order, State.DEAD, "was requeued")
        else:
            self.before[State.DEAD] -= 1
        self._end(fact.order, State.DISCARDED, "requeued")

    def _reset(self) -> None:
        for order, state in self.states.items():
            if state in LIVE:
                self._end(order, State.DISCARDED, "reset")
        for kept in self.kept.values():
            for batch in kept:
                self._forget(batch)
        self.loans.clear()
        self.kept.clear()
        self.returning.clear()

    # Later snapshots.

    def unnoticed(self, later: Books) -> list[Accepted]:
        """Return the groups of a new life's snapshot that the old life accepted last, without a fact of it yet."""
        return [later.known[order] for order in sorted(later.known) if order > self.highest]

    def moved(self, later: Books) -> None:
        """Learn from a snapshot where the groups lie by now."""
        for order, accepted in later.known.items():
            if order in self.known:
                self.known[order] = accepted
                self.last_segment = max(self.last_segment, later.last_segment)

    def adopt(self, later: Books) -> None:
        """Go on with what a snapshot says, after it was found to be different."""
        self.loans, self.kept, self.returning = later.loans, later.kept, later.returning
        self.accepted, self.rewound, self.forgotten = later.accepted, later.rewound, later.forgotten
        self.reasons, self.known = later.reasons, later.known
        self.came_back |= later.came_back
        for order, accepted in list(later.known.items()):
            self._name(accepted, later.states[order])
        named = Counter(self.states.values())
        self.before = Counter({state: count - named[state] for state, count in later.counts().items()})

    def _expect(self, order: int, state: State, event: str) -> None:
        found = self.states.get(order)
        if found is None:
            self._doubt(f"{event}, and was never accepted", order)
        elif found is not state:
            self._doubt(f"{event} while it was {found.value}", order)
