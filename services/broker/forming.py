"""Forming a step: from the queues to a list of groups, or the reason to wait.

What is too old for the policy that will learn is dropped here (or passed on and counted, as its environment is
configured), and so is what cannot be read back from disk. Only what a batch would take is looked at, so that no pull
scans a queue. The wait for an exact combination is measured per stream, not per request: pulls that are shorter than
it still see it end.
"""

from collections import Counter
from collections.abc import Iterable, Sequence

import msgspec

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Pull, Wait
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker.batching import Counts, Supply, compose, largest_below
from rolloutmq.services.broker.dropping import Dropping
from rolloutmq.services.broker.groups import StoredGroup, Stream
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.ledger import Ledger, State
from rolloutmq.services.broker.lineage import Lineage


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

    def form(self, stream: Stream, pull: Pull, now: float, wall: float) -> Formed | Wait:
        """Take exactly `pull.sequences` from the queues, or say why that cannot be now."""
        while True:
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
                _settle_carry(self._lanes.of_split(pull.split), formed.groups)
                return formed
            self._lanes.put_back(formed.groups)
            self._dropping.drop(stale, State.EXPIRED, "stale", wall)
            self._dropping.drop(damaged, State.DEAD, "damaged", wall)

    def _alone(self, pull: Pull) -> Formed | None:
        """Take a group that must not fail together with others, if there is one."""
        suspect = self._lanes.suspect(pull.split, pull.sequences)
        if suspect is None:
            return None
        self._lanes.of(suspect).remove(suspect)
        return Formed([suspect], short=suspect.header.sequences < pull.sequences)

    def deadline(self, now: float) -> float:
        """Return when a wait for an exact combination, or for a silent lane, may end."""
        exact = (since + self._config.exact_wait_s for since in self._unfit_since.values())
        silent = (lane.arrived_at + self._config.silent_env_s for lane in self._lanes if lane.min_share)
        return min((at for at in (*exact, *silent) if at > now), default=float("inf"))

    def forget(self) -> None:
        self._unfit_since.clear()

    def _attempt(self, stream: Stream, pull: Pull, now: float) -> Formed | Wait:
        lanes = self._lanes.of_split(pull.split)
        if sum(lane.queued.sequences for lane in lanes) < pull.sequences:
            self._unfit_since.pop(stream, None)
            return Wait.NO_BATCH
        floors = self._floors(lanes, pull.sequences, now)
        if floors is None:
            return Wait.MIN_SHARE
        stocked = [(lane, floors[lane]) for lane in lanes if lane.queued.groups]
        supplies = [_supply(lane, floor) for lane, floor in stocked]
        plan = compose(supplies, pull.sequences)
        if plan is not None:
            return self._take([lane for lane, _ in stocked], plan)
        since = self._unfit_since.setdefault(stream, now)
        if now - since < self._config.exact_wait_s:
            return Wait.NO_EXACT_FIT
        return self._below([lane for lane, _ in stocked], supplies, pull.sequences)

    def _below(self, lanes: Sequence[Lane], supplies: list[Supply], target: int) -> Formed | Wait:
        most = largest_below(supplies, target)
        plan = compose(supplies, most) if most else None
        if plan is None and most:
            for supply in supplies:
                supply.floor = 0
            plan = compose(supplies, most)
        if plan is None:
            return Wait.NO_EXACT_FIT
        formed = self._take(lanes, plan)
        formed.short = most < target
        return formed

    def _floors(self, lanes: list[Lane], target: int, now: float) -> dict[Lane, int] | None:
        """Return what each lane must get; None if one cannot give it yet and is not silent."""
        floors = dict.fromkeys(lanes, 0)
        left = target
        for lane in lanes:
            if not lane.min_share or lane.silent(now, self._config.silent_env_s):
                continue
            size = max(lane.sizes, default=lane.group_size)
            floors[lane] = min(left, int(lane.min_share * target + 1e-6)) // size * size
            if floors[lane] > lane.queued.sequences:
                return None
            left -= floors[lane]
        return floors

    def _take(self, lanes: Sequence[Lane], plan: list[Counts]) -> Formed:
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
            worst = max(worst, distance)
        self.staleness_max = max(self.staleness_max, worst)
        if passed:
            self._ledger.reasons["passed(stale)"] += passed


def _supply(lane: Lane, floor: int) -> Supply:
    sizes = lane.sizes
    if len(sizes) > 1:
        ordered = sorted(sizes.items(), key=lambda item: item[1][0].order)
        counts = {size: len(queue) for size, queue in ordered}
    else:
        counts = {size: len(queue) for size, queue in sizes.items()}
    weight = lane.weight if lane.connected else 0.0
    return Supply(counts, lane.ages, weight, floor, lane.carry)


def _settle_carry(lanes: Sequence[Lane], groups: Sequence[StoredGroup]) -> None:
    """Remember what each lane is owed; a lane that had nothing more to give is owed nothing."""
    if len(lanes) < 2:
        return
    taken: Counter[str] = Counter()
    for group in groups:
        taken[group.env] += group.header.sequences
    target = float(taken.total())
    weight = sum(lane.weight for lane in lanes if lane.connected) or 1.0
    for lane in lanes:
        share = lane.weight / weight if lane.connected else 0.0
        owed = lane.carry + target * share - taken[lane.env]
        lane.carry = max(-target, min(target, owed)) if lane.sizes else 0.0
