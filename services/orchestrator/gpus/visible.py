"""GPUs that workers may use: the configured ones among those visible to this process. Pure.

CUDA_VISIBLE_DEVICES restricts a run to a part of a host, by UUID prefixes or by indexes. NVML shows all GPUs
regardless, so the restriction is applied here. An index means the driver's order, which equals CUDA's if all GPUs of a
host are alike.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rolloutmq.schemas.wire.telemetry import GpuSample

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def allowing(use: Sequence[str], visible: str | None) -> Callable[[GpuSample], bool]:
    """Return the predicate of usable GPUs.

    Args:
        use: UUID prefixes; empty means all.
        visible: CUDA_VISIBLE_DEVICES of this process, or None if unset.
    """

    def allowed(sample: GpuSample) -> bool:
        named = not use or any(sample.uuid.startswith(beginning) for beginning in use)
        return named and (visible is None or is_visible(sample, visible))

    return allowed


def is_visible(sample: GpuSample, visible: str) -> bool:
    """Return whether CUDA would see the GPU; as in CUDA, an invalid entry hides all that follow it."""
    for entry in (part.strip() for part in visible.split(",")):
        if entry.isdecimal():
            if int(entry) == sample.index:
                return True
        elif not entry.startswith("GPU-"):
            return False
        elif sample.uuid.startswith(entry):
            return True
    return False


def value_of(uuids: Sequence[str]) -> str:
    """Return the CUDA_VISIBLE_DEVICES value for exactly these GPUs."""
    return ",".join(uuids)


def uuids_of(value: str | None) -> tuple[str, ...]:
    """Return the GPUs in a value written by `value_of`; empty for any other value."""
    parts = tuple((value or "").split(","))
    return parts if all(part.startswith("GPU-") for part in parts) else ()
