"""What is known of a run at this moment: events in, state out. Pure; times are given, on any steady clock."""

from collections import deque
from collections.abc import Mapping
from typing import Final

from rolloutmq.bus.engines import SILENT_S, engine_number
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import Pressure, ScaleDecision, StepDone, WorkerState, WorkerStatus
from rolloutmq.schemas.envelope import Split
from rolloutmq.schemas.hardware import GpuStanding
from rolloutmq.schemas.records import Supervision, Target
from rolloutmq.schemas.telemetry import (
    EngineDecision,
    EngineSample,
    Event,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
)
from rolloutmq.services.monitor.bounds import configured_bounds
from rolloutmq.services.monitor.crew import WorkerRow, joined

RATE_WINDOW_S: Final = 10.0
"""Steps a second are measured over this long: short enough to show a stall, long enough not to jump."""
REWARDS_KEPT: Final = 4096
STALE_S: Final = 3.0
"""Pressure comes four times a second; without any for this long, what is shown is old and says so."""


class Board:
    """Collects the events of one run.

    Args:
        name: Name of the run.
        total_steps: Steps that it shall have; 0 if nobody said.
        low, high: Where the rollout pressure should be: half to twice the setpoint.
        bounds: `max_staleness` of each environment that is trained on, until the broker says which is in force.
    """

    def __init__(
        self, name: str, total_steps: int, low: float, high: float, bounds: Mapping[str, int]
    ) -> None:
        self.name = name
        self.total_steps = total_steps
        self.low = low
        self.high = high
        self._bounds = dict(bounds)
        self.pressure: Pressure | None = None
        self.step: StepDone | None = None
        self.host: HostSample | None = None
        self.gpu_absence: GpuAbsence | None = None
        self.gpus: dict[str, GpuSample] = {}
        self.standings: dict[str, GpuStanding] = {}
        self.processes: dict[str, ProcessSample] = {}
        self.decisions: dict[str, ScaleDecision] = {}
        self.engine_decision: EngineDecision | None = None
        self._engines: dict[str, tuple[EngineSample, float]] = {}
        self.supervision: Supervision | None = None
        """What the orchestrator says of its workers: no event, whoever feeds the board looks for it."""
        self.unsent = ""
        """Why the trainer waits where it does not wait for the broker: no event either, see `sending`."""
        self.notice = ""
        """What a person should know first."""
        self.started_at: float | None = None
        self._pressure_at = 0.0
        self._rewards: deque[tuple[int, float]] = deque(maxlen=REWARDS_KEPT)
        self._steps: deque[tuple[float, int]] = deque()

    @classmethod
    def of(cls, config: RunConfig) -> "Board":
        """Make a board for a configured run."""
        return cls(
            config.run.name,
            config.trainer.steps if config.trainer.enabled else 0,
            config.orchestrator.scaling.setpoint_batches / 2.0,
            config.orchestrator.scaling.setpoint_batches * 2.0,
            configured_bounds(config),
        )

    def feed(self, event: Event, now: float) -> None:
        """Take one event that arrived at `now`."""
        if self.started_at is None:
            self.started_at = now
        match event:
            case Pressure():
                self.pressure = event
                self._pressure_at = now
                self._bounds |= {x.env: x.max_staleness for x in event.lanes if x.split is Split.TRAIN}
            case StepDone():
                self._take_step(event, now)
            case HostSample():
                self.host = event
            case ProcessSample():
                self.processes[event.name] = event
            case GpuSample():
                self.gpus[event.uuid] = event
                self.gpu_absence = None
            case GpuStanding():
                self.standings[event.uuid] = event
            case GpuAbsence():
                self.gpu_absence = event
                self.gpus.clear()
            case ScaleDecision():
                self.decisions[event.env] = event
            case EngineSample():
                self._engines[event.name] = event, now
            case EngineDecision():
                self.engine_decision = event

    def _take_step(self, step: StepDone, now: float) -> None:
        while self._rewards and self._rewards[-1][0] >= step.step:
            self._rewards.pop()  # A trainer that resumed takes these steps again.
        if self._steps and self._steps[-1][1] >= step.step:
            self._steps.clear()
        self.step = step
        self._rewards.append((step.step, step.reward))
        self._steps.append((now, step.step))

    @property
    def staleness_bound(self) -> int:
        """The largest bound in force."""
        return max(self._bounds.values(), default=0)

    @property
    def steps_done(self) -> int:
        """Steps as far as anybody said: an event may be lost, pressure repeats the number."""
        return max(
            self.step.step if self.step else 0,
            self.pressure.step if self.pressure and not self.step else 0,
        )

    def rewards(self) -> list[float]:
        """Return the rewards of the steps that were seen, oldest first."""
        return [reward for _, reward in self._rewards]

    def reward(self, steps: int = 10) -> float | None:
        """Return the mean reward of the last few steps; None before the first."""
        last = self.rewards()[-steps:]
        return sum(last) / len(last) if last else None

    def steps_per_s(self, now: float) -> float:
        """Return the rate over the last ten seconds, waiting included."""
        while len(self._steps) > 1 and now - self._steps[0][0] > RATE_WINDOW_S:
            self._steps.popleft()
        if len(self._steps) < 2:
            return 0.0
        (since, first), (_, last) = self._steps[0], self._steps[-1]
        return (last - first) / max(now - since, 1e-9)

    def elapsed_s(self, now: float) -> float:
        """Return the seconds since the first event."""
        return 0.0 if self.started_at is None else now - self.started_at

    def left_s(self, now: float) -> float | None:
        """Return the seconds that the remaining steps take at the present rate; None if that is unknown."""
        rate = self.steps_per_s(now)
        if not self.total_steps or rate <= 0.0:
            return None
        return max(0, self.total_steps - self.steps_done) / rate

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the workers that have not gone."""
        if self.pressure is None:
            return ()
        return tuple(one for one in self.pressure.workers if one.state is not WorkerState.GONE)

    def engines(self, now: float) -> list[EngineSample]:
        """Return the engines that were heard of lately, by number."""
        heard = [one for one, at in self._engines.values() if now - at <= SILENT_S]
        return sorted(heard, key=lambda one: engine_number(one.name))

    def crew(self, now: float) -> list[WorkerRow]:
        """Return the workers as orchestrator and broker see them together; `now` is CLOCK_MONOTONIC."""
        return joined(self.supervision, self.workers(), now)

    def targets(self) -> list[Target]:
        """Return how many workers each environment shall have: as last published, else as last written."""
        known = {one.env: one for one in self.supervision.targets} if self.supervision is not None else {}
        for one in self.decisions.values():
            known[one.env] = Target(env=one.env, target=one.target, current=one.current, reason=one.reason)
        return [known[env] for env in sorted(known)]

    def silent_s(self, now: float) -> float:
        """Return for how long the broker has been silent, if that is longer than it should be; else 0."""
        silence = now - self._pressure_at
        return silence if self.pressure is not None and silence > STALE_S else 0.0
