"""Forming a step: from the queues to a list of groups, or the reason to wait.

What is too old for the policy that will learn is dropped here (or passed on and counted, as its environment is
configured), and so is what cannot be read back from disk. Only what a batch would take is looked at, so that no pull
scans a queue. Every rank gets a group: where a batch would have fewer, it is made of smaller groups, or waited for. A
group that goes out alone, because it may be poison or is by itself more than was asked, leaves the other ranks without.
The wait for an exact combination is measured per stream, not per request: pulls that are shorter than
it still see it end.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

import msgspec

from rolloutmq.bus.lineage import Lineage
from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Pull, Wait
from rolloutmq.schemas.envelope import PolicyVersion, Split
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker import budget
from rolloutmq.services.broker.batching import Counts, Supply, compose, compose_below
from rolloutmq.services.broker.dropping import Dropping
from rolloutmq.services.broker.groups import StoredGroup, Stream
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.ledger import Ledger, State

Floors = dict[Lane, int]
"""What each lane that has anything must give."""


class Formed(msgspec.Struct):
    """Groups taken from the queues for one step, oldest first."""

    groups: list[StoredGroup]
    short: bool = False


class Former:
    """Takes batches from the lanes."""

    def __init__(
        self, config: BrokerConfig, lanes: Lanes, ledger: Ledger, dropping: Dropping, lineage: Lineage
    ) -> None:
        self._config = config
        self._lanes = lanes
        self._ledger = ledger
        self._dropping = dropping
        self._lineage = lineage
        self._unfit_since: dict[Stream, float] = {}
        self.staleness_max = 0
        self.closed = False
        """No new batch is ever formed: what is served is a record."""

    def adopt(self, config: BrokerConfig) -> None:
        """Go on with other waits."""
        self._config = config

    def form(self, stream: Stream, pull: Pull, now: float, wall: float) -> Formed | Wait:
        """Take exactly `pull.sequences`, or at most `pull.tokens`, from the queues, or say why that cannot be now."""
        measure = budget.tokens if pull.tokens else _sequences
        while not self.closed:
            formed = self._alone(pull) or self._attempt(stream, pull, now)
            if isinstance(formed, Wait):
                return formed
            stale = self._stale(formed.groups, pull.version)
            try:
                damaged = [group for group in formed.groups if group not in stale and not group.body.load()]
            except JournalWaitsError:
                self._lanes.put_back(formed.groups)
                return Wait.JOURNAL_SLOW
            if not stale and not damaged:
                self._unfit_since.pop(stream, None)
                self.count(formed.groups, pull.version)
                _settle_carry(self._lanes.of_split(pull.split), formed.groups, measure)
                return formed
            self._lanes.put_back(formed.groups)
            self._dropping.drop(stale, State.EXPIRED, "stale", wall)
            self._dropping.drop(damaged, State.DEAD, "damaged", wall)
        return Wait.END_OF_REPLAY

    def _alone(self, pull: Pull) -> Formed | None:
        """Take a group that must not fail together with others, if there is one."""
        suspect = self._lanes.suspect(pull.split)
        if suspect is None:
            return None
        self._lanes.of(suspect).remove(suspect)
        least = pull.tokens or pull.sequences
        got = suspect.header.tokens if pull.tokens else suspect.header.sequences
        return Formed([suspect], short=got < least)

    def deadline(self, now: float) -> float:
        """Return when a wait for an exact combination, or for a silent lane, may end."""
        exact = (since + self._config.exact_wait_s for since in self._unfit_since.values())
        silent = (lane.arrived_at + self._config.silent_env_s for lane in self._lanes if lane.min_share)
        return min((at for at in (*exact, *silent) if at > now), default=float("inf"))

    def forget(self) -> None:
        self._unfit_since.clear()

    def _attempt(self, stream: Stream, pull: Pull, now: float) -> Formed | Wait:
        lanes = self._lanes.of_split(pull.split)
        if _missing(lanes, pull):
            self._unfit_since.pop(stream, None)
            return Wait.NO_BATCH
        floors = self._floors(lanes, pull, now)
        if floors is None:
            return Wait.MIN_SHARE
        stocked = {lane: floors[lane] for lane in lanes if lane.sizes}
        if pull.tokens:
            return self._within(stocked, pull)
        formed = self._fitting(stream, stocked, pull, now)
        return self._above(stocked, pull.sequences, formed) or formed

    def _above(self, floors: Floors, target: int, formed: Formed | Wait) -> Formed | None:
        """Take a group of more than `target` sequences alone, if its turn comes before that of what was formed.

        No batch will ever hold it. It goes instead of waiting, and before a batch if its environment is owed more
        than those of the batch, or as much and it is older than what the batch takes.
        """
        found = [(lane, group) for lane in floors if (group := lane.oldest_above(target)) is not None]
        if not found:
            return None
        lane, group = min(found, key=_turn)
        if isinstance(formed, Formed):
            if min(_turn((self._lanes.of(one), one)) for one in formed.groups) < _turn((lane, group)):
                return None
            self._lanes.put_back(formed.groups)
        lane.remove(group)
        return Formed([group])

    def _fitting(self, stream: Stream, stocked: Floors, pull: Pull, now: float) -> Formed | Wait:
        """Take exactly so many sequences, or as many as can be below, once that was waited for."""
        formed = self._exact(stocked, pull.sequences, pull.world_size)
        if formed is not Wait.NO_EXACT_FIT:
            return formed
        since = self._unfit_since.setdefault(stream, now)
        if now - since < self._config.exact_wait_s:
            return Wait.NO_EXACT_FIT
        return self._below(stocked, pull.sequences, pull.world_size)

    def _exact(self, floors: Floors, target: int, ranks: int) -> Formed | Wait:
        """Take exactly `target` sequences."""
        plan = compose(_supplies(floors, target), target)
        if plan is None:
            return Wait.NO_EXACT_FIT
        if _groups(plan) < ranks:
            plan = compose(_supplies(floors, target // ranks), target)
        return Wait.TOO_FEW_GROUPS if plan is None else self._take(floors, plan)

    def _below(self, floors: Floors, target: int, ranks: int) -> Formed | Wait:
        """Take as many sequences as whole groups have, at most `target`: the wait for exactly that is over."""
        plan = compose_below(_supplies(floors, target), target)
        if plan is None:
            return Wait.NO_EXACT_FIT
        if _groups(plan) < ranks:
            plan = compose_below(_supplies(floors, target // ranks), target)
            if plan is None or _groups(plan) < ranks:
                return Wait.TOO_FEW_GROUPS
        formed = self._take(floors, plan)
        formed.short = sum(map(_sequences, formed.groups)) < target
        return formed

    def _within(self, floors: Floors, pull: Pull) -> Formed | Wait:
        """Take whole groups of at most `pull.tokens` tokens."""
        groups = budget.compose(_offers(floors), pull.tokens)
        alone = len(groups) == 1 and budget.tokens(groups[0]) > pull.tokens
        if len(groups) < pull.world_size and not alone:
            groups = budget.compose(_offers(floors), pull.tokens, pull.tokens // pull.world_size)
            if len(groups) < pull.world_size:
                return Wait.TOO_FEW_GROUPS
        for group in groups:
            self._lanes.of(group).remove(group)
        groups.sort(key=lambda group: group.order)
        return Formed(groups)

    def _floors(self, lanes: list[Lane], pull: Pull, now: float) -> dict[Lane, int] | None:
        """Return what each lane must get; None if one cannot give it yet and is not silent."""
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

    def _take(self, lanes: Iterable[Lane], plan: list[Counts]) -> Formed:
        groups: list[StoredGroup] = []
        for lane, counts in zip(lanes, plan, strict=True):
            for size, number in counts.items():
                if number:
                    groups += lane.take(size, number)
        groups.sort(key=lambda group: group.order)
        return Formed(groups)

    def _stale(self, groups: list[StoredGroup], version: PolicyVersion) -> list[StoredGroup]:
        """Return those that are too old for their environment, unless it passes them on."""
        found = []
        for group in groups:
            rule = self._lanes.of(group).rule
            if (
                rule.stale == "drop"
                and not group.requeued
                and self._staleness(group, version) > rule.max_staleness
            ):
                found.append(group)
        return found

    def _staleness(self, group: StoredGroup, version: PolicyVersion) -> int:
        return self._lineage.distance(version, group.header.oldest)

    def count(self, groups: Iterable[StoredGroup], version: PolicyVersion) -> None:
        """Count how old the groups of a batch are for the policy that learns from them."""
        worst = passed = 0
        for group in groups:
            distance = self._staleness(group, version)
            passed += distance > self._lanes.of(group).rule.max_staleness
            worst = max(worst, distance if group.split is Split.TRAIN else 0)
        self.staleness_max = max(self.staleness_max, worst)
        if passed:
            self._ledger.reasons["passed(stale)"] += passed


def _sequences(group: StoredGroup) -> int:
    return group.header.sequences


def _turn(candidate: tuple[Lane, StoredGroup]) -> tuple[float, int]:
    """Say whose turn it is: whose environment is owed most, then who came first."""
    lane, group = candidate
    return -lane.carry, group.order


def _groups(plan: list[Counts]) -> int:
    return sum(sum(counts.values()) for counts in plan)


def _missing(lanes: Iterable[Lane], pull: Pull) -> bool:
    """Whether less than a batch's worth is queued."""
    if pull.tokens:
        return sum(lane.queued.tokens for lane in lanes) < pull.tokens
    return sum(lane.queued.sequences for lane in lanes) < pull.sequences


def _supplies(floors: Floors, largest: int) -> list[Supply]:
    """Return what the lanes have in groups of at most `largest` sequences."""
    return [_supply(lane, floor, largest) for lane, floor in floors.items()]


def _supply(lane: Lane, floor: int, largest: int) -> Supply:
    counts = lane.counts(largest)
    return Supply(counts, lambda: map(_sequences, lane.heads(counts)), _weight(lane), floor, lane.carry)


def _offers(floors: Floors) -> list[budget.Offer]:
    return [
        budget.Offer(lane.heads(lane.sizes), lane.queued.tokens, _weight(lane), floor, lane.carry)
        for lane, floor in floors.items()
    ]


def _weight(lane: Lane) -> float:
    return lane.weight if lane.connected else 0.0


def _settle_carry(
    lanes: Sequence[Lane], groups: Sequence[StoredGroup], measure: Callable[[StoredGroup], int]
) -> None:
    """Remember what each lane is owed; a lane that had nothing more to give is owed nothing."""
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
