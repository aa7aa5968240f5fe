"""Telemetry: numbered samples of host, GPUs, processes and engines on `telemetry.*`. Samples may be lost."""

from enum import StrEnum

from rolloutmq.schemas.wire.control import Pressure, ScaleDecision, StepDone, StepSkipped
from rolloutmq.schemas.wire.envelope import Count, Message, Seconds
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.schemas.wire.tracing import RolloutTrace
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures


class HostSample(Message, tag="host_sample", frozen=True, kw_only=True):
    """One host."""

    host: str
    number: Count
    at: Seconds
    cpus: Count
    cpu_percent: float
    """0 to 100 over all cores since the last sample."""
    memory_used_bytes: Count
    memory_total_bytes: Count
    shm_free_bytes: Count
    disk_free_bytes: Count
    load_1m: float


class GpuState(StrEnum):
    """Result of a query to a GPU."""

    OK = "ok"
    LOST = "lost"
    """The driver reports that the GPU cannot be used any more."""
    SILENT = "silent"
    """No answer, so its state is unknown."""


class GpuSample(Message, tag="gpu_sample", frozen=True, kw_only=True):
    """One GPU, identified by its UUID, because indexes change. A field that the device does not report is None."""

    uuid: str
    number: Count
    at: Seconds
    name: str
    host: str = ""
    index: Count = 0
    """Current index in the driver's list."""
    state: GpuState = GpuState.OK
    why: str = ""
    """Reason for a state other than `ok`."""
    utilisation_percent: float | None = None
    memory_used_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    memory_reserved_bytes: Count | None = None
    """Memory of driver and firmware. None on older drivers, which count it as used."""
    temperature_c: float | None = None
    margin_c: float | None = None
    """Degrees Celsius below the temperature at which the GPU slows down."""
    clock_event_reasons: Count | None = None
    """Bit mask of NVML's clock-event reasons."""
    ecc_uncorrected: Count | None = None
    """Uncorrected memory errors since the driver was loaded."""
    remap_pending: bool | None = None
    """A memory row will be replaced at the next reset."""
    remap_failed: bool | None = None
    """A memory row failed and could not be replaced."""
    recovery_action: Count | None = None
    """Action that the driver requires for the GPU; 0 is none. See `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`."""
    xids: tuple[Count, ...] = ()
    """XID numbers of critical driver errors since the sampling began."""
    mig: bool = False
    """It is partitioned by MIG, so it cannot be assigned as a whole."""


class GpuAbsence(Message, tag="gpu_absence", frozen=True, kw_only=True):
    """No GPU of this host can be sampled, with the reason."""

    host: str
    number: Count
    at: Seconds
    why: str


class ProcessSample(Message, tag="process_sample", frozen=True, kw_only=True):
    """One process of the run."""

    name: str
    pid: Count
    number: Count
    at: Seconds
    cpu_percent: float
    rss_bytes: Count


class EngineSample(Message, tag="engine_sample", frozen=True, kw_only=True):
    """One engine, from its address file; see `InferenceAddress`."""

    name: str
    number: Count
    at: Seconds
    url: str
    pid: Count
    in_hand: Count
    busy: float
    draining: bool


class EngineDecision(Message, tag="engine_decision", frozen=True, kw_only=True):
    """Target number of engines, with its input; published on `telemetry.scale.inference`."""

    at: Seconds
    busy: float
    """Load of all ready engines, added up: 1.5 is the work of one and a half engines."""
    current: Count
    target: Count
    reason: str


class CurriculumProgress(Message, tag="curriculum", frozen=True, kw_only=True):
    """The curriculum of one environment; published on `telemetry.curriculum.NAME`. Recent figures are means over about
    the last fifty outcomes."""

    env: str
    sampler: str
    """Name of its sampler."""
    at: Seconds
    levels: Count
    """Levels of the task space."""
    open: Count
    """Tasks that wait or are rolled out."""
    drawn: Count
    """Tasks chosen so far."""
    outcomes: Count
    """Groups that answered tasks."""
    flat: Count
    """Groups with equal scores, which teach nothing."""
    failed: Count = 0
    """Tasks whose every delivery failed."""
    dropped: Count = 0
    """Tasks that expired or were cancelled."""
    success: float | None = None
    """Recent success rate; None before the first outcome."""
    flat_share: float | None = None
    """Recent share of groups with equal scores."""
    level: float | None = None
    """Recent mean level, from 0 to `levels` - 1."""


TelemetryEvent = HostSample | GpuSample | GpuAbsence | ProcessSample | EngineSample | LatencySample
Event = (
    Pressure
    | StepDone
    | StepSkipped
    | BatchSettled
    | StepFigures
    | ScaleDecision
    | EngineDecision
    | EvaluationDone
    | GpuStanding
    | CurriculumProgress
    | HealthFinding
    | RolloutTrace
    | NetworkStatus
    | TelemetryEvent
)
"""All events on `events` except `Ack` and `Drain`, which have one receiver."""
