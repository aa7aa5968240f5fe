"""The ledger of a run in a test: what became of each group, and assertions that name the groups they miss.

The states are recomputed from the journal as `rolloutmq ledger verify` does it, while the broker runs or after its end.
An acked group is in the journal, and so is a settlement that has been answered.
"""

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final, TypeAlias

from rolloutmq.launch.commands.records.ledger import check, recorded
from rolloutmq.schemas.errors import UsageError
from rolloutmq.schemas.files import DroppedGroup, RunLayout, SettledBatch
from rolloutmq.schemas.printable import moment
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
        unnamed: Number of groups in each state that ended before the kept history and have no id in `states`.
        earlier: Ids of these, as far as the broker's logs of settled and dropped groups name them.
        since: Beginning of a history that `broker.history_bytes` has cut, in wall-clock seconds; None if it is whole.
    """

    states: Mapping[str, str]
    counts: Mapping[str, int]
    reasons: Mapping[str, str]
    problems: tuple[str, ...]
    unnamed: Mapping[str, int]
    earlier: Collection[str]
    since: float | None

    @property
    def settled(self) -> int:
        """Number of groups that a trainer has settled as trained or filtered."""
        return sum(self.counts[state] for state in SETTLED)

    def told(self, group_id: str) -> str:
        """Return a group with its state and the reason, for people."""
        reason = self.reasons.get(group_id, "")
        return f"{group_id} ({self.states[group_id]}{f': {reason}' if reason else ''})"

    def unknown(self, group_ids: Iterable[str]) -> Iterator[str]:
        """Yield the groups that no record names, for people.

        Groups without a known id may be some of them: none is yielded if there are as many of these.
        """
        names = [
            name for name in dict.fromkeys(group_ids) if name not in self.states and name not in self.earlier
        ]
        nameless = sum(self.unnamed.values()) - len(self.earlier)
        if len(names) > nameless:
            why = "not in the kept history" if nameless > 0 else "never accepted"
            yield from (f"{name} ({why})" for name in names)

    def beginning(self) -> str:
        """Return what an error adds about an incomplete history; empty if it is whole."""
        if self.since is None:
            return ""
        ended = ", ".join(f"{count} {state}" for state, count in self.unnamed.items())
        return (
            f"; the history begins at {moment(self.since)}, and groups that ended earlier have no ids "
            f"({ended or 'none'}): raise broker.history_bytes to keep it whole"
        )


def run_dir_of(run: Run, argument: str = "run") -> Path:
    """Return the run directory of a broker for tests, or the directory itself.

    Raises:
        UsageError: It is neither, which names the argument; or the broker has no directory, see `LocalBroker.run_dir`.
    """
    if isinstance(run, str | Path):
        return Path(run)
    if not hasattr(type(run), "run_dir"):
        raise UsageError(
            f"{argument}: must be a LocalBroker or a run directory (got {run!r}); pass one of them"
        )
    return run.run_dir


def read_ledger(run: Run) -> Ledger:
    """Return what became of the groups of a run. Blocks on the disk: every group is read.

    Args:
        run: A broker for tests, or a run directory.

    Raises:
        MissingError: The directory holds no run.
        UsageError: The run has durability `memory`, without a journal; or `run` is neither a broker nor a directory.
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
        {state.value: count for state, count in model.before.items() if count},
        (_settled(layout) | dropped.keys()) - states.keys() if model.before.total() else frozenset(),
        verdict.since,
    )


def _settled(layout: RunLayout) -> set[str]:
    """Return the ids in the broker's log of settled batches, which is never cut."""
    lines = read_lines(layout.settled, SettledBatch)
    return {name for line in lines for name in (*line.trained, *line.filtered, *line.rejected)}


def assert_nothing_lost(run: Run, sent: Iterable[str] = (), *, dropped: Collection[str] = ()) -> None:
    """Assert that every accepted group is queued, leased or settled, and that the records agree. Blocks on the disk.

    Args:
        run: A broker for tests, or a run directory.
        sent: Ids of groups that must have been accepted: those whose `send` was acked.
        dropped: States of dropped groups to allow, such as `{"expired"}`.

    Raises:
        AssertionError: Groups are missing or dropped, or records contradict each other; it names each.
        MissingError: As for `read_ledger`.
        UsageError: As for `read_ledger`; or `sent` has something other than ids, or is one text, or `dropped` has
            another state than those of dropped groups.
    """
    __tracebackhide__ = True
    if isinstance(sent, str):
        raise UsageError(f"sent: must be ids of groups (got the text {sent!r}); pass a list of ids")
    sent = list(sent)
    strange = next((one for one in sent if not isinstance(one, str)), None)
    if strange is not None:
        raise UsageError(
            f"sent: must be ids of groups (got {strange!r}); pass [group.group_id for group in groups]"
        )
    if isinstance(dropped, str) or not DROPPED.issuperset(dropped):
        names = ", ".join(sorted(DROPPED))
        raise UsageError(f"dropped: must be a set of the states {names} (got {dropped!r})")
    ledger = read_ledger(run)
    lost = list(_lost(ledger, sent, dropped))
    if lost:
        raise AssertionError(f"{len(lost)} lost: {_listed(lost)}{ledger.beginning()}")


def _lost(ledger: Ledger, sent: Iterable[str], allowed: Collection[str]) -> Iterator[str]:
    yield from ledger.unknown(sent)
    yield from (ledger.told(name) for name in ledger.reasons if ledger.states[name] not in allowed)
    for state in sorted(DROPPED.difference(allowed)):
        yield from [f"a group without its id ({state})"] * ledger.unnamed.get(state, 0)
    yield from ledger.problems


def assert_settled(run: Run, count: int) -> None:
    """Assert that a trainer has settled exactly so many groups, as trained or filtered. Blocks on the disk.

    Args:
        run: A broker for tests, or a run directory.
        count: Number of settled groups.

    Raises:
        AssertionError: It is another number; the error names the groups that are not settled, with their states.
        MissingError: As for `read_ledger`.
        UsageError: As for `read_ledger`; or `count` is no integer of at least 0.
    """
    __tracebackhide__ = True
    if not isinstance(count, int) or isinstance(count, bool) or count < 0:
        raise UsageError(f"count: must be a number of groups, at least 0 (got {count!r}); pass an integer")
    ledger = read_ledger(run)
    if ledger.settled != count:
        others = [ledger.told(name) for name, state in ledger.states.items() if state not in SETTLED]
        rest = f"not settled: {_listed(others)}" if others else "there are no others"
        raise AssertionError(f"{ledger.settled} groups settled, {count} expected; {rest}{ledger.beginning()}")


def _listed(texts: list[str]) -> str:
    more = f" and {len(texts) - NAMED} more" if len(texts) > NAMED else ""
    return ", ".join(texts[:NAMED]) + more
