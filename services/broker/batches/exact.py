"""Composition of an exact batch: whole groups with exactly the requested number of sequences.

Each lane has a wish: its share by weight, at least its floor (the minimum share), corrected by the carry of earlier
batches. First the oldest groups meet the wishes. Where group sizes divide the batch, the usual case, that is exact
and costs one step a group. Otherwise subset sums decide: a lane with a floor gets a total that keeps it, the others
any total, and each lane fills its total as nearly oldest-first as its sizes allow. The other lanes may use the rest
of a lane's share: weights set the order, floors are kept.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heapreplace
from itertools import islice
from math import gcd
from typing import Final, Protocol

import msgspec

from rolloutmq.services.broker.batches.subset_sum import (
    CELLS_LIMIT,
    contains,
    extend,
    fit,
    members,
    nearest,
    reach,
    sumset,
)

SUMSET_LIMIT: Final = 4096
"""Largest target, in units of the sizes' common divisor, for which the exact search keeps floors."""

Counts = dict[int, int]
"""Number of groups by size."""


class LaneClaim(Protocol):
    """A lane's share of a batch, in sequences or in tokens; see `LaneSupply`."""

    weight: float
    floor: int
    carry: float

    @property
    def available(self) -> int: ...


class LaneSupply(msgspec.Struct):
    """The groups one lane offers to a batch.

    Attributes:
        counts: Groups queued, by size; the size of the oldest group comes first.
        ages: Makes an iterator over the sizes of the queued groups, oldest first.
        weight: Share relative to the other lanes; a lane with 0 only fills their rest.
        floor: Least sequences of this lane.
        carry: Sequences owed to the lane by earlier batches.
    """

    counts: Counts
    ages: Callable[[], Iterator[int]]
    weight: float = 1.0
    floor: int = 0
    carry: float = 0.0

    @property
    def available(self) -> int:
        return sum(size * count for size, count in self.counts.items())


def quotas(supplies: Sequence[LaneClaim], target: int) -> list[float]:
    """Divide `target` by weight, within each lane's floor and supply."""
    supply = [float(s.available) for s in supplies]
    weights = [s.weight for s in supplies]
    if not any(weights):
        weights = [1.0] * len(supplies)
    quota = [min(float(s.floor), have) for s, have in zip(supplies, supply, strict=True)]
    open_ = [i for i, weight in enumerate(weights) if weight > 0]
    left = target - sum(quota[i] for i in range(len(supplies)) if i not in open_)
    while open_:
        total = sum(weights[i] for i in open_)
        wish = {i: left * weights[i] / total + supplies[i].carry for i in open_}
        fixed = [i for i in open_ if wish[i] >= supply[i]] or [i for i in open_ if wish[i] < quota[i]]
        if not fixed:
            for i in open_:
                quota[i] = wish[i]
            break
        for i in fixed:
            quota[i] = supply[i] if wish[i] >= supply[i] else quota[i]
            left -= quota[i]
        open_ = [i for i in open_ if i not in fixed]
    return quota


class _OldestFirst:
    """Takes groups from one supply, oldest first, and stops at the first one that does not fit."""

    def __init__(self, supply: LaneSupply) -> None:
        self.taken: Counter[int] = Counter()
        self.total = 0
        self._ages = supply.ages()
        self._counts = supply.counts
        self._next = next(self._ages, 0)

    def up_to(self, limit: int) -> None:
        """Take groups while the total stays within `limit`."""
        if len(self._counts) == 1 and self._next:
            ((size, count),) = self._counts.items()
            more = min(count - self.taken[size], (limit - self.total) // size)
            if more > 0:
                self.taken[size] += more
                self.total += more * size
            return
        while self._next and self.total + self._next <= limit:
            self._take()

    def one(self, room: int) -> int:
        """Take the next group if it fits into `room`; return its size, 0 if it does not."""
        if len(self._counts) == 1:
            before = self.total
            size = next(iter(self._counts))
            self.up_to(self.total + min(room, size))
            return self.total - before
        size = self._next
        if not size or size > room:
            return 0
        self._take()
        return size

    def _take(self) -> None:
        self.taken[self._next] += 1
        self.total += self._next
        self._next = next(self._ages, 0)


def greedy(supplies: Sequence[LaneSupply], target: int) -> tuple[list[Counts], int]:
    """Meet the wishes with the oldest groups; return the counts and the number of missing sequences.

    What the wishes leave goes to the supply furthest below its wish, one group at a time. Of equals the one that was
    served last goes on: its place in the heap is moved ahead by one whole round.
    """
    wishes = quotas(supplies, target) if len(supplies) > 1 else [float(target)]
    walks = [_OldestFirst(supply) for supply in supplies]
    left = target
    for walk, wish in zip(walks, wishes, strict=True):
        walk.up_to(min(left, int(wish + 1e-6)))
        left -= walk.total
    number, served = len(walks), 0
    turns = [(walks[place].total - wishes[place], place) for place in range(number)]
    heapify(turns)
    while left and turns:
        place = turns[0][1] % number
        walk = walks[place]
        got = walk.one(left)
        left -= got
        if got:
            served += 1
            heapreplace(turns, (walk.total - wishes[place], place - served * number))
        else:
            heappop(turns)
    return [dict(walk.taken) for walk in walks], left


def compose(supplies: Sequence[LaneSupply], target: int) -> list[Counts] | None:
    """Choose whole groups with exactly `target` sequences together, or return None."""
    plan, left = greedy(supplies, target)
    if not left and _keeps_floors(plan, supplies):
        return plan
    unit = gcd(*(size for supply in supplies for size in supply.counts)) or 1
    if target % unit:
        return None
    supplies = _bounded(supplies, target)
    if largest_below(supplies, target) < target:
        return None
    totals = _lane_totals(supplies, plan, target, unit)
    if totals is None:
        return None
    composed: list[Counts] = []
    for supply, wish, total in zip(supplies, plan, totals, strict=True):
        counts = fit(supply.counts, wish, total)
        if counts is None:
            return None
        composed.append(counts)
    return composed


def compose_below(supplies: Sequence[LaneSupply], target: int) -> list[Counts] | None:
    """Choose whole groups with the most sequences up to `target`, or return None if there are no groups.

    Floors are kept where that costs no sequence.
    """
    plan, left = greedy(supplies, target)
    most = largest_below(_bounded(supplies, target), target)
    if target - left > most:
        return plan
    if not most:
        return None
    without = [msgspec.structs.replace(supply, floor=0) for supply in supplies]
    return compose(supplies, most) or compose(without, most)


def largest_below(supplies: Sequence[LaneSupply], target: int) -> int:
    """Return the largest sum of whole groups up to `target`, without regard to floors."""
    counts: Counter[int] = Counter()
    for supply in supplies:
        counts.update(supply.counts)
    unit = gcd(*counts) or 1
    units = {size // unit: count for size, count in counts.items()}
    return (reach(units, target // unit).bit_length() - 1) * unit


def _bounded(supplies: Sequence[LaneSupply], target: int) -> Sequence[LaneSupply]:
    """Return the supplies of an exact search: all of them for batches up to `sqrt(CELLS_LIMIT)` sequences.

    Larger batches may have more distinct sizes than a search can handle in time; each lane then keeps its oldest
    sizes.
    """
    sizes = sum(len(supply.counts) for supply in supplies)
    unit = gcd(*(size for supply in supplies for size in supply.counts)) or 1
    most = CELLS_LIMIT // (target // unit + 1)
    if sizes <= most:
        return supplies
    each = max(1, most // len(supplies))
    return [
        msgspec.structs.replace(supply, counts=dict(islice(supply.counts.items(), each)))
        for supply in supplies
    ]


def _keeps_floors(plan: Sequence[Counts], supplies: Sequence[LaneSupply]) -> bool:
    return all(
        not supply.floor or sum(size * n for size, n in counts.items()) >= supply.floor
        for counts, supply in zip(plan, supplies, strict=True)
    )


def _lane_totals(
    supplies: Sequence[LaneSupply], plan: Sequence[Counts], target: int, unit: int
) -> list[int] | None:
    """Choose the sequences of each lane, near to its total in `plan`."""
    limit = target // unit
    mask = (1 << (limit + 1)) - 1
    exact = limit <= SUMSET_LIMIT
    own = [
        reach({size // unit: n for size, n in supply.counts.items()}, limit)
        >> (low := -(-supply.floor // unit) if exact else 0)
        << low
        for supply in supplies
    ]
    suffix = [1]
    for supply, sums in zip(reversed(supplies), reversed(own), strict=True):
        suffix.append(_joined(suffix[-1], supply, sums, unit, mask, exact))
    suffix.reverse()
    if not suffix[0] >> limit & 1:
        return None
    totals = []
    left = limit
    for counts, sums, rest in zip(plan, own, suffix[1:], strict=True):
        wish = min(left, sum(size * n for size, n in counts.items()) // unit)
        mine, others = members(sums, limit), members(rest, limit)
        total = next(t for t in nearest(wish, 0, left) if contains(mine, t) and contains(others, left - t))
        totals.append(total * unit)
        left -= total
    return totals


def _joined(bits: int, supply: LaneSupply, sums: int, unit: int, mask: int, exact: bool) -> int:
    """Return the sums reachable by this lane and the later ones together."""
    if supply.floor and exact:
        return sumset(sums, bits, mask)
    for size, count in supply.counts.items():
        bits = extend(bits, (size // unit, min(count, mask.bit_length() // (size // unit))), mask)
    return bits
