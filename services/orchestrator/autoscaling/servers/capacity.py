"""The search for the capacity of the inference servers: what one measurement after another tells. Pure.

Sizes and throughputs are those of all environments of the servers, in sequences per second.

Growth: workers that are about as fast as fewer were prove their size. If they are clearly slower, they share a full
server: its capacity is their throughput, and the environments scale back to it. If throughput then drops, there was no
saturation.

Longer rollouts look the same: the fleet grows, and its throughput stays. A fleet that makes what the trainer demands is
not full. A pace that changes while the fleet stays is a change of the rollouts, and the baseline follows it. Once they
seem to have become `LONGER` times longer, some more workers than wanted are tried. If they make more, it was the
rollouts; if not, the servers are full. Slower workers at the capacity are told apart in the same way, and faster ones
are joined by some more.

A full server is told by fewer workers that make as much. If fewer make less, each of the others is needed, and more are
tried at once, unless recent fleets tell that they would not help. After a hold time, which doubles, one more worker is
tried at the capacity, or as many as chance does not hide; if that helps two more, then four: the server may have become
faster. Once nobody fills a probe whose workers helped, nothing bounds the fleet any longer.
"""

import math
from collections.abc import Mapping
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.control_law import ROUND
from rolloutmq.services.orchestrator.autoscaling.servers.curve import (
    MOST_GROUPS,
    Knee,
    ThroughputCurve,
)
from rolloutmq.services.orchestrator.autoscaling.servers.server_use import (
    CHANGE,
    CLEAR,
    SURE_GROUPS,
    SURE_S,
    Measurement,
    Span,
)

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
LONGER: Final = 1.6
"""Factor by which rollouts may seem to become longer before more workers than wanted are tried."""
TESTED: Final = 0.79
"""Largest size to scale back to, relative to the present one, so that the throughputs can be told apart."""
SMALL_PROBE: Final = 0.15
"""Most workers of a later probe, relative to the present ones: at least as many as chance does not hide."""
LARGE_PROBE: Final = 0.2
"""Workers of a large probe, relative to the present ones: their pace changed, and it may be that more help now."""
SLOWED: Final = 0.92
"""Ratio to the pace among fewer below which full servers clearly slow the workers."""
SUSPECT: Final = 0.8
"""Pace, relative to that of fewer workers before, below which the first measured ones may share a full server."""
SUSPECT_GROUPS: Final = 24
"""Groups after which a suspicion that may be chance ends."""
RARE: Final = 8.0
"""Workers with fewer of which a probe is made more seldom: one more worker is a larger part of them."""
LOST: Final = 0.95
"""Throughput after scaling back, relative to that before, from which the capacity is not too low."""


class CapacitySearch(msgspec.Struct, frozen=True):
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
    usual_groups: float = math.inf
    """Groups that told it."""
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
    explored: bool = False
    """More workers than those at the capacity were tried since it was found, or need not be tried soon."""
    helped: bool = False
    """The workers of the last probe made more, and of the present one nothing is known."""
    curve: ThroughputCurve = ThroughputCurve()
    """What fleets of other sizes made, as long as nothing seems to have changed since."""

    def _grown(self, new: Self, seen: Measurement, now: float) -> Self:
        """Judge workers whose capacity is unknown; they may be more than those proven."""
        if seen.size > MORE * self.proven and not self._tells_growth(seen):
            return self
        if seen.size > MORE * self.proven and seen.total < self._least(seen) * seen.size:
            if seen.total < KEPT * self.top:
                # Saturated workers share the throughput of fewer. Here every worker became slower: a new pace.
                if seen.is_changed(1.0 - seen.total / self.top, self.top_groups):
                    return new._changed(seen)
                if not seen.is_sure:
                    return self
            if seen.is_enough:  # it seems that rollouts became longer
                return replace(new._changed(seen), longer=self.longer * seen.size / seen.total)
            if not self.grown and seen.total < (1.0 + LIKE) * self.top:
                # The servers were full before the first measurement already.
                return self._full_before(new, seen, now)
            return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)
        if self.longer >= LONGER and seen.size > MORE * self.proven:
            if not seen.tells(LARGE_PROBE):
                return self
            return new._trying_more(seen, now)
        return new._followed(self, seen)

    def _full_before(self, new: Self, seen: Measurement, now: float) -> Self:
        """Search below the proven size, since more workers brought nothing. If that remains in doubt, the curve tells.

        The search begins with a sure measurement, so one standard error is enough.
        """
        if seen.error_beside(self.top_groups) <= LIKE:
            return replace(new._searching(self.proven, seen, now), is_full=self._is_slowed(seen))
        if not seen.is_sure:
            return self
        knee = new.curve.knee(seen.dispersion)
        new = replace(new._scaled(knee.pace), grown=True)
        return new._found(min(ROOM * knee.size, TESTED * seen.size) * knee.pace, seen, now)

    def _least(self, seen: Measurement) -> float:
        """Return the part of their size that more workers make at least if they are not slower.

        If that remains in doubt, it is the part between that of all workers and that of a full server.
        """
        lacks = 1.0 - seen.total / seen.size
        in_doubt = 1.0 - SLOWER < lacks < seen.error_beside(self.top_groups)
        return math.sqrt(self.proven / seen.size) if in_doubt else SLOWER

    def _tells_growth(self, seen: Measurement) -> bool:
        """Return whether a measurement tells more workers on a full server from those that nothing slows."""
        part, made = self.proven / seen.size, seen.total / seen.size
        if made >= SLOWER:
            return seen.shows(1.0 - part / made, self.top_groups)
        full = min(ROOM * made, TESTED)
        return seen.shows(1.0 - made, self.top_groups) and seen.shows(1.0 - full, SURE_GROUPS)

    def _first(self, before: Self, seen: Measurement, now: float) -> Self:
        """Take the first measurement of groups as proven, unless tokens tell that a smaller fleet was as fast."""
        new = replace(self, proven=seen.total, top=seen.total, top_groups=seen.groups, early={}, steady={})
        if seen.total < SLOWER * seen.size:
            return new._found(min(ROOM * seen.total, TESTED * seen.size), seen, now)
        is_suspect = any(self._is_suspect(env, pace) for env, pace in seen.paces.items())
        if is_suspect and not seen.is_enough:
            if any(self._is_clearly_suspect(env, pace, seen) for env, pace in seen.paces.items()):
                return new._searching(seen.total, seen, now)
            if seen.groups < SUSPECT_GROUPS:
                return before
        return replace(new, proven=seen.size)

    def _at_capacity(self, new: Self, seen: Measurement, now: float) -> Self:
        """Wait for the time of the next probe; follow workers that are far below the capacity."""
        if seen.size <= CLOSE * self.capacity:
            return new._followed(self, seen)
        change = seen.total / min(seen.size, self.capacity / ROOM)
        # Those that were tried before made no more, and were nearly as many.
        is_usual = change < SLOWER and self.top >= CLOSE * self.capacity and seen.total >= KEPT * self.top
        if not (SLOWER <= change <= 1.0 / SLOWER or is_usual):
            if not seen.is_changed(change - 1.0, self.full_groups or self.top_groups):
                return self if seen.groups < MOST_GROUPS else new
            if not self.doubted:
                return replace(new, doubted=True, curve=self.curve)
            return new._slowed(seen, now) if change < 1.0 else new._sped_up(seen, now)
        new = replace(new, doubted=False)
        if not seen.is_sure:
            is_more_told = seen.is_precise and not seen.size > (1.0 + STEADY) * self.full > 0.0
            return new if is_more_told and now < self.until else self
        knee = new.curve.knee(seen.dispersion)
        least, most = (1.0 - STEADY) * knee.low, (1.0 + STEADY) * ROOM * knee.high
        if not least <= self.capacity <= most and self._is_alike(seen):
            return new._kneed(seen, now)
        if not self.explored and knee.high > (1.0 + LARGE_PROBE) * seen.size:
            return new._exploring(knee, seen, now) if seen.is_precise else self
        if not self.explored and knee.low <= new.curve.least:  # fewer might do
            fewer = new._based(seen)._testing(seen.total, seen.total, now)
            return replace(fewer, is_search=True, is_full=True)
        if self._is_fuller(seen):
            return new._sped_up(seen, now)
        if now < self.until or self._shows(seen, now):
            return new
        step = max(self.step, self._least_step(seen))
        return replace(new, unit=self._unit, explored=True, step=step)._probing(seen, now)

    def _exploring(self, knee: Knee, seen: Measurement, now: float) -> Self:
        """Try more workers if nobody knows that they would not help: half as many more as may be useful, but few.

        A large step shows with fewer groups than a small one.
        """
        more = (min(knee.high, (1.0 + 2.0 * SMALL_PROBE) * seen.size) - seen.size) / 2.0
        return replace(self, unit=self._unit, step=max(1, round(more / self._unit)))._probing(seen, now)

    def _least_step(self, seen: Measurement) -> int:
        """Return the workers of a probe that chance does not hide, if they are few."""
        part = min(SMALL_PROBE, CLEAR * seen.error_beside(seen.groups))
        return round(part * seen.size / self._unit)

    def _is_alike(self, seen: Measurement) -> bool:
        """Return whether all measurements so far agree with this one, by chance."""
        return self.curve.misfit(seen.size, seen.total, seen.groups, seen.dispersion) < CHANGE

    def _shows(self, seen: Measurement, now: float) -> bool:
        """Return whether it will show without a probe that the servers become faster: they clearly slow the workers."""
        since = self.until - min(self.hold_s / 2.0, LONGEST_HOLD_S)
        return self.full > 0.0 and seen.total < SLOWED * seen.size and now < since + LONGEST_HOLD_S

    def _is_fuller(self, seen: Measurement) -> bool:
        """Return whether the servers make more than the full ones did, by more than chance: they became faster."""
        if not self.full:
            return False
        error = math.sqrt(seen.dispersion / seen.groups + seen.dispersion / self.full_groups)
        return seen.total > self.full * (1.0 + max(STEADY, CHANCE * error))

    def _probing(self, seen: Measurement, now: float) -> Self:
        """Try some more workers than those measured."""
        more = self.capacity + self.step * self.unit
        new = replace(self, capacity=more, known=self.capacity, until=now + self.hold_s)
        return replace(new, usual=seen.total, above=seen.size)

    def _slowed(self, seen: Measurement, now: float) -> Self:
        """Try more workers, since those at the capacity became clearly slower.

        Their rollouts are longer, or the server became slower. If it is full, more workers show that, and fewer are
        tried next.
        """
        return replace(self, hold_s=FIRST_HOLD_S, is_full=True)._trying_more(seen, now)

    def _trying_more(self, seen: Measurement, now: float) -> Self:
        """Take the present pace as the base, and try some more workers.

        They tell a full server from longer rollouts, and starve nobody meanwhile.
        """
        new = replace(self._changed(seen), capacity=seen.total, longer=max(self.longer, LONGER))
        new = replace(new, step=self._some(seen), unit=new._unit)
        return new._probing(replace(seen, size=seen.total), now)

    def _sped_up(self, seen: Measurement, now: float) -> Self:
        """Let some more workers join those at the capacity, which became clearly faster."""
        new = replace(self, full=0.0, doubted=False, hold_s=FIRST_HOLD_S, until=now, step=self._some(seen))
        new = replace(new, curve=ThroughputCurve().added(seen.size, seen.total, seen.groups))
        faster = seen.total / seen.size
        if faster <= 1.0 or not seen.is_clear(faster - 1.0, self.top_groups):
            return new  # the servers became faster, or chance: the pace of a worker that nothing slows stays
        return replace(new._scaled(faster), capacity=faster * self.capacity)

    def _some(self, seen: Measurement) -> int:
        """Return the workers of a large probe."""
        return max(1, round(LARGE_PROBE * seen.total / max(seen.paces.values())))

    def _is_suspect(self, env: str, pace: float) -> bool:
        """Return whether fewer workers seemed faster before the first measurement: the servers may be full."""
        return env in self.early and pace < SUSPECT * (self.early[env].pace(0) or 0.0)

    def _is_clearly_suspect(self, env: str, pace: float, seen: Measurement) -> bool:
        """Return whether fewer workers were faster by more than chance."""
        if not self._is_suspect(env, pace):
            return False
        early = self.early[env]
        return seen.is_clear(1.0 - pace * early.busy_s / early.made, early.groups)

    def _searching(self, above: float, seen: Measurement, now: float) -> Self:
        """Search the capacity below workers of the size `above`. First, it must be sure that they make as much."""
        new = replace(self, capacity=above, made=0.0, above=above, usual=seen.total, searched=seen.size)
        new = replace(new, made_groups=seen.groups, until=now + FIRST_HOLD_S)
        return replace(new, tests_fewer=True, is_search=True, doubted=False)

    def _fewer(self, new: Self, seen: Measurement, now: float) -> Self:
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
            # A test of one worker among many proves nothing if chance may hide what it makes.
            is_full = self.is_full or seen.is_clear(part, self.made_groups)
            new = replace(new._based(seen), is_full=is_full)
            return new._testing(max(seen.total, self.made), seen.total, now)
        if self.is_search and not self.is_full:
            # It was a suspicion, and each worker is needed: growth tells the capacity.
            return replace(new._unbound(seen), grown=self.grown)
        if self.is_search and enough < CLOSE * self.made:  # as many as before would make less
            return new._unbound(seen)
        return self._needed(new._based(seen), seen, now)

    def _needed(self, based: Self, seen: Measurement, now: float) -> Self:
        """Take all workers before a test as useful, since fewer make less; some more may be, too.

        A full server with all of them slowed each of them, or recent fleets tell that more would not help. Else more
        are tried at once.
        """
        enough = seen.total * self.above / seen.size
        capacity, slowed = min(ROOM * self.made, enough), 1.0 - self.made / enough
        is_told = slowed > STEADY and seen.is_clear(slowed, self.made_groups)
        more = capacity + max(LARGE_PROBE * capacity, based._unit)
        if self.is_search and (is_told or based.curve.knee(seen.dispersion).high < more):
            return based._ended(capacity, now)
        based = replace(based, capacity=capacity, made=0.0, until=now, step=self._some(seen))
        return replace(based, tests_fewer=False, is_search=False, is_full=False, explored=False)

    def _testing(self, made: float, above: float, now: float) -> Self:
        """Test whether fewer workers than those of the size `above` make as much."""
        fewer = min(TESTED * above, above - self._unit)
        if fewer < HELPS * self._unit:  # they are one worker
            return self._ended(above, now)
        until = now + FIRST_HOLD_S
        return replace(self, capacity=fewer, made=made, above=above, until=until, tests_fewer=True)

    def _unbound(self, seen: Measurement) -> Self:
        """Let workers grow again: fewer make less, so the servers were not full."""
        new = replace(self._based(seen), capacity=0.0, made=0.0, grown=True)
        return replace(new, tests_fewer=False, is_search=False, is_full=False)

    def _ended(self, capacity: float, now: float) -> Self:
        """Take a capacity after a test with fewer workers."""
        new = replace(self, capacity=capacity, made=0.0, tests_fewer=False, is_search=False, is_full=False)
        return replace(new, explored=True)._held(now)

    def _held(self, now: float) -> Self:
        """Wait until the next probe, and longer each time; one more of few workers is a large part of them."""
        held, workers = min(self.hold_s, LONGEST_HOLD_S), self.capacity / self._unit
        until = now + min(held * max(1.0, RARE / workers), LONGEST_HOLD_S)
        return replace(self, until=until, hold_s=2.0 * held)

    @property
    def _unit(self) -> float:
        """Return what the fastest worker makes among few."""
        return max(self.bests.values(), default=0.0)

    def _probed(self, new: Self, seen: Measurement, wanted: float, now: float) -> Self:
        """Judge a probe: one more worker, or a few. One that nobody fills ends without a result."""
        least_size = self.above + HELPS * self.unit * self.step
        if seen.size < least_size:
            if wanted >= least_size and now < self.until:
                return self
            if self.longer >= LONGER or self.helped:  # nothing tells that the servers are full
                return replace(new, capacity=0.0, known=0.0, helped=False, is_full=False)
            closed = replace(self, capacity=self.known, known=0.0, until=now + FIRST_HOLD_S)
            return closed._at_capacity(
                replace(new, capacity=self.known, known=0.0, until=closed.until), seen, now
            )
        if not seen.tells(seen.size / self.above - 1.0):
            return self
        is_alike = not self.explored and self._is_alike(seen)
        told = new.curve.knee(seen.dispersion).size / self.above if is_alike else seen.total / self.usual
        if told < 1.0 + HELPS * (seen.size / self.above - 1.0):
            return self._vain(new, seen, told, now)
        if not is_alike:  # the servers became faster, or rollouts shorter
            new = replace(new, curve=ThroughputCurve().added(seen.size, seen.total, seen.groups))
        if self.longer >= LONGER:
            new = replace(new, longer=1.0)
            if seen.is_clear(told - 1.0, seen.groups):  # it was the rollouts
                return replace(new._unbound(seen), known=0.0)
        new = replace(new, proven=seen.size, top=seen.total, hold_s=FIRST_HOLD_S)
        return replace(new, step=2 * self.step, helped=True)._probing(seen, now)

    def _vain(self, new: Self, seen: Measurement, told: float, now: float) -> Self:
        """Judge a probe whose workers do not seem to help: they make `told` times what those before made."""
        is_told = seen.is_clear(seen.size / self.above - told, seen.groups)
        if not is_told and seen.groups < MOST_GROUPS / 2.0 and now < self.until:
            return self  # more may help, but chance hides it
        new = replace(new, capacity=self.known)
        if self.longer >= LONGER:
            is_full = is_told or self.is_full
            return replace(new._searching(self.known, seen, now), known=0.0, longer=1.0, is_full=is_full)
        new = replace(new._found(self.known, seen, now), explored=True)
        return replace(new, made=0.0) if is_told else replace(new, until=(now + new.until) / 2.0)

    def _is_slowed(self, seen: Measurement) -> bool:
        """Return whether workers are slower than the baseline by more than chance."""
        return seen.total < SLOWER * seen.size and seen.is_clear(
            1.0 - seen.total / seen.size, self.top_groups
        )

    def _verified(self, new: Self, seen: Measurement, now: float) -> Self:
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
        useful = ROOM * max(self.made, seen.total) * seen.size / seen.total
        capacity = max(self.capacity, min(ROOM * self.made, self.above, useful))
        if seen.total < SLOWER * seen.size:
            if not self._is_slowed(seen):  # the baseline may be too high by chance
                return new._kneed(seen, now)
            capacity = ROOM * seen.total  # they are still too many
        elif not seen.is_clear(1.0 - part, self.made_groups):
            return new._kneed(seen, now)
        is_told = self.above > (1.0 + LARGE_PROBE) * seen.size and seen.is_changed(
            1.0 - part, self.made_groups
        )
        new = replace(new, capacity=capacity, made=0.0, explored=is_told)
        new = new._filled(seen, min(self.made, ROOM * seen.total))._balanced(seen)
        if seen.total < LOST * min(self.made, seen.size):  # the baseline was too high
            return replace(new, bests={env: best * LOST for env, best in new.bests.items()})
        return new

    def _balanced(self, seen: Measurement) -> Self:
        """Correct the paces of several environments by one another's, and keep their mean.

        Full servers slow all workers alike, so the ratio of these paces is that without saturation. The first paces
        come from a few groups: an environment that seems slower than it is would get too many workers.
        """
        if len(seen.paces) < 2 or seen.paces.keys() != self.bests.keys():
            return self
        parts = {env: pace / self.bests[env] for env, pace in seen.paces.items()}
        mean = seen.total / seen.size
        return replace(self, bests={env: best * parts[env] / mean for env, best in self.bests.items()})

    def _filled(self, seen: Measurement, made: float = 0.0) -> Self:
        """Take the throughput of full servers, if it is sure; a little more workers `made` more."""
        full = max(seen.total, made)
        if not seen.is_sure or full <= self.full:
            return self
        return replace(self, full=full, full_groups=seen.groups)

    def _based(self, seen: Measurement) -> Self:
        """Take a measurement as the new baseline."""
        bests, curve = {**self.bests, **seen.paces}, self.curve.scaled(seen.total / seen.size)
        new = replace(self, bests=bests, proven=seen.total, top=seen.total, size=seen.total, curve=curve)
        return replace(new, usual_part=1.0, doubted=False, full=0.0, top_groups=seen.groups)

    def _followed(self, before: Self, seen: Measurement) -> Self:
        """Let the baseline follow workers that are not saturated; while it may be chance, measure on as `before`.

        More workers than before are no measure of a change of the rollouts; the same number, or fewer, are. Rollouts
        become longer slowly, and a server fills up at once: the baseline falls slowly.
        """
        if seen.size > MORE * self.proven:
            usual, usual_groups = self.usual_part, self.usual_groups
            if seen.size > (1.0 + LIKE) * self.proven:
                usual, usual_groups = min(1.0, seen.total / seen.size), seen.groups
            grown = self.grown or seen.total > (1.0 + LIKE) * self.top
            new = replace(self, proven=seen.size, top=seen.total, usual_part=usual, doubted=False)
            return replace(new, grown=grown, usual_groups=usual_groups)._pooled(seen)
        usual = self.usual_part if seen.size > CLOSE * self.proven else 1.0
        changes = {env: pace / (usual * self.bests[env]) for env, pace in seen.paces.items()}
        largest = max(abs(change - 1.0) for change in changes.values())
        clearly = largest > 1.0 - SLOWER
        if clearly and not (seen.is_sure or seen.is_changed(largest, self.top_groups)):
            return before
        if clearly and not self.doubted:
            return replace(self, doubted=True)
        if self.capacity:  # what is left of a difference would move the number of workers at it to and fro
            changes = {env: 1.0 if abs(change - 1.0) < STEADY else change for env, change in changes.items()}
        if not clearly:
            most, weight = FOLLOWS_PER_S * seen.took_s, FOLLOWS
            if not self.capacity and usual < 1.0:
                least = max(SURE_GROUPS, SURE_S * seen.groups / max(seen.took_s, 1.0))
                if self.usual_groups < least or self.top_groups < SURE_GROUPS:
                    return self._remeasured(seen, changes)
                return self._settled()
            if not self.capacity and self.top_groups < SURE_GROUPS:  # the baseline is the less sure of both
                most, weight = 1.0, seen.groups / (self.top_groups + seen.groups)
            changes = {
                env: 1.0 + min(max((change - 1.0) * weight, -most), most) for env, change in changes.items()
            }
        bests = {env: best * changes.get(env, 1.0) for env, best in self.bests.items()}
        change = sum(bests[env] for env in seen.paces) / sum(self.bests[env] for env in seen.paces)
        new = replace(self, bests=bests, proven=self.proven * change, top=self.top * change, doubted=False)
        if clearly:  # if the servers became slower, the present workers may be too many for them already
            new = replace(new, grown=self.grown and change > 1.0, top_groups=seen.groups)
            return replace(new, curve=ThroughputCurve().added(change * seen.size, seen.total, seen.groups))
        groups = max(self.top_groups, min(self.top_groups + seen.groups, SURE_GROUPS))
        new = replace(new, longer=max(1.0, self.longer / change), top_groups=groups)
        return replace(new, curve=self.curve.scaled(change))

    def _settled(self) -> Self:
        """Take what the present workers surely make as their pace, whether their rollouts or the servers slow them.

        What a growth then brings is told beside that.
        """
        part = self.usual_part
        new = replace(self._scaled(part), proven=part * self.proven, usual_part=1.0)
        return replace(new, longer=self.longer / part)

    def _remeasured(self, seen: Measurement, changes: Mapping[str, float]) -> Self:
        """Correct the throughput of the present workers, who make less than their size, by one more measurement.

        Fewer workers told the pace of one that nothing slows. It rises only if these make more than their size. The
        ratios of the paces of several environments are corrected as well.
        """
        groups = min(self.usual_groups, self.top_groups) + seen.groups
        weight = seen.groups / groups
        whole = seen.total / (self.usual_part * seen.size)
        corrected = self.usual_part * (1.0 + weight * (whole - 1.0))
        faster = max(1.0, corrected)
        bests = {
            env: best * faster * (1.0 + weight * (changes.get(env, whole) / whole - 1.0))
            for env, best in self.bests.items()
        }
        top = self.top * corrected / self.usual_part
        new = replace(self, bests=bests, proven=faster * self.proven, top=top, usual_part=min(1.0, corrected))
        top_groups = min(self.top_groups + seen.groups, SURE_GROUPS)
        new = replace(new, top_groups=top_groups, usual_groups=groups)
        return replace(new, doubted=False, curve=self.curve.scaled(faster))

    def _changed(self, seen: Measurement) -> Self:
        """Take a measurement as the new baseline, since what was measured before holds no longer."""
        new = self._based(seen)
        return replace(new, curve=ThroughputCurve().added(seen.total, seen.total, seen.groups))

    def _pooled(self, seen: Measurement) -> Self:
        """Let workers that are as fast as those before, as far as chance lets it be told, correct the baseline."""
        change, groups = seen.total / seen.size, min(self.top_groups + seen.groups, SURE_GROUPS)
        is_slower = change < 1.0 and seen.is_clear(1.0 - change, self.top_groups)
        if (
            self.capacity or is_slower
        ):  # more workers are never faster than fewer: if they seem so, it is chance
            return replace(self, top_groups=seen.groups)
        change = 1.0 + (change - 1.0) * seen.groups / (self.top_groups + seen.groups)
        new = replace(self._scaled(change), proven=change * self.proven, top_groups=groups)
        return replace(
            new, longer=max(1.0, self.longer / change), usual_part=min(1.0, self.usual_part / change)
        )

    def _scaled(self, change: float) -> Self:
        """Correct the paces of all environments, and with them the sizes of the curve."""
        bests = {env: change * best for env, best in self.bests.items()}
        return replace(self, bests=bests, curve=self.curve.scaled(change))

    def _kneed(self, seen: Measurement, now: float) -> Self:
        """Take the capacity that all measurements together tell; two of them alone do not."""
        knee = self.curve.knee(seen.dispersion)
        groups = sum(one.groups for one in self.curve.points if one.size <= knee.size) or seen.groups
        pace = min(max(knee.pace, KEPT), 1.0 / KEPT)  # the rest is what changed since the older ones
        new = replace(self._scaled(pace), made=0.0, doubted=False, top_groups=groups)
        if knee.size < CLOSE * max(one.size for one in self.curve.points):
            size = pace * max(knee.size, TESTED * seen.size)  # fewer still are tested, not told
            # One more of few workers is a large part of them.
            whole = max(math.ceil(size / new._unit - ROUND), math.floor(ROOM * size / new._unit))
            return replace(new, capacity=whole * new._unit)
        if seen.size >= CLOSE * knee.size:
            return replace(new, until=now, step=self._some(seen))  # they seem to be needed, and more may be
        return replace(new, capacity=0.0, grown=True, proven=pace * seen.size, top=seen.total)

    def _found(self, capacity: float, seen: Measurement, now: float) -> Self:
        new = replace(self, capacity=capacity, known=0.0, step=1, doubted=False, explored=False, helped=False)
        made = seen.total if capacity < CLOSE * seen.size else 0.0  # else it can hardly be told
        new = replace(new, made=made, made_groups=seen.groups, above=seen.size)._filled(seen)
        return replace(new, proven=min(self.proven, capacity), top=min(self.top, seen.total))._held(now)
