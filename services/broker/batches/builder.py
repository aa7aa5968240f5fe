"""The batch builder: takes a batch from the queues, or returns the reason to wait.

Stale groups are dropped here (see `staleness`), and so are groups that cannot be read back from disk. Only the groups
of the batch are examined, so no pull scans a queue.

Every rank gets a group: a batch with too few groups is composed of smaller ones, or waited for. Two kinds of groups
are delivered alone and leave the other ranks without: a suspect, which may crash its trainer, and a group larger than
the batch.

The wait for an exact combination is measured per stream, not per request, so it also ends for pulls shorter than it.
A minimum share holds for every batch, with two exceptions: an environment that cannot meet it is waited for as long as
for an exact combination, once, until it can again; and a large group of another environment, whose turn has come, may
leave no room. What an environment misses stays owed to it, up to one batch, and later batches make up for it.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf
from operator import attrgetter
from typing import Final

import msgspec

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Pull
from rolloutmq.services.broker.batches import by_tokens
from rolloutmq.services.broker.batches.candidates import (
    Candidate,
    Floors,
    all_candidates,
    most_owed,
    next_groups,
)
from rolloutmq.services.broker.batches.drop import GroupDropper
from rolloutmq.services.broker.batches.exact import Counts, LaneSupply, compose, compose_below
from rolloutmq.services.broker.batches.staleness import StalenessRule
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup, out_of_memory
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.groups import Stream
from rolloutmq.services.broker.state.queues import Lane, Lanes
from rolloutmq.services.broker.state.split_queue import SplitQueue

Candidates = Sequence[Candidate]
_order: Final = attrgetter("order")


class BatchPlan(msgspec.Struct):
    """Groups taken from the queues for one step, oldest first."""

    share: BatchShare
    short: bool = False

    @property
    def groups(self) -> Sequence[StoredGroup]:
        return self.share.groups

    @classmethod
    def of(cls, groups: Sequence[StoredGroup], *, short: bool = False) -> "BatchPlan":
        return cls(BatchShare(groups), short)


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
        self._short_since: dict[Lane, float] = {}
        """When pulls began to wait for a minimum share; forgotten when the lane can meet it."""
        self.closed = False
        """No batch is ever built: a recorded run is being replayed."""

    def adopt(self, config: BrokerConfig) -> None:
        """Apply other wait times."""
        self._config = config

    def build(self, stream: Stream, pull: Pull, now: float, wall: float) -> BatchPlan | Wait:
        """Take exactly `pull.sequences`, or at most `pull.tokens` or `pull.groups`, or return the reason to wait."""
        queue = self._lanes.of_split(pull.split)
        while not self.closed:
            plan = self._take_suspect(pull) if queue.suspected else self._compose(queue, stream, pull, now)
            if isinstance(plan, Wait):
                return plan
            share = plan.share
            age = self._staleness.age(share, pull.version)
            stale = self._staleness.too_stale(share, age) if age.exceeds else []
            damaged: list[StoredGroup] = []
            if away := out_of_memory(share.groups):
                try:
                    damaged = [group for group in away if not (group in stale or group.body.load())]
                except JournalWaitsError:
                    self._lanes.put_back(plan.groups)
                    return Wait.JOURNAL_SLOW
            if not stale and not damaged:
                self._no_fit_since.pop(stream, None)
                if not pull.window:  # those of a window are recorded when they are settled
                    self._staleness.record(share, age)
                if len(queue.lanes) > 1:
                    self._note_shares(queue, pull, share)
                return plan
            self._lanes.put_back(plan.groups)
            self._dropper.drop(stale, GroupState.EXPIRED, "stale", wall)
            self._dropper.drop(damaged, GroupState.DEAD, "damaged", wall)
        return Wait.END_OF_REPLAY

    def _note_shares(self, queue: SplitQueue[Lane], pull: Pull, share: BatchShare) -> None:
        """Note what each lane gave to a batch, and what it is owed from now on."""
        taken: dict[Lane, int]
        if pull.tokens:
            taken = defaultdict(int)
            for group in share.groups:
                taken[self._lanes.of(group)] += by_tokens.tokens(group)
        else:
            taken = {self._lanes.of(totals.first): totals.sequences for totals in share.lanes}
        queue.served(taken)

    def _take_suspect(self, pull: Pull) -> BatchPlan:
        """Take the oldest suspect of a split with some: its next failure must not count against other groups."""
        suspect = self._lanes.suspect(pull.split)
        assert suspect is not None
        self._lanes.of(suspect).remove(suspect)
        least = pull.tokens or pull.sequences
        got = suspect.header.tokens if pull.tokens else suspect.header.sequences
        return BatchPlan.of([suspect], short=got < least)

    def is_too_stale(self, group: StoredGroup, version: PolicyVersion) -> bool:
        """Return whether a pull at a policy would drop a group."""
        share = BatchShare([group])
        return bool(self._staleness.too_stale(share, self._staleness.age(share, version)))

    def deadline(self, now: float) -> float:
        """Return when a wait for an exact combination, or for a silent lane, may end."""
        if not self._no_fit_since and not self._short_since:
            return inf
        exact = (since + self._config.exact_wait_s for since in self._no_fit_since.values())
        shares = (self._share_deadline(lane) for lane in self._short_since)
        return min((at for at in (*exact, *shares) if at > now), default=inf)

    def _share_deadline(self, lane: Lane) -> float:
        """Return when a wait for a lane's minimum share ends."""
        since = self._short_since[lane]
        return min(since + self._config.exact_wait_s, lane.arrived_at + self._config.silent_env_s)

    def reset_waits(self) -> None:
        self._no_fit_since.clear()
        self._short_since.clear()

    def _compose(self, queue: SplitQueue[Lane], stream: Stream, pull: Pull, now: float) -> BatchPlan | Wait:
        if pull.groups:
            return _take_alike(queue, pull) or self._compose_as_they_come(queue, pull.groups)
        queued = queue.queued
        if queued.tokens < pull.tokens if pull.tokens else queued.sequences < pull.sequences:
            self._no_fit_since.pop(stream, None)
            return Wait.NO_BATCH
        if (alike := _take_alike(queue, pull)) is not None:
            return alike
        floors = self._floors(queue.guaranteed, pull, now)
        if floors is None:
            return Wait.MIN_SHARE
        if pull.tokens:
            return self._compose_by_tokens(queue, floors, pull)
        plan = self._compose_few(queue, floors, pull) or self._compose_exact_or_short(
            stream, all_candidates(queue, floors), pull, now
        )
        return self._take_large(queue, floors, pull, plan) or plan

    def _compose_as_they_come(self, queue: SplitQueue[Lane], count: int) -> BatchPlan | Wait:
        """Take up to `count` groups. Minimum shares hold over time: what a lane misses is owed to it."""
        groups = next_groups(queue, count)
        for group in groups:
            self._lanes.of(group).remove(group)
        groups.sort(key=_order)
        return BatchPlan.of(groups) if groups else Wait.NO_BATCH

    def _compose_few(self, queue: SplitQueue[Lane], floors: Floors, pull: Pull) -> BatchPlan | None:
        """Take an exact batch from the lanes owed most; None if they have none, or if all lanes are few."""
        few = most_owed(queue, floors, pull.sequences, _queued_sequences)
        if few is None:
            return None
        plan = self._compose_exact(few, pull.sequences, pull.world_size)
        return plan if isinstance(plan, BatchPlan) else None

    def _take_large(
        self, queue: SplitQueue[Lane], floors: Floors, pull: Pull, plan: BatchPlan | Wait
    ) -> BatchPlan | None:
        """Take a group that the minimum shares leave no room for, if its turn comes before the plan's.

        No batch that keeps them will ever hold it, so it does not wait. It goes first if its environment is owed more
        than those of the plan, or as much and it is older than every group of the plan. A group of more than the batch
        goes alone.
        """
        found = _oldest_large(queue, floors, pull.sequences)
        if found is None:
            return None
        lane, group = found
        if isinstance(plan, BatchPlan):
            if min(_turn_key((self._lanes.of(one), one)) for one in plan.groups) < _turn_key(found):
                return None
            self._lanes.put_back(plan.groups)
        lane.remove(group)
        rest = pull.sequences - group.header.sequences
        if rest < 0:
            return BatchPlan.of([group])
        others = self._complete(queue, rest, pull.world_size - 1)
        if others is not None:
            return BatchPlan.of(sorted([group, *others], key=lambda one: one.order))
        self._lanes.put_back([group])
        if isinstance(plan, BatchPlan):
            for one in plan.groups:
                self._lanes.of(one).remove(one)
        return None

    def _complete(self, queue: SplitQueue[Lane], rest: int, ranks: int) -> Sequence[StoredGroup] | None:
        """Take groups of exactly `rest` sequences, without regard to minimum shares, and at least one for each rank."""
        if not rest:
            return None if ranks else []
        plan = self._compose_exact(all_candidates(queue, {}), rest, max(1, ranks))
        return plan.groups if isinstance(plan, BatchPlan) else None

    def _compose_exact_or_short(
        self, stream: Stream, lanes: Candidates, pull: Pull, now: float
    ) -> BatchPlan | Wait:
        """Take exactly `pull.sequences`, or as many as possible below once `exact_wait_s` is over."""
        plan = self._compose_exact(lanes, pull.sequences, pull.world_size)
        if plan is not Wait.NO_EXACT_FIT:
            return plan
        since = self._no_fit_since.setdefault(stream, now)
        if now - since < self._config.exact_wait_s:
            return Wait.NO_EXACT_FIT
        return self._compose_short(lanes, pull.sequences, pull.world_size)

    def _compose_exact(self, lanes: Candidates, target: int, ranks: int) -> BatchPlan | Wait:
        counts = compose(_supplies(lanes, target), target)
        if counts is None:
            return Wait.NO_EXACT_FIT
        if _group_count(counts) < ranks:
            counts = compose(_supplies(lanes, target // ranks), target)
        return Wait.TOO_FEW_GROUPS if counts is None else self._take(lanes, counts)

    def _compose_short(self, lanes: Candidates, target: int, ranks: int) -> BatchPlan | Wait:
        """Take as many sequences as whole groups have, at most `target`."""
        counts = compose_below(_supplies(lanes, target), target)
        if counts is None:
            return Wait.NO_EXACT_FIT
        if _group_count(counts) < ranks:
            counts = compose_below(_supplies(lanes, target // ranks), target)
            if counts is None or _group_count(counts) < ranks:
                return Wait.TOO_FEW_GROUPS
        plan = self._take(lanes, counts)
        plan.short = sum(map(_sequences, plan.groups)) < target
        return plan

    def _compose_by_tokens(self, queue: SplitQueue[Lane], floors: Floors, pull: Pull) -> BatchPlan | Wait:
        """Take whole groups of at most `pull.tokens` tokens: of the lanes owed most, if they have enough groups."""
        few = most_owed(queue, floors, pull.tokens, _queued_tokens)
        groups = _groups_by_tokens(few, pull) if few is not None else []
        if not groups:
            groups = _groups_by_tokens(all_candidates(queue, floors), pull)
        if not groups:
            return Wait.TOO_FEW_GROUPS
        for group in groups:
            self._lanes.of(group).remove(group)
        groups.sort(key=_order)
        return BatchPlan.of(groups)

    def _floors(self, lanes: Iterable[Lane], pull: Pull, now: float) -> Floors | None:
        """Return the floors of lanes with a minimum share; None if one cannot meet it yet and is not silent."""
        floors: dict[Lane, int] = {}
        left = target = pull.tokens or pull.sequences
        waits = False
        for lane in lanes:
            floor = min(left, int(lane.min_share * target + 1e-6))
            if not pull.tokens:
                size = max((size for size in lane.sizes if size <= target), default=lane.group_size)
                floor = floor // size * size
            have = lane.queued.tokens if pull.tokens else lane.queued.sequences
            if floor <= have:
                self._short_since.pop(lane, None)
            elif self._waits_for(lane, now):
                waits = True
            else:
                floor = 0
            floors[lane] = floor
            left -= floor
        return None if waits else floors

    def _waits_for(self, lane: Lane, now: float) -> bool:
        """Return whether a batch waits for a lane that cannot meet its minimum share.

        It waits once, for a short time. What is missing stays owed to the lane.
        """
        if lane.silent(now, self._config.silent_env_s):
            return False
        since = self._short_since.setdefault(lane, now)
        return now - since < self._config.exact_wait_s

    def _take(self, lanes: Candidates, plan: list[Counts]) -> BatchPlan:
        groups: list[StoredGroup] = []
        for candidate, counts in zip(lanes, plan, strict=True):
            for size, number in counts.items():
                if number:
                    groups += candidate.lane.take(size, number).groups
        groups.sort(key=_order)
        return BatchPlan.of(groups)


def _take_alike(queue: SplitQueue[Lane], pull: Pull) -> BatchPlan | None:
    """Take the groups whose turn is first if one lane has all groups, of one size: there is no choice.

    None if there is one, or if the size does not divide the batch.
    """
    if pull.tokens or len(queue.stocked) != 1 or queue.guaranteed:
        return None
    (lane,) = queue.stocked
    if len(lane.sizes) != 1:
        return None
    ((size, queued),) = lane.sizes.items()
    if pull.groups:
        count = min(pull.groups, len(queued))
    else:
        count, rest = divmod(pull.sequences, size)
        if rest or not pull.world_size <= count <= len(queued):
            return None
    return BatchPlan(lane.take(size, count))


def _sequences(group: StoredGroup) -> int:
    return group.header.sequences


def _oldest_large(queue: SplitQueue[Lane], floors: Floors, target: int) -> tuple[Lane, StoredGroup] | None:
    """Return the group whose turn comes first of those too large for a batch that keeps the other lanes' floors."""
    kept = sum(floors.values())
    if max(queue.sizes, default=0) <= target - kept:
        return None
    found = (
        (lane, group)
        for lane in queue.stocked
        if (group := lane.oldest_above(target - kept + floors.get(lane, 0))) is not None
    )
    return min(found, key=_turn_key, default=None)


def _turn_key(candidate: tuple[Lane, StoredGroup]) -> tuple[float, int]:
    """Order candidates: the environment owed most first, then the oldest group."""
    lane, group = candidate
    return -lane.carry, group.order


def _group_count(counts: list[Counts]) -> int:
    return sum(sum(lane.values()) for lane in counts)


def _queued_sequences(lane: Lane) -> int:
    return lane.queued.sequences


def _queued_tokens(lane: Lane) -> int:
    return lane.queued.tokens


def _groups_by_tokens(lanes: Candidates, pull: Pull) -> list[StoredGroup]:
    """Choose groups of at most `pull.tokens` tokens, at least one for each rank; none if there are too few."""
    groups = by_tokens.compose(_offers(lanes), pull.tokens)
    alone = len(groups) == 1 and by_tokens.tokens(groups[0]) > pull.tokens
    if len(groups) < pull.world_size and not alone:
        groups = by_tokens.compose(_offers(lanes), pull.tokens, pull.tokens // pull.world_size)
        if len(groups) < pull.world_size:
            return []
    return groups


def _supplies(lanes: Candidates, largest: int) -> list[LaneSupply]:
    """Return the supply of each lane in groups of at most `largest` sequences."""
    return [_supply(candidate, largest) for candidate in lanes]


def _supply(candidate: Candidate, largest: int) -> LaneSupply:
    lane = candidate.lane
    counts = lane.counts(largest)
    return LaneSupply(
        counts, lambda: map(_sequences, lane.heads(counts)), lane.part, candidate.floor, candidate.carry
    )


def _offers(lanes: Candidates) -> list[by_tokens.LaneOffer]:
    return [
        by_tokens.LaneOffer(lane.heads(lane.sizes), lane.queued.tokens, lane.part, floor, carry)
        for lane, floor, carry in lanes
    ]
