"""The moments of each lane, recomputed from the groups that the journal names, and held against each snapshot.

A snapshot names the half-life by which its broker counts. A life that begins has counted the events before its
snapshot, so the half-life of the next snapshot is the one to recompute with, and the groups of a log wait for it.
"""

from collections.abc import Iterable, Iterator
from math import isclose
from typing import Final

from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import RewardSummary, Split
from rolloutmq.services.broker.journal.format.events import Accepted, LaneSnapshot, Vacated, WasReset
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent

LaneName = tuple[str, Split]

TOLERANCE: Final = 1e-9
"""Relative difference that another order of the same groups explains."""


class LaneMoments:
    """Moments by lane, as of the last snapshot, and the events since."""

    def __init__(self) -> None:
        self._lanes: dict[LaneName, Moments] = {}
        self._names: dict[LaneName, LaneName] = {}
        self._since: list[tuple[LaneName, RewardSummary, int] | Vacated | WasReset] = []
        """Rewards and sequences of groups, not their headers, which are ten times as large."""

    def apply(self, event: AnyEvent) -> None:
        """Note an event. A requeued group was counted when it was first accepted."""
        if isinstance(event, Accepted):
            if not event.requeued:
                name = self._names.setdefault((event.env, event.split), (event.env, event.split))
                self._since.append((name, event.header.rewards, event.header.sequences))
        elif isinstance(event, Vacated | WasReset):
            self._since.append(event)

    def compare(self, snapshot: Iterable[AnyEvent], log: str) -> Iterator[str]:
        """Yield a line for each lane with other moments in a snapshot; then go on with the snapshot."""
        lanes = {(item.env, item.split): item for item in snapshot if isinstance(item, LaneSnapshot)}
        counted = self._recount({name: lane.half_life_groups for name, lane in lanes.items()})
        for name, lane in lanes.items():
            mine = counted.get(name, Moments())
            if not _same(mine, lane.rewards):
                yield (
                    f"the moments of {lane.env} ({lane.split.name.lower()}) in {log} are {_text(lane.rewards)}, by the "
                    f"groups before it they are {_text(mine)}"
                )
        self.open(lanes.values())

    def open(self, snapshot: Iterable[AnyEvent]) -> None:
        """Adopt the moments of a snapshot."""
        self._since.clear()
        self._lanes = {
            (item.env, item.split): item.rewards for item in snapshot if isinstance(item, LaneSnapshot)
        }

    def _recount(self, half_lives: dict[LaneName, int | None]) -> dict[LaneName, Moments]:
        lanes = dict(self._lanes)
        for event in self._since:
            if isinstance(event, WasReset):
                lanes.clear()
            elif isinstance(event, Vacated):
                for name in event.lanes:
                    lanes.pop(name, None)
            else:
                name, rewards, sequences = event
                before = lanes.get(name, Moments())
                lanes[name] = before.after(rewards, sequences, half_lives.get(name))
        return lanes


def _same(mine: Moments, theirs: Moments) -> bool:
    if (mine.groups, mine.left_out) != (theirs.groups, theirs.left_out):
        return False
    slack = TOLERANCE * max(abs(theirs.low), abs(theirs.high))
    ends = ((mine.mean, theirs.mean), (mine.low, theirs.low), (mine.high, theirs.high))
    near = all(abs(one - other) <= slack for one, other in ends)
    return near and all(
        isclose(one, other, rel_tol=TOLERANCE, abs_tol=square)
        for one, other, square in (
            (mine.weight, theirs.weight, 0.0),
            (mine.m2, theirs.m2, theirs.weight * slack * slack),
        )
    )


def _text(moments: Moments) -> str:
    return (
        f"{moments.groups} groups with mean {moments.mean:.9g} and deviation {moments.deviation:.9g}, "
        f"{moments.left_out} left out"
    )
