"""Samples of the machine, published on `telemetry.*`: lossy and numbered."""

from enum import StrEnum

from rolloutmq.schemas.control import Pressure, ScaleDecision, StepDone
from rolloutmq.schemas.envelope import Count, Seconds
from rolloutmq.schemas.hardware import GpuStanding
from rolloutmq.schemas.message import Message


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
    """What came of asking a GPU."""

    OK = "ok"
    LOST = "lost"
    """The driver says that it cannot be used any more: that is news, and bad."""
    SILENT = "silent"
    """No answer: nothing is known, neither good nor bad."""


class GpuSample(Message, tag="gpu_sample", frozen=True, kw_only=True):
    """One GPU, by its UUID: indexes change, UUIDs do not. What a device does not tell is None."""

    uuid: str
    number: Count
    at: Seconds
    name: str
    host: str = ""
    index: Count = 0
    """Place in the driver's list at this moment."""
    state: GpuState = GpuState.OK
    why: str = ""
    """Why the state is not `ok`."""
    utilisation_percent: float | None = None
    memory_used_bytes: Count | None = None
    memory_free_bytes: Count | None = None
    memory_total_bytes: Count | None = None
    memory_reserved_bytes: Count | None = None
    """What driver and firmware keep. None on older drivers, which count it as used."""
    temperature_c: float | None = None
    margin_c: float | None = None
    """Degrees below the temperature at which the GPU slows itself down."""
    clock_event_reasons: Count | None = None
    """Bit mask of NVML's clock-event reasons."""
    ecc_uncorrected: Count | None = None
    """Errors of the memory that could not be corrected, since the driver was loaded."""
    remap_pending: bool | None = None
    """A row of memory is replaced at the next reset."""
    remap_failed: bool | None = None
    """A row of memory failed and could not be replaced."""
    recovery_action: Count | None = None
    """What the driver says must be done with the GPU; 0 is nothing. See `NVML_FI_DEV_GET_GPU_RECOVERY_ACTION`."""
    xids: tuple[Count, ...] = ()
    """Critical errors of the driver since the sampling began, by their numbers in NVIDIA's list."""
    mig: bool = False
    """It is divided; as a whole it can be given to nobody."""


class GpuAbsence(Message, tag="gpu_absence", frozen=True, kw_only=True):
    """No GPU can be sampled on this host, and why."""

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
    """One engine, as it said of itself; see `InferenceAddress`."""

    name: str
    number: Count
    at: Seconds
    url: str
    pid: Count
    in_hand: Count
    busy: float
    draining: bool


class EngineDecision(Message, tag="engine_decision", frozen=True, kw_only=True):
    """How many engines there should be, with what was seen; published on `telemetry.scale.inference`."""

    at: Seconds
    busy: float
    """Of all that are ready together: 1.5 is one and a half engines' work."""
    current: Count
    target: Count
    reason: str


TelemetryEvent = HostSample | GpuSample | GpuAbsence | ProcessSample | EngineSample
Event = Pressure | StepDone | ScaleDecision | EngineDecision | GpuStanding | TelemetryEvent
"""All that may arrive on `events`, but for `Ack` and `Drain`, which are for one receiver."""
