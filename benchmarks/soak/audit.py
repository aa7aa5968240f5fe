"""The audit of an act: what producers and ranks wrote down themselves, against what the product reports. Pure.

    lost      every acked group is settled in the end, or reported as dropped with a reason
    twice     a group all ranks were told is settled never comes again, unless its trainer went back to a checkpoint
              before that step
    torn      every delivered group is bit for bit the one of its id, and was built
    counts    accepted, trained, filtered, expired and dead groups are as many as in the product's ledger

A rank may be killed between a settlement and its answer. Such a batch was settled if and only if its groups neither
come again nor are dropped, so the last delivery of each group decides, and the counts tell a group with two ends. If a
rank never asked to settle, the batch went back to the queue.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Final

import msgspec

from benchmarks.soak.bodies import GroupName
from benchmarks.soak.books import Asked, Began, Entry, Got, ProducerLife, Told
from rolloutmq.schemas.files import DroppedGroup
from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.schemas.wire.envelope import Split

SHOWN: Final = 20
"""Most violations of one kind that are named."""
REJECTED: Final = "rejected: drawn"
"""Reason of a group that a rank rejected."""
LOST_OFTEN: Final = "lost with "
"""Beginning of the reason of a group whose leases were lost too often."""


class Lease(msgspec.Struct):
    """A batch of one lease, as its ranks wrote it down."""

    trainer: str
    number: int
    generation: int
    incarnation: int
    step: int
    world: int
    shards: dict[int, tuple[str, ...]] = {}
    asked: dict[int, Asked] = {}
    settled: set[int] = set()
    """Ranks that were told it is settled."""

    @property
    def certain(self) -> bool:
        """Whether all ranks were told that it is settled."""
        return len(self.settled) == self.world

    @property
    def may_be_settled(self) -> bool:
        """Whether all ranks have asked to settle it."""
        return len(self.asked) == self.world

    def outcome(self, group_id: str) -> str:
        """Return what its rank asked for a group; empty if it did not ask."""
        rank = next(rank for rank, ids in self.shards.items() if group_id in ids)
        asked = self.asked.get(rank)
        if asked is None:
            return ""
        if group_id in asked.rejected:
            return "dead"
        return "filtered" if group_id in asked.filtered else "trained"

    @property
    def trains(self) -> bool:
        """Whether it is a step: a rank trained a group of it."""
        return any(
            len(self.shards[rank]) > len(asked.filtered) + len(asked.rejected)
            for rank, asked in self.asked.items()
        )


class Books(msgspec.Struct):
    """Everything written down in one act.

    Attributes:
        producers: Every life of every producer.
        ranks: Entries of each rank, over its lives, by (trainer, rank).
        splits: Split of each producer and of each trainer.
        dropped: The product's own list of groups that left the queue untrained.
    """

    producers: list[ProducerLife]
    ranks: Mapping[tuple[str, int], list[Entry]]
    splits: Mapping[str, Split]
    dropped: list[DroppedGroup] = []


class Promise(msgspec.Struct, frozen=True):
    """What the configuration of an act allows."""

    may_expire: bool = False
    may_die: bool = False


class Verdict(msgspec.Struct):
    """The result: violations by kind, and the state of each group by the books."""

    violations: dict[str, list[str]] = {}
    states: dict[str, str] = {}
    acked: int = 0
    again: int = 0
    """Groups trained again after a resume."""

    def blame(self, kind: str, what: str) -> None:
        self.violations.setdefault(kind, []).append(what)

    def lines(self) -> Iterator[str]:
        """Yield the violations, the first ones of each kind."""
        for kind, found in self.violations.items():
            yield from (f"{kind}: {what}" for what in found[:SHOWN])
            if len(found) > SHOWN:
                yield f"{kind}: and {len(found) - SHOWN} more"


class Auditor:
    """One audit.

    Args:
        books: Everything written down.
        promise: What the configuration allows.
        history: Returns the product's history of a group, for a group the books cannot explain: its state, its reason
            and a text. A line of `dropped.jsonl` may be missing behind a kill.
    """

    def __init__(
        self, books: Books, promise: Promise, history: Callable[[str], tuple[str, str, str]] | None = None
    ) -> None:
        self._books = books
        self._promise = promise
        self._history = history
        self._verdict = Verdict()
        self._built = {(life.producer, life.life): life.built for life in books.producers}
        self._forks: defaultdict[str, dict[int, int]] = defaultdict(dict)
        self._leases: dict[tuple[str, int, int], Lease] = {}
        self._dropped: dict[str, DroppedGroup] = {line.group_id: line for line in books.dropped}

    def audit(self) -> Verdict:
        """Check everything but the counts, and return the verdict."""
        for (trainer, rank), entries in self._books.ranks.items():
            for entry in entries:
                self._read(trainer, rank, entry)
        acked = self._acked()
        self._verdict.acked = len(acked)
        deliveries: defaultdict[str, list[Lease]] = defaultdict(list)
        # In the order in which the broker gave them: a stopped rank notes a batch that went on to another meanwhile.
        for lease in sorted(self._leases.values(), key=lambda one: (one.generation, one.number)):
            for ids in lease.shards.values():
                for group_id in ids:
                    deliveries[group_id].append(lease)
        for group_id, leases in deliveries.items():
            self._check_origin(group_id, leases)
            self._check_once(group_id, leases)
            self._end(group_id, leases[-1])
        for group_id in acked - deliveries.keys():
            self._end(group_id, None)
        for group_id in self._dropped.keys() - self._verdict.states.keys():
            self._end(group_id, None)
        return self._verdict

    def _read(self, trainer: str, rank: int, entry: Entry) -> None:
        match entry:
            case Began():
                if entry.resume is not None:
                    self._forks[trainer][entry.incarnation] = entry.resume
            case Got():
                self._got(trainer, rank, entry)
            case Asked():
                self._lease(trainer, entry).asked[rank] = entry
            case Told():
                if entry.how == "settled":
                    self._lease(trainer, entry).settled.add(rank)

    def _got(self, trainer: str, rank: int, got: Got) -> None:
        key = trainer, got.lease, got.generation
        lease = self._leases.setdefault(
            key,
            Lease(
                trainer,
                got.lease,
                got.generation,
                got.incarnation,
                got.step,
                got.world,
                {},
                {},
                set(),
            ),
        )
        lease.shards[rank] = got.ids
        for group_id in got.torn:
            self._verdict.blame("torn", f"{group_id} in lease {got.lease} of {trainer}/{rank}")
        if len(set(got.ids)) < len(got.ids):
            self._verdict.blame("twice", f"lease {got.lease} of {trainer}/{rank} names a group twice")

    def _lease(self, trainer: str, entry: Asked | Told) -> Lease:
        return self._leases[trainer, entry.lease, entry.generation]

    def _acked(self) -> set[str]:
        """Return the ids of all groups whose producer knew that they are acked."""
        lives: defaultdict[str, list[ProducerLife]] = defaultdict(list)
        for life in sorted(self._books.producers, key=lambda one: one.life):
            lives[life.producer].append(life)
        found = set()
        for name, all_of_it in lives.items():
            for index, life in enumerate(all_of_it):
                # A producer that leaves in order saves what is not acked; the next one opens once that is.
                taken_over = life.left and any(later.took_over for later in all_of_it[index + 1 :])
                numbers = life.sent | life.acked if taken_over else life.acked
                found |= {str(GroupName(name, life.life, number)) for number in numbers}
        return found

    def _check_origin(self, group_id: str, leases: list[Lease]) -> None:
        name = GroupName.parse(group_id)
        if name is None or name.number >= self._built.get((name.producer, name.life), 0):
            self._verdict.blame("torn", f"{group_id} was never built")
            return
        for lease in leases:
            if self._books.splits[lease.trainer] is not self._books.splits[name.producer]:
                self._verdict.blame("torn", f"{group_id} came to {lease.trainer}, of another split")

    def _check_once(self, group_id: str, leases: list[Lease]) -> None:
        for index, lease in enumerate(leases[1:], 1):
            for before in leases[:index]:
                if not before.certain:
                    continue
                if self._undone(before, lease):
                    self._verdict.again += 1
                    continue
                self._verdict.blame(
                    "twice",
                    f"{group_id} was settled as {before.outcome(group_id)} with {_about(before)} "
                    f"and came again with {_about(lease)}",
                )

    def _undone(self, before: Lease, lease: Lease) -> bool:
        """Return whether a trainer went back to a checkpoint before one of its batches, and then got another."""
        if before.trainer != lease.trainer:
            return False
        forks = [
            step
            for incarnation, step in self._forks[lease.trainer].items()
            if before.incarnation < incarnation <= lease.incarnation
        ]
        # Nothing was trained: the batch counts as later than any checkpoint that no step follows.
        return bool(forks) and (before.step > min(forks) or not before.trains)

    def _end(self, group_id: str, last: Lease | None) -> None:
        """Note the state of a group, or blame the product for its loss."""
        dropped = self._dropped.get(group_id)
        if last is not None and last.may_be_settled:
            state = last.outcome(group_id)
            settled = dropped is None or (dropped.state, dropped.reason) == (state, REJECTED)
            if settled or last.certain:
                self._verdict.states[group_id] = state
                if not settled and dropped is not None:
                    what = f"{group_id} was settled as {state} with {_about(last)}, and is {_drop(dropped)}"
                    self._verdict.blame("twice", what)
                return
        text = "it is in no list of the product"
        if (
            dropped is None
            and self._history is not None
            and len(self._verdict.violations.get("lost", ())) < SHOWN
        ):
            state, reason, text = self._history(group_id)
            if state in {"expired", "dead", "discarded"}:
                dropped = DroppedGroup(at=0.0, group_id=group_id, state=state, reason=reason)
        if dropped is None:
            where = (
                f"its last batch was {_about(last)}, which went back" if last else "it was never delivered"
            )
            self._verdict.blame("lost", f"{group_id} was acked; {where}; {text}")
            return
        self._verdict.states[group_id] = dropped.state
        if not self._allowed(dropped):
            self._verdict.blame("dropped", f"{group_id} is {_drop(dropped)}")

    def _allowed(self, dropped: DroppedGroup) -> bool:
        if dropped.state == "expired":
            return self._promise.may_expire and dropped.reason == "stale"
        if dropped.state == "dead":
            return self._promise.may_die and dropped.reason.startswith(LOST_OFTEN)
        return False


def _about(lease: Lease) -> str:
    sure = "settled" if lease.certain else "perhaps settled" if lease.may_be_settled else "not settled"
    return (
        f"lease {lease.number} (step {lease.incarnation}.{lease.step} of {lease.trainer}, "
        f"{len(lease.settled)} of {lease.world} ranks told, {sure})"
    )


def _drop(dropped: DroppedGroup) -> str:
    return f"{dropped.state}({dropped.reason})"


def compare(verdict: Verdict, counts: LedgerCounts) -> None:
    """Hold the states by the books against the product's ledger of a drained queue."""
    mine = Counter(verdict.states.values())
    pairs = {
        "accepted": (len(verdict.states), counts.accepted),
        "trained": (mine["trained"], counts.trained + counts.committed),
        **{
            name: (mine[name], getattr(counts, name)) for name in ("filtered", "expired", "dead", "discarded")
        },
        "queued and leased": (0, counts.queued + counts.leased),
    }
    for name, (by_books, by_product) in pairs.items():
        if by_books != by_product:
            verdict.blame("counts", f"{name}: {by_books} by the books, {by_product} by the product")


def trained(verdict: Verdict) -> dict[str, int]:
    """Return how often each group is trained, for `ledger verify`."""
    return {group_id: 1 for group_id, state in verdict.states.items() if state == "trained"}


def by_rank(entries: Iterable[tuple[str, int, list[Entry]]]) -> dict[tuple[str, int], list[Entry]]:
    """Join the lives of each rank; (trainer, rank, entries) in the order of the lives."""
    found: defaultdict[tuple[str, int], list[Entry]] = defaultdict(list)
    for trainer, rank, life in entries:
        found[trainer, rank] += life
    return dict(found)
