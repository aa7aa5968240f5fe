"""How many workers an environment should have: the control law. Pure: the clock is passed in.

Pressure is what lies queued, in batches of the trainer. Much queued means that *fewer* workers would do. But the queue
integrates what is made less what is eaten, and a worker takes seconds to minutes to start. So a rule that follows the
queue alone is either late or restless. What decides here is the quotient of two measured rates, and the queue corrects:

    want = appetite / per worker + correction
    correction = what the queue lacks, made good in `refill_s`, / per worker + its slow integral; within about the band

    an operator's number          holds, within the bounds, whatever is measured
    no news for `stale_s`         hold: silence is not zero pressure
    no trainer                    hold: one that comes back is hungry at once
    workers wait for the teacher,
      and nothing comes           hold, and nobody goes for `down_window_s`
    nothing measured yet          hold, or more while the trainer starves and all are ready
    the trainer starves           up at once, and nobody goes for `down_window_s`
    want above target + band,
      or the trainer waits        up, once all news of `confirm_up_s` agree, by a bounded step
    the most that was wanted in
      `down_window_s` below
      target - band               down, once all news of `confirm_down_s` agree, by a bounded step
    otherwise                     hold

A queue that is too full takes nobody away by itself: the marks and pacing bound it, and a worker that waits costs less
than one that goes and comes back. Where workers wait, the queue is as full as it may be, whichever mark that is, in
bytes, groups or policy versions: nothing is lacking then, and where they wait for most of their time more of them would
wait too. Who starts counts as started, who drains as gone. The integral stands still while anybody starts or drains and
where the target cannot follow it. More workers that bring no more have met a bound that they share, the inference
server: see `knee`. Always min <= target <= max, and at most as many as there is room for.

Sources: tolerance, stabilisation window and step limits are those of the Kubernetes horizontal autoscaler (algorithm
page of its documentation), panic is after Knative's; the integral stands still after Astrom and Hagglund, Advanced PID
Control, 3.5 (conditional integration).
"""

import math
from dataclasses import dataclass, field, replace
from typing import Final

from rolloutmq.schemas.orchestration import ScalingConfig
from rolloutmq.services.orchestrator.estimates import Rates
from rolloutmq.services.orchestrator.knee import Knee
from rolloutmq.services.orchestrator.pressure import Crew, Decision, PressureSample

INFERENCE_BOUND: Final = "inference_bound"
"""What is said where workers share a server that is full."""
TEACHER_AWAY: Final = "teacher_away"
"""What is said where workers wait for the teacher: more of them would wait too, and it is not they who are too many."""
YOUNG_S: Final = 30.0
UNSURE: Final = 2.0
"""For so long the dead band upwards is so many times as wide: the first rates are of a few batches."""
FIRST_BATCH_S: Final = 15.0
"""Workers that are there when the first batch is complete anyhow bring nothing: who makes it within that is enough, or
within a start or a rollout, where that is longer."""
LONGEST_START_S: Final = 300.0
"""A worker that takes longer waits for something: a GPU, or its next try."""
EMPTY: Final = 1.0
"""Batches; a trainer that waits while less is queued waits for workers."""
STARVED_PART: Final = 0.5
"""Part of the last seconds that a trainer waits when it starves."""
WAITING_PART: Final = 0.1
"""A trainer that waits for more than that part of its time could do more with another worker."""
FULL_PART: Final = 0.2
"""Workers that wait for that part of their time have filled what may be filled."""
IDLE_PART: Final = 0.5
"""Where workers wait for that part of their time, more of them would only wait too."""
ROUND: Final = 0.25
"""So much of a worker may be missing: the quotient of two rates is not known better."""
MORE: Final = 0.9
LESS: Final = 0.9
"""The correction is at most that many bands up, and that part of the band beyond one worker down."""


@dataclass(frozen=True, slots=True)
class State:
    """What the controller remembers from tick to tick."""

    target: int
    rates: Rates = field(default_factory=Rates)
    knee: Knee = field(default_factory=Knee)
    news: tuple[int, int] = (-1, -1)
    """Epoch and number of the last pressure that was heard."""
    at: float = -math.inf
    trim: float = 0.0
    """Workers."""
    up_since: float = math.inf
    down_since: float = math.inf
    """Since when all news have agreed that more would do, or fewer."""
    wants: tuple[tuple[float, float], ...] = ()
    """When and how many were wanted, within the window; falling, so that the first is the most."""
    up_from: tuple[float, int] = (-math.inf, 0)
    """When the present step up began, and at which target."""
    calm_from: float = math.inf
    """Nobody goes before: somebody starved, or it is not known yet what was. Not set before the first tick."""
    starting_since: float = math.inf
    start_s: float = 10.0
    """How long a worker takes to be ready, the longest of late."""
    level: float = 0.0
    """Pressure when it was looked at last, and how much of it a second comes to; that forgets."""
    slope: float = 0.0


class PressureController:
    """The control law of one environment."""

    def __init__(self, min_workers: int, max_workers: int, scaling: ScalingConfig) -> None:
        self.min_workers = min_workers
        self.max_workers = max_workers
        self.scaling = scaling

    def initial(self, workers: int = 0) -> State:
        """Begin with the workers that live, or with the fewest allowed; nobody goes for the first window."""
        return State(self._within(workers))

    def decide(self, state: State, sample: PressureSample, now: float) -> tuple[State, Decision]:
        """Decide once a tick; `now` in seconds, monotonic."""
        state, decision = self._decide(state, sample, now)
        room = sample.room
        if room is not None and room.workers < decision.target and not decision.bound:
            reason = f"{decision.reason}; {_bounded(sample, room.workers, room.why)}"
            decision = replace(decision, reason=reason, bound=room.why)
        return state, decision

    def _decide(self, state: State, sample: PressureSample, now: float) -> tuple[State, Decision]:
        if math.isinf(state.calm_from):
            state = replace(state, calm_from=now + self.scaling.down_window_s)
        state = self._watch_starts(state, sample.crew, now)
        is_news = (
            now - sample.heard_at <= self.scaling.stale_s and (sample.epoch, sample.number) != state.news
        )
        if is_news and math.isinf(state.rates.last_at):
            # Of those that lived at the beginning some were told to go.
            state = replace(state, target=self._within(state.target - sample.crew.draining))
        if sample.wanted is not None:
            return self._asked(self._look(state, sample, now) if is_news else state, sample)
        if now - sample.heard_at > self.scaling.stale_s:
            return state, Decision(state.target, f"hold: {_silence(now - sample.heard_at)}")
        if not is_news:
            return state, Decision(state.target, "hold: no news")
        state = self._look(state, sample, now)
        if not sample.trainers:
            return self._hold(state, "no trainer")
        if state.rates.away:
            # Of what was eaten meanwhile nothing follows either: it is looked anew once the teacher is back.
            state = replace(state, calm_from=max(state.calm_from, now + self.scaling.down_window_s))
            return self._hold(state, f"{TEACHER_AWAY}: {sample.untaught} of its workers wait for the teacher")
        want = self._want(state, sample)
        if want is None:
            return self._grope(state, sample, now)
        state, decision = self._move(self._trimmed(state, sample, want, now), sample, want, now)
        return state, replace(decision, want=want)

    def _look(self, state: State, sample: PressureSample, now: float) -> State:
        rates = state.rates.looked(sample, now)
        knee = state.knee.looked(rates, sample, now)
        slope, elapsed = 0.0, now - state.rates.last_at
        if 0.0 < elapsed < self.scaling.stale_s:
            change = (sample.pressure - state.level) / elapsed
            new = 1.0 - math.exp(-elapsed / self.scaling.derivative_filter_s)
            slope = state.slope + (change - state.slope) * new
        news = sample.epoch, sample.number
        return replace(state, news=news, rates=rates, knee=knee, level=sample.pressure, slope=slope)

    def _want(self, state: State, sample: PressureSample) -> float | None:
        """Return how many workers would do, as a real number; None while that is not known."""
        appetite, per_worker = state.rates.appetite, state.rates.per_worker
        if appetite is None or per_worker is None:
            return None
        need = appetite / per_worker
        lack = self._error(state, sample) / (self._refill_s(state) * per_worker)
        band = self._band(need)
        return need + min(max(lack + state.trim, -LESS * (band - 1.0)), MORE * band)

    def _band(self, workers: float) -> float:
        return max(1.0, self.scaling.band_part * workers)

    def _error(self, state: State, sample: PressureSample) -> float:
        """Return how many sequences the queue lacks: negative if it is more than twice as full as it should be."""
        setpoint = self.scaling.setpoint_batches
        pressure = max(0.0, sample.pressure + self.scaling.derivative_s * state.slope)
        if pressure > setpoint:
            return min(0.0, 2.0 * setpoint - pressure) * sample.batch_sequences
        if state.rates.idle > FULL_PART:
            return 0.0
        return (setpoint - pressure) * sample.batch_sequences

    def _refill_s(self, state: State) -> float:
        rates = state.rates
        return max(self.scaling.refill_s, 2.0 * (state.start_s + rates.rollout_s), rates.memory_s)

    def _trimmed(self, state: State, sample: PressureSample, want: float, now: float) -> State:
        """Integrate the error of the queue, unless the target cannot follow anyhow."""
        elapsed = min(max(0.0, now - state.at), self.scaling.stale_s)
        state = replace(state, at=now)
        per_worker = state.rates.per_worker
        if per_worker is None or sample.crew.starting or sample.crew.draining:
            return state
        lack = self._error(state, sample) / (self._refill_s(state) * per_worker)
        if (lack > 0.0 and want >= self._limit(state, sample)[0]) or (
            lack < 0.0 and want <= self.min_workers
        ):
            return state
        bound = max(1.0, self.scaling.trim_part * want)
        trim = min(max(state.trim + lack * elapsed / self.scaling.integral_s, -bound), bound)
        return replace(state, trim=trim)

    def _limit(self, state: State, sample: PressureSample) -> tuple[int, str]:
        """Return the most that is allowed and of use, and what bounds it."""
        most, why = self.max_workers, "max_workers"
        if state.knee.most and state.knee.most < most:
            most, why = state.knee.most, INFERENCE_BOUND
        if sample.room is not None and sample.room.workers < most:
            most, why = sample.room.workers, sample.room.why
        return max(self.min_workers, most), why

    def _move(self, state: State, sample: PressureSample, want: float, now: float) -> tuple[State, Decision]:
        state = self._remember(state, want, now)
        target, (limit, bound), why = state.target, self._limit(state, sample), _why(state, sample, want)
        starving = self._starving(state, sample)
        if starving:
            state = replace(state, calm_from=max(state.calm_from, now + self.scaling.down_window_s))
        if target > limit:
            return self._to(state, limit, f"{why}; {_bounded(sample, limit, bound)}", bound)
        waits = state.rates.waits > WAITING_PART and sample.pressure < self.scaling.setpoint_batches
        wanted, band = math.ceil(want - ROUND), self._band(target)
        is_young = now - state.rates.first_at < YOUNG_S
        up_band = UNSURE * band if is_young else band
        if starving and not target:
            wanted = max(wanted, 1)  # without anybody nothing can be measured
        if wanted > target and (want - target >= up_band or waits or starving):
            why = f"{why}; starving" if starving else why
            return self._up(state, sample, wanted, why, now, at_once=starving)
        most = state.wants[0][1]
        last = target == 1 and most <= ROUND and sample.pressure >= self.scaling.setpoint_batches
        if (target - most >= band or last) and now >= state.calm_from:
            return self._down(state, math.ceil(most - ROUND), why, now)
        return self._hold(state, why)

    def _up(
        self, state: State, sample: PressureSample, wanted: int, why: str, now: float, *, at_once: bool
    ) -> tuple[State, Decision]:
        scaling, target, (limit, bound) = self.scaling, state.target, self._limit(state, sample)
        if state.knee.slow:
            return self._hold(state, f"{why}; each makes less than among fewer: no more before that is clear")
        if state.rates.silent:
            return self._hold(state, f"{why}; nothing comes from its workers: more of them would not help")
        if state.rates.idle > IDLE_PART and target:
            return self._hold(state, f"{why}; its workers wait themselves ({sample.wait or 'no_credit'})")
        if target >= limit:
            return self._hold(state, f"{why}; {_bounded(sample, limit, bound)}", bound)
        reach = state.knee.reach or wanted
        if target >= reach:
            return self._hold(state, f"{why}; no more than {reach} before it is seen what those bring")
        state = replace(state, up_since=min(state.up_since, now), down_since=math.inf)
        if now - state.up_since < scaling.confirm_up_s and not at_once:
            return state, Decision(target, f"{why}; not confirmed yet")
        since, base = state.up_from
        if now - since >= scaling.up_every_s:
            since, base = now, target
        most = max(math.floor(base * scaling.up_factor), base + scaling.up_least)
        if most <= target:
            return state, Decision(target, f"{why}; {most} are enough for {scaling.up_every_s:g} s")
        state = replace(state, up_from=(since, base))
        return self._to(state, min(wanted, most, limit, reach), why, bound if wanted > limit else "")

    def _down(self, state: State, wanted: int, why: str, now: float) -> tuple[State, Decision]:
        scaling, target = self.scaling, state.target
        if target <= self.min_workers:
            return self._hold(state, f"{why}; {target} is the fewest allowed")
        state = replace(state, down_since=min(state.down_since, now), up_since=math.inf)
        if now - state.down_since < scaling.confirm_down_s:
            return state, Decision(target, f"{why}; not confirmed yet")
        left = math.ceil(target * scaling.down_part) if target > 1 else 0
        return self._to(state, max(wanted, left), why)

    def _remember(self, state: State, want: float, now: float) -> State:
        """Keep the wants of the window, but those that a later one exceeds."""
        oldest = now - self.scaling.down_window_s
        kept = [entry for entry in state.wants if entry[0] >= oldest and entry[1] > want]
        return replace(state, wants=(*kept, (now, want)))

    def _grope(self, state: State, sample: PressureSample, now: float) -> tuple[State, Decision]:
        """Decide while the rates are not known."""
        per_worker = state.rates.per_worker
        if not self._starving(state, sample) or sample.crew.ready < state.target:
            return self._hold(state, "nothing measured yet")
        if not state.target:
            return self._up(state, sample, 1, "starving, nothing eaten yet", now, at_once=False)
        if per_worker is None:
            return self._hold(state, "nothing measured yet")
        lack = max(0.0, 1.0 - sample.pressure) * sample.batch_sequences
        soon_s = max(FIRST_BATCH_S, state.start_s, state.rates.rollout_s)
        more = min(2 * state.target, math.ceil(lack / (soon_s * per_worker)))
        if more <= state.target:
            return self._hold(state, f"nothing eaten yet; there is a batch within {soon_s:.0f} s")
        return self._up(state, sample, more, "starving, nothing eaten yet", now, at_once=False)

    @staticmethod
    def _starving(state: State, sample: PressureSample) -> bool:
        return sample.pressure < EMPTY and state.rates.starved > STARVED_PART

    def _watch_starts(self, state: State, crew: Crew, now: float) -> State:
        if not crew.starting:
            if state.starting_since < now:
                took = min(now - state.starting_since, LONGEST_START_S)
                state = replace(state, start_s=max(took, 0.7 * state.start_s + 0.3 * took))
            return replace(state, starting_since=math.inf)
        return replace(state, starting_since=min(state.starting_since, now))

    def _asked(self, state: State, sample: PressureSample) -> tuple[State, Decision]:
        wanted = sample.wanted or 0
        within, why = self._within(wanted), f"{wanted} asked for"
        if within != wanted:
            why = f"{why}; {self.min_workers} to {self.max_workers} allowed"
        target, bound = within, ""
        if sample.room is not None and max(sample.room.workers, self.min_workers) < within:
            target, bound = max(sample.room.workers, self.min_workers), sample.room.why
            why = f"{why}; {_bounded(sample, target, bound)}"
        state, decision = self._to(state, target, why, bound)
        return state, replace(decision, want=float(within))

    def _to(self, state: State, target: int, why: str, bound: str = "") -> tuple[State, Decision]:
        target = self._within(target)
        return replace(_unsure(state), target=target), Decision(target, why, bound=bound)

    @staticmethod
    def _hold(state: State, why: str, bound: str = "") -> tuple[State, Decision]:
        return _unsure(state), Decision(state.target, f"hold: {why}", bound=bound)

    def _within(self, workers: int) -> int:
        return min(max(workers, self.min_workers), self.max_workers)


def _unsure(state: State) -> State:
    return replace(state, up_since=math.inf, down_since=math.inf)


def _why(state: State, sample: PressureSample, want: float) -> str:
    rates = state.rates
    return (
        f"want {want:.1f}: eats {rates.appetite or 0.0:.1f}/s, a worker makes {rates.per_worker or 0.0:.2f}/s, "
        f"pressure {sample.pressure:.2f}"
    )


def _bounded(sample: PressureSample, limit: int, bound: str) -> str:
    if sample.room is not None and sample.room.why == bound and sample.room.details:
        return sample.room.details
    match bound:
        case "inference_bound":
            return f"{bound}: more than {limit} bring no more"
        case "max_workers":
            return f"max_workers: {limit} is the most allowed"
        case _:
            return f"{bound}: there is room for {limit}"


def _silence(age_s: float) -> str:
    return "no pressure heard yet" if math.isinf(age_s) else f"no pressure for {age_s:.1f} s"
