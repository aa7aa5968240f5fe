"""GPUs as text: one line each, or one for all without a problem. Pure, except `read_gpus`."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import GpuBook, RunLayout, Supervision
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.monitor.text import format

SHORT: Final = 12
"""Characters of a UUID that distinguish the GPUs of a host."""
NOTE_LIMIT: Final = 160


def read_gpus(layout: RunLayout) -> GpuBook:
    """Return the GPU file of the orchestrator; empty if it is missing or unreadable."""
    try:
        return read_json(layout.gpus, GpuBook) or GpuBook()
    except (msgspec.MsgspecError, NotADirectoryError):
        return GpuBook()


def with_limits(book: GpuBook, known: Supervision | None) -> GpuBook:
    """Return the GPUs, and the limits of workers by a cluster beside those by GPUs."""
    return book if known is None else replace(book, limits={**book.limits, **known.limits})


def is_fine(sample: GpuSample, standing: GpuStanding | None) -> bool:
    """Return whether a GPU has no problem and no note."""
    return sample.state is GpuState.OK and (standing is None or not (standing.reason or standing.ghost_bytes))


def figures_of(gpus: Iterable[GpuSample]) -> str:
    """Return mean utilization, total memory, and highest temperature of some GPUs."""
    gpus = list(gpus)
    use = _present(gpu.utilisation_percent for gpu in gpus)
    heat = _present(gpu.temperature_c for gpu in gpus)
    used = sum(gpu.memory_used_bytes or 0 for gpu in gpus)
    total = sum(gpu.memory_total_bytes or 0 for gpu in gpus)
    parts = [
        f"{sum(use) / len(use):.0f} %" if use else "use unknown",
        format.portion(used, total) if total else "memory unknown",
        f"{max(heat):.0f} °C" if heat else "temperature unknown",
    ]
    return " · ".join(parts)


def note(sample: GpuSample | None, standing: GpuStanding | None) -> str:
    """Return the problem of a GPU and the action taken, or nothing."""
    parts = []
    if standing is not None and standing.cordoned:
        causes = ", ".join(standing.causes)
        parts.append(f"{'cordoned and drained' if standing.draining else 'cordoned'} ({causes})")
    if standing is not None and standing.reason:
        parts.append(standing.reason)
    elif sample is not None and sample.state is not GpuState.OK:
        parts.append(f"{sample.state}: {sample.why}")
    if sample is not None and sample.mig:
        parts.append("divided (MIG)")
    if standing is not None and standing.ghost_bytes:
        parts.append(f"{format.amount(standing.ghost_bytes)} still in use by dead workers")
    return "; ".join(parts)[:NOTE_LIMIT]


def line(sample: GpuSample | None, standing: GpuStanding | None) -> str:
    """Return one GPU as a line: id, figures, workers, problem."""
    uuid, name = ("", "") if sample is None else (sample.uuid, sample.name)
    if standing is not None:
        uuid, name = standing.uuid, name or standing.name
    is_known = sample is not None and sample.state is GpuState.OK
    parts = [
        f"{uuid[:SHORT]} {name}".rstrip(),
        figures_of([sample]) if is_known and sample is not None else "",
    ]
    if standing is not None:
        parts.append(_holders(standing.holders))
    parts.append(note(sample, standing))
    return " · ".join(part for part in parts if part)


def _holders(workers: Sequence[str]) -> str:
    more = f" and {len(workers) - 2} more" if len(workers) > 2 else ""
    return ", ".join(workers[:2]) + more


def _present(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
