"""Reports of training: settled batches, and the figures that a trainer logs.

A batch has an event for the views, and a line of `settled.jsonl` for the report.

Both come from the headers of the groups, so a run shows its rewards, steps and staleness whoever trains. The line waits
until the settlement is durable: it names no group that a restarted broker would deliver again. A broker killed in
between leaves a settlement without a line; the ledger decides on counts.
"""

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
from rolloutmq.services.broker.batches.outcomes import TRAINED
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

    def ended(self, lease: Lease, policy: PolicyVersion, wall: float) -> None:
        """Report a training batch that all ranks have settled; `policy` is the one after it."""
        if lease.split is not Split.TRAIN:
            return
        ended = _Ended.of(lease)
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
                rewards=tuple(map(bounded, means)),
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
        oldest = [group.header.oldest for group in groups]
        known = {one: self._state.run.lineage.staleness(pulled, one) for one in set(oldest)}
        return [known[one] for one in oldest]

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


def _ids(groups: Iterable[StoredGroup]) -> tuple[str, ...]:
    return tuple([group.header.group_id for group in groups])


def _pulled_at(lease: Lease, policy: PolicyVersion) -> PolicyVersion:
    """Return the policy from which staleness counts; for groups of a window, the one before their step."""
    return replace(policy, step=max(0, policy.step - 1)) if lease.window else lease.version


def lane_scores(groups: Iterable[StoredGroup]) -> tuple[LaneScores, ...]:
    """Return the scores of each environment, by name, as far as headers tell them; see `BatchSettled.scores`."""
    found: dict[str, _Tally] = {}
    for group in groups:
        header = group.header
        rewards = header.rewards
        low, high, mean = rewards.low, rewards.high, rewards.mean
        if low <= mean <= high and rewards.m2 >= 0 and isfinite(high - low):  # no comparison holds for NaN
            if (tally := found.get(group.env)) is None:
                tally = found[group.env] = _Tally()
            tally.add(header, low, high, mean)
    return tuple([found[env].scores(env) for env in sorted(found)])


class _Tally:
    """Sums over the groups of one environment; a broker adds thousands of groups a second."""

    __slots__ = ("at_high", "at_low", "flat", "groups", "high", "low", "m2", "mean", "sequences", "tokens")

    def __init__(self) -> None:
        self.groups = self.flat = self.sequences = self.tokens = self.at_low = self.at_high = 0
        self.mean = self.m2 = 0.0
        self.low, self.high = inf, -inf

    def add(self, header: GroupHeader, low: float, high: float, mean: float) -> None:
        """Add the scores of one group, whose summary does not contradict itself; the merge is that of
        `LaneScores.merged`.
        """
        m2, count, before = header.rewards.m2, header.sequences, self.sequences
        self.groups += 1
        self.tokens += header.tokens
        self.sequences = total = before + count
        share, apart = count / total, mean - self.mean
        self.m2 += m2 + apart * apart * before * share
        self.mean += apart * share
        if low == high:
            self.flat += 1
            at_low = at_high = count
        else:
            at_low, at_high = _at_ends(header.rewards, count)
        if low < self.low:
            self.low, self.at_low = low, 0
        if high > self.high:
            self.high, self.at_high = high, 0
        if low == self.low:
            self.at_low += at_low
        if high == self.high:
            self.at_high += at_high

    def scores(self, env: str) -> LaneScores:
        """Return the sums of an environment."""
        return LaneScores(
            env=env,
            groups=self.groups,
            flat=self.flat,
            sequences=self.sequences,
            mean=bounded(self.mean),
            m2=bounded(self.m2),
            low=self.low,
            high=self.high,
            at_low=self.at_low,
            at_high=self.at_high,
            tokens=self.tokens,
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
