"""Engine scaling: the target number of inference engines. Pure; the caller passes the clock.

Workers that add no throughput share a saturated engine. The workers' controller reports that (`inference_bound`), and
this rule reacts. It runs once a tick:

    an operator's number           hold it, within the bounds
    an engine was given up         hold, with its reason: another would fail alike
    an engine starts or drains     hold: the last decision has not taken effect yet
    the cluster has no room        no further scale up: the last one has not taken effect yet
    no update on the workers       hold: silence is not spare capacity
    bound, and workers are short   scale up by one, once this held `confirm_s` longer than not
    the others have the capacity   scale down by one, once this held `idle_s` without a break
    otherwise                      hold

A confirmation counts for one change only: all of them are reset when the engines change. An engine with few concurrent
sequences may have spare capacity although it is busy, so `busy` overstates the load, which favours keeping an engine.
Always min <= target <= max.
"""

from collections.abc import Mapping
from typing import Final, Self

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, WorkerCounts

LONGEST_TICK_S: Final = 3.0
"""Longest time one tick counts for."""
FULL: Final = 0.7
"""Largest busy part of the remaining engines after a scale-down; they take over the work of the removed one."""


class EngineBound(msgspec.Struct, frozen=True):
    """Saturation of one environment, from its controller.

    Attributes:
        inference_bound: More workers add no throughput.
        short: Workers wanted beyond the bound.
    """

    inference_bound: bool = False
    short: float = 0.0

    @property
    def holds_back(self) -> bool:
        """Return whether the bound holds back workers now."""
        return self.inference_bound and self.short > 0.0


class PoolSample(msgspec.Struct, frozen=True):
    """Input of the rule at one tick.

    Attributes:
        crew: Engine counts, the first included.
        bounds: By environment; empty if unknown.
        busy: Sum of the busy parts of the ready engines.
        wanted: Number of engines set by an operator.
        failure: Why an engine was given up.
        no_room: Why a wanted engine is not started; empty if none is missing.
    """

    crew: WorkerCounts = msgspec.field(default_factory=WorkerCounts)
    bounds: Mapping[str, EngineBound] = msgspec.field(default_factory=dict)
    busy: float = 0.0
    wanted: int | None = None
    failure: str = ""
    no_room: str = ""


class PoolState(msgspec.Struct, frozen=True):
    """Memory of the rule between ticks."""

    target: int
    at: float = float("-inf")
    bound_s: float = 0.0
    """Time workers were held back, minus the time they were not."""
    idle_s: float = 0.0
    """Uninterrupted time for which one engine fewer would have sufficed."""

    def steady(self) -> "PoolState":
        """Return the state with all confirmations reset."""
        return replace(self, bound_s=0.0, idle_s=0.0)


class EngineScalingRule(msgspec.Struct, frozen=True):
    """Adds an engine while workers are held back, removes one while the others have the capacity."""

    min_engines: int
    max_engines: int
    confirm_s: float
    idle_s: float

    @classmethod
    def of(cls, config: InferenceConfig) -> Self:
        """Return the rule of a configuration."""
        return cls(config.min_engines, config.max_engines, config.engine_confirm_s, config.engine_idle_s)

    def initial(self, engines: int = 1) -> PoolState:
        """Start with the running engines, or with the minimum."""
        return PoolState(self._within(engines))

    def decide(self, state: PoolState, sample: PoolSample, now: float) -> tuple[PoolState, Decision]:
        """Decide once a tick; `now` in monotonic seconds."""
        # A late tick says nothing about the time it missed.
        elapsed = min(max(0.0, now - state.at), LONGEST_TICK_S) if state.at > float("-inf") else 0.0
        state = replace(state, at=now)
        if sample.wanted is not None:
            return self._to(state, sample.wanted, f"pinned to {sample.wanted}")
        if sample.crew.failed:
            return _hold(state, f"an engine was given up: {sample.failure}")
        if sample.crew.starting or sample.crew.draining:
            return _hold(state, f"{sample.crew.starting} starting, {sample.crew.draining} draining")
        if not sample.bounds:
            return _hold(state, "no update on the workers")
        held_back = sorted(env for env, bound in sample.bounds.items() if bound.holds_back)
        if held_back:
            short = sum(sample.bounds[env].short for env in held_back)
            why = f"inference_bound: {', '.join(held_back)} short of {short:.1f} workers"
            if sample.no_room:
                return _hold(state, f"{why}; an engine is missing")
            return self._more(replace(state, idle_s=0.0), elapsed, why)
        state = replace(state, bound_s=max(0.0, state.bound_s - elapsed))
        return self._fewer(state, sample, elapsed)

    def _more(self, state: PoolState, elapsed: float, why: str) -> tuple[PoolState, Decision]:
        if state.target >= self.max_engines:
            return _hold(state, f"{why}; {state.target} is max_engines")
        state = replace(state, bound_s=state.bound_s + elapsed)
        if state.bound_s < self.confirm_s:
            seen = f"{state.bound_s:.0f} of {self.confirm_s:g} s"
            return state, Decision(state.target, f"hold: {why}; not confirmed yet, {seen}")
        return self._to(state, state.target + 1, f"{why} for {self.confirm_s:g} s")

    def _fewer(self, state: PoolState, sample: PoolSample, elapsed: float) -> tuple[PoolState, Decision]:
        left = state.target - 1
        why = f"{sample.busy:.2f} of {state.target} engines busy"
        # Without engines left, or with NaN, the comparison is false.
        if not sample.busy <= FULL * left or left < self.min_engines:
            return replace(state, idle_s=0.0), Decision(state.target, f"hold: {why}")
        state = replace(state, idle_s=state.idle_s + elapsed)
        if state.idle_s < self.idle_s:
            seen = f"{state.idle_s:.0f} of {self.idle_s:g} s"
            return state, Decision(
                state.target, f"hold: {why}, {left} would suffice; not confirmed yet, {seen}"
            )
        return self._to(state, left, f"{why}, {left} would have sufficed for {self.idle_s:g} s")

    def _to(self, state: PoolState, target: int, why: str) -> tuple[PoolState, Decision]:
        within = self._within(target)
        if within != target:
            why = f"{why}; {self.min_engines} to {self.max_engines} allowed"
        return replace(state.steady(), target=within), Decision(within, why)

    def _within(self, engines: int) -> int:
        return min(max(engines, self.min_engines), self.max_engines)


def _hold(state: PoolState, why: str) -> tuple[PoolState, Decision]:
    return state.steady(), Decision(state.target, f"hold: {why}")
