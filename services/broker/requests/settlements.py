"""Reports of training: settled batches, and the figures that a trainer logs.

A batch has an event for the views, and a line of `settled.jsonl` for the report.

Both come from the headers of the groups, so a run shows its rewards, steps and staleness whoever trains. The line waits
until the settlement is durable: it names no group that a restarted broker would deliver again. A broker killed in
between leaves a settlement without a line; the ledger decides on counts.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from operator import mul

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.files import SettledBatch
from rolloutmq.schemas.wire.envelope import ErrorCode, GroupHeader, PolicyVersion, RewardSummary, Split
from rolloutmq.schemas.wire.health import LaneScores, bounded
from rolloutmq.schemas.wire.replies import ErrorReply, Ok
from rolloutmq.schemas.wire.requests import LogFigures
from rolloutmq.schemas.wire.training import BatchSettled
from rolloutmq.services.broker.batches.leases import Lease
from rolloutmq.services.broker.batches.shards import TRAINED
from rolloutmq.services.broker.broker_state import BrokerState, refuse, taken_over
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup

ENDS_TOLERANCE = 1e-6
"""Relative distance from the largest possible variance up to which all scores of a group count as at its ends."""


class _Ended(msgspec.Struct):
    """Groups of a lease by outcome."""

    trained: list[StoredGroup]
    filtered: list[StoredGroup]
    rejected: list[StoredGroup]

    @classmethod
    def of(cls, lease: Lease) -> "_Ended":
        found = cls([], [], [])
        places = {GroupState.TRAINED: found.trained, GroupState.FILTERED: found.filtered}
        for part in lease.parts:
            if part.outcomes.count(TRAINED) == len(part.groups):
                found.trained += part.groups
                continue
            for group, (state, _) in zip(part.groups, part.outcomes, strict=True):
                places.get(state, found.rejected).append(group)
        return found


class Settlements:
    """Tells of settled batches, of resumed trainers and of figures."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def ended(self, lease: Lease, wall: float) -> None:
        """Report a training batch that all ranks have settled."""
        if lease.split is not Split.TRAIN:
            return
        ended, policy = _Ended.of(lease), lease.policy_after
        used = [group.header for group in (*ended.trained, *ended.filtered)]
        staleness = self._staleness(ended.trained, _pulled_at(lease, policy))
        means = [header.rewards.mean for header in used]
        sizes = [header.sequences for header in used]
        self._state.outbox.settled(
            SettledBatch(
                at=wall,
                version=policy,
                trained=_ids(ended.trained),
                filtered=_ids(ended.filtered),
                rejected=_ids(ended.rejected),
                staleness=tuple(staleness),
                rewards=_all_bounded(means),
                rewound=lease.rewound,
                consumer=lease.parts[0].consumer,
            )
        )
        sequences = sum(sizes)
        run = self._state.run.name
        event = BatchSettled(
            run=run,
            incarnation=policy.incarnation,
            step=policy.step,
            at=wall,
            stepped=bool(ended.trained),
            reward=bounded(sum(map(mul, means, sizes)) / sequences) if sequences else 0.0,
            sequences=sequences,
            tokens=sum([header.tokens for header in used]),
            trained=len(ended.trained),
            filtered=len(ended.filtered),
            rejected=len(ended.rejected),
            staleness_max=max(staleness, default=0),
            staleness_mean=sum(staleness) / len(staleness) if staleness else 0.0,
            scores=lane_scores([*ended.trained, *ended.filtered]),
        )
        self._state.outbox.publish(topics.telemetry("settled", run), event)

    def _staleness(self, groups: Sequence[StoredGroup], pulled: PolicyVersion) -> list[int]:
        """Return the staleness of each group; it is computed once for each policy."""
        known: dict[PolicyVersion, int] = {}
        found = []
        for group in groups:
            oldest = group.header.oldest
            if (steps := known.get(oldest)) is None:
                steps = known[oldest] = self._state.run.lineage.staleness(pulled, oldest)
            found.append(steps)
        return found

    def resumed(self, version: PolicyVersion, wall: float) -> None:
        """Report that a trainer resumed at a checkpoint: the lines of later steps are void."""
        self._state.outbox.settled(SettledBatch(at=wall, version=version, resumed=True))

    def log(self, request: LogFigures, now: float) -> Ok | ErrorReply:
        """Publish the figures that a trainer logged."""
        consumers = self._state.consumers
        if consumers.fenced(request.consumer, request.generation):
            return taken_over(request.consumer)
        if consumers.heard(request.consumer, now) is None:
            return refuse(ErrorCode.UNKNOWN, f"consumer {request.consumer} is not registered")
        for one in request.logged:
            for name, value in one.figures.items():
                if not isfinite(value):
                    return refuse(ErrorCode.INVALID, f"logged.figures.{name}: must be finite (got {value})")
        run = self._state.run.name
        for one in request.logged:
            self._state.outbox.publish(topics.telemetry("figures", run), replace(one, run=run))
        return Ok()


def _ids(groups: Sequence[StoredGroup]) -> tuple[str, ...]:
    return tuple([group.header.group_id for group in groups]) if groups else ()


def _pulled_at(lease: Lease, policy: PolicyVersion) -> PolicyVersion:
    """Return the policy from which staleness counts; for groups of a window, the one before their step."""
    return replace(policy, step=max(0, policy.step - 1)) if lease.window else lease.version


def _all_bounded(values: list[float]) -> tuple[float, ...]:
    """Return `bounded` values; finite ones, whose sum shows at a glance that they are, stay as they are."""
    return tuple(values) if isfinite(sum(values)) else tuple(map(bounded, values))


def lane_scores(groups: Sequence[StoredGroup]) -> tuple[LaneScores, ...]:
    """Return the scores of each environment, by name, as far as headers tell them; see `BatchSettled.scores`."""
    lanes: defaultdict[str, list[GroupHeader]] = defaultdict(list)
    for group in groups:
        lanes[group.env].append(group.header)
    found = [_scores(env, lanes[env]) for env in sorted(lanes)]
    return tuple([scores for scores in found if scores.groups])


def _scores(env: str, headers: Iterable[GroupHeader]) -> LaneScores:
    """Return the sums over groups of one environment, without those whose summary contradicts itself.

    The merge is that of `LaneScores.merged`. A broker adds thousands of groups a second, so the sums are plain numbers.
    """
    groups = flat = sequences = tokens = at_low = at_high = 0
    mean = m2 = 0.0
    lowest, highest = inf, -inf
    for header in headers:
        rewards, count = header.rewards, header.sequences
        low, high = rewards.low, rewards.high
        if not (
            low <= rewards.mean <= high and rewards.m2 >= 0 and isfinite(high - low)
        ):  # as no comparison with NaN
            continue
        groups += 1
        tokens += header.tokens
        before, sequences = sequences, sequences + count
        share, apart = count / sequences, rewards.mean - mean
        m2 += rewards.m2 + apart * apart * before * share
        mean += apart * share
        flat += low == high
        low_ones, high_ones = (count, count) if low == high else _at_ends(rewards, count)
        if low < lowest:
            lowest, at_low = low, 0
        if high > highest:
            highest, at_high = high, 0
        at_low += low_ones * (low == lowest)
        at_high += high_ones * (high == highest)
    return LaneScores(
        env=env,
        groups=groups,
        flat=flat,
        sequences=sequences,
        mean=bounded(mean),
        m2=bounded(m2),
        low=lowest,
        high=highest,
        at_low=at_low,
        at_high=at_high,
        tokens=tokens,
        sxx=0.0,
        syy=0.0,
        sxy=0.0,
    )


def _at_ends(rewards: RewardSummary, sequences: int) -> tuple[int, int]:
    """Return how many scores are the lowest and the highest, if all are one of both; else one each.

    No scores of a mean vary more than those at the ends (Bhatia and Davis 2000): only there is the variance the product
    of the distances of the mean from both.
    """
    widest = (rewards.high - rewards.mean) * (rewards.mean - rewards.low)
    if not 0 < widest < inf or abs(rewards.m2 / sequences - widest) > ENDS_TOLERANCE * widest:
        return 1, 1
    at_high = round(sequences * (rewards.mean - rewards.low) / (rewards.high - rewards.low))
    return sequences - at_high, at_high
