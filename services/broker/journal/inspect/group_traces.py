"""The way of single groups, followed through the events of the journal: when each part began and ended. Pure.

A group is over once it left the broker: covered by a checkpoint, dropped, or rejected. What is sampled is decided by a
hash of its id, so every process and every life decides the same.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Final, NamedTuple, TypeVar

from rolloutmq.schemas.wire.envelope import GroupHeader, Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.schemas.wire.tracing import is_sampled
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Dropped,
    GroupState,
    Settles,
    TaskEnded,
    TaskSnapshot,
    TaskSubmitted,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.hops import FollowedGroup, HopFollower

T = TypeVar("T")

OPEN_LIMIT: Final = 10_000
"""Sampled groups and tasks under way; the oldest are forgotten for further ones."""


class Part(NamedTuple):
    """One part of the way of a group, in wall-clock seconds."""

    hop: Hop
    began_at: float
    ended_at: float


@dataclass(slots=True)
class GroupTrace:
    """The way of one group.

    Attributes:
        header: Header of the group.
        env, split: Its queue.
        producer: Producer of the group.
        submitted_at: When its task was submitted, wall-clock seconds; None without a task, or if that is not known.
        parts: Parts of its way, in the order in which they ended.
        outcome: `committed`, `filtered` if the trainer took no signal from it, or the state in which it left, with the
            reason; empty if the events do not say.
    """

    header: GroupHeader
    env: str
    split: Split
    producer: str
    submitted_at: float | None
    parts: list[Part] = field(default_factory=list)
    outcome: str = ""


class TraceFollower(HopFollower):
    """Follows the sampled groups of a run.

    Args:
        ratio: Part of the groups that is followed, 0 to 1.
    """

    def __init__(self, ratio: float) -> None:
        super().__init__()
        self._ratio = ratio
        self._at = 0.0
        self._open: dict[str, GroupTrace] = {}
        self._tasks: dict[str, float] = {}
        self._over: list[GroupTrace] = []

    def apply(self, at: float, event: AnyEvent) -> None:
        """Apply an event, or a record of a snapshot, that was committed at this wall-clock time."""
        self._at = at
        match event:
            case TaskSubmitted():
                _keep(self._tasks, event.id, event.at)
            case TaskSnapshot():
                _keep(self._tasks, event.submitted.id, event.submitted.at)
            case TaskEnded():
                self._tasks.pop(event.id, None)
            case Accepted() if is_sampled(event.header.group_id, self._ratio):
                self._begin(event)
            case Dropped() if (group := self._groups.get(event.order)) is not None:
                self._end_as(group, f"{event.state}: {event.reason}")
            case Settles():
                self._judge(event.settle)
        super().apply(at, event)

    def over(self) -> list[GroupTrace]:
        """Return the groups that are over since the last call."""
        over, self._over = self._over, []
        return over

    def _begin(self, event: Accepted) -> None:
        header = event.header
        trace = GroupTrace(header, event.env, event.split, event.producer, self._tasks.pop(header.task, None))
        if header.started_at and header.finished_at and not event.requeued:
            trace.parts.append(
                Part(Hop.ROLLOUT, header.started_at, max(header.finished_at, header.started_at))
            )
            trace.parts.append(Part(Hop.SEND, header.finished_at, max(event.at, header.finished_at)))
        _keep(self._open, header.group_id, trace)

    def _end_as(self, group: FollowedGroup, outcome: str) -> None:
        if (trace := self._open.get(group.group_id)) is not None:
            trace.outcome = outcome

    def _judge(self, settle: Settle) -> None:
        """Note what was filtered; after a rewind the same group may be trained."""
        for outcome, group_ids in ((GroupState.FILTERED.value, settle.filtered), ("", settle.trained)):
            for group_id in group_ids:
                if (trace := self._open.get(group_id)) is not None:
                    trace.outcome = outcome

    def _add(self, group: FollowedGroup, hop: Hop, seconds: float) -> None:
        trace = self._open.get(group.group_id)
        if trace is None or hop in {Hop.ROLLOUT, Hop.SEND}:
            return
        trace.parts.append(Part(hop, self._at - max(seconds, 0.0), self._at))
        if hop is Hop.COMMIT:
            trace.outcome = trace.outcome or "committed"

    def _forget(self, orders: Iterable[int]) -> None:
        orders = tuple(orders)
        for order in orders:
            group = self._groups.get(order)
            if group is not None and (trace := self._open.pop(group.group_id, None)) is not None:
                self._over.append(trace)
        super()._forget(orders)

    def _reset(self) -> None:
        self._open.clear()
        super()._reset()


def _keep(kept: dict[str, T], key: str, value: T) -> None:
    """Keep a value in place of the oldest one, if there is no room."""
    if key not in kept and len(kept) >= OPEN_LIMIT:
        del kept[next(iter(kept))]
    kept[key] = value
