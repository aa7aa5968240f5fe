"""Whether a run's ledger adds up, by what is on disk alone.

The accounts are kept anew from the logs of facts; each later snapshot, the segments, the dead letters, and what
producers and trainer wrote down by themselves are held against them. Every group that is not accounted for is named.

A broker that lives changes the files while they are read. So whatever does not add up is looked at again, and only
what shows both times is a problem.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.records import AckedGroup
from rolloutmq.services.broker.journal.accounts import Accounts
from rolloutmq.services.broker.journal.books import Books, Problem
from rolloutmq.services.broker.journal.dead import DeadStore
from rolloutmq.services.broker.journal.differences import differences
from rolloutmq.services.broker.journal.factlog import log_path
from rolloutmq.services.broker.journal.facts import Accepted
from rolloutmq.services.broker.journal.history import (
    SEGMENTS,
    Chapter,
    History,
    Sighting,
    files,
    segment,
    sightings,
    unlogged,
)
from rolloutmq.services.broker.journal.segments import GROUP
from rolloutmq.services.broker.ledger import State

ATTEMPTS: Final = 3

SETTLED: Final = frozenset({State.TRAINED, State.COMMITTED})


class Witness(msgspec.Struct, frozen=True):
    """What others than the broker wrote down.

    Attributes:
        acked: Lines of the producers.
        trained: How often the trainer's log counts each group as learned from.
    """

    acked: Sequence[AckedGroup] = ()
    trained: Mapping[str, int] = {}


class Verdict(msgspec.Struct, kw_only=True):
    """What was found. `since` is when the history begins, in wall-clock seconds, where it is not whole."""

    recorded: bool = True
    since: float | None = None
    accepted: int = 0
    counts: dict[str, int] = {}
    reasons: dict[str, int] = {}
    rewound: int = 0
    forgotten: int = 0
    """Groups counted as trained that are not kept for a checkpoint."""
    logs: int = 0
    groups_checked: int = 0
    bytes_checked: int = 0
    problems: list[Problem] = []


def verify(journal: Path, dead: Path, witness: Callable[[], Witness], *, quick: bool = False) -> Verdict:
    """Check the journal of a run.

    Args:
        journal: Its directory.
        dead: The dead letters.
        witness: Reads what others wrote; called before the journal is read, which so knows of all of it.
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
    audit = Audit(journal)
    audit.read()
    audit.check_records(quick)
    audit.check_dead(DeadStore(dead, 0, sync=False))
    audit.check_acked(witness.acked)
    audit.check_trained(witness.trained)
    return audit.verdict


class Audit:
    """One look at everything."""

    def __init__(self, journal: Path) -> None:
        self._journal = journal
        self._history = History(journal)
        self._accounts = Accounts()
        self._begun_at = 0
        """Highest order that was given before the history begins."""
        self.verdict = Verdict()

    def read(self) -> None:
        """Keep the accounts from the beginning of the history to its end."""
        if not self._journal.is_dir():
            self._note(Problem(f"there is no journal in {self._journal.parent}"))
        for chapter in self._history.chapters():
            if not self.verdict.logs:
                self._begin(chapter)
            elif chapter.whole:
                self._compare(chapter)  # a snapshot that is not whole was noted as damage
            self.verdict.logs += 1
            for commit in chapter.commits:
                for fact in commit.facts:
                    self._accounts.apply(fact)
        for accepted in unlogged(self._journal, self._accounts.highest, self._accounts.last_segment):
            self._accounts.accept(accepted)
        self._note(*map(Problem, self._history.damage))
        self._sum_up()

    def _begin(self, chapter: Chapter) -> None:
        self._accounts.open(chapter.snapshot)
        self._begun_at = self._accounts.highest
        if self._accounts.accepted:
            self.verdict.since = chapter.at

    def _compare(self, chapter: Chapter) -> None:
        """Hold a snapshot against the accounts; where they differ, say so and go on with the snapshot."""
        accounts, later = self._accounts, Books()
        later.open(chapter.snapshot)
        if chapter.began is not None:
            for accepted in accounts.unnoticed(later):
                accounts.accept(accepted)
        found = [*later.problems, *differences(accounts, later, log_path(self._journal, chapter.number).name)]
        self._note(*found)
        if found:
            accounts.adopt(later)
        accounts.moved(later)

    def _sum_up(self) -> None:
        accounts, verdict = self._accounts, self.verdict
        counts = accounts.counts()
        self._note(*accounts.problems)
        if sum(counts.values()) != accounts.accepted:
            self._note(Problem(f"{accounts.accepted} were accepted, the states hold {sum(counts.values())}"))
        verdict.accepted, verdict.rewound = accounts.accepted, accounts.rewound
        verdict.forgotten = accounts.forgotten
        verdict.counts = {state.value: count for state, count in counts.items()}
        verdict.reasons = {why: count for why, count in sorted(accounts.reasons.items()) if count}

    def check_records(self, quick: bool) -> None:
        """Look for the record of each group that is still needed."""
        needed: defaultdict[int, dict[int, Accepted]] = defaultdict(dict)
        for accepted in self._accounts.known.values():
            if accepted.place is None:
                self._miss(accepted, "no fact says where it lies")
            else:
                needed[accepted.place.segment][accepted.order] = accepted
        for number, path in files(self._journal, SEGMENTS).items():
            wanted = needed.pop(number, {})
            left = self._glance(number, path, wanted) if quick else self._read(number, path, wanted)
            for accepted in left:
                assert accepted.place is not None
                self._miss(accepted, f"its record in {path.name} at {accepted.place.offset} is damaged")
        for number, wanted in needed.items():
            for accepted in wanted.values():
                self._miss(accepted, f"its segment groups-{number:08d}.rmq is gone")

    def _read(self, number: int, path: Path, wanted: dict[int, Accepted]) -> Iterator[Accepted]:
        """Yield the groups whose records are not found whole where they should be."""
        left = dict(wanted)
        for sighting in sightings(number, path):
            self._meet(sighting, path)
            accepted = left.get(sighting.meta.order)
            if accepted is not None and sighting.is_of(accepted):
                del left[accepted.order]
                self._found(accepted)
        yield from left.values()

    def _meet(self, sighting: Sighting, path: Path) -> None:
        """Note a group that was written and that the accounts have never heard of."""
        order = sighting.meta.order
        if self._begun_at < order <= self._accounts.highest and order not in self._accounts.states:
            what = f"its record lies in {path.name} at {sighting.place.offset}, and it was never accepted"
            self._note(Problem(what, sighting.meta.header.group_id, order))

    def _glance(self, number: int, path: Path, wanted: dict[int, Accepted]) -> Iterator[Accepted]:
        """Yield the groups that have no header of a record where they should be."""
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

    def check_dead(self, store: DeadStore) -> None:
        """Look for the letter of each dead group."""
        letters = {entry.order: entry for entry in store.entries()}
        for order, state in self._accounts.states.items():
            if state is not State.DEAD:
                continue
            letter = letters.get(order)
            if letter is None or letter.damaged:
                what = "is missing" if letter is None else f"is damaged: {letter.damaged}"
                group_id = self._accounts.ids.get(order, "?")
                self._note(Problem(f"is dead, and its dead letter {what}", group_id, order))

    def check_acked(self, acked: Iterable[AckedGroup]) -> None:
        """Look for each group that a producer saw acked."""
        named = set()
        for line in acked:
            group_id = line.group_id
            if self._accounts.knows(group_id) or group_id in named or self._is_older(line):
                continue
            named.add(group_id)
            what = f"was acked as number {line.seq} of session {line.session}, and was never accepted"
            self._note(Problem(what, group_id))

    def _is_older(self, line: AckedGroup) -> bool:
        """Whether a group was accepted before the history begins, as far as can still be known."""
        if self.verdict.since is None:
            return False
        session = self._accounts.sessions.get(line.session)
        if session is None:
            return line.session not in self._accounts.opened
        return line.seq <= session.cumulative or any(line.seq == number for number, _ in session.above)

    def check_trained(self, trained: Mapping[str, int]) -> None:
        """Look for each group that the trainer learned from."""
        orders: defaultdict[str, list[int]] = defaultdict(list)
        for order, group_id in self._accounts.ids.items():
            if group_id in trained:
                orders[group_id].append(order)
        for group_id, times in trained.items():
            named = orders[group_id]
            if times > max(1, len(named)):
                self._note(Problem(f"was trained {times} times", group_id, named[0] if named else 0))
            if not named and self.verdict.since is None:
                self._note(Problem("was trained, and was never accepted", group_id))
            if named and not any(map(self._may_be_trained, named)):
                states = Counter(self._accounts.states[order].value for order in named)
                self._note(Problem(f"was trained, and is {', '.join(states)}", group_id, named[0]))

    def _may_be_trained(self, order: int) -> bool:
        """Whether a trainer may have learned from a group: it says so before it settles, and may lose the lease."""
        state = self._accounts.states[order]
        if state in SETTLED or state is State.LEASED:
            return True
        return state is not State.FILTERED and order in self._accounts.came_back

    def _miss(self, accepted: Accepted, what: str) -> None:
        state = self._accounts.states[accepted.order].value
        self._note(Problem(f"is {state}, and {what}", accepted.header.group_id, accepted.order))

    def _note(self, *problems: Problem) -> None:
        self.verdict.problems.extend(problems)
