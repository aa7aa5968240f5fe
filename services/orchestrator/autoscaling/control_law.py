"""The control law: the target number of workers of one environment. Pure; the caller passes the clock.

Pressure is the queue in batches of the trainer: a long queue means that *fewer* workers suffice. The queue integrates
production minus consumption, and a worker takes seconds to minutes to start. A controller on the queue alone is
therefore either slow or unstable. This one divides two measured rates, and the queue only corrects the quotient:

    want = (demand / throughput per worker + correction) / availability + a margin for crashes
    correction = missing sequences, refilled within `refill_s`, / throughput per worker + a slow integral;
                 limited to about the dead band

    an operator's number          hold it, within the bounds
    no pressure for `stale_s`     hold: silence is not zero pressure
    no trainer                    hold: a returning trainer has full demand at once
    workers wait for the teacher,
      and nothing arrives         hold, and no scale-down for the window
    no measurement yet            hold, or scale up while the trainer starves and all workers are ready;
                                  workers that wait most of their time were never measured: scale down to the
                                  number that surely suffices
    the trainer starves           scale up at once, and no scale-down for the window
    the trainer consumes an epoch
      at once, then nothing       its demand is the mean of such cycles, while the queue lasts: see `cycles`
    want above target             scale up, once all updates of `confirm_up_s` agree, by a bounded step; a large step
                                  waits while the queue lasts for longer than a start: it may be a burst
    want below target - band soon
      after a step up             withdraw the workers that start, but for those wanted, once the want has fallen by the
                                  band: at the end of a short burst, they would be ready too late
    peak want of the window
      below target - band         scale down, once all updates of `confirm_down_s` agree, by a bounded step
    otherwise                     hold

The window is `down_window_s`, or one start if that is longer. The dead band lies below the target alone: a worker too
many costs a worker, one too few starves a trainer.

A full queue alone does not scale down. High-water marks and pacing bound it, and a waiting worker costs less than a
restart. If workers wait, the queue is at one of its limits (bytes, groups or policy versions), so nothing is missing.
If they wait most of the time, or at the same time as the trainer, more workers would only wait too. A starting worker
counts as present, a draining one as gone. The integral freezes while a worker starts or drains and while the target
cannot follow (anti-windup). The inference servers limit growth until its effect is measured, and workers that add no
throughput: see `saturation`. Always min <= target <= max, and at most the available room.

Sources: tolerance, stabilization window and step limits follow the Kubernetes horizontal pod autoscaler (algorithm
page of its documentation), immediate scale-up follows Knative's panic mode, anti-windup follows Astrom and Hagglund,
Advanced PID Control, 3.5 (conditional integration).
"""

import math
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.config.orchestrator import ScalingConfig
from rolloutmq.services.orchestrator.autoscaling.cycles import DemandCycles
from rolloutmq.services.orchestrator.autoscaling.demand import DemandEstimator
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample
from rolloutmq.services.orchestrator.autoscaling.trend import DemandTrend

INFERENCE_BOUND: Final = "inference_bound"
"""Bound reported when the workers share a saturated server."""
UNMEASURED: Final = "unmeasured"
"""Bound reported until it is known how fast the present workers are: more might only share a full server."""
TEACHER_AWAY: Final = "teacher_away"
"""Reason reported while workers wait for the teacher: more workers would wait too, and fewer would not help."""
FIRST_BATCH_S: Final = 15.0
"""Time in which the present workers should complete the first batch; more workers would add nothing before that. A
longer start or rollout replaces it."""
FIRST_WORKERS: Final = 8
LONG_BATCH_S: Final = 180.0
"""More workers than `FIRST_WORKERS` start for the first batch only if it takes longer than this: nobody knows yet how
long the trainer takes for one."""
LARGE_STEP: Final = 0.25
"""Step up, relative to the target, that waits while the queue lasts: it may be a burst."""
LEAD_STARTS, LEAD_S = 1.25, 5.0
"""Starts and seconds before the queue runs out at which a scale-up must begin: some starts take longer."""
LONGEST_START_S: Final = 300.0
"""A start longer than this waits for something else: a GPU, or its next attempt."""
LEAST_AVAILABLE: Final = 0.2
"""Availability below which more workers would not help: nearly all of them crash all the time."""
EMPTY: Final = 1.0
"""Batches in the queue below which a waiting trainer waits for workers."""
SPARE: Final = 1.05
"""Factor on the mean demand of cycles, so that the queue fills up."""
RESTS: Final = 2.0
"""Workers are kept between two bursts only if the next one comes within this factor of the time of a start."""
TREND_S, TREND_STEPS = 30.0, 8.0
"""Time in which a demand must rise to be expected to go on, in seconds and in trainer steps; or one start."""
SEEN_LATE_S: Final = 5.0
"""Age of the measured demand, a mean over about twice this time."""
MOST_AHEAD: Final = 0.25
"""Most that is expected beyond the demand of now, relative to it."""
STARVED_PART: Final = 0.5
"""Part of the last seconds that a starving trainer waits."""
FULL_PART: Final = 0.2
"""Part of their time that workers wait when the queue is at a limit."""
IDLE_PART: Final = 0.5
"""Part of their waiting time from which more workers would only wait too."""
WHOLE: Final = 0.85
"""Smallest dead band, in workers: with two of them, a want of one is one."""
HIGHEST: Final = 2.0
"""Standard errors by which the highest want of a window exceeds the mean of some by chance."""
UNSURE: Final = 3.5
UNSURE_PART: Final = 0.25
"""Dead band in standard errors of the measured rates, and the largest such part of the target: both the number that was
wanted once and the one that is wanted now differ by chance."""
ROUND: Final = 0.25
"""Tolerated shortfall in workers: the quotient of two rates is no more precise."""
WITHDRAWN: Final = 0.5
"""Part of a start within which a step up is withdrawn if the want falls: the rest of it costs more than was spent."""
REFILLS: Final = 0.5
"""Part of the planned pace at which a queue is refilled: then the measured rates are right."""
MORE, HALF = 0.9, 0.5
LESS: Final = 0.9
"""Limits of the correction: `MORE` bands up, less the error of the rates, but at least `HALF` a band; and `LESS` of the
band beyond one worker down."""


class ControllerState(msgspec.Struct, frozen=True):
    """Memory of the controller between ticks."""

    target: int
    rates: DemandEstimator = msgspec.field(default_factory=DemandEstimator)
    cycles: DemandCycles = msgspec.field(default_factory=DemandCycles)
    trend: DemandTrend = msgspec.field(default_factory=DemandTrend)
    news: tuple[int, int] = (-1, -1)
    """Epoch and number of the last pressure message."""
    at: float = -math.inf
    trim: float = 0.0
    """Integral term, in workers."""
    up_since: float = math.inf
    down_since: float = math.inf
    """Times since when all updates agree on scale-up, or on scale-down."""
    wants: tuple[tuple[float, float], ...] = ()
    """Times and wants within the window; descending, so that the first is the peak."""
    up_from: tuple[float, int] = (-math.inf, 0)
    """Start time of the present step up, and the target then."""
    tied_at: float = -math.inf
    """Last time at which the trainer and the workers waited at once: all credit is in running rollouts, and each
    returns some when it arrives."""
    calm_from: float = math.inf
    """Earliest time of a scale-down, after starvation or a start. Infinite before the first tick."""
    start_s: float = 10.0
    """Time a worker takes to become ready."""
    waits: tuple[float, int] = (math.inf, 0)
    """Time at which a step up is due that waits while the queue lasts, and its target."""
    level: float = 0.0
    """Batches that will be queued after the next one was taken, and the filtered derivative per second."""
    slope: float = 0.0


class PressureController:
    """Controller of one environment."""

    def __init__(self, min_workers: int, max_workers: int, scaling: ScalingConfig) -> None:
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.scaling = scaling

    def initial(self, workers: int = 0) -> ControllerState:
        """Start with the running workers, or with the minimum; no scale-down within the first window."""
        return ControllerState(self._within(workers))

    def decide(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        """Decide once a tick; `now` in monotonic seconds."""
        state, decision = self._decide(state, sample, now)
        room = sample.room
        if room is not None and room.workers < decision.target and not decision.bound:
            reason = f"{decision.reason}; {_bounded(sample, room.workers, room.why)}"
            decision = replace(decision, reason=reason, bound=room.why)
        return state, decision

    def _decide(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        if math.isinf(state.calm_from):
            state = replace(state, calm_from=now + self._window_s(state))
        if sample.crew.start_s:
            state = replace(state, start_s=min(sample.crew.start_s, LONGEST_START_S))
        is_news = (
            now - sample.heard_at <= self.scaling.stale_s and (sample.epoch, sample.number) != state.news
        )
        if is_news and math.isinf(state.rates.last_at):
            # Some of the workers alive at the start were already draining.
            state = replace(state, target=self._within(state.target - sample.crew.draining))
        if sample.wanted is not None:
            return self._asked(self._look(state, sample, now) if is_news else state, sample, now)
        if now - sample.heard_at > self.scaling.stale_s:
            return self._unheard(state, sample, now)
        if not is_news:
            return state, Decision(state.target, "hold: no news")
        state = replace(self._look(state, sample, now), waits=ControllerState(0).waits)
        if not sample.trainers:
            return self._hold(state, "no trainer")
        if state.rates.away:
            # Rates measured meanwhile mean nothing: measure anew once the teacher replies.
            state = replace(state, calm_from=max(state.calm_from, now + self._window_s(state)))
            return self._hold(state, f"{TEACHER_AWAY}: {sample.untaught} workers wait for the teacher")
        want = self._want(state, sample)
        if want is None:
            return self._without_rates(state, sample, now)
        state, decision = self._move(self._trimmed(state, sample, want, now), sample, want, now)
        return state, replace(decision, want=want)

    def _unheard(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        """Hold without news; only a step up that waited for the queue to run out is made when that is due."""
        due, wanted = state.waits
        why = _silence(now - sample.heard_at)
        if now < due or wanted <= state.target:
            return state, Decision(state.target, f"hold: {why}")
        why = f"{why}; by the last news the queue runs out before more workers are ready"
        return self._up(state, sample, wanted, why, now, at_once=True)

    def _look(self, state: ControllerState, sample: PressureSample, now: float) -> ControllerState:
        rates = state.rates.looked(sample, now)
        slope, elapsed, level = 0.0, now - state.rates.last_at, sample.pressure - rates.step_part
        if 0.0 < elapsed < self.scaling.stale_s:
            change = (level - state.level) / elapsed
            new = 1.0 - math.exp(-elapsed / self.scaling.derivative_filter_s)
            slope = state.slope + (change - state.slope) * new
        cycles = state.cycles if sample.epoch == state.news[0] else DemandCycles()
        if sample.trainers and not rates.away:
            is_full = rates.idle > FULL_PART
            cycles = cycles.looked(now, sample.eaten, rates.pace, rates.starved, is_full=is_full)
        trend = state.trend.looked(now, rates.pace, self._trend_s(state))
        news = sample.epoch, sample.number
        state = replace(state, news=news, rates=rates, cycles=cycles, trend=trend)
        return replace(state, level=level, slope=slope)

    def _want(self, state: ControllerState, sample: PressureSample) -> float | None:
        """Return the number of workers needed, as a real number; None while the rates are unknown."""
        demand, per_worker = state.rates.demand, state.rates.per_worker
        if demand is None or per_worker is None:
            return None
        need = self._planned(state, sample, demand)[0] / per_worker
        lack = self._error(state, sample) / (self._refill_s(state) * per_worker)
        band = self._band(need)
        # With few workers the lower limit is above 0: some spare stays, since growth from few takes more steps. A queue
        # beyond twice its setpoint is spare enough.
        least = LESS * (1.0 - band) if lack >= 0.0 else min(0.0, LESS * (1.0 - band))
        # The error of the rates and the correction together stay within about the band. The fleet follows the highest
        # want, which chance raises by more than one standard error.
        most = max(HALF * band, MORE * band - HIGHEST * state.rates.error * need)
        want = need + min(max(lack + state.trim, least), most)
        available = max(state.rates.available, LEAST_AVAILABLE)
        return (want + self._reserve(state, sample, want, available)) / available

    def _reserve(
        self, state: ControllerState, sample: PressureSample, want: float, available: float
    ) -> float:
        """Return some more workers, since at times fewer are ready than on average; the queue stands in for some.

        The number of ready workers returns to its mean within about a start. The queue counts with its setpoint at
        least, and twice of it at most: a longer one may soon be shorter. It lacks half a batch at times.
        """
        fewer = math.sqrt(want * (1.0 - available))
        setpoint = self.scaling.setpoint_batches
        spare = max(0.0, min(max(setpoint, sample.pressure), 2.0 * setpoint) - 0.5) * sample.batch_sequences
        lasts_s = max(1.0, available * state.start_s)
        return max(0.0, fewer - spare / (lasts_s * (state.rates.per_worker or math.inf)))

    def _planned(self, state: ControllerState, sample: PressureSample, demand: float) -> tuple[float, str]:
        """Return the demand to plan for, and in words how it differs from that of now."""
        if (steady := self._steady(state, sample, demand)) is not None:
            return SPARE * steady, f", {steady:.1f}/s as the mean of its cycles"
        ahead = self._ahead(state, sample.share, demand)
        return demand + ahead, f", rising by {ahead:.1f}/s within a start" if ahead else ""

    def _steady(self, state: ControllerState, sample: PressureSample, demand: float) -> float | None:
        """Return the mean demand of a trainer that consumes an epoch at once, if that fills the queue in time."""
        cycles = state.cycles
        if not cycles.is_known:
            return None
        mean = cycles.mean * sample.share
        if not cycles.is_burst:
            return mean if SPARE * mean > demand and not cycles.filled else None
        spare = (sample.pressure - self.scaling.setpoint_batches) * sample.batch_sequences
        return mean if SPARE * mean < demand and spare >= cycles.left * sample.share > 0 else None

    @staticmethod
    def _trend_s(state: ControllerState) -> float:
        return max(TREND_S, state.start_s, TREND_STEPS * state.rates.step_s)

    def _ahead(self, state: ControllerState, share: float, demand: float) -> float:
        """Return what a rising demand will have risen by when workers that start now deliver."""
        rise_per_s = share * state.trend.rise_per_s(self._trend_s(state))
        return min(rise_per_s * (state.start_s + state.rates.rollout_s + SEEN_LATE_S), MOST_AHEAD * demand)

    def _window_s(self, state: ControllerState) -> float:
        """Return the time for which the peak want counts: a worker sent away too early costs a start."""
        if self._rests(state):
            return self.scaling.confirm_down_s
        return max(self.scaling.down_window_s, state.start_s)

    def _rests(self, state: ControllerState) -> bool:
        """Return whether the next burst is so far away that a worker kept for it costs more than a start."""
        return state.cycles.rests_s > RESTS * self._lead_s(state)

    def _band(self, workers: float) -> float:
        return max(WHOLE, self.scaling.band_part * workers)

    def _unsure_band(self, state: ControllerState, workers: float) -> float:
        """Return the dead band, as wide as chance may make two wants differ."""
        return max(self._band(workers), min(UNSURE * state.rates.error, UNSURE_PART) * workers)

    def _error(self, state: ControllerState, sample: PressureSample) -> float:
        """Return the sequences missing from the queue; negative beyond twice its setpoint, unless a burst is due.

        A trainer takes a batch at once, and the queue grows during its step. What counts is what will be left after the
        next batch: that does not depend on when the queue is seen.
        """
        setpoint = self.scaling.setpoint_batches
        if state.cycles.is_known and sample.pressure > setpoint:
            return 0.0  # the queue holds the next burst
        pressure = max(0.0, state.level + self.scaling.derivative_s * state.slope)
        if pressure > setpoint:
            return min(0.0, 2.0 * setpoint - pressure) * sample.batch_sequences
        if state.rates.idle > FULL_PART:
            return 0.0
        return (setpoint - pressure) * sample.batch_sequences

    def _refill_s(self, state: ControllerState) -> float:
        rates = state.rates
        return max(self.scaling.refill_s, 2.0 * (state.start_s + rates.rollout_s), rates.memory_s)

    def _trimmed(
        self, state: ControllerState, sample: PressureSample, want: float, now: float
    ) -> ControllerState:
        """Integrate the queue error, unless the target cannot follow (anti-windup)."""
        elapsed = min(max(0.0, now - state.at), self.scaling.stale_s)
        state = replace(state, at=now)
        per_worker = state.rates.per_worker
        if per_worker is None or sample.crew.starting or sample.crew.draining:
            return state
        missing, refill_s = self._error(state, sample), self._refill_s(state)
        lack = missing / (refill_s * per_worker)
        held = sample.server.slow or want >= min(self._limit(sample)[0], sample.server.reach)
        if (lack > 0.0 and held) or (lack < 0.0 and want <= self.min_workers):
            return state
        if lack > 0.0 and state.slope * sample.batch_sequences >= REFILLS * missing / refill_s:
            return state
        bound = max(1.0, self.scaling.trim_part * want)
        trim = min(max(state.trim + lack * elapsed / self.scaling.integral_s, -bound), bound)
        return replace(state, trim=trim)

    def _limit(self, sample: PressureSample) -> tuple[int, str]:
        """Return the maximum that is allowed and useful, and its bound."""
        most, why = self.max_workers, "max_workers"
        if sample.server.most and sample.server.most < most:
            most, why = sample.server.most, INFERENCE_BOUND
        if sample.room is not None and sample.room.workers < most:
            most, why = sample.room.workers, sample.room.why
        return max(self.min_workers, most), why

    def _move(
        self, state: ControllerState, sample: PressureSample, want: float, now: float
    ) -> tuple[ControllerState, Decision]:
        state = self._remember(state, want, now)
        target, (limit, bound), why = state.target, self._limit(sample), self._why(state, sample, want)
        starving = self._starving(state, sample)
        if starving:
            state = replace(state, calm_from=max(state.calm_from, now + self._window_s(state)))
            if state.rates.idle > FULL_PART:
                state = replace(state, tied_at=now)
        if target > limit:
            return self._to(state, limit, f"{why}; {_bounded(sample, limit, bound)}", bound)
        wanted = math.ceil(want - self._tolerated(state, sample, want))
        band = self._unsure_band(state, target)
        if starving and not target:
            wanted = max(wanted, 1)  # without a worker nothing can be measured
        if wanted > target:
            why = f"{why}; starving" if starving else why
            return self._up(state, sample, wanted, why, now, at_once=starving)
        kept = self._kept(state, sample, want, now)
        if target - kept >= band and state.wants[0][1] - want >= band:  # less would be chance
            return self._down(state, kept, f"{why}; less is wanted before the last step up is ready", now)
        most = state.wants[0][1]
        last = target == 1 and most <= ROUND and sample.pressure >= self.scaling.setpoint_batches
        if (target - most >= band or last) and (now >= state.calm_from or self._rests(state)):
            kept = max(math.ceil(most - ROUND), min(target, self._surely(state)))
            return self._down(state, kept, why, now) if kept < target else self._hold(state, why)
        return self._hold(state, why)

    def _surely(self, state: ControllerState) -> int:
        """Return the workers that surely meet the demand: the measured rates differ by chance.

        All wants of a window follow from about the same arrivals, so their highest one may be too low as well. A long
        queue lowers the want, but it does not last.
        """
        demand, per_worker = state.rates.demand, state.rates.per_worker
        if demand is None or not per_worker:
            return 0
        available = max(state.rates.available, LEAST_AVAILABLE)
        most = 1.0 + min(HIGHEST * state.rates.error, UNSURE_PART)
        return math.ceil(most * demand / (per_worker * available) - ROUND)

    def _tolerated(self, state: ControllerState, sample: PressureSample, want: float) -> float:
        """Return the shortfall that brings no worker.

        The measured rates differ by chance, and more where workers crash. A queue beyond twice its setpoint bridges
        what chance may make of them; if it falls, they are right.
        """
        if sample.pressure <= 2.0 * self.scaling.setpoint_batches:
            return ROUND
        return max(ROUND, min(UNSURE * state.rates.error, UNSURE_PART) * want)

    def _kept(self, state: ControllerState, sample: PressureSample, want: float, now: float) -> int:
        """Return the workers to keep if less is wanted soon after a step up: those that were there before it stay."""
        since, base = state.up_from
        starting = sample.crew.starting - sample.crew.restarting
        if starting <= 0 or now - since > WITHDRAWN * state.start_s:
            return state.target
        return min(state.target, max(math.ceil(want - ROUND), base, state.target - starting))

    def _up(
        self,
        state: ControllerState,
        sample: PressureSample,
        wanted: int,
        why: str,
        now: float,
        *,
        at_once: bool,
    ) -> tuple[ControllerState, Decision]:
        scaling, target, (limit, bound) = self.scaling, state.target, self._limit(sample)
        if sample.server.slow:
            said = "throughput per worker fell: no scale-up until saturation is ruled out"
            return self._hold(state, f"{why}; {said}", UNMEASURED)
        if state.rates.silent:
            return self._hold(state, f"{why}; no group arrives from the workers: more would not help")
        if (state.rates.idle > IDLE_PART or now - state.tied_at <= state.rates.rollout_s) and target:
            return self._hold(state, f"{why}; the workers wait themselves ({sample.wait or 'no_credit'})")
        if target >= limit:
            return self._hold(state, f"{why}; {_bounded(sample, limit, bound)}", bound)
        reach = sample.server.reach
        if target >= reach:
            said = f"at most {reach} until their throughput is measured"
            return self._hold(state, f"{why}; {said}", UNMEASURED)
        state = replace(state, up_since=min(state.up_since, now), down_since=math.inf)
        is_large = wanted - target > LARGE_STEP * target
        if is_large and not at_once and (lasts_s := self._lasts_s(state, sample)):
            lead_s = self._lead_s(state)
            state = replace(state, waits=(now + lasts_s - lead_s, wanted))
            said = f"the queue lasts {lasts_s:.0f} s, and a new worker takes {lead_s:.0f} s"
            return state, Decision(target, f"hold: {why}; {said}")
        if now - state.up_since < scaling.confirm_up_s and not at_once:
            return state, Decision(target, f"{why}; not confirmed yet")
        since, base = state.up_from
        if now - since >= scaling.up_every_s:
            since, base = now, target
        most = max(math.floor(base * scaling.up_factor), base + scaling.up_least, sample.server.tried)
        if most <= target:
            return state, Decision(target, f"{why}; at most {most} within {scaling.up_every_s:g} s")
        state = replace(state, up_from=(since, base))
        return self._to(state, min(wanted, most, limit, reach), why, bound if wanted > limit else "")

    def _lasts_s(self, state: ControllerState, sample: PressureSample) -> float:
        """Return the time that the queue lasts if that is longer than new workers need; 0 if it is not."""
        demand, per_worker = state.rates.demand or 0.0, state.rates.per_worker or 0.0
        missing = demand - sample.crew.ready * per_worker
        spare = (sample.pressure - self.scaling.setpoint_batches) * sample.batch_sequences
        if missing <= 0.0 or spare < missing * self._lead_s(state):
            return 0.0
        return spare / missing

    @staticmethod
    def _lead_s(state: ControllerState) -> float:
        """Return the time before workers are needed at which they must start."""
        return LEAD_STARTS * state.start_s + state.rates.rollout_s + LEAD_S

    def _down(
        self, state: ControllerState, wanted: int, why: str, now: float
    ) -> tuple[ControllerState, Decision]:
        scaling, target = self.scaling, state.target
        if target <= self.min_workers:
            return self._hold(state, f"{why}; {target} is min_workers")
        state = replace(state, down_since=min(state.down_since, now), up_since=math.inf)
        if now - state.down_since < scaling.confirm_down_s:
            return state, Decision(target, f"{why}; not confirmed yet")
        left = math.ceil(target * scaling.down_part) if target > 1 else 0
        return self._to(state, max(wanted, left), why)

    def _remember(self, state: ControllerState, want: float, now: float) -> ControllerState:
        """Keep the wants of the window, except those below a later one."""
        oldest = now - self._window_s(state)
        kept = [entry for entry in state.wants if entry[0] >= oldest and entry[1] > want]
        return replace(state, wants=(*kept, (now, want)))

    def _without_rates(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        """Decide while the rates are unknown."""
        per_worker = state.rates.per_worker
        if (enough := self._enough(state)) is not None and now >= state.calm_from:
            part = f"the workers wait {state.rates.idle:.0%} of their time"
            return self._down(state, enough, f"{part}: {enough} suffice", now)
        if not self._starving(state, sample) or sample.crew.ready < state.target - sample.crew.failed:
            return self._hold(state, _unmeasured(state.rates))
        if not state.target:
            return self._up(state, sample, 1, "starving, no batch consumed yet", now, at_once=False)
        if per_worker is None:
            return self._hold(state, _unmeasured(state.rates))
        lack = max(0.0, 1.0 - sample.pressure) * sample.batch_sequences
        soon_s = max(FIRST_BATCH_S, state.start_s, state.rates.rollout_s)
        more = min(2 * state.target, math.ceil(lack / (soon_s * per_worker)))
        if more > FIRST_WORKERS:
            soon_s = max(LONG_BATCH_S, state.start_s, state.rates.rollout_s)
            more = max(FIRST_WORKERS, min(more, math.ceil(lack / (soon_s * per_worker))))
        if more <= state.target:
            return self._hold(state, f"no batch consumed yet; one is complete within {soon_s:.0f} s")
        return self._up(state, sample, more, "starving, no batch consumed yet", now, at_once=False)

    def _enough(self, state: ControllerState) -> int | None:
        """Return a number of workers that surely suffices; None if it is unknown, or about the target.

        Workers that wait most of their time say nothing about their throughput but that it is at least so much. Without
        this, a restarted orchestrator would keep idle workers for ever.
        """
        rates = state.rates
        least, demand = rates.per_worker_least, rates.demand
        if rates.per_worker is not None or least is None or demand is None or rates.idle <= IDLE_PART:
            return None
        most = demand / least
        return math.ceil(most - ROUND) if state.target - most >= self._band(state.target) else None

    def _why(self, state: ControllerState, sample: PressureSample, want: float) -> str:
        demand, per_worker = state.rates.demand or 0.0, state.rates.per_worker or 0.0
        planned = self._planned(state, sample, demand)[1]
        return (
            f"want {want:.1f}: demand {demand:.1f}/s{planned}, per worker {per_worker:.2f}/s, "
            f"pressure {sample.pressure:.2f}"
        )

    @staticmethod
    def _starving(state: ControllerState, sample: PressureSample) -> bool:
        return sample.share > 0.0 and sample.pressure < EMPTY and state.rates.starved > STARVED_PART

    def _asked(
        self, state: ControllerState, sample: PressureSample, now: float
    ) -> tuple[ControllerState, Decision]:
        # Once the law decides again, the demand of a window must have been seen before it scales down.
        state = replace(state, calm_from=max(state.calm_from, now + self._window_s(state)))
        wanted = sample.wanted or 0
        within, why = self._within(wanted), f"pinned to {wanted}"
        if within != wanted:
            why = f"{why}; {self.min_workers} to {self.max_workers} allowed"
        target, bound = within, ""
        if sample.room is not None and max(sample.room.workers, self.min_workers) < within:
            target, bound = max(sample.room.workers, self.min_workers), sample.room.why
            why = f"{why}; {_bounded(sample, target, bound)}"
        state, decision = self._to(state, target, why, bound)
        return state, replace(decision, want=float(within))

    def _to(
        self, state: ControllerState, target: int, why: str, bound: str = ""
    ) -> tuple[ControllerState, Decision]:
        target = self._within(target)
        return replace(_unsure(state), target=target), Decision(target, why, bound=bound)

    @staticmethod
    def _hold(state: ControllerState, why: str, bound: str = "") -> tuple[ControllerState, Decision]:
        return _unsure(state), Decision(state.target, f"hold: {why}", bound=bound)

    def _within(self, workers: int) -> int:
        return min(max(workers, self.min_workers), self.max_workers)


def _unsure(state: ControllerState) -> ControllerState:
    return replace(state, up_since=math.inf, down_since=math.inf)


def _bounded(sample: PressureSample, limit: int, bound: str) -> str:
    if sample.room is not None and sample.room.why == bound and sample.room.details:
        return sample.room.details
    match bound:
        case "inference_bound":
            return f"{bound}: more than {limit} add no throughput"
        case "max_workers":
            return f"max_workers: at most {limit}"
        case _:
            return f"{bound}: room for {limit}"


def _unmeasured(rates: DemandEstimator) -> str:
    """Return which rate is unknown, and why if groups were made: they alone measure nothing."""
    if rates.per_worker is None and rates.per_worker_least:
        return f"throughput of a worker unknown: workers wait {rates.idle:.0%} of their time"
    if rates.demand is None and rates.per_worker is not None:
        return "demand unknown: the trainer was not observed for long enough"
    return "no measurement yet"


def _silence(age_s: float) -> str:
    return "no pressure received yet" if math.isinf(age_s) else f"no pressure for {age_s:.1f} s"
