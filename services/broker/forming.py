"""Forming a step: from the queues to a list of groups, or the reason to wait.

What is too old for the policy that will learn is dropped here (or passed on and counted, as its environment is
configured), and only what a batch would take is looked at, so that no pull scans a queue. The wait for an exact
combination is measured per stream, not per request: pulls that are shorter than it still see it end.
"""

from collections import Counter
from collections.abc import Sequence

import msgspec

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Pull, Wait
from rolloutmq.schemas.envelope import Split
from rolloutmq.services.broker.actions import Outbox
from rolloutmq.services.broker.batching import Counts, Supply, compose, largest_below
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.ledger import Ledger, State

Stream = tuple[str, Split]
"""A consumer group and a split: one step of it is leased at a time."""


class Formed(msgspec.Struct):
    """Groups taken from the queues for one step, oldest first."""

    groups: list[StoredGroup]
    short: bool = False


class Former:
    """Takes batches from the lanes."""

    def __init__(self, config: BrokerConfig, lanes: Lanes, ledger: Ledger, outbox: Outbox) -> None:
        self._config = config
        self._lanes = lanes
        self._ledger = ledger
        self._outbox = outbox
        self._unfit_since: dict[Stream, float] = {}
        self.staleness_max = 0

    def form(self, stream: Stream, pull: Pull, now: float, wall: float) -> Formed | Wait:
        """Take exactly `pull.sequences` from the queues, or say why that cannot be now."""
        while True:
            formed = self._attempt(stream, pull, now)
            if isinstance(formed, Wait):
                return formed
            fresh = self._without_stale(formed.groups, pull, wall)
            if fresh is None:
                self._unfit_since.pop(stream, None)
                _settle_carry(self._lanes.of_split(pull.split), formed.groups)
                return formed
            self._lanes.put_back(fresh)

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

    def _without_stale(self, groups: list[StoredGroup], pull: Pull, wall: float) -> list[StoredGroup] | None:
        """Drop what is too old and return the rest; None if nothing had to be dropped."""
        stale: list[StoredGroup] = []
        worst = passed = 0
        for group in groups:
            distance = pull.version.distance(group.header.oldest)
            rule = self._lanes.of(group).rule
            if distance > rule.max_staleness and rule.stale == "drop":
                stale.append(group)
                continue
            passed += distance > rule.max_staleness
            worst = max(worst, distance)
        if not stale:
            self.staleness_max = max(self.staleness_max, worst)
            if passed:
                self._ledger.reasons["passed(stale)"] += passed
            return None
        for group in stale:
            self.drop(group, State.EXPIRED, "stale", wall)
        dropped = set(map(id, stale))
        return [group for group in groups if id(group) not in dropped]

    def drop(self, group: StoredGroup, state: State, reason: str, wall: float) -> None:
        """End a group that was taken from its queue and is not leased."""
        self._ledger.move(State.QUEUED, state, reason=reason)
        self._lanes.let_go(group)
        self._outbox.dropped(wall, group.header.group_id, state.value, reason)


def _supply(lane: Lane, floor: int) -> Supply:
    sizes = lane.sizes
    if len(sizes) > 1:
        ordered = sorted(sizes.items(), key=lambda item: item[1][0].order)
        counts = {size: len(queue) for size, queue in ordered}
    else:
        counts = {size: len(queue) for size, queue in sizes.items()}
    weight = lane.weight if lane.connected else 0.0
    return Supply(counts, lambda: (g.header.sequences for g in lane.in_order()), weight, floor, lane.carry)


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
