"""The saturation detector: how many workers the inference servers of a run can feed. Pure.

All environments sample from the same servers, so they are judged together. The measure is sequences per second: the
`size` of a fleet is what its workers would make if none slowed another down; their throughput is what they make. This
module measures both, and tells each environment its limit; `capacity` judges the measurements.

An environment that makes a small part of all is measured over a longer time than the others. Until its own pace is
known, what it makes counts all the same.

Growth needs evidence. At most twice the proven size may run, or a few workers more, until enough groups have arrived to
tell how fast the workers are. If they are about as fast as fewer were, their size is proven, and the next doubling is
free.

Where rollouts take minutes, the tokens of their completions confirm a growth before groups can: see `progress`. Workers
that load the servers and deliver nothing yet are not judged by groups.

Another engine is expected to feed as many as each of the others. A worker that crashed and starts again counts as a
worker.
"""

import math
import operator
from collections.abc import Collection, Mapping, Sequence
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.budget import divide
from rolloutmq.services.orchestrator.autoscaling.control_law import ROUND
from rolloutmq.services.orchestrator.autoscaling.pressure import ServerLimit
from rolloutmq.services.orchestrator.autoscaling.servers.capacity import (
    FIRST_HOLD_S,
    LIKE,
    MORE,
    ROOM,
    SLOWER,
    CapacitySearch,
)
from rolloutmq.services.orchestrator.autoscaling.servers.progress import (
    Meters,
    ProgressMeter,
    reach,
    unslowed,
)
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import (
    LONG_S,
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
FURTHER: Final = 1.9
LEAST_FURTHER, KNOWN_ERROR = 1.5, 0.07
FEW: Final = 4
"""Limit of growth without evidence: this factor of the proven size, at least that where chance hides the pace, or this
many workers more."""
ENOUGH, ENOUGH_PART = 0.95, 0.03
"""Throughput relative to the demand, and waiting part of the trainer's time, up to which it has enough."""
CRASHES: Final = 0.08
"""Difference in availability that moves no limit: with twenty workers one crash is 0.05."""
CHANCE: Final = 0.05
"""Part of a worker by which a capacity may exceed whole workers by chance; it brings no further one."""
CHANCE_PART: Final = 0.02
"""The same for one or two workers, as a part of the capacity."""


class SaturationDetector(CapacitySearch, frozen=True):
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

    def looked(self, uses: Sequence[ServerUse], engines: int, now: float) -> Self:
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
        proven = self._share(self._further(best, use), use, uses) / best
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

    def _further(self, best: float, use: ServerUse) -> float:
        """Return the size that may be tried: of the first few workers, more may bring nothing.

        Where rollouts are long, each step of growth takes minutes. The pace of a worker may be higher than measured,
        and the proven size then has fewer workers.
        """
        if not self.grown and self.top <= (FEW + ROUND) * best and use.rollout_s < LONG_S:
            return self.top + FEW / 2.0 * best
        error = math.sqrt(use.dispersion / max(1.0, self.top_groups))
        sure = max(LEAST_FURTHER, FURTHER * min(1.0, 1.0 + KNOWN_ERROR - error))
        return max(sure * self.top, self.top + FEW * best)

    def _most(self, uses: Sequence[ServerUse]) -> dict[str, int]:
        """Return the whole workers of each environment at the capacity; empty if it is unknown.

        A worker too many of one environment takes throughput from the others. Of the roundings that keep the servers
        full, the one counts that leaves all environments nearest to their shares, and up before down.
        """
        known = [one for one in uses if one.env in self.bests] if self.capacity else []
        bests = [self.bests[one.env] * self.ready.get(one.env, one.available) for one in known]
        exact = [self._share(self.capacity, one, uses) / best for one, best in zip(known, bests, strict=True)]
        chosen = [math.ceil(one - min(CHANCE_PART * one, CHANCE)) for one in exact]
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

    def resumed(self, env: str, limit: ServerLimit, engines: int) -> Self:
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
            explored=True,
            bests={**self.bests, env: limit.best},
            engines=engines,
        )

    def _is_slow(self, use: ServerUse, uses: Sequence[ServerUse]) -> bool:
        """Return whether a worker makes clearly less than at the last measurement, and that will be understood soon."""
        usual = self.usual_part * self.bests[use.env]
        if use.pace is None or self.capacity or use.pace >= SLOWER * usual:
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

    def _with_engines(self, engines: int, now: float) -> Self:
        """Expect of more engines what each of the present ones can feed; of fewer, measure it anew."""
        if not self.engines:
            return replace(self, engines=engines)
        new = type(self)(
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
        return replace(new, capacity=capacity, until=until, hold_s=2.0 * FIRST_HOLD_S, explored=True)

    def _anew(self, uses: Sequence[ServerUse], now: float, left: Collection[str]) -> Self:
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

    def _judged(self, seen: Measurement, uses: Sequence[ServerUse], now: float) -> Self:
        new = self._anew(uses, now, self.begun.keys() - seen.paces.keys())
        if unknown := {env: pace for env, pace in seen.paces.items() if env not in self.bests}:
            bests = {one.env: self._unslowed(one, unknown[one.env]) for one in uses if one.env in unknown}
            new = replace(new, bests={**self.bests, **bests})
        new = replace(new, curve=new.curve.aged(seen.took_s, seen.dispersion))
        if not self.proven:
            new = replace(new, curve=new.curve.added(seen.size, seen.total, seen.groups))
            return new._first(self, seen, now)
        if self.capacity and seen.size > self._fits(uses):
            return new  # scale-down in progress
        new = replace(new, curve=new.curve.added(seen.size, seen.total, seen.groups))
        if self.tests_fewer:
            return self._fewer(new, seen, now)
        if self.made:
            return self._verified(new, seen, now)
        if self.known:
            return self._probed(new, seen, self._wanted(uses), now)
        if self.capacity:
            return self._at_capacity(new, seen, now)
        return self._grown(new, seen, now)

    def _wanted(self, uses: Sequence[ServerUse]) -> float:
        """Return the size that the environments want."""
        return sum(one.want * one.available * self.bests.get(one.env, 0.0) for one in uses)

    def _fits(self, uses: Sequence[ServerUse]) -> float:
        """Return the largest size of whole workers within the capacity."""
        return self.capacity + sum(self.bests.get(one.env, 0.0) for one in uses)

    def _is_unsuspected(self, use: ServerUse) -> bool:
        """Return whether a few more may start unmeasured: nobody knows that fewer were clearly faster."""
        if use.env not in self.early or use.env not in self.steady:
            return True
        pace = self.steady[use.env].early_pace
        return pace is not None and not self._is_suspect(use.env, pace)


def _unlike(numbers: Sequence[int], shares: Sequence[float]) -> float:
    """Return how unlike the parts of their shares are that environments get, rounded."""
    parts = [number / share for number, share in zip(numbers, shares, strict=True)]
    return round(max(parts) / min(parts), 3)
