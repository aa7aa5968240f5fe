"""The batch builder: takes a batch from the queues, or returns the reason to wait.

Stale groups are dropped here (see `staleness`), and so are groups that cannot be read back from disk. Only the groups
of the batch are examined, so no pull scans a queue.

Every rank gets a group: a batch with too few groups is composed of smaller ones, or waited for. Two kinds of groups
are delivered alone and leave the other ranks without: a suspect, which may crash its trainer, and a group larger than
the batch.

The wait for an exact combination is measured per stream, not per request, so it also ends for pulls shorter than it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Pull
from rolloutmq.services.broker.batches import by_tokens
from rolloutmq.services.broker.batches.drop import GroupDropper
from rolloutmq.services.broker.batches.exact import Counts, LaneSupply, compose, compose_below
from rolloutmq.services.broker.batches.staleness import StalenessRule
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.groups import Stream
from rolloutmq.services.broker.state.queues import Lane, Lanes

Floors = dict[Lane, int]
"""Least sequences or tokens of each lane in the batch."""


class BatchPlan(msgspec.Struct):
    """Groups taken from the queues for one step, oldest first."""

    groups: list[StoredGroup]
    short: bool = False


class BatchBuilder:
    """Builds batches from the lanes."""

    def __init__(
        self,
        config: BrokerConfig,
        lanes: Lanes,
        dropper: GroupDropper,
        staleness: StalenessRule,
    ) -> None:
        self._config = config
        self._lanes = lanes
        self._dropper = dropper
        self._staleness = staleness
        self._no_fit_since: dict[Stream, float] = {}
        self.closed = False
        """No batch is ever built: a recorded run is being replayed."""

    def adopt(self, config: BrokerConfig) -> None:
        """Apply other wait times."""
        self._config = config

    def build(self, stream: Stream, pull: Pull, now: float, wall: float) -> BatchPlan | Wait:
        """Take exactly `pull.sequences`, or at most `pull.tokens`, from the queues, or return the reason to wait."""
        measure = by_tokens.tokens if pull.tokens else _sequences
        while not self.closed:
            plan = self._take_suspect(pull) or self._compose(stream, pull, now)
            if isinstance(plan, Wait):
                return plan
            stale = self._staleness.too_stale(plan.groups, pull.version)
            try:
                damaged = [group for group in plan.groups if group not in stale and not group.body.load()]
            except JournalWaitsError:
                self._lanes.put_back(plan.groups)
                return Wait.JOURNAL_SLOW
            if not stale and not damaged:
                self._no_fit_since.pop(stream, None)
                self._staleness.record(plan.groups, pull.version)
                _update_carry(self._lanes.of_split(pull.split), plan.groups, measure)
                return plan
            self._lanes.put_back(plan.groups)
            self._dropper.drop(stale, GroupState.EXPIRED, "stale", wall)
            self._dropper.drop(damaged, GroupState.DEAD, "damaged", wall)
        return Wait.END_OF_REPLAY

    def _take_suspect(self, pull: Pull) -> BatchPlan | None:
        """Take the oldest suspect, if there is one: its next failure must not count against other groups."""
        suspect = self._lanes.suspect(pull.split)
        if suspect is None:
            return None
        self._lanes.of(suspect).remove(suspect)
        least = pull.tokens or pull.sequences
        got = suspect.header.tokens if pull.tokens else suspect.header.sequences
        return BatchPlan([suspect], short=got < least)

    def deadline(self, now: float) -> float:
        """Return when a wait for an exact combination, or for a silent lane, may end."""
        exact = (since + self._config.exact_wait_s for since in self._no_fit_since.values())
        silent = (lane.arrived_at + self._config.silent_env_s for lane in self._lanes if lane.min_share)
        return min((at for at in (*exact, *silent) if at > now), default=float("inf"))

    def reset_waits(self) -> None:
        self._no_fit_since.clear()

    def _compose(self, stream: Stream, pull: Pull, now: float) -> BatchPlan | Wait:
        lanes = self._lanes.of_split(pull.split)
        if _too_few_queued(lanes, pull):
            self._no_fit_since.pop(stream, None)
            return Wait.NO_BATCH
        floors = self._floors(lanes, pull, now)
        if floors is None:
            return Wait.MIN_SHARE
        stocked = {lane: floors[lane] for lane in lanes if lane.sizes}
        if pull.tokens:
            return self._compose_by_tokens(stocked, pull)
        plan = self._compose_exact_or_short(stream, stocked, pull, now)
        return self._take_oversized(stocked, pull.sequences, plan) or plan

    def _take_oversized(self, floors: Floors, target: int, plan: BatchPlan | Wait) -> BatchPlan | None:
        """Take a group of more than `target` sequences, alone, if its turn comes before the plan's.

        No batch will ever hold it, so it does not wait. It goes first if its environment is owed more than those of
        the plan, or as much and it is older than every group of the plan.
        """
        found = [(lane, group) for lane in floors if (group := lane.oldest_above(target)) is not None]
        if not found:
            return None
        lane, group = min(found, key=_turn_key)
        if isinstance(plan, BatchPlan):
            if min(_turn_key((self._lanes.of(one), one)) for one in plan.groups) < _turn_key((lane, group)):
                return None
            self._lanes.put_back(plan.groups)
        lane.remove(group)
        return BatchPlan([group])

    def _compose_exact_or_short(
        self, stream: Stream, stocked: Floors, pull: Pull, now: float
    ) -> BatchPlan | Wait:
        """Take exactly `pull.sequences`, or as many as possible below once `exact_wait_s` is over."""
        plan = self._compose_exact(stocked, pull.sequences, pull.world_size)
        if plan is not Wait.NO_EXACT_FIT:
            return plan
        since = self._no_fit_since.setdefault(stream, now)
        if now - since < self._config.exact_wait_s:
            return Wait.NO_EXACT_FIT
        return self._compose_short(stocked, pull.sequences, pull.world_size)

    def _compose_exact(self, floors: Floors, target: int, ranks: int) -> BatchPlan | Wait:
        counts = compose(_supplies(floors, target), target)
        if counts is None:
            return Wait.NO_EXACT_FIT
        if _group_count(counts) < ranks:
            counts = compose(_supplies(floors, target // ranks), target)
        return Wait.TOO_FEW_GROUPS if counts is None else self._take(floors, counts)

    def _compose_short(self, floors: Floors, target: int, ranks: int) -> BatchPlan | Wait:
        """Take as many sequences as whole groups have, at most `target`."""
        counts = compose_below(_supplies(floors, target), target)
        if counts is None:
            return Wait.NO_EXACT_FIT
        if _group_count(counts) < ranks:
            counts = compose_below(_supplies(floors, target // ranks), target)
            if counts is None or _group_count(counts) < ranks:
                return Wait.TOO_FEW_GROUPS
        plan = self._take(floors, counts)
        plan.short = sum(map(_sequences, plan.groups)) < target
        return plan

    def _compose_by_tokens(self, floors: Floors, pull: Pull) -> BatchPlan | Wait:
        """Take whole groups of at most `pull.tokens` tokens."""
        groups = by_tokens.compose(_offers(floors), pull.tokens)
        alone = len(groups) == 1 and by_tokens.tokens(groups[0]) > pull.tokens
        if len(groups) < pull.world_size and not alone:
            groups = by_tokens.compose(_offers(floors), pull.tokens, pull.tokens // pull.world_size)
            if len(groups) < pull.world_size:
                return Wait.TOO_FEW_GROUPS
        for group in groups:
            self._lanes.of(group).remove(group)
        groups.sort(key=lambda group: group.order)
        return BatchPlan(groups)

    def _floors(self, lanes: list[Lane], pull: Pull, now: float) -> dict[Lane, int] | None:
        """Return the floor of each lane; None if a lane cannot meet it yet and is not silent."""
        floors = dict.fromkeys(lanes, 0)
        left = target = pull.tokens or pull.sequences
        for lane in lanes:
            if not lane.min_share or lane.silent(now, self._config.silent_env_s):
                continue
            floor = min(left, int(lane.min_share * target + 1e-6))
            if not pull.tokens:
                size = max((size for size in lane.sizes if size <= target), default=lane.group_size)
                floor = floor // size * size
            if floor > (lane.queued.tokens if pull.tokens else lane.queued.sequences):
                return None
            floors[lane] = floor
            left -= floor
        return floors

    def _take(self, lanes: Iterable[Lane], plan: list[Counts]) -> BatchPlan:
        groups: list[StoredGroup] = []
        for lane, counts in zip(lanes, plan, strict=True):
            for size, number in counts.items():
                if number:
                    groups += lane.take(size, number)
        groups.sort(key=lambda group: group.order)
        return BatchPlan(groups)


def _sequences(group: StoredGroup) -> int:
    return group.header.sequences


def _turn_key(candidate: tuple[Lane, StoredGroup]) -> tuple[float, int]:
    """Order candidates: the environment owed most first, then the oldest group."""
    lane, group = candidate
    return -lane.carry, group.order


def _group_count(counts: list[Counts]) -> int:
    return sum(sum(lane.values()) for lane in counts)


def _too_few_queued(lanes: Iterable[Lane], pull: Pull) -> bool:
    """Return whether the lanes hold less than a batch."""
    if pull.tokens:
        return sum(lane.queued.tokens for lane in lanes) < pull.tokens
    return sum(lane.queued.sequences for lane in lanes) < pull.sequences


def _supplies(floors: Floors, largest: int) -> list[LaneSupply]:
    """Return the supply of each lane in groups of at most `largest` sequences."""
    return [_supply(lane, floor, largest) for lane, floor in floors.items()]


def _supply(lane: Lane, floor: int, largest: int) -> LaneSupply:
    counts = lane.counts(largest)
    return LaneSupply(counts, lambda: map(_sequences, lane.heads(counts)), _weight(lane), floor, lane.carry)


def _offers(floors: Floors) -> list[by_tokens.LaneOffer]:
    return [
        by_tokens.LaneOffer(lane.heads(lane.sizes), lane.queued.tokens, _weight(lane), floor, lane.carry)
        for lane, floor in floors.items()
    ]


def _weight(lane: Lane) -> float:
    return lane.weight if lane.connected else 0.0


def _update_carry(
    lanes: Sequence[Lane], groups: Sequence[StoredGroup], measure: Callable[[StoredGroup], int]
) -> None:
    """Update the sequences owed to each lane; an empty lane is owed nothing."""
    if len(lanes) < 2:
        return
    taken: Counter[str] = Counter()
    for group in groups:
        taken[group.env] += measure(group)
    target = float(taken.total())
    weight = sum(lane.weight for lane in lanes if lane.connected) or 1.0
    for lane in lanes:
        share = lane.weight / weight if lane.connected else 0.0
        owed = lane.carry + target * share - taken[lane.env]
        lane.carry = max(-target, min(target, owed)) if lane.sizes else 0.0
