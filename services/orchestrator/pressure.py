"""How many workers an environment should have: the control law, pure.

Pressure is what lies queued, in batches of the trainer. Much queued means that *fewer* workers
would do. The rule, looked at once a tick:

    an operator's number        holds, within the bounds, whatever the pressure is
    no news for `STALE_S`       hold: silence is not zero pressure
    a worker starts or drains   hold: what was decided has not had its effect yet
    pressure < low              one worker more, once `confirm_ticks` in a row agree
    pressure > high             one worker fewer, likewise
    between                     hold

Always min <= target <= max. A rule is `decide(state, sample, now)`: all it knows is in its state and
the sample, all it wants is in the decision, with the reason; the clock is passed in. A sample
carries rates, waits and ages too, which this rule does not need and a better one will.
"""

import math
from dataclasses import dataclass, replace
from typing import Final, Protocol, Self, TypeVar

from rolloutmq.schemas.config import EnvironmentConfig, OrchestratorConfig
from rolloutmq.schemas.control import LaneStatus, Pressure

STALE_S: Final = 3.0
"""Age at which a pressure says nothing any more: a dozen of them were missed."""


@dataclass(frozen=True, slots=True)
class Crew:
    """The workers of one environment as the supervisor sees them."""

    ready: int = 0
    starting: int = 0
    """Started and not heard to be ready, or waiting to be started again."""
    draining: int = 0
    failed: int = 0
    """Given up for good; they keep their place, so that nobody is started into the same failure."""

    @property
    def current(self) -> int:
        """Workers that count towards the target."""
        return self.ready + self.starting + self.failed


@dataclass(frozen=True, slots=True)
class PressureSample:
    """What a rule sees at one tick, for one environment.

    Attributes:
        crew: The workers.
        heard_at: When the queue's part of the sample arrived, on the clock of `now`; -inf if never.
        number: Number of the `Pressure` it is from: the same one twice is no news.
        pressure: Queued sequences over what one batch takes from this environment.
        consumed_per_s: Sequences a second that trainers settled, all environments.
        produced_per_s: Sequences a second that were accepted from this environment.
        queued_bytes, high_bytes: Fill of the broker, all environments.
        oldest_age_s: Age of the environment's oldest queued group.
        lane_wait: Why its producers wait, or empty.
        trainer_wait: Why the trainer waits, or empty.
        wanted: Number of workers that an operator asked for.
        batch_sequences: What one batch takes from this environment.
        eaten, made: Sequences of this environment that trainers settled, and that its workers brought, ever.
        trainer_waited_s, workers_waited_s: Time waited for batches, and for credit by each slot of each worker, ever.
        slots: Rollouts that one worker has under way at once.

    What follows `wanted` is not taken from a `Pressure` yet: only a simulated plant fills it in.
    """

    crew: Crew = Crew()
    heard_at: float = -math.inf
    number: int = 0
    pressure: float = 0.0
    consumed_per_s: float = 0.0
    produced_per_s: float = 0.0
    queued_bytes: int = 0
    high_bytes: int = 0
    oldest_age_s: float = 0.0
    lane_wait: str = ""
    trainer_wait: str = ""
    wanted: int | None = None
    batch_sequences: float = 1.0
    eaten: int = 0
    made: int = 0
    trainer_waited_s: float = 0.0
    workers_waited_s: float = 0.0
    slots: int = 1


@dataclass(frozen=True, slots=True)
class Decision:
    """How many workers there should be, and why."""

    target: int
    reason: str


_S = TypeVar("_S")


class Rule(Protocol[_S]):
    """The seam: any control law of this form can take the place of `PressureRule`."""

    def initial(self, workers: int) -> _S:
        """Return the state to begin with, with so many workers alive already."""
        ...

    def decide(self, state: _S, sample: PressureSample, now: float) -> tuple[_S, Decision]:
        """Decide once a tick; `now` in seconds, monotonic."""
        ...


@dataclass(frozen=True, slots=True)
class RuleState:
    """What the rule remembers from tick to tick."""

    target: int
    low_ticks: int = 0
    high_ticks: int = 0

    def steady(self) -> "RuleState":
        """Return the state after a tick that confirmed nothing."""
        return replace(self, low_ticks=0, high_ticks=0)


@dataclass(frozen=True, slots=True)
class PressureRule:
    """One worker more below the band, one fewer above it."""

    min_workers: int
    max_workers: int
    low: float
    high: float
    confirm_ticks: int

    @classmethod
    def of(cls, env: EnvironmentConfig, config: OrchestratorConfig) -> Self:
        """Take the numbers from the configuration."""
        return cls(
            env.min_workers,
            env.max_workers,
            config.low_pressure,
            config.high_pressure,
            config.confirm_ticks,
        )

    def initial(self, workers: int = 0) -> RuleState:
        """Begin with the workers that live, or with the fewest allowed."""
        return RuleState(self._within(workers))

    def decide(self, state: RuleState, sample: PressureSample, now: float) -> tuple[RuleState, Decision]:
        """Decide once a tick."""
        if sample.wanted is not None:
            return self._to(sample.wanted, f"{sample.wanted} asked for")
        crew = sample.crew
        if now - sample.heard_at > STALE_S:
            return self._hold(state, _silence(now - sample.heard_at))
        if crew.starting or crew.draining:
            return self._hold(state, f"{crew.starting} starting, {crew.draining} draining")
        if sample.pressure < self.low:
            state = replace(state, low_ticks=state.low_ticks + 1, high_ticks=0)
            why = f"pressure {sample.pressure:.2f} below {self.low:g}"
            return self._move(state, +1, state.low_ticks, why)
        if sample.pressure > self.high:
            state = replace(state, high_ticks=state.high_ticks + 1, low_ticks=0)
            why = f"pressure {sample.pressure:.2f} above {self.high:g}"
            return self._move(state, -1, state.high_ticks, why)
        return self._hold(state, "pressure within the band")

    def _move(self, state: RuleState, step: int, ticks: int, why: str) -> tuple[RuleState, Decision]:
        if self._within(state.target + step) == state.target:
            bound = "most" if step > 0 else "fewest"
            return self._hold(state, f"{why}; {state.target} is the {bound} allowed")
        if ticks < self.confirm_ticks:
            return state, Decision(state.target, f"{why}; not confirmed yet")
        return self._to(state.target + step, f"{why} for {ticks} ticks")

    def _to(self, target: int, why: str) -> tuple[RuleState, Decision]:
        within = self._within(target)
        if within != target:
            why = f"{why}; {self.min_workers} to {self.max_workers} allowed"
        return RuleState(within), Decision(within, why)

    @staticmethod
    def _hold(state: RuleState, why: str) -> tuple[RuleState, Decision]:
        return state.steady(), Decision(state.target, f"hold: {why}")

    def _within(self, workers: int) -> int:
        return min(max(workers, self.min_workers), self.max_workers)


def _silence(age_s: float) -> str:
    return "no pressure heard yet" if math.isinf(age_s) else f"no pressure for {age_s:.1f} s"


def sample_of(
    env: str, group_size: int, crew: Crew, pressure: Pressure | None, heard_at: float
) -> PressureSample:
    """Take what concerns one environment from a `Pressure`; None if none was ever heard."""
    if pressure is None:
        return PressureSample(crew)
    lane = next((lane for lane in pressure.lanes if lane.env == env), None)
    return PressureSample(
        crew,
        heard_at,
        pressure.number,
        pressure.rollout_pressure if lane is None else _of_lane(lane, pressure),
        pressure.consumed_per_s,
        pressure.produced_per_s if lane is None else lane.accepted_per_s * group_size,
        pressure.queued_bytes,
        pressure.high_bytes,
        0.0 if lane is None else lane.oldest_age_s,
        "" if lane is None else lane.wait,
        pressure.trainer_wait,
        pressure.wanted.get(env),
    )


def _of_lane(lane: LaneStatus, pressure: Pressure) -> float:
    """Return what is queued of one environment over its part of a batch."""
    weights = sum(other.weight for other in pressure.lanes if other.split == lane.split)
    share = lane.weight / weights if weights > 0.0 else 0.0
    batch = pressure.batch_sequences * max(share, lane.min_share)
    return lane.queued_sequences / batch if batch > 0.0 else pressure.rollout_pressure
