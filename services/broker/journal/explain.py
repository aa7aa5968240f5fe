"""The story of one group: where it came from, where it has been and why, out of the history of the journal.

The accounts are kept along the way, as for the ledger, so that a fact which names no group (a commit, a rewind, a lost
lease) is told of exactly the groups that it moved.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.journal.accounts import Accounts
from rolloutmq.services.broker.journal.books import Books, Shards
from rolloutmq.services.broker.journal.facts import (
    Accepted,
    Committed,
    Dropped,
    Forgot,
    GroupItem,
    Leased,
    Lost,
    Pulled,
    Requeued,
    Rewound,
    Settles,
    Skipped,
    WasReset,
)
from rolloutmq.services.broker.journal.history import Chapter, History, unlogged
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.journal.taskstory import task_story
from rolloutmq.services.broker.ledger import State


class Moment(msgspec.Struct, frozen=True):
    """One thing that happened to a group. `at` is when it was written down, in wall-clock seconds."""

    at: float
    event: str
    details: dict[str, Any] = {}


class Story(msgspec.Struct):
    """All that is known of one group."""

    order: int
    accepted: Accepted
    state: str = State.QUEUED.value
    moments: list[Moment] = []

    @property
    def group_id(self) -> str:
        return self.accepted.header.group_id


def stories(journal: Path, group_id: str) -> list[Story]:
    """Return the story of each group of that id, in the order of their acceptance; blocks on the disk."""
    teller = Teller(group_id)
    history = History(journal)
    for number, chapter in enumerate(history.chapters()):
        teller.begin(chapter, first=number == 0)
        for commit in chapter.commits:
            for fact in commit.facts:
                teller.hear(commit.at, fact)
    for accepted in unlogged(journal, teller.accounts.highest, teller.accounts.last_segment):
        teller.hear(accepted.at, accepted)
    told = teller.told()
    for story in told:
        if task := story.accepted.header.task:
            story.moments = [*(Moment(*about) for about in task_story(journal, task)), *story.moments]
            story.moments.sort(key=lambda moment: moment.at)
    return told


class Teller:
    """Hears the facts of a run and keeps what is about one id."""

    def __init__(self, group_id: str) -> None:
        self.accounts = Accounts()
        self._group_id = group_id
        self._stories: dict[int, Story] = {}
        self._repeats: list[Moment] = []

    def begin(self, chapter: Chapter, *, first: bool) -> None:
        """Hear the items of a snapshot."""
        if first:
            self._open_with(chapter)
            return
        later = Books()
        later.open(chapter.snapshot)
        for accepted in self.accounts.unnoticed(later):
            self.hear(accepted.at, accepted)
        self.accounts.moved(later)
        if (began := chapter.began) is not None:
            details = {"epoch": began.epoch, "durability": began.durability}
            for story in self._existing():
                self._tell(story, chapter.at, "broker began", details)

    def _open_with(self, chapter: Chapter) -> None:
        self.accounts.open(chapter.snapshot)
        for item in chapter.snapshot:
            if isinstance(item, GroupItem) and item.accepted.header.group_id == self._group_id:
                state = self.accounts.states[item.accepted.order].value
                details = {"state": state, "deliveries": item.deliveries, "failures": item.failures}
                self._open(item.accepted, chapter.at, "known", details)

    def hear(self, at: float, fact: AnyFact) -> None:
        """Apply a fact, and note what it says of the group."""
        accounts = self.accounts
        before = {order: (accounts.states.get(order), order in accounts.known) for order in self._stories}
        named = list(self._named(fact)) if self._stories else []
        accounts.apply(fact)
        if isinstance(fact, Accepted) and fact.header.group_id == self._group_id:
            place = msgspec.to_builtins(fact.place, str_keys=True) if fact.place else None
            where = {"segment": place[0], "offset": place[1]} if place else {}
            self._open(fact, fact.at, "accepted", where)
        if isinstance(fact, Skipped) and fact.group_id == self._group_id:
            self._repeats.append(Moment(at, "sent again", {"session": fact.session, "seq": fact.seq}))
        for order, event, details in named:
            self._tell(self._stories[order], at, event, details)
        for order, (state, needed) in before.items():
            self._notice(at, fact, order, state, needed)

    def told(self) -> list[Story]:
        """Return the stories as they stand."""
        for story in self._stories.values():
            story.state = self.accounts.states[story.order].value
            story.accepted = self.accounts.known.get(story.order, story.accepted)
        told = [self._stories[order] for order in sorted(self._stories)]
        if told:
            told[0].moments = sorted([*told[0].moments, *self._repeats], key=lambda moment: moment.at)
        return told

    def _open(self, accepted: Accepted, at: float, event: str, details: dict[str, Any]) -> None:
        self._stories[accepted.order] = Story(accepted.order, accepted)
        self._tell(self._stories[accepted.order], at, event, details)

    def _tell(self, story: Story, at: float, event: str, details: dict[str, Any]) -> None:
        story.moments = [*story.moments, Moment(at, event, details)]

    def _existing(self) -> Iterator[Story]:
        return (story for order, story in self._stories.items() if order in self.accounts.known)

    def _named(self, fact: AnyFact) -> Iterator[tuple[int, str, dict[str, Any]]]:
        """Yield what a fact says of groups that it names itself, or by their lease."""
        match fact:
            case Leased():
                for order, rank in self._among(fact.shards):
                    yield order, "leased", _leased(fact, rank)
            case Pulled():
                details = {"lease": fact.lease, "consumer": fact.consumer, "request": fact.request_id}
                for order in self._in_part(fact.lease, fact.rank):
                    yield order, "handed out", details
            case Settles():
                for order in self._in_part(fact.settle.lease, fact.settle.rank):
                    yield order, "settled", self._settled(fact, order)
            case Lost():
                for order, _ in self._in_lease(fact.lease):
                    details = {"lease": fact.lease, "why": fact.why, "failed": fact.failed}
                    yield order, "lost", details | ({"recalled": True} if fact.recalled else {})
            case Dropped() if fact.order in self._stories:
                yield fact.order, fact.state, {"reason": fact.reason}
            case Requeued() if fact.order in self._stories:
                yield fact.order, "requeued", {}

    def _notice(self, at: float, fact: AnyFact, order: int, state: State | None, needed: bool) -> None:
        """Tell of what a fact changed without naming the group."""
        story, now = self._stories[order], self.accounts.states.get(order)
        let_go = needed and order not in self.accounts.known
        match fact:
            case Committed() | Rewound() if now is State.COMMITTED and state is not now:
                self._tell(story, at, "committed", {"by": fact.group, "policy": _policy(fact.version)})
            case Rewound() if now is State.QUEUED and state is not now:
                details = {"was": state.value if state else "", "policy": _policy(fact.version)}
                self._tell(story, at, "rewound", {**details, "consumer": fact.consumer})
            case WasReset() if now is State.DISCARDED and state is not now:
                self._tell(story, at, "discarded", {"reason": "reset", "why": fact.reason})
            case Committed() | Rewound() | Forgot() | WasReset() if let_go:
                self._tell(story, at, "let go", {"as": now.value if now else ""})

    def _among(self, shards: Shards) -> Iterator[tuple[int, int]]:
        """Yield (order, rank) of our groups."""
        for rank, shard in enumerate(shards):
            yield from ((order, rank) for order in shard if order in self._stories)

    def _in_lease(self, number: int) -> Iterator[tuple[int, int]]:
        loan = self.accounts.loans.get(number)
        return self._among(loan.shards) if loan is not None else iter(())

    def _in_part(self, number: int, rank: int) -> Iterator[int]:
        return (order for order, of in self._in_lease(number) if of == rank)

    def _settled(self, fact: Settles, order: int) -> dict[str, Any]:
        settle = fact.settle
        details = {"lease": settle.lease, "consumer": settle.consumer, "policy": _policy(settle.version)}
        group_id = self._stories[order].group_id
        for rejected in settle.rejected:
            if rejected.group_id == group_id:
                return {"as": "rejected", "reason": rejected.reason, **details}
        return {"as": "trained" if group_id in settle.trained else "filtered", **details}


def origin(accepted: Accepted) -> dict[str, Any]:
    """Return where a group came from, as plain data."""
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


def _leased(fact: Leased, rank: int) -> dict[str, Any]:
    details: dict[str, Any] = {
        "lease": fact.number,
        "step": fact.step,
        "policy": _policy(fact.version),
        "by": fact.group,
        "rank": rank,
        **({"tokens": fact.tokens} if fact.tokens else {"sequences": fact.sequences}),
    }
    marks = {"short": fact.short, "again": fact.again}
    return details | {name: True for name, marked in marks.items() if marked}


def _policy(version: PolicyVersion) -> str:
    """Return a policy as `incarnation.step`."""
    return f"{version.incarnation}.{version.step}"
