"""The ledger of a run in a test: what became of each group, and assertions that name the groups they miss.

The states are recomputed from the journal as `rolloutmq ledger verify` does it, while the broker runs or after its end.
An acked group is in the journal, and so is a settlement that has been answered.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from rolloutmq.launch.commands.ledger import check, recorded
from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.files import DroppedGroup, RunLayout
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.inspect.verify import recount
from rolloutmq.services.monitor.text.jsonl import read_lines

if TYPE_CHECKING:
    from rolloutmq.testing.broker import LocalBroker

Run: TypeAlias = "LocalBroker | Path | str"
"""A broker for tests, or the run directory of any run."""

SETTLED: Final = frozenset({GroupState.TRAINED, GroupState.COMMITTED, GroupState.FILTERED})
"""A trainer has trained on the group, or found nothing to learn in it."""
DROPPED: Final = frozenset({GroupState.EXPIRED, GroupState.DEAD, GroupState.DISCARDED})
"""A rule of the broker has removed the group from the queue."""
NAMED: Final = 20
"""Most groups that an error names; it counts the others."""


@dataclass(frozen=True)
class Ledger:
    """What became of the groups of a run.

    Attributes:
        states: State of each group by its id: `queued`, `leased`, `trained`, `committed`, `filtered`, `expired`, `dead`
            or `discarded`. `committed` is trained and covered by a checkpoint.
        counts: Number of groups in each state, with those that ended before the kept history and have no id.
        reasons: Why each dropped group left the queue, by its id.
        problems: Contradictions between the records of broker, producers and trainer; empty if none is lost.
    """

    states: Mapping[str, str]
    counts: Mapping[str, int]
    reasons: Mapping[str, str]
    problems: tuple[str, ...]

    @property
    def settled(self) -> int:
        """Number of groups that a trainer has settled as trained or filtered."""
        return sum(self.counts[state] for state in SETTLED)

    def told(self, group_id: str) -> str:
        """Return a group with its state and the reason, for people."""
        reason = self.reasons.get(group_id, "")
        return f"{group_id} ({self.states[group_id]}{f': {reason}' if reason else ''})"


def run_dir_of(run: Run) -> Path:
    """Return the run directory of a broker for tests, or the directory itself."""
    return Path(run) if isinstance(run, str | Path) else run.run_dir


def read_ledger(run: Run) -> Ledger:
    """Return what became of the groups of a run. Blocks on the disk: every group is read.

    Args:
        run: A broker for tests, or a run directory.

    Raises:
        MissingError: The directory holds no run.
        UsageError: The run has durability `memory`, without a journal.
    """
    layout = RunLayout(run_dir_of(run))
    if not recorded(layout):
        raise UsageError(
            "ledger: the run keeps no journal (got broker.durability = memory); set it to os or disk"
        )
    verdict, model = check(layout), recount(layout.journal)
    states = {model.ids[order]: state.value for order, state in sorted(model.states.items())}
    dropped = {line.group_id: line.reason for line in read_lines(layout.dropped, DroppedGroup)}
    return Ledger(
        states,
        {state.value: count for state, count in model.counts().items()},
        {name: dropped.get(name, "") for name, state in states.items() if state in DROPPED},
        tuple(map(str, verdict.problems)),
    )


def assert_nothing_lost(run: Run, sent: Iterable[str] = (), *, dropped: Collection[str] = ()) -> None:
    """Assert that every accepted group is queued, leased or settled, and that the records agree. Blocks on the disk.

    Args:
        run: A broker for tests, or a run directory.
        sent: Ids of groups that must have been accepted: those whose `send` was acked.
        dropped: States of dropped groups to allow, such as `{"expired"}`.

    Raises:
        AssertionError: Groups are missing or dropped, or records contradict each other; it names each.
        MissingError: As for `read_ledger`.
        UsageError: As for `read_ledger`; or `sent` is one text, or `dropped` has no state of dropped groups.
    """
    __tracebackhide__ = True
    if isinstance(sent, str):
        raise UsageError(f"sent: must be ids of groups (got the text {sent!r}); pass a list of ids")
    if isinstance(dropped, str) or not DROPPED.issuperset(dropped):
        names = ", ".join(sorted(DROPPED))
        raise UsageError(f"dropped: must be a set of the states {names} (got {dropped!r})")
    ledger = read_ledger(run)
    lost = list(_lost(ledger, sent, dropped))
    if lost:
        raise AssertionError(f"{len(lost)} lost: {_listed(lost)}")


def _lost(ledger: Ledger, sent: Iterable[str], allowed: Collection[str]) -> Iterator[str]:
    yield from (f"{name} (never accepted)" for name in sent if name not in ledger.states)
    yield from (ledger.told(name) for name in ledger.reasons if ledger.states[name] not in allowed)
    yield from ledger.problems


def assert_settled(run: Run, count: int) -> None:
    """Assert that a trainer has settled exactly so many groups, as trained or filtered. Blocks on the disk.

    Args:
        run: A broker for tests, or a run directory.
        count: Number of settled groups.

    Raises:
        AssertionError: It is another number; the error names the groups that are not settled, with their states.
        MissingError, UsageError: As for `read_ledger`.
    """
    __tracebackhide__ = True
    ledger = read_ledger(run)
    if ledger.settled != count:
        others = [ledger.told(name) for name, state in ledger.states.items() if state not in SETTLED]
        rest = f"not settled: {_listed(others)}" if others else "there are no others"
        raise AssertionError(f"{ledger.settled} groups settled, {count} expected; {rest}")


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
