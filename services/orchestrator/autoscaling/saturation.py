"""The saturation detector: how many workers the inference servers of a run can feed. Pure.

All environments sample from the same servers, so they are judged together. The measure is sequences per second: the
`size` of a fleet is what its workers would make if none slowed another down; their throughput is what they make.

An environment that makes a small part of all is measured over a longer time than the others. Until its own pace is
known, what it makes counts all the same.

Growth needs evidence. At most twice the proven size may run, or a few workers more, until enough groups have arrived to
tell how fast the workers are. If they are about as fast as fewer were, their size is proven, and the next doubling is
free. If they are clearly slower, they share a full server: its capacity is their throughput, and the environments scale
back to it, each to its share. If throughput then drops, there was no saturation.

Where rollouts take minutes, the tokens of their completions confirm a growth before groups can: see `progress`. Workers
that load the servers and deliver nothing yet are not judged by groups.

Longer rollouts look the same: the fleet grows, and its throughput stays. A fleet that makes what the trainer demands is
not full. Once rollouts seem to have become `LONGER` times longer, the next growth is tested with fewer workers. Another
engine is expected to feed as many as each of the others.

A pace that changes while the fleet stays is a change of the rollouts, and the baseline follows it. At the capacity,
slower workers are first tried with fewer of them, and faster ones with some more. After a hold time, which doubles, one
more worker is tried at the capacity; if that helps two more, then four: the server may have become faster. A worker
that crashed and starts again counts as a worker.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.budget import divide
from rolloutmq.services.orchestrator.autoscaling.control_law import ROUND
from rolloutmq.services.orchestrator.autoscaling.pressure import ServerLimit
from rolloutmq.services.orchestrator.autoscaling.progress import (
    Meters,
    ProgressMeter,
    Sampled,
    reach,
    unslowed,
)

GROUPS: Final = 24
"""Arrived groups that tell a throughput, while nobody knows how much it differs by chance."""
LEAST_GROUPS: Final = 8
PRECISE: Final = 0.1
"""Least groups if they arrive evenly; and the relative error that they may have."""
OWN_GROUPS: Final = 12
"""Most groups that one environment needs for its own pace, if it makes at least `LARGE` of all."""
LARGE: Final = 0.2
CYCLES: Final = 1.0
"""Rollouts that they must span: workers that started together deliver together."""
SLOW_CYCLES: Final = 2.0
SLOW_S: Final = 120.0
"""Rollouts, and seconds, after which one group of each worker is enough: some rollouts take an hour."""
LONG_S: Final = 30.0
"""Rollouts from which tokens may confirm growth. Of shorter ones groups tell as early, and of two noisy measurements
the one that lets more workers start would count."""
SOON_S: Final = 15.0
"""Time for `GROUPS` within which growth waits for a measurement if a worker became slower."""
SURE_GROUPS: Final = 200
SURE_S: Final = 45.0
"""The same for one more worker at the capacity, whose effect is small."""
LIKE: Final = 0.15
"""Relative change of the size within one measurement."""
MORE: Final = 1.005
"""Size, relative to the proven one, from which it is another."""
SLOWER: Final = 0.85
"""Ratio to the earlier pace below which a worker is clearly slower."""
FIRST_HOLD_S: Final = 900.0
"""First hold time of a capacity; it doubles each time."""
LONGEST_HOLD_S: Final = 3600.0
ROOM: Final = 1.05
"""Size relative to the capacity, so that the server stays full while a worker pauses."""
FURTHER: Final = 1.9
FEW: Final = 4
"""Limit of growth without evidence: this factor of the proven size, or this many workers more."""
KEPT: Final = 0.9
"""Minimum throughput of saturated workers, relative to that of fewer."""
CLOSE: Final = 0.8
"""Size, relative to another, from which the two are too close to tell their throughputs apart."""
HELPS: Final = 0.5
"""Minimum part of the expected gain that shows that more workers help."""
STEADY: Final = 0.05
"""Relative difference from the baseline that is no change while the capacity is known."""
CHANCE: Final = 4.0
"""Difference of two throughputs, in standard errors, that is a change."""
FOLLOWS: Final = 0.25
"""Weight of a new measurement in the baseline."""
FOLLOWS_PER_S: Final = 0.0004
"""Part by which the baseline may fall in a second."""
ENOUGH, ENOUGH_PART = 0.95, 0.03
"""Throughput relative to the demand, and waiting part of the trainer's time, up to which it has enough."""
LONGER: Final = 1.6
"""Factor by which rollouts may seem to become longer before a growth is tested with fewer workers."""
TESTED: Final = 0.79
"""Largest size to scale back to, relative to the present one, so that the throughputs can be told apart."""
CRASHES: Final = 0.08
"""Difference in availability that moves no limit: with twenty workers one crash is 0.05."""
LARGE_PROBE: Final = 0.25
"""Workers of a large probe, relative to the present ones: their pace changed, and it may be that more help now."""
LOST: Final = 0.95
"""Throughput after scaling back, relative to that before, from which the capacity is not too low."""


class ServerUse(msgspec.Struct, frozen=True):
    """What the detector knows of one environment.

    Attributes:
        env: Its name.
        workers: Workers whose rollouts arrive now; crashed ones that start again count.
        made: Sequences made, in total.
        busy_s: Time in which its workers did not wait meanwhile, summed over them.
        present_s: Time in which they were there.
        counted_s: Time in which this was measured.
        pace: Sequences per second of one worker, lately; None while unknown.
        rollout_s: Mean duration of a rollout.
        group_sequences: Sequences of one group.
        weight: Its share, relative to the others.
        want: Workers it would run if the servers fed them all.
        available: Part of their time in which its workers are ready; the others crashed and start again.
        demand: Sequences per second the trainer would consume; None while unknown.
        starved_s: Time in which the trainer waited, in total.
        sampled: What its workers have sampled, whether their rollouts arrive yet or not.
        dispersion: Variance of the number of groups relative to that of independent ones.
    """

    env: str
    workers: int
    made: float
    busy_s: float
    present_s: float
    counted_s: float
    pace: float | None
    rollout_s: float = 0.0
    group_sequences: int = 1
    weight: float = 1.0
    want: float = 0.0
    available: float = 1.0
    demand: float | None = None
    starved_s: float = 0.0
    sampled: Sampled = msgspec.field(default_factory=Sampled)
    dispersion: float = 1.0

    @property
    def trusts_tokens(self) -> bool:
        """Return whether tokens may confirm growth: rollouts are long, and enough groups have arrived to know how many
        workers to grow to."""
        return self.rollout_s >= LONG_S and self.made >= self.group_sequences * min(OWN_GROUPS, self.workers)


class _Span(msgspec.Struct, frozen=True):
    """What one environment did since some time: sequences and groups made, time without waits, and mean workers."""

    made: float
    groups: float
    busy_s: float
    workers: float

    @classmethod
    def of(cls, then: ServerUse, now: ServerUse) -> "_Span":
        made = now.made - then.made
        workers = (now.present_s - then.present_s) / max(now.counted_s - then.counted_s, 1e-3)
        return cls(made, made / max(1, now.group_sequences), now.busy_s - then.busy_s, workers)

    def pace(self, least: int) -> float | None:
        """Return the sequences per second of one worker; None with fewer groups than `least`."""
        return self.made / self.busy_s if self.busy_s > 0.0 and self.groups >= least else None


class _Rest(msgspec.Struct):
    """The environments without a pace of their own in a measurement, taken together."""

    size: float = 0.0
    made: float = 0.0
    expected: float = 0.0
    """What they would have made if none slowed another down."""
    groups: float = 0.0

    def add(self, span: _Span, best: float) -> None:
        self.size += span.workers * best
        self.made += span.made
        self.expected += span.busy_s * best
        self.groups += span.groups

    def total(self, usual: float) -> float:
        """Return their throughput: of their size, the part that they made; the `usual` part with too few groups."""
        is_told = self.groups >= OWN_GROUPS and self.expected > 0.0
        return self.size * (self.made / self.expected if is_told else usual)


class _Measured(msgspec.Struct, frozen=True):
    """One measurement: paces by environment; size, throughput and groups; whether the trainer got what it demands."""

    paces: Mapping[str, float]
    size: float
    total: float
    groups: float
    is_sure: bool
    is_enough: bool


def _telling(uses: Sequence[ServerUse]) -> int:
    """Return the groups that tell the throughput of all: fewer if they arrive more evenly than by chance."""
    dispersion = max((one.dispersion for one in uses), default=1.0)
    return min(GROUPS, max(LEAST_GROUPS, math.ceil(dispersion / PRECISE**2)))


class SaturationDetector(msgspec.Struct, frozen=True):
    """State of the search for the capacity. Sizes and throughputs are in sequences per second."""

    capacity: float = 0.0
    """Largest useful size; 0 if unknown."""
    known: float = 0.0
    """Capacity before the present probe; 0 without one."""
    unit: float = 0.0
    """What one worker of the present probe adds."""
    step: int = 1
    """Workers of the next probe; doubles each time they help."""
    usual: float = 0.0
    """Throughput at the capacity before the probe."""
    full: float = 0.0
    """Largest throughput that full servers surely had; 0 if unknown."""
    full_groups: float = 0.0
    """Groups that told it."""
    until: float = -math.inf
    """Time of the next probe."""
    hold_s: float = FIRST_HOLD_S
    bests: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Pace of a worker without saturation, by environment."""
    proven: float = 0.0
    """Largest size that was not clearly slower."""
    top: float = 0.0
    """Throughput at that size."""
    usual_part: float = 1.0
    """The same relative to the size, as measured after the last clear growth: a little more is no measure."""
    made: float = 0.0
    """Throughput before scaling back to the capacity; 0 once the result is known."""
    above: float = 0.0
    """Size that made it; during a probe, the size before it."""
    tests_fewer: bool = False
    """Workers at the capacity changed their pace, and fewer of them are tried."""
    longer: float = 1.0
    """Factor by which rollouts seem to have become longer since that was last tested."""
    doubted: bool = False
    """The last measurement differed clearly from the baseline, and may have begun before the change."""
    size: float = 0.0
    """Size at the beginning of the present measurement."""
    since: float = -math.inf
    """That beginning."""
    begun: Mapping[str, ServerUse] = msgspec.field(default_factory=dict)
    """What was known of each environment then."""
    earlier: Mapping[str, ServerUse] = msgspec.field(default_factory=dict)
    """The same of environments whose own measurement began earlier: the last one had too few groups of theirs."""
    ready: Mapping[str, float] = msgspec.field(default_factory=dict)
    """Availability that the limit of each environment counts with: each crash would move the limit to and fro."""
    engines: int = 0
    """Inference servers; a change of their number discards the capacity."""
    meters: Meters = msgspec.field(default_factory=dict)
    """Paces within rollouts, by environment."""

    def looked(self, uses: Sequence[ServerUse], engines: int, now: float) -> "SaturationDetector":
        """Return the state after one more sample."""
        new = self if engines == self.engines else self._with_engines(engines, now)
        if new.capacity and math.isinf(new.until):
            new = replace(new, until=now + new.hold_s)
        size = new._size(uses)
        like = 0.0 if new.known else LIKE * new.size
        present = {one.env for one in uses if one.workers}
        if abs(size - new.size) > like + 1e-9 or present != new.begun.keys():
            new = new._anew(uses, now, {env for env in new.begun if env not in new.bests})
        new = replace(new, ready={one.env: new._ready(one) for one in uses}, meters=new._metered(uses))
        measured = new._measured(uses, now)
        if measured is None:
            return new
        new = new._judged(measured, uses, now)
        if new.capacity:
            return new
        return replace(new, meters={env: one.proven() for env, one in new.meters.items()})

    def limit(self, use: ServerUse, uses: Sequence[ServerUse]) -> ServerLimit:
        """Return what the servers allow one environment."""
        further = reach(self.meters, use.env)
        if use.env not in self.bests:
            return ServerLimit(reach=max(FEW, use.workers, further))
        best = self.bests[use.env] * self.ready.get(use.env, use.available)
        most = math.ceil(self._share(self.capacity, use, uses) / best - 1e-9) if self.capacity else 0
        proven = self._share(max(FURTHER * self.top, self.top + FEW * best), use, uses) / best
        return ServerLimit(
            most=max(1, most) if most else 0,
            reach=max(FEW, math.floor(proven + 1e-9), most, further),
            tried=math.floor(self._share(self.proven, use, uses) / best + ROUND),
            slow=self._is_slow(use, uses),
            best=best,
            capacity=self.capacity,
            proven=self.proven,
            made=self.made,
            above=self.above if self.made else 0.0,
            tests_fewer=self.tests_fewer,
        )

    def _metered(self, uses: Sequence[ServerUse]) -> dict[str, ProgressMeter]:
        """Return the meters after one more sample; at a known capacity nothing is confirmed."""
        meters = {one.env: self.meters.get(one.env, ProgressMeter()) for one in uses}
        if self.capacity:
            meters = {env: replace(meter, confirmed=0) for env, meter in meters.items()}
        # After a restart the present fleet may be larger than the one known to be fast.
        begins = not self.capacity and (not self.proven or self._size(uses) <= (1.0 + LIKE) * self.proven)
        return {
            one.env: meters[one.env].looked(
                one.sampled, confirms=not self.capacity and one.trusts_tokens, begins=begins
            )
            for one in uses
        }

    def _unslowed(self, use: ServerUse, pace: float) -> float:
        """Return the pace of a worker among fewer, if tokens tell it."""
        return unslowed(self.meters, use.env, pace) if use.trusts_tokens else pace

    def _ready(self, use: ServerUse) -> float:
        """Return the availability to count with: the former one until it has clearly changed."""
        former = self.ready.get(use.env, 0.0)
        return former if abs(use.available - former) <= CRASHES else use.available

    def resumed(self, env: str, limit: ServerLimit, engines: int) -> "SaturationDetector":
        """Return the state with what an earlier orchestrator had told one environment."""
        if not limit.best:
            return self
        return replace(
            self,
            capacity=limit.capacity,
            proven=limit.proven,
            top=limit.proven,
            made=limit.made,
            above=limit.above,
            tests_fewer=limit.tests_fewer,
            bests={**self.bests, env: limit.best},
            engines=engines,
        )

    def _is_slow(self, use: ServerUse, uses: Sequence[ServerUse]) -> bool:
        """Return whether a worker makes clearly less than it did, and that will be understood soon."""
        best = self.bests[use.env]
        if use.pace is None or self.capacity or use.pace >= SLOWER * best:
            return False
        groups_s = use.workers * use.pace / max(1, use.group_sequences)
        return self._size(uses) > MORE * self.proven or SOON_S * groups_s >= _telling(uses)

    def _size(self, uses: Sequence[ServerUse]) -> float:
        return sum(one.workers * one.available * (self.bests.get(one.env) or one.pace or 0.0) for one in uses)

    def _share(self, size: float, use: ServerUse, uses: Sequence[ServerUse]) -> float:
        """Return the part of a size for one environment, by weights; what others do not want is divided again."""
        if len(uses) == 1:
            return size
        wants = [one.want * one.available * (self.bests.get(one.env) or one.pace or 0.0) for one in uses]
        return divide(size, [one.weight for one in uses], wants)[uses.index(use)]

    def _with_engines(self, engines: int, now: float) -> "SaturationDetector":
        """Expect of more engines what each of the present ones can feed; of fewer, measure it anew."""
        if not self.engines:
            return replace(self, engines=engines)
        new = SaturationDetector(
            engines=engines, bests=self.bests, proven=self.proven, top=self.top, meters=self.meters
        )
        known = self.known or self.capacity
        if not known or engines < self.engines:
            return new
        return replace(new, capacity=known * engines / self.engines, until=now + FIRST_HOLD_S)

    def _anew(self, uses: Sequence[ServerUse], now: float, left: Collection[str]) -> "SaturationDetector":
        """Return the state at the beginning of a measurement; the own one of those that are `left` out goes on."""
        begun = {one.env: one for one in uses if one.workers}
        earlier = {env: self.earlier.get(env, self.begun[env]) for env in left if env in begun}
        return replace(self, size=self._size(uses), since=now, begun=begun, earlier=earlier)

    def _measured(self, uses: Sequence[ServerUse], now: float) -> _Measured | None:
        """Return the measurement since its beginning; None while it tells too little."""
        paces: dict[str, float] = {}
        groups, size, total, rest, took_s = 0.0, 0.0, 0.0, _Rest(), now - self.since
        whole, present = self._size(uses), [one for one in uses if one.workers]
        few, enough = sum(one.workers for one in present), _telling(present)
        is_slow = took_s >= max(SLOW_S, SLOW_CYCLES * max((one.rollout_s for one in uses), default=0.0))
        for one in present:
            own_groups = min(OWN_GROUPS, enough)
            least = min(own_groups, one.workers) if is_slow else own_groups
            span, best = _Span.of(self.begun[one.env], one), self.bests.get(one.env)
            is_large = one.workers * (best or one.pace or 0.0) >= LARGE * whole
            if took_s < CYCLES * one.rollout_s or (is_large and span.groups < least):
                return None
            if one.sampled.workers > (1.0 + LIKE) * one.workers:
                return None  # others load the servers already, and deliver nothing yet
            groups += span.groups
            pace = span.pace(least)
            own = pace or _Span.of(self.earlier.get(one.env, self.begun[one.env]), one).pace(least)
            if own is not None:
                paces[one.env] = own
            if pace is not None:
                size += span.workers * (best or self._unslowed(one, pace))
                total += span.workers * pace
            else:
                rest.add(span, best or own or one.pace or 0.0)
        if groups < (few if is_slow else enough) or not paces:
            return None
        total += rest.total(total / size if size else 1.0)
        is_sure = groups >= SURE_GROUPS and took_s >= SURE_S
        return _Measured(
            paces, size + rest.size, total, groups, is_sure, self._is_enough(uses, total, took_s)
        )

    def _is_enough(self, uses: Sequence[ServerUse], total: float, took_s: float) -> bool:
        demands = [one.demand for one in uses]
        starved_s = max(
            one.starved_s - self.begun[one.env].starved_s for one in uses if one.env in self.begun
        )
        return (
            None not in demands
            and total >= ENOUGH * sum(one or 0.0 for one in demands)
            and starved_s <= ENOUGH_PART * took_s
        )

    def _judged(self, seen: _Measured, uses: Sequence[ServerUse], now: float) -> "SaturationDetector":
        new = self._anew(uses, now, self.begun.keys() - seen.paces.keys())
        if unknown := {env: pace for env, pace in seen.paces.items() if env not in self.bests}:
            bests = {one.env: self._unslowed(one, unknown[one.env]) for one in uses if one.env in unknown}
            new = replace(new, bests={**self.bests, **bests})
        if not self.proven:
            return new._first(seen, now)
        if self.capacity and seen.size > self._fits(uses):
            return new  # scale-down in progress
        if self.tests_fewer:
            return self._fewer(new, seen, now) if seen.is_sure else self
        if self.made:
            return self._verified(new, seen)
        if self.known:
            return self._probed(new, seen, now)
        if self.capacity:
            return self._at_capacity(new, seen, uses, now)
        if seen.size > MORE * self.proven and seen.total < SLOWER * seen.size:
            if seen.total < KEPT * self.top:
                # Saturated workers share the throughput of fewer. Here every worker became slower: a new pace.
                return new._based(seen)
            if not seen.is_enough:
                return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)
            # They make what is demanded: it seems that rollouts became longer.
            return replace(new._based(seen), longer=self.longer * seen.size / seen.total)
        if self.longer >= LONGER and seen.size > MORE * self.proven:
            # If fewer make less, rollouts did become longer.
            based = replace(seen, size=seen.total)
            return replace(new._based(seen)._found(TESTED * seen.total, based, now), longer=1.0)
        return new._followed(seen, now - self.since)

    def _first(self, seen: _Measured, now: float) -> "SaturationDetector":
        """Take the first measurement of groups as proven, unless tokens tell that a smaller fleet was as fast."""
        new = replace(self, proven=seen.total, top=seen.total)
        if seen.total >= SLOWER * seen.size:
            return replace(new, proven=seen.size)
        return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)

    def _fits(self, uses: Sequence[ServerUse]) -> float:
        """Return the largest size of whole workers within the capacity."""
        return self.capacity + sum(self.bests.get(one.env, 0.0) for one in uses)

    def _at_capacity(
        self, new: "SaturationDetector", seen: _Measured, uses: Sequence[ServerUse], now: float
    ) -> "SaturationDetector":
        """Wait for the time of the next probe; follow workers that are far below the capacity."""
        if seen.size <= CLOSE * self.capacity:
            return new._followed(seen, now - self.since)
        change = seen.total / min(seen.size, self.capacity / ROOM)
        if not SLOWER <= change <= 1.0 / SLOWER:
            if not self.doubted:
                return replace(new, doubted=True)
            return new._slowed(seen) if change < 1.0 else new._sped_up(seen, now)
        new = replace(new, doubted=False)
        if not seen.is_sure:
            return self if now >= self.until or seen.size > (1.0 + STEADY) * self.full > 0.0 else new
        if self._is_fuller(seen, uses):
            return new._sped_up(seen, now)
        if now < self.until:
            return new
        return replace(new, unit=max(self.bests.get(one.env, 0.0) for one in uses))._probing(seen, now)

    def _is_fuller(self, seen: _Measured, uses: Sequence[ServerUse]) -> bool:
        """Return whether the servers make more than the full ones did, by more than chance: they became faster."""
        if not self.full:
            return False
        dispersion = max(one.dispersion for one in uses)
        error = math.sqrt(dispersion / seen.groups + dispersion / self.full_groups)
        return seen.total > self.full * (1.0 + max(STEADY, CHANCE * error))

    def _probing(self, seen: _Measured, now: float) -> "SaturationDetector":
        """Try some more workers than those measured."""
        more = self.capacity + self.step * self.unit
        new = replace(self, capacity=more, known=self.capacity, until=now + self.hold_s)
        return replace(new, usual=seen.total, above=seen.size)

    def _slowed(self, seen: _Measured) -> "SaturationDetector":
        """Try fewer workers, since those at the capacity became clearly slower.

        Their rollouts are longer, or the server became slower: neither makes more workers useful if the server is full.
        """
        new = replace(self._based(seen), hold_s=FIRST_HOLD_S)
        return replace(new, capacity=TESTED * seen.total, made=seen.total, above=seen.total, tests_fewer=True)

    def _sped_up(self, seen: _Measured, now: float) -> "SaturationDetector":
        """Let some more workers join those at the capacity, which became clearly faster."""
        as_many = self.capacity * seen.total / seen.size
        new = replace(self._based(seen), capacity=as_many, hold_s=FIRST_HOLD_S)
        return replace(new, until=now, step=self._some(seen))

    def _some(self, seen: _Measured) -> int:
        """Return the workers of a large probe."""
        return max(1, round(LARGE_PROBE * seen.total / max(seen.paces.values())))

    def _fewer(self, new: "SaturationDetector", seen: _Measured, now: float) -> "SaturationDetector":
        """Judge a test with fewer workers: as long as they make as much, even fewer are tried."""
        based = replace(new._based(seen), tests_fewer=False, made=0.0, until=now)
        dropped = seen.total < self.made * (1.0 + seen.size / self.above) / 2.0
        if dropped:  # they were needed, and some more may be, too
            return replace(
                based,
                capacity=min(ROOM * self.made, seen.total * self.above / seen.size),
                step=self._some(seen),
            )
        return replace(
            based,
            capacity=TESTED * seen.total,
            made=max(seen.total, self.made),
            above=seen.total,
            tests_fewer=True,
        )

    def _probed(self, new: "SaturationDetector", seen: _Measured, now: float) -> "SaturationDetector":
        """Judge a probe: one more worker, or a few."""
        known = replace(new, capacity=self.known)
        if not seen.is_sure or seen.size < self.above + 0.5 * self.unit:
            return self
        if seen.total < self.usual * (1.0 + HELPS * (seen.size / self.above - 1.0)):
            return known._found(self.known, seen, now)
        new = replace(new, proven=seen.size, top=seen.total, hold_s=FIRST_HOLD_S, step=2 * self.step)
        return new._probing(seen, now)

    def _verified(self, new: "SaturationDetector", seen: _Measured) -> "SaturationDetector":
        """Compare the throughput at a capacity that was just found with that of more workers."""
        if seen.size < CLOSE * self.capacity:
            return new  # less is wanted now, which tells nothing
        part = seen.size / self.above
        if seen.total < self.made * (1.0 + part) / 2.0:
            return replace(new._based(seen), capacity=0.0, made=0.0)  # it dropped: no saturation
        if not seen.is_sure:
            return self
        new = replace(new, capacity=max(self.capacity, min(ROOM * self.made, self.above)), made=0.0)
        new = new._filled(seen)
        if seen.total < LOST * min(self.made, seen.size):  # the baseline was too high
            return replace(new, bests={env: best * LOST for env, best in new.bests.items()})
        return new

    def _filled(self, seen: _Measured) -> "SaturationDetector":
        """Take the throughput of full servers, if it is sure."""
        if not seen.is_sure or seen.total <= self.full:
            return self
        return replace(self, full=seen.total, full_groups=seen.groups)

    def _based(self, seen: _Measured) -> "SaturationDetector":
        """Take a measurement as the new baseline."""
        bests = {**self.bests, **seen.paces}
        new = replace(self, bests=bests, proven=seen.total, top=seen.total, size=seen.total)
        return replace(new, usual_part=1.0, doubted=False, full=0.0)

    def _followed(self, seen: _Measured, took_s: float) -> "SaturationDetector":
        """Let the baseline follow workers that are not saturated.

        More workers than before are no measure of a change of the rollouts; the same number, or fewer, are. Rollouts
        become longer slowly, and a server fills up at once: the baseline falls slowly.
        """
        if seen.size > MORE * self.proven:
            usual = self.usual_part
            if seen.size > (1.0 + LIKE) * self.proven:
                usual = min(1.0, seen.total / seen.size)
            return replace(self, proven=seen.size, top=seen.total, usual_part=usual, doubted=False)
        usual = self.usual_part if seen.size > CLOSE * self.proven else 1.0
        changes = {env: pace / (usual * self.bests[env]) for env, pace in seen.paces.items()}
        clearly = any(abs(change - 1.0) > 1.0 - SLOWER for change in changes.values())
        if clearly and not self.doubted:
            return replace(self, doubted=True)
        if self.capacity:  # what is left of a difference would move the number of workers at it to and fro
            changes = {env: 1.0 if abs(change - 1.0) < STEADY else change for env, change in changes.items()}
        if not clearly:
            most = FOLLOWS_PER_S * took_s
            changes = {
                env: 1.0 + min(max((change - 1.0) * FOLLOWS, -most), most) for env, change in changes.items()
            }
        bests = {env: best * changes.get(env, 1.0) for env, best in self.bests.items()}
        change = sum(bests[env] for env in seen.paces) / sum(self.bests[env] for env in seen.paces)
        new = replace(self, bests=bests, proven=self.proven * change, top=self.top * change, doubted=False)
        return new if clearly else replace(new, longer=max(1.0, self.longer / change))

    def _found(self, capacity: float, seen: _Measured, now: float) -> "SaturationDetector":
        held = min(self.hold_s, LONGEST_HOLD_S)
        new = replace(self, capacity=capacity, known=0.0, step=1, doubted=False)
        made = seen.total if capacity < CLOSE * seen.size else 0.0  # else it can hardly be told
        new = replace(new, made=made, above=seen.size, proven=min(self.proven, capacity))._filled(seen)
        return replace(new, top=min(self.top, seen.total), until=now + held, hold_s=2.0 * held)
