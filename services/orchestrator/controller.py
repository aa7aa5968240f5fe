"""How many workers an environment should have: the control law. Pure: the clock is passed in.

Pressure is what lies queued, in batches of the trainer. Much queued means that *fewer* workers would do. But the queue
integrates what is made less what is eaten, and a worker takes seconds to minutes to start. So a rule that follows the
queue alone is either late or restless. What decides here is the quotient of two measured rates, and the queue corrects:

    want = appetite / per worker + correction
    correction = what the queue lacks, made good in `refill_s`, / per worker + its slow integral; within about the band

    an operator's number          holds, within the bounds, whatever is measured
    no news for `stale_s`         hold: silence is not zero pressure
    nothing measured yet          hold, or one more while the trainer starves and all are ready
    the trainer starves           up at once, and nobody goes for `window_s`
    want above target + band,
      or the trainer waits        up, once `confirm_up` ticks agree, by a bounded step
    the most that was wanted in
      `window_s` below - band     down, once `confirm_down` ticks agree, by a bounded step
    otherwise                     hold

A queue that is too full takes nobody away by itself: the marks and pacing bound it, and a worker that waits costs less
than one that goes and comes back. Who starts counts as started, who drains as gone. The integral stands still while
anybody starts or drains and where the target cannot follow it. More workers that bring no more have met a bound that
they share, the inference server: see `knee`. Always min <= target <= max.

Sources: tolerance, stabilisation window and step limits are those of the Kubernetes horizontal autoscaler (algorithm
page of its documentation), panic is after Knative's; the integral stands still after Astrom and Hagglund, Advanced PID
Control, 3.5 (conditional integration).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from rolloutmq.services.orchestrator.estimates import Rates
from rolloutmq.services.orchestrator.knee import Knee
from rolloutmq.services.orchestrator.pressure import Crew, Decision, PressureSample

EMPTY: Final = 0.25
"""Batches; below it a trainer that waits finds nothing."""
STARVED_PART: Final = 0.5
"""Part of the last seconds that a trainer waits when it starves."""
WAITING_PART: Final = 0.1
"""A trainer that waits for more than that part of its time could do more with another worker."""
ROUND: Final = 0.25
"""So much of a worker may be missing: the quotient of two rates is not known better."""
MORE: Final = 1.2
LESS: Final = 0.9
"""The correction is at most that many bands up, and that part of the band beyond one worker down."""


@dataclass(frozen=True, slots=True)
class Gains:
    """The numbers of the law."""

    min_workers: int
    max_workers: int
    setpoint: float = 1.5
    """Batches that should lie queued: one is taken while the next is still being made."""
    refill_s: float = 60.0
    """Time in which the queue is filled again; longer where workers take longer to start."""
    integral_s: float = 240.0
    """Time in which the integral adds the same correction once more."""
    trim_part: float = 0.05
    """Most of the integral, as a part of what is wanted; one worker if that is more."""
    band_part: float = 0.1
    """Dead band, as a part of the target; one worker if that is more."""
    confirm_up: int = 2
    """Ticks that must agree before workers are started: one alone may be a batch that came late."""
    confirm_down: int = 15
    """The same before workers go: it is cheaper to keep one than to start it again."""
    window_s: float = 30.0
    """Workers go only for what was not wanted for so long."""
    step_up: float = 2.0
    """Most that the target may grow to within `step_s`, in times of what it was."""
    step_up_least: int = 4
    """Workers that may be started within `step_s` in any case."""
    step_s: float = 5.0
    step_down: float = 0.5
    """Least part of the target that is left by one step down."""
    stale_s: float = 3.0
    """Age at which news say nothing any more: a dozen of them were missed."""


@dataclass(frozen=True, slots=True)
class State:
    """What the controller remembers from tick to tick."""

    target: int
    rates: Rates = field(default_factory=Rates)
    knee: Knee = field(default_factory=Knee)
    number: int = -1
    """Of the last pressure that was heard."""
    at: float = -math.inf
    trim: float = 0.0
    """Workers."""
    up_ticks: int = 0
    down_ticks: int = 0
    wants: tuple[tuple[float, float], ...] = ()
    """When and how many were wanted, within the window; falling, so that the first is the most."""
    up_from: tuple[float, int] = (-math.inf, 0)
    """When the present step up began, and at which target."""
    calm_from: float = math.inf
    """Nobody goes before: somebody starved, or it is not known yet what was. Not set before the first tick."""
    starting_since: float = math.inf
    start_s: float = 10.0
    """How long a worker takes to be ready, the longest of late."""


class PressureController:
    """The control law of one environment."""

    def __init__(self, gains: Gains) -> None:
        self.gains = gains

    def initial(self, workers: int = 0) -> State:
        """Begin with the workers that live, or with the fewest allowed; nobody goes for the first window."""
        return State(self._within(workers))

    def decide(self, state: State, sample: PressureSample, now: float) -> tuple[State, Decision]:
        """Decide once a tick; `now` in seconds, monotonic."""
        if math.isinf(state.calm_from):
            state = replace(state, calm_from=now + self.gains.window_s)
        state = self._watch_starts(state, sample.crew, now)
        if sample.wanted is not None:
            return self._asked(state, sample.wanted)
        if now - sample.heard_at > self.gains.stale_s:
            return self._hold(state, _silence(now - sample.heard_at))
        if sample.number == state.number:
            return state, Decision(state.target, "hold: no news")
        state = self._look(state, sample, now)
        want = self._want(state, sample)
        if want is None:
            return self._grope(state, sample, now)
        return self._move(self._trimmed(state, sample, want, now), sample, want, now)

    def _look(self, state: State, sample: PressureSample, now: float) -> State:
        crew = sample.crew
        rates = state.rates.looked(sample, now)
        knee = state.knee.looked(rates, crew.ready, starting=crew.starting > 0, now=now)
        return replace(state, number=sample.number, rates=rates, knee=knee)

    def _want(self, state: State, sample: PressureSample) -> float | None:
        """Return how many workers would do, as a real number; None while that is not known."""
        appetite, per_worker = state.rates.appetite, state.rates.per_worker
        if appetite is None or per_worker is None:
            return None
        need = appetite / per_worker
        lack = self._error(sample) / (self._refill_s(state) * per_worker)
        band = self._band(need)
        return need + min(max(lack + state.trim, -LESS * (band - 1.0)), MORE * band)

    def _band(self, workers: float) -> float:
        return max(1.0, self.gains.band_part * workers)

    def _error(self, sample: PressureSample) -> float:
        """Return how many sequences the queue lacks: negative if it is more than twice as full as it should be."""
        setpoint, pressure = self.gains.setpoint, sample.pressure
        if pressure > setpoint:
            return min(0.0, 2.0 * setpoint - pressure) * sample.batch_sequences
        return (setpoint - pressure) * sample.batch_sequences

    def _refill_s(self, state: State) -> float:
        return max(self.gains.refill_s, 2.0 * state.start_s, state.rates.memory_s)

    def _trimmed(self, state: State, sample: PressureSample, want: float, now: float) -> State:
        """Integrate the error of the queue, unless the target cannot follow anyhow."""
        elapsed = min(max(0.0, now - state.at), self.gains.stale_s)
        state = replace(state, at=now)
        per_worker = state.rates.per_worker
        if per_worker is None or sample.crew.starting or sample.crew.draining:
            return state
        lack = self._error(sample) / (self._refill_s(state) * per_worker)
        if (lack > 0.0 and want >= self._limit(state)) or (lack < 0.0 and want <= self.gains.min_workers):
            return state
        bound = max(1.0, self.gains.trim_part * want)
        trim = min(max(state.trim + lack * elapsed / self.gains.integral_s, -bound), bound)
        return replace(state, trim=trim)

    def _limit(self, state: State) -> int:
        """Return the most that is allowed and of use."""
        most = self.gains.max_workers
        return max(self.gains.min_workers, min(most, state.knee.most or most))

    def _move(self, state: State, sample: PressureSample, want: float, now: float) -> tuple[State, Decision]:
        state = self._remember(state, want, now)
        target, limit, why = state.target, self._limit(state), _why(state, sample, want)
        starving = self._starving(state, sample)
        if starving:
            state = replace(state, calm_from=max(state.calm_from, now + self.gains.window_s))
        if target > limit:
            return self._to(state, limit, f"{why}; inference_bound: more than {limit} bring no more")
        waits = state.rates.waits > WAITING_PART and sample.pressure < self.gains.setpoint
        wanted, band = math.ceil(want - ROUND), self._band(target)
        if wanted > target and (want - target >= band or waits or starving):
            return self._up(state, wanted, f"{why}; starving" if starving else why, now, at_once=starving)
        most = state.wants[0][1]
        if target - most >= band and now >= state.calm_from:
            return self._down(state, math.ceil(most - ROUND), why)
        return self._hold(state, why)

    def _up(
        self, state: State, wanted: int, why: str, now: float, *, at_once: bool
    ) -> tuple[State, Decision]:
        gains, target, limit = self.gains, state.target, self._limit(state)
        if state.knee.slow:
            return self._hold(state, f"{why}; each makes less than among fewer: no more before that is clear")
        if target >= limit:
            bound = f"inference_bound: more than {limit} bring no more"
            return self._hold(state, f"{why}; {bound if limit < gains.max_workers else _most(limit)}")
        state = replace(state, up_ticks=state.up_ticks + 1, down_ticks=0)
        if state.up_ticks < gains.confirm_up and not at_once:
            return state, Decision(target, f"{why}; not confirmed yet")
        since, base = state.up_from
        if now - since >= gains.step_s:
            since, base = now, target
        most = max(math.floor(base * gains.step_up), base + gains.step_up_least)
        if most <= target:
            return state, Decision(target, f"{why}; {most} are enough for {gains.step_s:g} s")
        return self._to(replace(state, up_from=(since, base)), min(wanted, most, limit), why)

    def _down(self, state: State, wanted: int, why: str) -> tuple[State, Decision]:
        gains, target = self.gains, state.target
        if target <= gains.min_workers:
            return self._hold(state, f"{why}; {target} is the fewest allowed")
        state = replace(state, down_ticks=state.down_ticks + 1, up_ticks=0)
        if state.down_ticks < gains.confirm_down:
            return state, Decision(target, f"{why}; not confirmed yet")
        return self._to(state, max(wanted, math.ceil(target * gains.step_down)), why)

    def _remember(self, state: State, want: float, now: float) -> State:
        """Keep the wants of the window, but those that a later one exceeds."""
        oldest = now - self.gains.window_s
        kept = [entry for entry in state.wants if entry[0] >= oldest and entry[1] > want]
        return replace(state, wants=(*kept, (now, want)))

    def _grope(self, state: State, sample: PressureSample, now: float) -> tuple[State, Decision]:
        """Decide while the rates are not known."""
        known = state.rates.per_worker is not None
        if known and self._starving(state, sample) and sample.crew.ready >= state.target:
            return self._up(state, state.target + 1, "starving, nothing eaten yet", now, at_once=False)
        return self._hold(state, "nothing measured yet")

    @staticmethod
    def _starving(state: State, sample: PressureSample) -> bool:
        return sample.pressure < EMPTY and state.rates.starved > STARVED_PART

    def _watch_starts(self, state: State, crew: Crew, now: float) -> State:
        if not crew.starting:
            if state.starting_since < now:
                took = now - state.starting_since
                state = replace(state, start_s=max(took, 0.7 * state.start_s + 0.3 * took))
            return replace(state, starting_since=math.inf)
        return replace(state, starting_since=min(state.starting_since, now))

    def _asked(self, state: State, wanted: int) -> tuple[State, Decision]:
        within = self._within(wanted)
        bounds = f"; {self.gains.min_workers} to {self.gains.max_workers} allowed" if within != wanted else ""
        return self._to(state, within, f"{wanted} asked for{bounds}")

    def _to(self, state: State, target: int, why: str) -> tuple[State, Decision]:
        target = self._within(target)
        return replace(state, target=target, up_ticks=0, down_ticks=0), Decision(target, why)

    @staticmethod
    def _hold(state: State, why: str) -> tuple[State, Decision]:
        return replace(state, up_ticks=0, down_ticks=0), Decision(state.target, f"hold: {why}")

    def _within(self, workers: int) -> int:
        return min(max(workers, self.gains.min_workers), self.gains.max_workers)


def _why(state: State, sample: PressureSample, want: float) -> str:
    rates = state.rates
    return (
        f"want {want:.1f}: eats {rates.appetite or 0.0:.1f}/s, a worker makes {rates.per_worker or 0.0:.2f}/s, "
        f"pressure {sample.pressure:.2f}"
    )


def _most(limit: int) -> str:
    return f"{limit} is the most allowed"


def _silence(age_s: float) -> str:
    return "no pressure heard yet" if math.isinf(age_s) else f"no pressure for {age_s:.1f} s"
