"""Placement: the GPUs of a new worker, with the fewest workers first, then the most free memory. Pure.

A GPU is fit if it has a recent sample, is not cordoned, full or busy, and has the worker's memory free beyond all
reservations. If too few are fit, the result is a reason instead of a placement: a worker started anyway would fail, or
make another one fail.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rolloutmq.schemas.config.orchestrator import HardwareConfig


@dataclass(frozen=True, slots=True)
class GpuRequest:
    """GPU demand of one worker process.

    Attributes:
        gpus: Number of GPUs.
        vram_bytes: Memory on each of them; 0 for the whole GPU, without other workers.
    """

    gpus: int = 0
    vram_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Placement:
    """Placement data of one GPU.

    Attributes:
        fresh: It has a recent sample and responded.
        cordoned: It takes no new workers.
        allowed: Workers may use it at all.
        whole: A process can use all of it: it is not partitioned.
        used_bytes, free_bytes, total_bytes, reserved_bytes: From the driver; None if unknown.
        busy_percent: Recent mean utilization; NaN if unknown.
        promised_bytes: Reserved for loading workers.
        claimed_bytes: Total claims of its workers.
        workers: Number of its workers.
        alone: One of them has exclusive use.
    """

    uuid: str
    fresh: bool = True
    cordoned: bool = False
    allowed: bool = True
    whole: bool = True
    used_bytes: int | None = None
    free_bytes: int | None = None
    total_bytes: int | None = None
    reserved_bytes: int | None = None
    busy_percent: float = math.nan
    promised_bytes: int = 0
    claimed_bytes: int = 0
    workers: int = 0
    alone: bool = False

    @property
    def room_bytes(self) -> int:
        """Return the bytes available to a new worker: free, unreserved, and within the memory beside all claims."""
        if self.free_bytes is None or self.total_bytes is None:
            return 0
        usable = self.total_bytes - (self.reserved_bytes or 0)
        return max(0, min(self.free_bytes - self.promised_bytes, usable - self.claimed_bytes))


class Unfit(StrEnum):
    """Reason why a GPU takes no worker, as text."""

    NOT_ALLOWED = "not allowed"
    CORDONED = "cordoned"
    SILENT = "without a recent sample"
    DIVIDED = "divided"
    TAKEN = "taken by other workers"
    FULL = "full"
    BUSY = "busy"
    MEMORY = "without enough memory"


@dataclass(frozen=True, slots=True)
class NoGpu:
    """Reason for the lack of a placement."""

    reason: str


def unfit(need: GpuRequest, place: Placement, limits: HardwareConfig) -> Unfit | None:
    """Return why a GPU cannot take a worker, or None if it can."""
    used = 0.0 if not place.total_bytes or place.used_bytes is None else place.used_bytes / place.total_bytes
    # A missing value excludes no GPU, but memory cannot be reserved unseen.
    verdicts = (
        (Unfit.NOT_ALLOWED, not place.allowed),
        (Unfit.CORDONED, place.cordoned),
        (Unfit.SILENT, not place.fresh),
        (Unfit.DIVIDED, not place.whole),
        (Unfit.TAKEN, place.alone or (place.workers > 0 and not need.vram_bytes)),
        (Unfit.FULL, 100.0 * used >= limits.full_percent),
        (Unfit.BUSY, place.busy_percent >= limits.busy_percent),
        (Unfit.MEMORY, place.room_bytes < need.vram_bytes),
    )
    return next((why for why, holds in verdicts if holds), None)


def choose(need: GpuRequest, places: Iterable[Placement], limits: HardwareConfig) -> tuple[str, ...] | NoGpu:
    """Return the UUIDs for one worker, or why there are none."""
    fit: list[Placement] = []
    against: Counter[Unfit] = Counter()
    most = 0
    for place in places:
        why = unfit(need, place, limits)
        if why is None:
            fit.append(place)
        else:
            against[why] += 1
            most = max(most, place.room_bytes if why is Unfit.MEMORY else 0)
    if len(fit) < need.gpus:
        return NoGpu(_reason(need, len(fit), against, most))
    fit.sort(key=lambda place: (place.workers, -place.room_bytes, place.uuid))
    return tuple(place.uuid for place in fit[: need.gpus])


def _reason(need: GpuRequest, fit: int, against: Counter[Unfit], most: int) -> str:
    if not fit and not against:
        return "no_gpu: no GPU reported"
    parts = [f"{count} {why}" for why, count in against.most_common()]
    if against[Unfit.MEMORY]:
        parts.append(f"{need.vram_bytes >> 20} MiB wanted, {most >> 20} MiB available")
    return f"no_gpu: {fit} of {need.gpus} wanted; {', '.join(parts) or 'there are no others'}"
