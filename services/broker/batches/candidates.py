"""Candidates: the lanes a batch is composed from.

With few lanes these are all lanes with groups. With many, most batches come from the lanes owed most, and the cost of
composing does not grow with the others: they are only ranked. If these lanes have no fitting batch, all lanes are
tried.

A pull of groups as they come has no size to fit: each group is that of the lane owed most at that moment.

The wishes of the lanes owed most are made to add up to the batch: what they are owed more than the others, they are all
owed. It stays owed to them until they are served.
"""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.queues import Lane
from rolloutmq.services.broker.state.split_queue import SplitQueue

FEW_LANES: Final = 64
"""Least number of candidates. Up to this many lanes are all candidates."""
SPARE_TIMES: Final = 2
"""The candidates hold this many batches together, so sizes that do not fit rarely matter."""

Floors = Mapping[Lane, int]
"""Least sequences or tokens of lanes in the batch; of others it is 0."""


class Candidate(NamedTuple):
    """A lane, its floor, and the sequences or tokens owed to it."""

    lane: Lane
    floor: int
    carry: float


def all_candidates(queue: SplitQueue[Lane], floors: Floors) -> list[Candidate]:
    """Return every lane with groups, in the order of the lanes."""
    lanes = sorted(queue.stocked, key=lambda lane: lane.number)
    return [Candidate(lane, floors.get(lane, 0), lane.carry) for lane in lanes]


def most_owed(
    queue: SplitQueue[Lane], floors: Floors, target: int, queued: Callable[[Lane], int]
) -> list[Candidate] | None:
    """Return the lanes owed most, and those with a floor; None if all lanes are few.

    Args:
        queue: All lanes of the split.
        floors: Their floors.
        target: Sequences or tokens of the batch.
        queued: Returns the sequences or tokens queued in a lane.
    """
    if len(queue.stocked) <= FEW_LANES:
        return None
    owed = queue.owed(target)
    chosen = [lane for lane in floors if lane in owed]
    held = sum(map(queued, chosen))
    for lane in sorted(owed, key=owed.__getitem__, reverse=True):
        if len(chosen) >= FEW_LANES and held >= SPARE_TIMES * target:
            break
        if lane not in floors:
            chosen.append(lane)
            held += queued(lane)
    return _centred(chosen, floors)


def next_groups(queue: SplitQueue[Lane], count: int) -> list[StoredGroup]:
    """Return up to `count` groups whose turn comes next: of the lane owed most at that moment, its oldest first."""
    owed = queue.owed(0)
    ranked = sorted(owed, key=owed.__getitem__, reverse=True)[:FEW_LANES]
    heads = {lane: lane.heads(lane.sizes) for lane in ranked}
    turns = {lane: next(heads[lane]) for lane in ranked}
    found: list[StoredGroup] = []
    total = 0
    while turns and len(found) < count:
        _, _, lane = max((owed[one] + one.part * total, -turns[one].order, one) for one in turns)
        group, size = turns[lane], turns[lane].header.sequences
        found.append(group)
        owed[lane] -= size
        total += size
        following = next(heads[lane], None)
        if following is None:
            del turns[lane]
        else:
            turns[lane] = following
    return found


def _centred(lanes: list[Lane], floors: Floors) -> list[Candidate]:
    """Return candidates that are owed nothing together."""
    carries = [lane.carry for lane in lanes]
    common = sum(carries) / total if (total := sum(lane.part for lane in lanes)) else 0.0
    return [
        Candidate(lane, floors.get(lane, 0), carry - lane.part * common)
        for lane, carry in zip(lanes, carries, strict=True)
    ]
