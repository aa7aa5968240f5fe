"""Samples for the laws of GPUs, and a clock that goes a second with each."""

from typing import Any

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState

GIB = 1 << 30
LIMITS = HardwareConfig()
IDLE, APPLICATION, POWER_CAP, SLOWDOWN, SW_THERMAL, HW_THERMAL = 0x1, 0x2, 0x4, 0x8, 0x20, 0x40


def sample(uuid: str = "GPU-1", **facts: Any) -> GpuSample:
    """Return a sample of a cool, empty GPU of 80 GiB that tells everything, but for what is given."""
    healthy = {
        "utilisation_percent": 0.0,
        "memory_used_bytes": 0,
        "memory_free_bytes": 79 * GIB,
        "memory_total_bytes": 80 * GIB,
        "memory_reserved_bytes": 1 * GIB,
        "temperature_c": 40.0,
        "margin_c": 45.0,
        "clock_event_reasons": IDLE,
        "ecc_uncorrected": 0,
        "remap_pending": False,
        "remap_failed": False,
        "recovery_action": 0,
    }
    return GpuSample(uuid=uuid, at=0.0, name="H100", **({"number": 1} | healthy | facts))


def using(used: int, uuid: str = "GPU-1", **facts: Any) -> GpuSample:
    """Return the same with so much memory in use."""
    return sample(uuid, memory_used_bytes=used, memory_free_bytes=79 * GIB - used, **facts)


def hot(uuid: str = "GPU-1", **facts: Any) -> GpuSample:
    """Return a sample of a GPU that slows down for its temperature."""
    return sample(uuid, **({"clock_event_reasons": HW_THERMAL | SLOWDOWN, "margin_c": 1.0} | facts))


def lost(uuid: str = "GPU-1", number: int = 1) -> GpuSample:
    """Return what telemetry says of a GPU that fell off the bus."""
    return GpuSample(uuid=uuid, number=number, at=0.0, name="H100", state=GpuState.LOST, why="GPU is lost")


def silent(uuid: str = "GPU-1", number: int = 1) -> GpuSample:
    """Return what telemetry says of a GPU whose driver hangs."""
    return GpuSample(uuid=uuid, number=number, at=0.0, name="H100", state=GpuState.SILENT, why="hangs")
