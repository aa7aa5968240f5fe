"""The state of a run for its live view: events in, state out. Pure; the caller passes times of one steady clock."""

import copy
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

from rolloutmq.bus.engine_registry import SILENT_S, engine_number
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Supervision, Target
from rolloutmq.schemas.wire.control import (
    Pressure,
    ScaleDecision,
    StepDone,
    StepSkipped,
    WorkerState,
    WorkerStatus,
)
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.schemas.wire.telemetry import (
    CurriculumProgress,
    EngineDecision,
    EngineSample,
    Event,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
)
from rolloutmq.schemas.wire.tracing import RolloutTrace
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.monitor.report.history import MOMENTARY, History
from rolloutmq.services.monitor.report.latencies import LatencyWindow
from rolloutmq.services.monitor.report.metrics import configured_bounds
from rolloutmq.services.monitor.report.waited import Waited, WaitedLives
from rolloutmq.services.monitor.status.trainers import NO_TROUBLE, TrainerTrouble, trouble
from rolloutmq.services.monitor.status.worker_view import WorkerRow, counted, joined
from rolloutmq.services.monitor.text import figures

RATE_WINDOW_S: Final = 10.0
SLOW_STEPS: Final = 5
"""Steps that tell the rate where the last ten seconds have fewer than two."""
"""Window of the step rate: short enough to show a stall, long enough not to jitter."""
REWARDS_KEPT: Final = 4096
MOMENTARY_S: Final = 60.0
STALE_S: Final = 3.0
"""Age from which the state is stale; the broker publishes pressure four times a second."""
CREW_S: Final = 0.2
"""Age from which the joined view of the workers is made anew: a thousand take tens of milliseconds."""


class GroupEnd(NamedTuple):
    """A group that has left the queue: id, outcome and wall clock."""

    group_id: str
    outcome: str
    at: float


class RunState:
    """State collected from the events of one run.

    Args:
        name: Name of the run.
        total_steps: Steps of the run; 0 if unknown.
        low, high: Target band of the rollout pressure: half to twice the setpoint.
        bounds: `max_staleness` of each training environment, until the broker publishes the bound in force.
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
        self.step: StepDone | BatchSettled | None = None
        """The last step: as the trainer reported it, or else as the broker did."""
        self.figures: dict[str, float] = {}
        """Last value of each figure of learning."""
        self.not_finite: tuple[str, ...] = ()
        """Figures that were not finite when the trainer last logged some."""
        self.host: HostSample | None = None
        self.gpu_absence: GpuAbsence | None = None
        self.gpus: dict[str, GpuSample] = {}
        self.standings: dict[str, GpuStanding] = {}
        self.processes: dict[str, ProcessSample] = {}
        self.decisions: dict[str, ScaleDecision] = {}
        self.engine_decision: EngineDecision | None = None
        self.decided_at: float | None = None
        """Time of the last event of the orchestrator."""
        self._findings: dict[tuple[str, str], tuple[HealthFinding, float]] = {}
        self.evaluation: EvaluationDone | None = None
        self._engines: dict[str, tuple[EngineSample, float]] = {}
        self.curricula: dict[str, CurriculumProgress] = {}
        self.supervision: Supervision | None = None
        """Worker states from the orchestrator's file; the owner of this object reads it."""
        self.orchestrator = ""
        """Since when the orchestrator has not been heard, and what does not work; read from a file, too."""
        self.record = ""
        """Since when no event is recorded, and why; read from a file, too."""
        self.outside = ""
        """Reason why the trainer does not ask the broker now, see `waits.outside`; read from a file, too."""
        self.network: NetworkStatus | None = None
        """Other hosts, if the broker listens for them."""
        self.is_own_trainer = False
        """Whether no launcher starts the trainer."""
        self.unserved = ""
        """Reason why no inference server can sample, see `waits.unserved`; read from files, too."""
        self.hangs: Mapping[str, str] = {}
        """What holds the event loop of silent workers, by worker; read from files, too."""
        self.given_up: Mapping[str, str] = {}
        """Why it has no worker any more, and where to look, by environment; read from files, too. An environment
        leaves once a worker of it works again, not while others are tried."""
        self.groups: Sequence[GroupEnd] = ()
        """Groups that ended last, the newest first; read from files, too."""
        self.latencies = LatencyWindow()
        self._waits = WaitedLives()
        self.left_out = ""
        """Points of the evaluation that were left out, why, and what to set; read from a file, too."""
        self.notice = ""
        """Most important message for a person; empty if there is none."""
        self.is_dead = False
        """Whether the launcher was killed, though processes of the run may go on; read from files, too."""
        self.started_at: float | None = None
        self._pressure_at = 0.0
        self._rewards: deque[tuple[int, float]] = deque(maxlen=REWARDS_KEPT)
        self._steps: deque[tuple[float, int]] = deque()
        self._slots: Mapping[str, int] = {}
        """Rollout slots of a worker, by environment."""
        self._crew: tuple[float, tuple[object, ...], list[WorkerRow]] | None = None

    @classmethod
    def of(cls, config: RunConfig) -> "RunState":
        """Return the initial state of a configured run."""
        state = cls(
            config.run.name,
            config.trainer.steps,
            config.orchestrator.scaling.setpoint_batches / 2.0,
            config.orchestrator.scaling.setpoint_batches * 2.0,
            configured_bounds(config),
        )
        state.is_own_trainer = not config.trainer.enabled
        state._slots = {name: env.concurrency for name, env in config.environment.items()}
        return state

    def recall(self, history: History, now: float) -> None:
        """Begin with the history of the run; call it before the first event, with the time `now` of the reading."""
        if history.ran_s is not None:
            self.started_at = now - history.ran_s
        if history.waits is not None:
            self._waits.join(history.waits)
        for at, event in history.events:
            self.feed(event, now - max(0.0, history.wall - at))

    def feed(self, event: Event, now: float) -> None:
        """Apply one event received at `now`."""
        if self.started_at is None:
            self.started_at = now
        match event:
            case Pressure():
                self.pressure = event
                self._waits.take(event)
                self._pressure_at = now
                self._bounds |= {x.env: x.max_staleness for x in event.lanes if x.split is Split.TRAIN}
            case StepDone() | BatchSettled() | StepFigures():
                self._take_training(event, now)
            case StepSkipped() | RolloutTrace():
                pass  # its findings are shown; traces have a receiver of their own
            case LatencySample():
                self.latencies.add(event, now)
            case EvaluationDone():
                self.evaluation = event
            case CurriculumProgress():
                self.curricula[event.env] = event
            case HealthFinding():
                self._take_finding(event, now)
            case ScaleDecision():
                self.decisions[event.env] = event
                self.decided_at = now
            case EngineSample():
                self._engines[event.name] = event, now
            case EngineDecision():
                self.engine_decision = event
                self.decided_at = now
            case _:
                self._take_machine(event)

    def _take_training(self, event: StepDone | BatchSettled | StepFigures, now: float) -> None:
        match event:
            case StepDone():
                self._take_step(event, now)
                self.figures |= figures.of_step(event.loss, event.extra)
            case BatchSettled():
                if event.stepped and not self._is_known(event):
                    self._take_step(event, now)
            case StepFigures():
                self.figures |= event.figures
                self.not_finite = event.not_finite

    def _take_machine(
        self, event: HostSample | ProcessSample | GpuSample | GpuStanding | GpuAbsence | NetworkStatus
    ) -> None:
        match event:
            case HostSample():
                self.host = event
            case NetworkStatus():
                self.network = event
            case ProcessSample():
                self.processes[event.name] = event
            case GpuSample() | GpuStanding() | GpuAbsence():
                self._take_gpu(event)

    def _take_gpu(self, event: GpuSample | GpuStanding | GpuAbsence) -> None:
        match event:
            case GpuSample():
                self.gpus[event.uuid] = event
                self.gpu_absence = None
            case GpuStanding():
                self.standings[event.uuid] = event
            case GpuAbsence():
                self.gpu_absence = event
                self.gpus.clear()

    def _take_finding(self, found: HealthFinding, now: float) -> None:
        if found.ended:
            self._findings.pop((found.env, found.finding), None)
        else:
            self._findings[found.env, found.finding] = found, now

    def _is_known(self, step: StepDone | BatchSettled) -> bool:
        last = self.step
        return last is not None and (last.incarnation, last.step) == (step.incarnation, step.step)

    def _take_step(self, step: StepDone | BatchSettled, now: float) -> None:
        if self._is_known(step):  # the broker reported it before the trainer did
            self.step = step
            self._rewards[-1] = step.step, step.reward
            return
        while self._rewards and self._rewards[-1][0] >= step.step:
            self._rewards.pop()  # A resumed trainer takes these steps again.
        if self._steps and self._steps[-1][1] >= step.step:
            self._steps.clear()
        self.step = step
        self._rewards.append((step.step, step.reward))
        self._steps.append((now, step.step))

    def findings(self, now: float) -> list[HealthFinding]:
        """Return the findings about rewards: those that last, and momentary ones of the last minute."""
        return [
            one
            for one, at in self._findings.values()
            if one.finding not in MOMENTARY or now - at <= MOMENTARY_S
        ]

    @property
    def staleness_bound(self) -> int:
        """Return the largest staleness bound in force."""
        return max(self._bounds.values(), default=0)

    @property
    def steps_done(self) -> int:
        """Return the highest reported step; pressure repeats it, in case an event was lost."""
        return max(
            self.step.step if self.step else 0,
            self.pressure.step if self.pressure and not self.step else 0,
        )

    def rewards(self) -> list[float]:
        """Return the rewards of the received steps, oldest first."""
        return [reward for _, reward in self._rewards]

    def reward(self, steps: int = 10) -> float | None:
        """Return the mean reward of the last steps; None before the first."""
        last = self.rewards()[-steps:]
        return sum(last) / len(last) if last else None

    def steps_per_s(self, now: float) -> float:
        """Return the rate over the last ten seconds, waits included; of slower steps, that since the last few."""
        marks = self._steps
        while len(marks) > SLOW_STEPS and now - marks[1][0] > RATE_WINDOW_S:
            marks.popleft()
        if not marks:
            return 0.0
        begin = max(now - RATE_WINDOW_S, marks[0][0] if self.started_at is None else self.started_at)
        recent = [step for at, step in marks if at > begin]
        if len(recent) < 2 and len(marks) > max(1, len(recent)):
            (since, first), (_, last) = marks[0], marks[-1]
            return (last - first) / max(now - since, 1e-9)
        before = marks[-len(recent) - 1][1] if len(marks) > len(recent) else recent[0] - 1
        return (marks[-1][1] - before) / max(now - begin, 1e-9)

    def elapsed_s(self, now: float) -> float:
        """Return the seconds that the run has run; without a history, since the first event."""
        return 0.0 if self.started_at is None else now - self.started_at

    def left_s(self, now: float) -> float | None:
        """Return the seconds the remaining steps take at the present rate; None if unknown."""
        rate = self.steps_per_s(now)
        if not self.total_steps or rate <= 0.0:
            return None
        return max(0, self.total_steps - self.steps_done) / rate

    def trainer_trouble(self) -> TrainerTrouble:
        """Return what is wrong with the trainers."""
        if self.pressure is None:
            return NO_TROUBLE
        return trouble(self.pressure, self.total_steps, is_own=self.is_own_trainer)

    def workers(self) -> tuple[WorkerStatus, ...]:
        """Return the workers except those in state `gone`."""
        if self.pressure is None:
            return ()
        return tuple(one for one in self.pressure.workers if one.state is not WorkerState.GONE)

    def waited(self) -> Waited:
        """Return the seconds waited, over all lives of the broker: its own sums begin with its start."""
        return self._waits.sum()

    def engines(self, now: float) -> list[EngineSample]:
        """Return the engines with a recent sample, by number."""
        heard = [one for one, at in self._engines.values() if now - at <= SILENT_S]
        return sorted(heard, key=lambda one: engine_number(one.name))

    def crew(self, now: float) -> list[WorkerRow]:
        """Return the workers, orchestrator and broker views joined; `now` is CLOCK_MONOTONIC."""
        sources = (self.pressure, self.supervision, self.hangs)
        if self._crew is not None:
            made_at, known, rows = self._crew
            is_same = all(one is other for one, other in zip(sources, known, strict=True))
            if is_same and 0.0 <= now - made_at < CREW_S:
                return rows
        heard = self.pressure.workers if self.pressure is not None else ()
        rows = joined(self.supervision, heard, now, self._slots)
        if self.hangs:
            rows = [msgspec.structs.replace(row, hang=self.hangs.get(row.worker, "")) for row in rows]
        self._crew = now, sources, rows
        return rows

    def counts(self, now: float) -> Counter[str]:
        """Return the number of workers in each state but `gone`; `now` is CLOCK_MONOTONIC."""
        counts = counted(self.crew(now))
        counts.pop(WorkerState.GONE, None)
        return counts

    def frozen(self) -> "RunState":
        """Return the state as it is now, which later events do not change."""
        twin = copy.copy(self)
        for name, value in vars(self).items():
            if isinstance(value, dict | deque):
                setattr(twin, name, value.copy())
        twin._waits = self._waits.copy()
        return twin

    def targets(self) -> list[Target]:
        """Return the target worker count of each environment: as last published, else as last written to file."""
        known = {one.env: one for one in self.supervision.targets} if self.supervision is not None else {}
        for one in self.decisions.values():
            known[one.env] = Target(
                env=one.env,
                target=one.target,
                current=one.current,
                reason=one.reason,
                joined=one.joined,
            )
        return [known[env] for env in sorted(known)]

    def silent_s(self, now: float) -> float:
        """Return how long the broker has been silent if the state is stale; else 0."""
        silence = now - self._pressure_at
        return silence if self.pressure is not None and silence > STALE_S else 0.0
