"""Group histories: where one group came from, and each of its events, from the history of the journal.

The ledger model is kept along the way, so an event without group names (a commit, a rewind, a lost lease) is
reported for exactly the groups it moved. The events of a group's task come first.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Committed,
    Dropped,
    Forgot,
    GroupSnapshot,
    GroupState,
    Leased,
    Lost,
    Pulled,
    Requeued,
    Rewound,
    Settles,
    Skipped,
    TaskEnded,
    TaskReturned,
    TaskSnapshot,
    TaskSubmitted,
    TaskTaken,
    WasReset,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.history import JournalHistory, LogHistory, unlogged
from rolloutmq.services.broker.journal.inspect.ledger_model import LedgerModel, Shards, SnapshotModel


class HistoryEntry(msgspec.Struct, frozen=True):
    """One event of a group. `at` is when it was recorded, in wall-clock seconds."""

    at: float
    event: str
    details: dict[str, Any] = {}


class GroupHistory(msgspec.Struct):
    """The history of one group."""

    order: int
    accepted: Accepted
    state: str = GroupState.QUEUED.value
    moments: list[HistoryEntry] = []

    @property
    def group_id(self) -> str:
        return self.accepted.header.group_id


def group_histories(journal: Path, group_id: str) -> list[GroupHistory]:
    """Return the history of each group of that id, in the order of their acceptance; blocks on the disk."""
    builder = HistoryBuilder(group_id)
    for number, log in enumerate(JournalHistory(journal).logs()):
        builder.begin(log, first=number == 0)
        for commit in log.commits:
            for event in commit.events:
                builder.apply(commit.at, event)
    for accepted in unlogged(journal, builder.model.highest, builder.model.last_segment):
        builder.apply(accepted.at, accepted)
    found = builder.histories()
    for history in found:
        if task := history.accepted.header.task:
            history.moments = [
                *(HistoryEntry(*about) for about in task_history(journal, task)),
                *history.moments,
            ]
            history.moments.sort(key=lambda entry: entry.at)
    return found


class HistoryBuilder:
    """Follows the events of a run and keeps those about one group id."""

    def __init__(self, group_id: str) -> None:
        self.model = LedgerModel()
        self._group_id = group_id
        self._histories: dict[int, GroupHistory] = {}
        self._repeats: list[HistoryEntry] = []

    def begin(self, log: LogHistory, *, first: bool) -> None:
        """Apply the snapshot of a log."""
        if first:
            self._open_with(log)
            return
        later = SnapshotModel()
        later.open(log.snapshot)
        for accepted in self.model.unnoticed(later):
            self.apply(accepted.at, accepted)
        self.model.moved(later)
        if (began := log.began) is not None:
            details = {"epoch": began.epoch, "durability": began.durability}
            for history in self._existing():
                self._add(history, log.at, "broker began", details)

    def _open_with(self, log: LogHistory) -> None:
        self.model.open(log.snapshot)
        for item in log.snapshot:
            if isinstance(item, GroupSnapshot) and item.accepted.header.group_id == self._group_id:
                state = self.model.states[item.accepted.order].value
                details = {"state": state, "deliveries": item.deliveries, "failures": item.failures}
                self._open(item.accepted, log.at, "known", details)

    def apply(self, at: float, event: AnyEvent) -> None:
        """Apply an event, and add its entries."""
        model = self.model
        before = {order: (model.states.get(order), order in model.known) for order in self._histories}
        named = list(self._named(event)) if self._histories else []
        model.apply(event)
        if isinstance(event, Accepted) and event.header.group_id == self._group_id:
            place = msgspec.to_builtins(event.place, str_keys=True) if event.place else None
            where = {"segment": place[0], "offset": place[1]} if place else {}
            self._open(event, event.at, "accepted", where)
        if isinstance(event, Skipped) and event.group_id == self._group_id:
            self._repeats.append(HistoryEntry(at, "sent again", {"session": event.session, "seq": event.seq}))
        for order, what, details in named:
            self._add(self._histories[order], at, what, details)
        for order, (state, needed) in before.items():
            self._notice(at, event, order, state, needed)

    def histories(self) -> list[GroupHistory]:
        """Return the histories so far."""
        for history in self._histories.values():
            history.state = self.model.states[history.order].value
            history.accepted = self.model.known.get(history.order, history.accepted)
        found = [self._histories[order] for order in sorted(self._histories)]
        if found:
            found[0].moments = sorted([*found[0].moments, *self._repeats], key=lambda entry: entry.at)
        return found

    def _open(self, accepted: Accepted, at: float, event: str, details: dict[str, Any]) -> None:
        self._histories[accepted.order] = GroupHistory(accepted.order, accepted)
        self._add(self._histories[accepted.order], at, event, details)

    def _add(self, history: GroupHistory, at: float, event: str, details: dict[str, Any]) -> None:
        history.moments = [*history.moments, HistoryEntry(at, event, details)]

    def _existing(self) -> Iterator[GroupHistory]:
        return (history for order, history in self._histories.items() if order in self.model.known)

    def _named(self, event: AnyEvent) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield the entries of groups in the event itself, or in its lease."""
        match event:
            case Leased():
                for order, rank in self._among(event.shards):
                    yield order, "leased", _leased(event, rank)
            case Pulled():
                details = {"lease": event.lease, "consumer": event.consumer, "request": event.request_id}
                for order in self._in_part(event.lease, event.rank):
                    yield order, "handed out", details
            case Settles():
                for order in self._in_part(event.settle.lease, event.settle.rank):
                    yield order, "settled", self._settled(event, order)
            case Lost():
                for order, _ in self._in_lease(event.lease):
                    details = {"lease": event.lease, "why": event.why, "failed": event.failed}
                    yield order, "lost", details | ({"recalled": True} if event.recalled else {})
            case Dropped() if event.order in self._histories:
                yield event.order, event.state, {"reason": event.reason}
            case Requeued() if event.order in self._histories:
                yield event.order, "requeued", {}

    def _notice(self, at: float, event: AnyEvent, order: int, state: GroupState | None, needed: bool) -> None:
        """Add entries for groups an event changed without naming them."""
        history, now = self._histories[order], self.model.states.get(order)
        let_go = needed and order not in self.model.known
        match event:
            case Committed() | Rewound() if now is GroupState.COMMITTED and state is not now:
                self._add(history, at, "committed", {"by": event.group, "policy": _policy(event.version)})
            case Rewound() if now is GroupState.QUEUED and state is not now:
                details = {"was": state.value if state else "", "policy": _policy(event.version)}
                self._add(history, at, "rewound", {**details, "consumer": event.consumer})
            case WasReset() if now is GroupState.DISCARDED and state is not now:
                self._add(history, at, "discarded", {"reason": "reset", "why": event.reason})
            case Committed() | Rewound() | Forgot() | WasReset() if let_go:
                self._add(history, at, "let go", {"as": now.value if now else ""})

    def _among(self, shards: Shards) -> Iterator[tuple[int, int]]:
        """Yield (order, rank) of the followed groups."""
        for rank, shard in enumerate(shards):
            yield from ((order, rank) for order in shard if order in self._histories)

    def _in_lease(self, number: int) -> Iterator[tuple[int, int]]:
        lease = self.model.leases.get(number)
        return self._among(lease.shards) if lease is not None else iter(())

    def _in_part(self, number: int, rank: int) -> Iterator[int]:
        return (order for order, of in self._in_lease(number) if of == rank)

    def _settled(self, event: Settles, order: int) -> dict[str, Any]:
        settle = event.settle
        details = {"lease": settle.lease, "consumer": settle.consumer, "policy": _policy(settle.version)}
        group_id = self._histories[order].group_id
        for rejected in settle.rejected:
            if rejected.group_id == group_id:
                return {"as": "rejected", "reason": rejected.reason, **details}
        return {"as": "trained" if group_id in settle.trained else "filtered", **details}


def origin(accepted: Accepted) -> dict[str, Any]:
    """Return the origin of a group, as plain data."""
    header = accepted.header
    return {
        "producer": accepted.producer,
        "env": accepted.env,
        "split": accepted.split.name.lower(),
        "run": accepted.run,
        "task": header.task,
        "session": accepted.session,
        "seq": header.seq,
        "sequences": header.sequences,
        "tokens": header.tokens,
        "nbytes": header.nbytes,
        "oldest": _policy(header.oldest),
        "newest": _policy(header.newest),
        "started_at": header.started_at,
        "finished_at": header.finished_at,
        "accepted_at": accepted.at,
        "rewards": {"mean": header.rewards.mean, "low": header.rewards.low, "high": header.rewards.high},
    }


def _leased(event: Leased, rank: int) -> dict[str, Any]:
    details: dict[str, Any] = {
        "lease": event.number,
        "step": event.step,
        "policy": _policy(event.version),
        "by": event.group,
        "rank": rank,
        **({"tokens": event.tokens} if event.tokens else {"sequences": event.sequences}),
    }
    marks = {"short": event.short, "again": event.again}
    return details | {name: True for name, marked in marks.items() if marked}


def _policy(version: PolicyVersion) -> str:
    """Return a policy as `incarnation.step`."""
    return f"{version.incarnation}.{version.step}"


TaskEntry = tuple[float, str, dict[str, Any]]
"""Wall-clock seconds of the record; the event; details."""


def task_history(journal: Path, task_id: str) -> list[TaskEntry]:
    """Return the events of a task; none if no task of that id was submitted. Blocks on the disk."""
    return [
        (at, what, details)
        for at, event in JournalHistory(journal)
        for what, details in _task_entries(event, task_id)
    ]


def _task_entries(event: AnyEvent, task_id: str) -> Iterator[tuple[str, dict[str, Any]]]:
    match event:
        case TaskSnapshot() if event.submitted.id == task_id:
            details = {"state": event.state.value, "worker": event.worker, "deliveries": event.deliveries}
            yield "task known", details
        case TaskSubmitted() if event.id == task_id:
            yield "task submitted", {"env": event.env, "size": event.size, "priority": event.priority}
        case TaskTaken() if event.id == task_id:
            yield "task taken", {"worker": event.worker, "session": event.session}
        case TaskReturned() if event.id == task_id:
            yield "task failed" if event.failed else "task came back", {"reason": event.reason}
        case TaskEnded() if event.id == task_id:
            yield f"task {event.state.value}", {"reason": event.reason}
