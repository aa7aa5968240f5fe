"""The ledger verifier: checks that a run's ledger adds up, from disk alone.

It recomputes the ledger and the moments of each lane from the event logs. It checks both against each later snapshot,
and the ledger against the segments, the dead letters, and the records that producers and trainer keep themselves. Every
unaccounted group is named, and so is every group that was lost to damage, however long ago.

A live broker changes the files while they are read. A contradiction is therefore checked again, and only one that
persists is a problem.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.files import AckedGroup
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Accepted, GroupState, LaneSnapshot
from rolloutmq.services.broker.journal.inspect.history import (
    SEGMENTS,
    JournalHistory,
    LogHistory,
    Sighting,
    files,
    segment,
    sightings,
    unlogged,
)
from rolloutmq.services.broker.journal.inspect.lane_moments import LaneMoments
from rolloutmq.services.broker.journal.inspect.ledger_model import (
    DAMAGED,
    LedgerModel,
    Problem,
    RewoundBatch,
    SnapshotModel,
    UncommittedBatch,
)
from rolloutmq.services.broker.journal.read.event_log_reader import log_path
from rolloutmq.services.broker.journal.read.segments import GROUP

ATTEMPTS: Final = 3


SETTLED: Final = frozenset({GroupState.TRAINED, GroupState.COMMITTED})


class Witness(msgspec.Struct, frozen=True):
    """Records kept by producers and the trainer.

    Attributes:
        acked: Lines of the producers' ack logs.
        trained: How often the trainer's log counts each group as trained, in parts with different groups.
    """

    acked: Iterable[AckedGroup] = ()
    trained: Iterable[Mapping[str, int]] = ()


class Verdict(msgspec.Struct, kw_only=True):
    """The result. `since` is the beginning of an incomplete history, in wall-clock seconds."""

    recorded: bool = True
    since: float | None = None
    accepted: int = 0
    counts: dict[str, int] = {}
    reasons: dict[str, int] = {}
    rewound: int = 0
    forgotten: int = 0
    """Groups counted as trained that are not retained for a checkpoint."""
    logs: int = 0
    groups_checked: int = 0
    bytes_checked: int = 0
    problems: list[Problem] = []


def verify(journal: Path, dead: Path, witness: Callable[[], Witness], *, quick: bool = False) -> Verdict:
    """Check the journal of a run.

    Args:
        journal: Its directory.
        dead: The dead letters.
        witness: The other records of this moment; called before the journal is read, which therefore covers all of
            them. They may be read later.
        quick: Do not read the groups themselves.
    """
    verdict = _attempt(journal, dead, witness(), quick)
    for _ in range(ATTEMPTS - 1):
        if not verdict.problems:
            break
        again = _attempt(journal, dead, witness(), quick)
        persistent = [problem for problem in again.problems if problem in set(verdict.problems)]
        settled = len(persistent) == len(verdict.problems)
        again.problems = persistent
        verdict = again
        if settled:
            break
    return verdict


def _attempt(journal: Path, dead: Path, witness: Witness, quick: bool) -> Verdict:
    verifier = LedgerVerifier(journal)
    verifier.read()
    verifier.check_lost()
    verifier.check_records(quick)
    verifier.check_dead(DeadLetterStore(dead, 0, sync=False))
    verifier.check_acked(witness.acked)
    for part in witness.trained:
        verifier.check_trained(part)
    return verifier.verdict


def recount(journal: Path) -> LedgerModel:
    """Return the ledger as `verify` recomputes it: each group the history names, and the count of the others."""
    verifier = LedgerVerifier(journal)
    verifier.read()
    return verifier.model


class LedgerVerifier:
    """One pass over all files."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._history = JournalHistory(journal)
        self._model = LedgerModel()
        self._moments = LaneMoments()
        self._begun_at = 0
        """Highest order given before the history begins."""
        self.verdict = Verdict()

    @property
    def model(self) -> LedgerModel:
        """The ledger as recomputed so far."""
        return self._model

    def read(self) -> None:
        """Recompute the ledger from the beginning of the history to its end."""
        if not self._journal.is_dir():
            self._note(Problem(f"there is no journal in {self._journal.parent}"))
        for log in self._history.logs():
            if not self.verdict.logs:
                self._begin(log)
            elif log.whole:
                self._compare(log)  # an incomplete snapshot was noted as damage
            self.verdict.logs += 1
            for commit in log.commits:
                for event in commit.events:
                    self._model.apply(event)
                    self._moments.apply(event)
        for accepted in unlogged(self._journal, self._model.highest, self._model.last_segment):
            self._model.accept(accepted)
        self._note(*map(Problem, self._history.damage))
        self._sum_up()

    def _begin(self, log: LogHistory) -> None:
        self._model.open(log.snapshot)
        self._moments.open(log.snapshot.of(LaneSnapshot))
        self._begun_at = self._model.highest
        if self._model.accepted:
            self.verdict.since = log.at

    def _compare(self, log: LogHistory) -> None:
        """Hold a snapshot against the model; where they differ, say so and go on with the snapshot."""
        model, later = self._model, SnapshotModel()
        later.open(log.snapshot)
        if log.began is not None:
            for accepted in model.unnoticed(later):
                model.accept(accepted)
                self._moments.apply(accepted)
        name = log_path(self._journal, log.number).name
        found = [*later.problems, *differences(model, later, name)]
        self._note(*map(Problem, self._moments.compare([*log.snapshot.of(LaneSnapshot)], name)))
        self._note(*found)
        if found:
            model.adopt(later)
        model.moved(later)

    def _sum_up(self) -> None:
        model, verdict = self._model, self.verdict
        counts = model.counts()
        self._note(*model.problems)
        if sum(counts.values()) != model.accepted:
            self._note(Problem(f"{model.accepted} were accepted, the states hold {sum(counts.values())}"))
        verdict.accepted, verdict.rewound = model.accepted, model.rewound
        verdict.forgotten = model.forgotten
        verdict.counts = {state.value: count for state, count in counts.items()}
        verdict.reasons = {why: count for why, count in sorted(model.reasons.items()) if count}

    def check_lost(self) -> None:
        """Report the groups lost to damage: the broker has counted them as dead, and they were accepted for good."""
        model = self._model
        for order in sorted(model.damaged):
            if model.states[order] is GroupState.DEAD:  # it may have been queued again from its dead letter
                what = "is dead, since its record was damaged or its segment gone"
                self._note(Problem(what, model.ids.get(order, "?"), order))
        earlier = model.reasons[f"{GroupState.DEAD.value}({DAMAGED})"] - len(model.damaged)
        if earlier > 0:
            what = f"{earlier} groups were lost to damage before the history begins"
            self._note(Problem(f"{what}; `rolloutmq dead list` has their ids"))

    def check_records(self, quick: bool) -> None:
        """Check the record of each group that is still needed."""
        needed: defaultdict[int, list[int]] = defaultdict(list)
        known = self._model.known
        for accepted in known.values():
            if accepted.place is None:
                self._miss(accepted, "no event has its address")
            else:
                needed[accepted.place.segment].append(accepted.order)
        for number, path in files(self._journal, SEGMENTS).items():
            wanted = {order: known[order] for order in needed.pop(number, ())}
            left = self._glance(number, path, wanted) if quick else self._read(number, path, wanted)
            for accepted in left:
                assert accepted.place is not None
                self._miss(accepted, f"its record in {path.name} at {accepted.place.offset} is damaged")
        for number, orders in needed.items():
            for order in orders:
                self._miss(known[order], f"its segment groups-{number:08d}.rmq is gone")

    def _read(self, number: int, path: Path, wanted: dict[int, Accepted]) -> Iterator[Accepted]:
        """Yield the groups without a whole record at their address."""
        left = dict(wanted)
        for sighting in sightings(number, path):
            self._meet(sighting, path)
            accepted = left.get(sighting.meta.order)
            if accepted is not None and sighting.is_of(accepted):
                del left[accepted.order]
                self._found(accepted)
        yield from left.values()

    def _meet(self, sighting: Sighting, path: Path) -> None:
        """Report a record of a group that was never accepted."""
        order = sighting.meta.order
        if self._begun_at < order <= self._model.highest and order not in self._model.states:
            what = f"its record lies in {path.name} at {sighting.place.offset}, and it was never accepted"
            self._note(Problem(what, sighting.meta.header.group_id, order))

    def _glance(self, number: int, path: Path, wanted: dict[int, Accepted]) -> Iterator[Accepted]:
        """Yield the groups without a record header at their address."""
        with segment(number, path) as file:
            for accepted in wanted.values():
                assert accepted.place is not None
                header = file.header(accepted.place.offset) if file is not None else None
                if header is not None and header.kind == GROUP and header.frames == accepted.header.frames:
                    self._found(accepted)
                else:
                    yield accepted

    def _found(self, accepted: Accepted) -> None:
        self.verdict.groups_checked += 1
        self.verdict.bytes_checked += accepted.header.nbytes

    def check_dead(self, store: DeadLetterStore) -> None:
        """Check the dead letter of each dead group."""
        letters = {entry.order: entry for entry in store.entries()}
        for order, state in self._model.states.items():
            if state is not GroupState.DEAD:
                continue
            letter = letters.get(order)
            if letter is None or letter.problem:
                what = "is missing" if letter is None else f"is damaged: {letter.problem}"
                group_id = self._model.ids.get(order, "?")
                self._note(Problem(f"is dead, and its dead letter {what}", group_id, order))

    def check_acked(self, acked: Iterable[AckedGroup]) -> None:
        """Check each group in the producers' ack logs."""
        named = set()
        for line in acked:
            group_id = line.group_id
            if self._model.knows(group_id) or group_id in named or self._is_older(line):
                continue
            named.add(group_id)
            what = f"was acked as number {line.seq} of session {line.session}, and was never accepted"
            self._note(Problem(what, group_id))

    def _is_older(self, line: AckedGroup) -> bool:
        """Return whether a group was accepted before the history begins, as far as is known."""
        if self.verdict.since is None:
            return False
        session = self._model.sessions.get(line.session)
        if session is None:
            return line.session not in self._model.opened
        return line.seq <= session.cumulative or any(line.seq == number for number, _ in session.above)

    def check_trained(self, trained: Mapping[str, int]) -> None:
        """Check some groups of the trainer's log."""
        orders: defaultdict[str, list[int]] = defaultdict(list)
        for order, group_id in self._model.ids.items():
            if group_id in trained:
                orders[group_id].append(order)
        for group_id, times in trained.items():
            named = orders[group_id]
            if times > max(1, len(named)):
                self._note(Problem(f"was trained {times} times", group_id, named[0] if named else 0))
            if not named and self.verdict.since is None:
                self._note(Problem("was trained, and was never accepted", group_id))
            if named and not any(map(self._may_be_trained, named)):
                states = Counter(self._model.states[order].value for order in named)
                self._note(Problem(f"was trained, and is {', '.join(states)}", group_id, named[0]))

    def _may_be_trained(self, order: int) -> bool:
        """Return whether a trainer may have trained on a group: it logs that before it settles, and may lose the
        lease.
        """
        state = self._model.states[order]
        if state in SETTLED or state is GroupState.LEASED:
            return True
        return state is not GroupState.FILTERED and order in self._model.came_back

    def _miss(self, accepted: Accepted, what: str) -> None:
        state = self._model.states[accepted.order].value
        self._note(Problem(f"is {state}, and {what}", accepted.header.group_id, accepted.order))

    def _note(self, *problems: Problem) -> None:
        self.verdict.problems.extend(problems)


def differences(model: SnapshotModel, later: SnapshotModel, log: str) -> Iterator[Problem]:
    """Yield the differences between a snapshot and the events before it."""
    here, there = model.places(), later.places()
    for order in sorted(here.keys() | there.keys()):
        was, found = here.get(order), there.get(order)
        if was == found:
            continue
        group = (model.known.get(order) or later.known[order]).header.group_id
        if was is None and order not in model.states:
            what = f"is {found} in {log}, and was never accepted"
        else:
            what = f"was {was or model.states[order].value} before {log}, and is {found or 'not'} in it"
        yield Problem(what, group, order)
    for what in _other_batches(model, later):
        yield Problem(f"the batches {what} in {log} are not those of the events before it")
    for name, mine, theirs in _figures(model, later):
        if mine != theirs:
            yield Problem(
                f"the ledger in {log} has {theirs} {name}, by the events before it there are {mine}"
            )


def _figures(model: SnapshotModel, later: SnapshotModel) -> Iterator[tuple[str, int, int]]:
    mine, theirs = model.counts(), later.counts()
    yield "accepted", model.accepted, later.accepted
    yield from ((state.value, mine[state], theirs[state]) for state in GroupState)
    yield "rewound", model.rewound, later.rewound
    yield "forgotten", model.forgotten, later.forgotten
    for why in sorted(model.reasons.keys() | later.reasons.keys()):
        yield why, model.reasons[why], later.reasons[why]


def _other_batches(model: SnapshotModel, later: SnapshotModel) -> Iterator[str]:
    """Yield the kinds of batches that differ: their composition and order must be equal."""
    if model.leases != later.leases:
        yield "leased"
    if _filled(model.uncommitted) != _filled(later.uncommitted):
        yield "kept"
    streams = {*model.rewind_queues, *later.rewind_queues}
    if not all(_same_queue(model.rewind_queues[one], later.rewind_queues[one]) for one in streams):
        yield "on the rewind queue"


def _filled(kept: Mapping[str, deque[UncommittedBatch]]) -> dict[str, deque[UncommittedBatch]]:
    return {group: batches for group, batches in kept.items() if batches}


def _same_queue(mine: Iterable[RewoundBatch], theirs: Iterable[RewoundBatch]) -> bool:
    """Return whether two rewind queues hold the same batches; a lost one may be split in the second."""
    others = deque(batch.orders for batch in theirs if batch.orders)
    for batch in mine:
        left = set(batch.orders)
        while left and others and left.issuperset(others[0]):
            left.difference_update(others.popleft())
            if not batch.lost:
                break
        if left:
            return False
    return not others
