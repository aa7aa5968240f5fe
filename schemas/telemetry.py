"""Samples of the machine, published on `telemetry.*`: lossy and numbered."""

from rolloutmq.schemas.control import Pressure, ScaleDecision, StepDone
from rolloutmq.schemas.envelope import Count, Seconds
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


class GpuSample(Message, tag="gpu_sample", frozen=True, kw_only=True):
    """One GPU, by its UUID: indexes change, UUIDs do not."""

    uuid: str
    number: Count
    at: Seconds
    name: str
    utilisation_percent: float
    memory_used_bytes: Count
    memory_total_bytes: Count
    temperature_c: float
    clock_event_reasons: Count
    """Bit mask of NVML's clock-event reasons."""


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
Event = Pressure | StepDone | ScaleDecision | EngineDecision | TelemetryEvent
"""All that may arrive on `events`, but for `Ack` and `Drain`, which are for one receiver."""
