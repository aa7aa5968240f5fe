"""Baseline controllers for the same plants: the ratio rule of Kubernetes' horizontal pod autoscaler, and a PID.

Both follow their published descriptions with the sign inverted: a short queue means more workers. Sources: algorithm
page of the Kubernetes horizontal pod autoscaler (tolerance 0.1, scale-up by at most 100 % or four in 15 s, scale-down
to the peak of 300 s); Astrom and Hagglund, Advanced PID Control, equation 3.1, with a clamped integral.
"""

import math

import msgspec
from msgspec.structs import replace

from rolloutmq.services.orchestrator.autoscaling.pressure import Decision, PressureSample


class RatioState(msgspec.Struct, frozen=True):
    """Memory of the ratio rule."""

    target: int
    at: float = -math.inf
    recommended: tuple[tuple[float, int], ...] = ()


class RatioRule(msgspec.Struct, frozen=True):
    """Scales workers by the ratio of the queue's setpoint to its length."""

    min_workers: int
    max_workers: int
    setpoint: float
    tolerance: float = 0.1
    every_s: float = 15.0
    window_s: float = 300.0

    def initial(self, workers: int = 0) -> RatioState:
        """See `ScalingRule`."""
        return RatioState(min(max(workers, self.min_workers), self.max_workers))

    def decide(self, state: RatioState, sample: PressureSample, now: float) -> tuple[RatioState, Decision]:
        """See `ScalingRule`."""
        if now - state.at < self.every_s:
            return state, Decision(state.target, "hold: interval not over")
        ratio = self.setpoint / max(sample.pressure, 0.01 * self.setpoint)
        wanted = state.target if abs(ratio - 1.0) <= self.tolerance else math.ceil(state.target * ratio)
        wanted = min(wanted, max(2 * state.target, state.target + 4), self.max_workers)
        wanted = max(wanted, self.min_workers)
        kept = tuple(one for one in (*state.recommended, (now, wanted)) if one[0] >= now - self.window_s)
        target = max(wanted, min(state.target, max(number for _, number in kept)))
        return RatioState(target, now, kept), Decision(target, f"ratio {ratio:.2f}")


class PidState(msgspec.Struct, frozen=True):
    """Memory of the PID."""

    target: int
    integral: float
    at: float = -math.inf
    error: float = 0.0


class PidRule(msgspec.Struct, frozen=True):
    """Proportional, integral and derivative of the error, in workers per missing batch."""

    min_workers: int
    max_workers: int
    setpoint: float
    proportional: float = 2.0
    integral: float = 0.1
    derivative: float = 2.0

    def initial(self, workers: int = 0) -> PidState:
        """See `ScalingRule`."""
        target = min(max(workers, self.min_workers), self.max_workers)
        return PidState(target, float(target))

    def decide(self, state: PidState, sample: PressureSample, now: float) -> tuple[PidState, Decision]:
        """See `ScalingRule`."""
        dt = now - state.at
        error = self.setpoint - sample.pressure
        if not 0.0 < dt < math.inf:
            return replace(state, at=now, error=error), Decision(state.target, "begin")
        integral = min(max(state.integral + self.integral * error * dt, 0.0), float(self.max_workers))
        slope = (error - state.error) / dt
        out = self.proportional * error + integral + self.derivative * slope
        target = min(max(round(out), self.min_workers), self.max_workers)
        return PidState(target, integral, now, error), Decision(target, f"error {error:.2f}")
