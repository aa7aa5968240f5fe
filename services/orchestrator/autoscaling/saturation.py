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
import operator
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
    reach,
    unslowed,
)
from rolloutmq.services.orchestrator.autoscaling.server_use import (
    OWN_GROUPS,
    SURE_GROUPS,
    SURE_S,
    Measurement,
    Rest,
    ServerUse,
    Span,
    telling_groups,
)

LARGE: Final = 0.2
CYCLES: Final = 1.0
"""Rollouts that they must span: workers that started together deliver together."""
SLOW_CYCLES: Final = 2.0
SLOW_S: Final = 120.0
"""Rollouts, and seconds, after which one group of each worker is enough: some rollouts take an hour."""
SOON_S: Final = 15.0
"""Time for `GROUPS` within which growth waits for a measurement if a worker became slower."""
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
SLOWED: Final = 0.92
"""Ratio to the pace among fewer below which full servers clearly slow the workers."""
SUSPECT: Final = 0.8
"""Pace, relative to that of fewer workers before, below which the first measured ones may share a full server."""
RARE: Final = 8.0
"""Workers with fewer of which a probe is made more seldom: one more worker is a larger part of them."""
LOST: Final = 0.95
"""Throughput after scaling back, relative to that before, from which the capacity is not too low."""


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
    """Throughput at the capacity before the probe, or of the workers whose throughput began the search."""
    searched: float = 0.0
    """Size of the latter."""
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
    top_groups: float = math.inf
    """Groups that told it."""
    usual_part: float = 1.0
    """The same relative to the size, as measured after the last clear growth: a little more is no measure."""
    made: float = 0.0
    """Throughput before scaling back to the capacity; 0 once the result is known."""
    made_groups: float = math.inf
    """Groups that told it."""
    above: float = 0.0
    """Size that made it; during a probe, the size before it."""
    tests_fewer: bool = False
    """Fewer workers are tried: those at the capacity changed their pace, or the servers may have been full before the
    first measurement."""
    is_search: bool = False
    """It is the second of these tests, so no more workers are tried after it."""
    is_full: bool = False
    """In that search, more workers or fewer have made as much: the servers are full."""
    grown: bool = False
    """More workers than those first measured made more: the servers were not full before."""
    steady: Mapping[str, Span] = msgspec.field(default_factory=dict)
    """What the present workers made, before the first measurement."""
    early: Mapping[str, Span] = msgspec.field(default_factory=dict)
    """What fewer workers made before the first measurement, by environment: those with the fastest pace."""
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
            new = replace(new, early=new._early())
            new = new._anew(uses, now, {env for env in new.begun if env not in new.bests})
        new = replace(new, ready={one.env: new._ready(one) for one in uses}, meters=new._metered(uses))
        if not new.proven:
            spans = {one.env: Span.of(new.begun[one.env], one) for one in uses if one.env in new.begun}
            new = replace(new, steady=spans)
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
            few = FEW if self._is_unsuspected(use) else 0
            return ServerLimit(reach=max(few, use.workers, further))
        best = self.bests[use.env] * self.ready.get(use.env, use.available)
        most = self._most(uses).get(use.env, 0)
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

    def _most(self, uses: Sequence[ServerUse]) -> dict[str, int]:
        """Return the whole workers of each environment at the capacity; empty if it is unknown.

        A worker too many of one environment takes throughput from the others. Of the roundings that keep the servers
        full, the one counts that leaves all environments nearest to their shares, and up before down.
        """
        known = [one for one in uses if one.env in self.bests] if self.capacity else []
        bests = [self.bests[one.env] * self.ready.get(one.env, one.available) for one in known]
        exact = [self._share(self.capacity, one, uses) / best for one, best in zip(known, bests, strict=True)]
        chosen = [math.ceil(one - 1e-9) for one in exact]
        is_told = len(known) == len(uses) > 1 and not self.known and not self.tests_fewer
        if is_told and min(exact) >= 1.0:
            roundings = [[math.floor(one + part) for one in exact] for part in (0.5, 1e-9)]
            least = self.capacity / ROOM - 1e-9
            full = [one for one in roundings if sum(map(operator.mul, one, bests)) >= least]
            chosen = min([chosen, *full], key=lambda numbers: _unlike(numbers, exact))
        return {one.env: number for one, number in zip(known, chosen, strict=True)}

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
            tests_fewer=limit.tests_fewer and limit.made > 0.0,
            grown=True,
            bests={**self.bests, env: limit.best},
            engines=engines,
        )

    def _is_slow(self, use: ServerUse, uses: Sequence[ServerUse]) -> bool:
        """Return whether a worker makes clearly less than it did, and that will be understood soon."""
        best = self.bests[use.env]
        if use.pace is None or self.capacity or use.pace >= SLOWER * best:
            return False
        groups_s = use.workers * use.pace / max(1, use.group_sequences)
        return self._size(uses) > MORE * self.proven or SOON_S * groups_s >= telling_groups(uses)

    def _size(self, uses: Sequence[ServerUse]) -> float:
        return sum(one.workers * one.available * self._supposed(one) for one in uses)

    def _supposed(self, use: ServerUse) -> float:
        """Return the pace of a worker without saturation; an unmeasured one stays within a measurement."""
        begun = self.begun.get(use.env)
        return self.bests.get(use.env) or (begun.pace if begun is not None else None) or use.pace or 0.0

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
            engines=engines,
            bests=self.bests,
            proven=self.proven,
            top=self.top,
            meters=self.meters,
            grown=self.grown,
        )
        known = self.known or self.capacity
        if not known or engines < self.engines:
            return new
        # The wait for the first probe is the first hold time; without it two probes in a row would wait as long.
        capacity, until = known * engines / self.engines, now + FIRST_HOLD_S
        return replace(new, capacity=capacity, until=until, hold_s=2.0 * FIRST_HOLD_S)

    def _anew(self, uses: Sequence[ServerUse], now: float, left: Collection[str]) -> "SaturationDetector":
        """Return the state at the beginning of a measurement; the own one of those that are `left` out goes on."""
        begun = {one.env: one for one in uses if one.workers}
        earlier = {env: self.earlier.get(env, self.begun[env]) for env in left if env in begun}
        return replace(self, size=self._size(uses), since=now, begun=begun, earlier=earlier)

    def _early(self) -> dict[str, Span]:
        """Return what fewer workers made, before the first measurement, as far as it tells something."""
        found = dict(self.early)
        for env, span in self.steady.items():
            pace, known = span.early_pace, found.get(env)
            if pace is not None and (known is None or pace > (known.pace(0) or 0.0)):
                found[env] = span
        return found

    def _measured(self, uses: Sequence[ServerUse], now: float) -> Measurement | None:
        """Return the measurement since its beginning; None while it tells too little."""
        paces: dict[str, float] = {}
        groups, size, total, rest, took_s = 0.0, 0.0, 0.0, Rest(), now - self.since
        whole, present = self._size(uses), [one for one in uses if one.workers]
        few, enough = sum(one.workers for one in present), telling_groups(present)
        is_slow = took_s >= max(SLOW_S, SLOW_CYCLES * max((one.rollout_s for one in uses), default=0.0))
        for one in present:
            own_groups = min(OWN_GROUPS, enough)
            least = min(own_groups, one.workers) if is_slow else own_groups
            span, best = Span.of(self.begun[one.env], one), self.bests.get(one.env)
            is_large = one.workers * (best or one.pace or 0.0) >= LARGE * whole
            if took_s < CYCLES * one.rollout_s or (is_large and span.groups < least):
                return None
            if one.sampled.workers > (1.0 + LIKE) * one.workers:
                return None  # others load the servers already, and deliver nothing yet
            groups += span.groups
            pace = span.pace(least)
            own = pace or Span.of(self.earlier.get(one.env, self.begun[one.env]), one).pace(least)
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
        return Measurement(
            paces,
            size + rest.size,
            total,
            groups,
            is_sure,
            self._is_enough(uses, total, took_s),
            took_s,
            max(one.dispersion for one in present),
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

    def _judged(self, seen: Measurement, uses: Sequence[ServerUse], now: float) -> "SaturationDetector":
        new = self._anew(uses, now, self.begun.keys() - seen.paces.keys())
        if unknown := {env: pace for env, pace in seen.paces.items() if env not in self.bests}:
            bests = {one.env: self._unslowed(one, unknown[one.env]) for one in uses if one.env in unknown}
            new = replace(new, bests={**self.bests, **bests})
        if not self.proven:
            return new._first(seen, now)
        if self.capacity and seen.size > self._fits(uses):
            return new  # scale-down in progress
        if self.tests_fewer:
            return self._fewer(new, seen, now)
        if self.made:
            return self._verified(new, seen, now)
        if self.known:
            return self._probed(new, seen, uses, now)
        if self.capacity:
            return self._at_capacity(new, seen, uses, now)
        return self._grown(new, seen, now)

    def _grown(self, new: "SaturationDetector", seen: Measurement, now: float) -> "SaturationDetector":
        """Judge workers whose capacity is unknown; they may be more than those proven."""
        if seen.size > MORE * self.proven and not seen.shows(1.0 - self.proven / seen.size):
            return self
        if seen.size > MORE * self.proven and seen.total < SLOWER * seen.size:
            if seen.total < KEPT * self.top and seen.is_clear(1.0 - seen.total / self.top, self.top_groups):
                # Saturated workers share the throughput of fewer. Here every worker became slower: a new pace.
                return new._based(seen)
            if seen.is_enough:  # it seems that rollouts became longer
                return replace(new._based(seen), longer=self.longer * seen.size / seen.total)
            if not self.grown and seen.total < (1.0 + LIKE) * self.top:
                # The servers were full before the first measurement already.
                return replace(new._searching(self.proven, seen, now), is_full=self._is_slowed(seen))
            return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)
        if self.longer >= LONGER and seen.size > MORE * self.proven:
            if not seen.tells(1.0 - TESTED):
                return self
            # If fewer make less, rollouts did become longer.
            based = replace(seen, size=seen.total)
            return replace(new._based(seen)._found(TESTED * seen.total, based, now), longer=1.0)
        return new._followed(self, seen, now - self.since)

    def _first(self, seen: Measurement, now: float) -> "SaturationDetector":
        """Take the first measurement of groups as proven, unless tokens tell that a smaller fleet was as fast."""
        new = replace(self, proven=seen.total, top=seen.total, top_groups=seen.groups, early={}, steady={})
        if seen.total < SLOWER * seen.size:
            return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)
        is_suspect = any(self._is_suspect(env, pace) for env, pace in seen.paces.items())
        if is_suspect and not seen.is_enough:
            return new._searching(seen.total, seen, now)
        return replace(new, proven=seen.size)

    def _fits(self, uses: Sequence[ServerUse]) -> float:
        """Return the largest size of whole workers within the capacity."""
        return self.capacity + sum(self.bests.get(one.env, 0.0) for one in uses)

    def _at_capacity(
        self, new: "SaturationDetector", seen: Measurement, uses: Sequence[ServerUse], now: float
    ) -> "SaturationDetector":
        """Wait for the time of the next probe; follow workers that are far below the capacity."""
        if seen.size <= CLOSE * self.capacity:
            return new._followed(self, seen, now - self.since)
        change = seen.total / min(seen.size, self.capacity / ROOM)
        if not SLOWER <= change <= 1.0 / SLOWER:
            if not seen.shows(change - 1.0, self.full_groups or math.inf):
                return self
            if not self.doubted:
                return replace(new, doubted=True)
            return new._slowed(seen, now) if change < 1.0 else new._sped_up(seen, now)
        new = replace(new, doubted=False)
        if not seen.is_sure:
            return self if now >= self.until or seen.size > (1.0 + STEADY) * self.full > 0.0 else new
        if self._is_fuller(seen, uses):
            return new._sped_up(seen, now)
        if now < self.until or self._shows(seen, now):
            return new
        return replace(new, unit=max(self.bests.get(one.env, 0.0) for one in uses))._probing(seen, now)

    def _shows(self, seen: Measurement, now: float) -> bool:
        """Return whether it will show without a probe that the servers become faster: they clearly slow the workers."""
        since = self.until - min(self.hold_s / 2.0, LONGEST_HOLD_S)
        return self.full > 0.0 and seen.total < SLOWED * seen.size and now < since + LONGEST_HOLD_S

    def _is_fuller(self, seen: Measurement, uses: Sequence[ServerUse]) -> bool:
        """Return whether the servers make more than the full ones did, by more than chance: they became faster."""
        if not self.full:
            return False
        dispersion = max(one.dispersion for one in uses)
        error = math.sqrt(dispersion / seen.groups + dispersion / self.full_groups)
        return seen.total > self.full * (1.0 + max(STEADY, CHANCE * error))

    def _probing(self, seen: Measurement, now: float) -> "SaturationDetector":
        """Try some more workers than those measured."""
        more = self.capacity + self.step * self.unit
        new = replace(self, capacity=more, known=self.capacity, until=now + self.hold_s)
        return replace(new, usual=seen.total, above=seen.size)

    def _slowed(self, seen: Measurement, now: float) -> "SaturationDetector":
        """Try fewer workers, since those at the capacity became clearly slower.

        Their rollouts are longer, or the server became slower: neither makes more workers useful if the server is full.
        """
        return replace(self._based(seen), hold_s=FIRST_HOLD_S)._testing(seen.total, seen.total, now)

    def _sped_up(self, seen: Measurement, now: float) -> "SaturationDetector":
        """Let some more workers join those at the capacity, which became clearly faster."""
        new = replace(self, full=0.0, doubted=False, hold_s=FIRST_HOLD_S, until=now, step=self._some(seen))
        faster = seen.total / seen.size
        if faster <= 1.0 or not seen.is_clear(faster - 1.0, self.top_groups):
            return new  # the servers became faster, or chance: the pace of a worker that nothing slows stays
        bests = {env: faster * best for env, best in self.bests.items()}
        return replace(new, bests=bests, capacity=faster * self.capacity)

    def _some(self, seen: Measurement) -> int:
        """Return the workers of a large probe."""
        return max(1, round(LARGE_PROBE * seen.total / max(seen.paces.values())))

    def _is_unsuspected(self, use: ServerUse) -> bool:
        """Return whether a few more may start unmeasured: nobody knows that fewer were clearly faster."""
        if use.env not in self.early or use.env not in self.steady:
            return True
        pace = self.steady[use.env].early_pace
        return pace is not None and not self._is_suspect(use.env, pace)

    def _is_suspect(self, env: str, pace: float) -> bool:
        """Return whether fewer workers were clearly faster before the first measurement: the servers may be full."""
        return env in self.early and pace < SUSPECT * (self.early[env].pace(0) or 0.0)

    def _searching(self, above: float, seen: Measurement, now: float) -> "SaturationDetector":
        """Search the capacity below workers of the size `above`. First, it must be sure that they make as much."""
        new = replace(self, capacity=above, made=0.0, above=above, usual=seen.total, searched=seen.size)
        new = replace(new, made_groups=seen.groups, until=now + FIRST_HOLD_S)
        return replace(new, tests_fewer=True, is_search=True, doubted=False)

    def _fewer(self, new: "SaturationDetector", seen: Measurement, now: float) -> "SaturationDetector":
        """Judge a test with fewer workers: as long as they make as much, even fewer are tried."""
        if not self.made:
            if seen.is_less(self.usual, min(self.above / self.searched, 2.0 * KEPT - 1.0), self.made_groups):
                return new._unbound(seen)
            if not seen.tells(self._unit / self.above):
                return self
            return new._based(seen)._testing(seen.total, seen.total, now)
        part = 1.0 - seen.size / self.above
        if part * self.above < HELPS * self._unit or not seen.tells(part):
            return self if now < self.until else new._ended(self.above, now)
        enough = seen.total * self.above / seen.size
        if seen.total >= self.made * (1.0 - part / 2.0):
            new = replace(new._based(seen), is_full=True)
            return new._testing(max(seen.total, self.made), seen.total, now)
        if not self.is_search:  # they were needed, and some more may be, too
            capacity = min(ROOM * self.made, enough)
            based = replace(new._based(seen), capacity=capacity, tests_fewer=False, made=0.0, until=now)
            return replace(based, step=self._some(seen))
        if not self.is_full:  # it was a suspicion, and each worker is needed: growth will tell the capacity
            return replace(new._unbound(seen), grown=self.grown)
        if enough < CLOSE * self.made:  # as many as before would make less
            return new._unbound(seen)
        return new._ended(self.above, now)

    def _testing(self, made: float, above: float, now: float) -> "SaturationDetector":
        """Test whether fewer workers than those of the size `above` make as much."""
        fewer = min(TESTED * above, above - self._unit)
        if fewer < HELPS * self._unit:  # they are one worker
            return self._ended(above, now)
        until = now + FIRST_HOLD_S
        return replace(self, capacity=fewer, made=made, above=above, until=until, tests_fewer=True)

    def _unbound(self, seen: Measurement) -> "SaturationDetector":
        """Let workers grow again: fewer make less, so the servers were not full."""
        new = replace(self._based(seen), capacity=0.0, made=0.0, grown=True)
        return replace(new, tests_fewer=False, is_search=False, is_full=False)

    def _ended(self, capacity: float, now: float) -> "SaturationDetector":
        """Take a capacity after a test with fewer workers."""
        new = replace(self, capacity=capacity, made=0.0, tests_fewer=False, is_search=False, is_full=False)
        return new._held(now)

    def _held(self, now: float) -> "SaturationDetector":
        """Wait until the next probe, and longer each time; one more of few workers is a large part of them."""
        held, workers = min(self.hold_s, LONGEST_HOLD_S), self.capacity / self._unit
        until = now + min(held * max(1.0, RARE / workers), LONGEST_HOLD_S)
        return replace(self, until=until, hold_s=2.0 * held)

    @property
    def _unit(self) -> float:
        """Return what the fastest worker makes among few."""
        return max(self.bests.values(), default=0.0)

    def _probed(
        self, new: "SaturationDetector", seen: Measurement, uses: Sequence[ServerUse], now: float
    ) -> "SaturationDetector":
        """Judge a probe: one more worker, or a few. One that nobody fills ends without a result."""
        if seen.size < self.above + HELPS * self.unit:
            wanted = sum(one.want * one.available * self.bests.get(one.env, 0.0) for one in uses)
            if wanted >= self.above + HELPS * self.unit and now < self.until:
                return self
            closed = replace(self, capacity=self.known, known=0.0, until=now + FIRST_HOLD_S)
            return closed._at_capacity(
                replace(new, capacity=self.known, known=0.0, until=closed.until), seen, uses, now
            )
        known = replace(new, capacity=self.known)
        if not seen.tells(seen.size / self.above - 1.0):
            return self
        if seen.total < self.usual * (1.0 + HELPS * (seen.size / self.above - 1.0)):
            return known._found(self.known, seen, now)
        new = replace(new, proven=seen.size, top=seen.total, hold_s=FIRST_HOLD_S, step=2 * self.step)
        return new._probing(seen, now)

    def _is_slowed(self, seen: Measurement) -> bool:
        """Return whether workers are slower than the baseline by more than chance."""
        return seen.total < SLOWER * seen.size and seen.is_clear(
            1.0 - seen.total / seen.size, self.top_groups
        )

    def _verified(self, new: "SaturationDetector", seen: Measurement, now: float) -> "SaturationDetector":
        """Compare the throughput at a capacity that was just found with that of more workers."""
        if seen.size < CLOSE * self.capacity:
            return new  # less is wanted now, which tells nothing
        part = seen.size / self.above
        if not seen.tells(1.0 - part):
            return self
        if seen.is_more(self.made, self.made_groups) or seen.is_less(self.made, part, self.made_groups):
            return new._unbound(seen)
        if not seen.is_sure:
            return self
        capacity = max(self.capacity, min(ROOM * self.made, self.above))
        if seen.total < SLOWER * seen.size:
            if not self._is_slowed(seen):  # the baseline may be too high by chance: fewer will tell
                return replace(new._based(seen)._testing(seen.total, seen.total, now), is_search=True)
            capacity = ROOM * seen.total  # they are still too many
        elif not seen.is_clear(1.0 - part, self.made_groups):  # they may all be needed, and more
            return replace(new, made=0.0, until=now, step=self._some(seen))
        new = replace(new, capacity=capacity, made=0.0)
        new = new._filled(seen, min(self.made, ROOM * seen.total))._balanced(seen)
        if seen.total < LOST * min(self.made, seen.size):  # the baseline was too high
            return replace(new, bests={env: best * LOST for env, best in new.bests.items()})
        return new

    def _balanced(self, seen: Measurement) -> "SaturationDetector":
        """Correct the paces of several environments by one another's, and keep their mean.

        Full servers slow all workers alike, so the ratio of these paces is that without saturation. The first paces
        come from a few groups: an environment that seems slower than it is would get too many workers.
        """
        if len(seen.paces) < 2 or seen.paces.keys() != self.bests.keys():
            return self
        parts = {env: pace / self.bests[env] for env, pace in seen.paces.items()}
        mean = seen.total / seen.size
        return replace(self, bests={env: best * parts[env] / mean for env, best in self.bests.items()})

    def _filled(self, seen: Measurement, made: float = 0.0) -> "SaturationDetector":
        """Take the throughput of full servers, if it is sure; a little more workers `made` more."""
        full = max(seen.total, made)
        if not seen.is_sure or full <= self.full:
            return self
        return replace(self, full=full, full_groups=seen.groups)

    def _based(self, seen: Measurement) -> "SaturationDetector":
        """Take a measurement as the new baseline."""
        bests = {**self.bests, **seen.paces}
        new = replace(self, bests=bests, proven=seen.total, top=seen.total, size=seen.total)
        return replace(new, usual_part=1.0, doubted=False, full=0.0, top_groups=seen.groups)

    def _followed(
        self, before: "SaturationDetector", seen: Measurement, took_s: float
    ) -> "SaturationDetector":
        """Let the baseline follow workers that are not saturated; while it may be chance, measure on as `before`.

        More workers than before are no measure of a change of the rollouts; the same number, or fewer, are. Rollouts
        become longer slowly, and a server fills up at once: the baseline falls slowly.
        """
        if seen.size > MORE * self.proven:
            usual = self.usual_part
            if seen.size > (1.0 + LIKE) * self.proven:
                usual = min(1.0, seen.total / seen.size)
            grown = self.grown or seen.total > (1.0 + LIKE) * self.top
            new = replace(self, proven=seen.size, top=seen.total, usual_part=usual, doubted=False)
            return replace(new, grown=grown, top_groups=seen.groups)
        usual = self.usual_part if seen.size > CLOSE * self.proven else 1.0
        changes = {env: pace / (usual * self.bests[env]) for env, pace in seen.paces.items()}
        largest = max(abs(change - 1.0) for change in changes.values())
        clearly = largest > 1.0 - SLOWER
        if clearly and not seen.shows(largest, self.top_groups):
            return before
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

    def _found(self, capacity: float, seen: Measurement, now: float) -> "SaturationDetector":
        new = replace(self, capacity=capacity, known=0.0, step=1, doubted=False)
        made = seen.total if capacity < CLOSE * seen.size else 0.0  # else it can hardly be told
        new = replace(new, made=made, made_groups=seen.groups, above=seen.size)._filled(seen)
        return replace(new, proven=min(self.proven, capacity), top=min(self.top, seen.total))._held(now)


def _unlike(numbers: Sequence[int], shares: Sequence[float]) -> float:
    """Return how unlike the parts of their shares are that environments get, rounded."""
    parts = [number / share for number, share in zip(numbers, shares, strict=True)]
    return round(max(parts) / min(parts), 3)
