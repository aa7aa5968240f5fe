"""GPUs as a person reads them: one line each, or one for those that have nothing to tell. Pure but for `read_gpus`."""

from collections.abc import Iterable, Sequence
from typing import Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.hardware import GpuStanding
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import GpuBook
from rolloutmq.schemas.telemetry import GpuSample, GpuState
from rolloutmq.services.monitor import figures

SHORT: Final = 12
"""Characters of a UUID that tell the GPUs of a host apart."""
NOTE_LIMIT: Final = 160


def read_gpus(layout: RunLayout) -> GpuBook:
    """Return what the orchestrator last wrote of its GPUs; nothing if there are none or it cannot be read."""
    try:
        return read_json(layout.gpus, GpuBook) or GpuBook()
    except (msgspec.MsgspecError, NotADirectoryError):
        return GpuBook()


def is_fine(sample: GpuSample, standing: GpuStanding | None) -> bool:
    """Whether there is nothing to tell but figures."""
    return sample.state is GpuState.OK and (standing is None or not (standing.reason or standing.ghost_bytes))


def figures_of(gpus: Iterable[GpuSample]) -> str:
    """Return the mean use, all memory, and the hottest of some GPUs."""
    gpus = list(gpus)
    use = _told(gpu.utilisation_percent for gpu in gpus)
    heat = _told(gpu.temperature_c for gpu in gpus)
    used = sum(gpu.memory_used_bytes or 0 for gpu in gpus)
    total = sum(gpu.memory_total_bytes or 0 for gpu in gpus)
    parts = [
        f"{sum(use) / len(use):.0f} %" if use else "use not told",
        figures.portion(used, total) if total else "memory not told",
        f"{max(heat):.0f} °C" if heat else "temperature not told",
    ]
    return " · ".join(parts)


def note(sample: GpuSample | None, standing: GpuStanding | None) -> str:
    """Return what is wrong with a GPU and what is done about it, or nothing."""
    parts = []
    if standing is not None and standing.cordoned:
        causes = ", ".join(standing.causes)
        parts.append(f"{'cordoned and drained' if standing.draining else 'cordoned'} ({causes})")
    if standing is not None and standing.reason:
        parts.append(standing.reason)
    elif sample is not None and sample.state is not GpuState.OK:
        parts.append(f"{sample.state}: {sample.why}")
    if standing is not None and standing.ghost_bytes:
        parts.append(f"{figures.amount(standing.ghost_bytes)} in use that no worker has any more")
    return "; ".join(parts)[:NOTE_LIMIT]


def line(sample: GpuSample | None, standing: GpuStanding | None) -> str:
    """Return one GPU: which, how it is, whose it is, and what is wrong."""
    uuid, name = ("", "") if sample is None else (sample.uuid, sample.name)
    if standing is not None:
        uuid, name = standing.uuid, name or standing.name
    told = sample is not None and sample.state is GpuState.OK
    parts = [f"{uuid[:SHORT]} {name}".rstrip(), figures_of([sample]) if told and sample is not None else ""]
    if standing is not None:
        parts.append(_holders(standing.holders))
    parts.append(note(sample, standing))
    return " · ".join(part for part in parts if part)


def _holders(workers: Sequence[str]) -> str:
    more = f" and {len(workers) - 2} more" if len(workers) > 2 else ""
    return ", ".join(workers[:2]) + more


def _told(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]
