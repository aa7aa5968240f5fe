"""Which GPUs a new worker gets: the fit ones with the fewest workers, then with the most free memory. Pure.

A GPU is fit if something is known of it now, it is not cordoned, it is not full and not busy, and the memory that the
worker takes is free on it beyond what others were promised. Where too few are fit there is a reason and no placement:
a worker that is started all the same would fail, or make another one fail.
"""

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from rolloutmq.schemas.orchestration import HardwareConfig


@dataclass(frozen=True, slots=True)
class Need:
    """What one worker process takes.

    Attributes:
        gpus: How many GPUs.
        vram_bytes: Memory on each of them; 0 is the whole GPU, with nobody else on it.
    """

    gpus: int = 0
    vram_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Place:
    """What counts of one GPU.

    Attributes:
        fresh: A sample came lately, and the GPU answered.
        cordoned: It takes no new workers.
        allowed: Workers may be put on it at all.
        whole: It can be given to a process: it is not divided.
        used_bytes, free_bytes, total_bytes, reserved_bytes: As the driver says; None if it does not.
        busy_percent: Mean utilisation of late; NaN if the driver does not tell.
        promised_bytes: Kept for workers that load.
        claimed_bytes: What all workers on it may take.
        workers: How many those are.
        alone: One of them wants it for itself.
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
        """What can be promised now: free and kept for nobody, and within the memory beside all claims."""
        if self.free_bytes is None or self.total_bytes is None:
            return 0
        usable = self.total_bytes - (self.reserved_bytes or 0)
        return max(0, min(self.free_bytes - self.promised_bytes, usable - self.claimed_bytes))


class Unfit(StrEnum):
    """Why a GPU takes no worker, as it is said."""

    NOT_ALLOWED = "not to be used"
    CORDONED = "cordoned"
    SILENT = "not heard of lately"
    DIVIDED = "divided"
    TAKEN = "taken by other workers"
    FULL = "full"
    BUSY = "busy"
    MEMORY = "without enough memory"


@dataclass(frozen=True, slots=True)
class NoGpu:
    """No placement, and why."""

    reason: str


def unfit(need: Need, place: Place, limits: HardwareConfig) -> Unfit | None:
    """Say why a GPU cannot take a worker, or None if it can."""
    used = 0.0 if not place.total_bytes or place.used_bytes is None else place.used_bytes / place.total_bytes
    # What is not told keeps nobody away, but memory that must be there cannot be promised unseen.
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


def choose(need: Need, places: Iterable[Place], limits: HardwareConfig) -> tuple[str, ...] | NoGpu:
    """Return the UUIDs for one worker, or why there are none."""
    fit: list[Place] = []
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


def _reason(need: Need, fit: int, against: Counter[Unfit], most: int) -> str:
    if not fit and not against:
        return "no_gpu: none was heard of"
    parts = [f"{count} {why}" for why, count in against.most_common()]
    if against[Unfit.MEMORY]:
        parts.append(f"{need.vram_bytes >> 20} MiB wanted, {most >> 20} MiB to be had")
    return f"no_gpu: {fit} of {need.gpus} wanted; {', '.join(parts) or 'there are no more'}"
