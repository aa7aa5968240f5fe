"""Which GPUs workers may be put on: what the configuration names, out of what this process itself was given. Pure.

Whoever starts a run on a part of a host says so by CUDA_VISIBLE_DEVICES: by UUIDs, which may be cut short, or by
indexes. NVML shows all GPUs whatever it says, so that it has to be heeded here. An index is taken as the driver's,
which is CUDA's wherever the GPUs of a host are alike.
"""

from collections.abc import Callable, Sequence
from typing import Final

from rolloutmq.schemas.telemetry import GpuSample

VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def allowing(use: Sequence[str], visible: str | None) -> Callable[[GpuSample], bool]:
    """Return the test of a GPU.

    Args:
        use: Beginnings of UUIDs; none means all.
        visible: The variable as this process has it, or None if it is not set.
    """

    def allowed(sample: GpuSample) -> bool:
        named = not use or any(sample.uuid.startswith(beginning) for beginning in use)
        return named and (visible is None or is_visible(sample, visible))

    return allowed


def is_visible(sample: GpuSample, visible: str) -> bool:
    """Say whether CUDA would see the GPU; as in CUDA, what follows an entry that is none is not seen."""
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
    """Return the variable that gives a process these GPUs and no others."""
    return ",".join(uuids)


def uuids_of(value: str | None) -> tuple[str, ...]:
    """Return the GPUs that `value_of` gave a process; none if somebody else wrote it."""
    parts = tuple((value or "").split(","))
    return parts if all(part.startswith("GPU-") for part in parts) else ()
