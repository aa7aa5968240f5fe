"""How many engines there should be: the law of the pool, pure: the clock is passed in.

Workers of an environment that bring no more among more of them share something that is full: the engines. The law of
the workers finds that and says so (`inference_bound`); this is the answer to it. Looked at once a tick:

    an operator's number           holds, within the bounds, whatever is measured
    an engine was given up         hold, with its reason: another would meet the same
    an engine starts or drains     hold: what was decided has not had its effect yet
    no news of the workers         hold: silence is not plenty
    bound, and workers were short  one more, once that was so for `confirm_s` longer than it was not
    the others could do it all     one fewer, once that was so for `idle_s` without a pause
    otherwise                      hold

What was confirmed counts for one change alone: it is all forgotten when the engines change. An engine that is busy
with few sequences at once may do more, so busy overstates what is used, and an engine rather stays.
Always min <= target <= max.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Self

from rolloutmq.schemas.config import InferenceConfig
from rolloutmq.services.orchestrator.pressure import Crew, Decision

LONGEST_TICK_S: Final = 3.0
"""Longest time that one tick counts for."""
FULL: Final = 0.7
"""Part of their time that the engines that are left may be busy: they will have to do the work of the one that went."""


@dataclass(frozen=True, slots=True)
class Bound:
    """What the law of the workers says of one environment.

    Attributes:
        inference_bound: More workers were found to bring no more.
        short: Workers that it wanted beyond the bound.
    """

    inference_bound: bool = False
    short: float = 0.0

    @property
    def holds_back(self) -> bool:
        """Whether workers are kept back by it now."""
        return self.inference_bound and self.short > 0.0


@dataclass(frozen=True, slots=True)
class PoolSample:
    """What the law sees at one tick.

    Attributes:
        crew: The engines, the first among them.
        bounds: By environment; empty if nothing was heard of the workers.
        busy: Parts of their time that the ready engines generate, summed.
        wanted: Number of engines that an operator asked for.
        failure: Why an engine was given up.
    """

    crew: Crew = field(default_factory=Crew)
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    busy: float = 0.0
    wanted: int | None = None
    failure: str = ""


@dataclass(frozen=True, slots=True)
class PoolState:
    """What the law remembers from tick to tick."""

    target: int
    at: float = float("-inf")
    bound_s: float = 0.0
    """For how long workers were held back, less for how long they were not."""
    idle_s: float = 0.0
    """For how long without a pause one engine fewer would have done."""

    def steady(self) -> "PoolState":
        """Return the state after a tick that makes what was confirmed void."""
        return replace(self, bound_s=0.0, idle_s=0.0)


@dataclass(frozen=True, slots=True)
class PoolRule:
    """One engine more where workers are held back, one fewer where the others would do."""

    min_engines: int
    max_engines: int
    confirm_s: float
    idle_s: float

    @classmethod
    def of(cls, config: InferenceConfig) -> Self:
        """Take the numbers from the configuration."""
        return cls(config.min_engines, config.max_engines, config.engine_confirm_s, config.engine_idle_s)

    def initial(self, engines: int = 1) -> PoolState:
        """Begin with the engines that live, or with the fewest allowed."""
        return PoolState(self._within(engines))

    def decide(self, state: PoolState, sample: PoolSample, now: float) -> tuple[PoolState, Decision]:
        """Decide once a tick; `now` in seconds, monotonic."""
        # A tick that came late says nothing of the time that it missed.
        elapsed = min(max(0.0, now - state.at), LONGEST_TICK_S) if state.at > float("-inf") else 0.0
        state = replace(state, at=now)
        if sample.wanted is not None:
            return self._to(state, sample.wanted, f"{sample.wanted} asked for")
        if sample.crew.failed:
            return _hold(state, f"an engine was given up: {sample.failure}")
        if sample.crew.starting or sample.crew.draining:
            return _hold(state, f"{sample.crew.starting} starting, {sample.crew.draining} draining")
        if not sample.bounds:
            return _hold(state, "no news of the workers")
        held_back = sorted(env for env, bound in sample.bounds.items() if bound.holds_back)
        if held_back:
            short = sum(sample.bounds[env].short for env in held_back)
            why = f"inference_bound: {', '.join(held_back)} short of {short:.1f} workers"
            return self._more(replace(state, idle_s=0.0), elapsed, why)
        state = replace(state, bound_s=max(0.0, state.bound_s - elapsed))
        return self._fewer(state, sample, elapsed)

    def _more(self, state: PoolState, elapsed: float, why: str) -> tuple[PoolState, Decision]:
        if state.target >= self.max_engines:
            return _hold(state, f"{why}; {state.target} is the most allowed")
        state = replace(state, bound_s=state.bound_s + elapsed)
        if state.bound_s < self.confirm_s:
            seen = f"{state.bound_s:.0f} of {self.confirm_s:g} s"
            return state, Decision(state.target, f"hold: {why}; not confirmed yet, {seen}")
        return self._to(state, state.target + 1, f"{why} for {self.confirm_s:g} s")

    def _fewer(self, state: PoolState, sample: PoolSample, elapsed: float) -> tuple[PoolState, Decision]:
        left = state.target - 1
        why = f"{sample.busy:.2f} of {state.target} engines busy"
        # With none left, or a number that is none, the comparison says no.
        if not sample.busy <= FULL * left or left < self.min_engines:
            return replace(state, idle_s=0.0), Decision(state.target, f"hold: {why}")
        state = replace(state, idle_s=state.idle_s + elapsed)
        if state.idle_s < self.idle_s:
            seen = f"{state.idle_s:.0f} of {self.idle_s:g} s"
            return state, Decision(state.target, f"hold: {why}, {left} would do; not for long enough, {seen}")
        return self._to(state, left, f"{why}, {left} would have done for {self.idle_s:g} s")

    def _to(self, state: PoolState, target: int, why: str) -> tuple[PoolState, Decision]:
        within = self._within(target)
        if within != target:
            why = f"{why}; {self.min_engines} to {self.max_engines} allowed"
        return replace(state.steady(), target=within), Decision(within, why)

    def _within(self, engines: int) -> int:
        return min(max(engines, self.min_engines), self.max_engines)


def _hold(state: PoolState, why: str) -> tuple[PoolState, Decision]:
    return state.steady(), Decision(state.target, f"hold: {why}")
