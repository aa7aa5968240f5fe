"""The fleet: the GPUs of one host for its workers. Samples, orders and worker ends in; placements, limits, drains out.

Pure: composes `health`, `cordons`, `reservations` and `placement`; owns no clock, file or process. UUIDs identify GPUs.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.files import GpuRecord
from rolloutmq.schemas.wire.hardware import GpuOrder, GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState
from rolloutmq.services.orchestrator.gpus.cordons import Cordons
from rolloutmq.services.orchestrator.gpus.placement import GpuRequest, NoGpu, Placement, Unfit, choose, unfit
from rolloutmq.services.orchestrator.gpus.reservations import Reservations, ReservationStage


@dataclass(frozen=True, slots=True)
class WorkerLife:
    """One worker process as the supervisor sees it.

    Attributes:
        pid: Process id, or None without a process.
        ready: The broker has its ready report.
        comes_back: It will be restarted.
    """

    pid: int | None
    ready: bool = False
    comes_back: bool = False


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """Number of additional workers that can be placed now, up to the number asked for, and the reason for the limit."""

    count: int
    reason: str = ""


class GpuWait(Enum):
    """Reason why the GPUs of an ended worker are not ready for its restart yet."""

    SETTLING = "its memory is not free yet"
    SILENT = "no recent sample"


@dataclass(slots=True)
class _Seen:
    """Last sample of a GPU that responded."""

    sample: GpuSample
    last: GpuSample
    at: float = -math.inf
    busy: deque[float] = field(default_factory=deque)


class Fleet:
    """The GPUs of one host.

    Args:
        limits: Thresholds.
        allowed: Returns whether workers may use the GPU of a sample.
    """

    def __init__(self, limits: HardwareConfig, allowed: Callable[[GpuSample], bool] = lambda _: True) -> None:
        self._limits = limits
        self._allowed = allowed
        self._seen: dict[str, _Seen] = {}
        self._pids: dict[str, int] = {}
        self.cordons = Cordons(limits)
        self.promises = Reservations(limits)

    def see(self, sample: GpuSample, now: float, wall: float) -> None:
        """Apply a sample that arrived now."""
        uuid = sample.uuid
        self.cordons.see(uuid, sample, now, wall)
        seen = self._seen.get(uuid)
        if seen is None:
            seen = self._seen[uuid] = _Seen(sample, sample, busy=deque(maxlen=self._limits.hot_window))
        seen.last = sample
        if sample.state is not GpuState.OK:
            return
        seen.sample, seen.at = sample, now
        if sample.utilisation_percent is not None:
            seen.busy.append(sample.utilisation_percent)
        if sample.memory_used_bytes is not None:
            self.promises.see(uuid, sample.memory_used_bytes, sample.memory_total_bytes or 0, now)

    def carry_out(self, orders: Mapping[str, GpuOrder], now: float, wall: float) -> None:
        """Apply the operators' orders."""
        self.cordons.carry_out(orders, now, wall)

    def place(self, worker: str, need: GpuRequest, now: float) -> tuple[str, ...] | NoGpu:
        """Choose the GPUs of a new worker, and reserve them."""
        chosen = choose(need, self._places(now), self._limits)
        if not isinstance(chosen, NoGpu):
            self.promises.claim(worker, chosen, need.vram_bytes, now)
        return chosen

    def adopt(self, worker: str, uuids: tuple[str, ...], need: GpuRequest, pid: int, now: float) -> None:
        """Take over a running worker and its GPUs."""
        self.promises.claim(worker, uuids, need.vram_bytes, now, adopted=True)
        self._pids[worker] = pid

    def room(self, need: GpuRequest, count: int, now: float) -> GpuRoom:
        """Return how many of `count` more workers can be placed now."""
        trial = self._places(now)
        for placed in range(count):
            chosen = choose(need, trial, self._limits)
            if isinstance(chosen, NoGpu):
                return GpuRoom(placed, chosen.reason)
            trial = [_taken(place, need) if place.uuid in chosen else place for place in trial]
        return GpuRoom(count)

    def follow(self, lives: Mapping[str, WorkerLife], now: float) -> None:
        """Compare the reservations with the processes; release those of ended workers."""
        for worker in self.promises.workers():
            life = lives.get(worker, WorkerLife(None))
            known = self._pids.get(worker)
            if life.pid is None:
                self.promises.ended(worker, now, comes_back=life.comes_back)
                self._pids.pop(worker, None)
                continue
            if known is not None and known != life.pid:
                self.promises.ended(worker, now, comes_back=True)
            claim = self.promises.of(worker)
            if claim is not None and claim.stage is ReservationStage.SETTLING:
                self.promises.again(worker, now)
            self._pids[worker] = life.pid
            if life.ready:
                self.promises.ready(worker, now)
        self.promises.settle(now)

    def leaving(self) -> dict[str, str]:
        """Return the workers that must leave because of their GPUs, with the reason."""
        doomed = self.cordons.doomed()
        found = {}
        for uuid, reason in doomed.items():
            for claim in self.promises.claims(uuid):
                found[claim.worker] = f"{uuid}: {reason}"
        return found

    def comeback(self, worker: str, now: float) -> NoGpu | GpuWait | None:
        """Return None if an ended worker may restart on its GPUs, else why not, or why not yet."""
        claim = self.promises.of(worker)
        if claim is None:
            return None
        if not self.promises.settled(worker):
            return GpuWait.SETTLING
        need = GpuRequest(len(claim.uuids), claim.vram_bytes)
        for uuid in claim.uuids:
            why = unfit(need, self._place(uuid, now, but=worker), self._limits)
            if why is Unfit.SILENT:
                return GpuWait.SILENT
            if why is not None and why is not Unfit.BUSY:
                return NoGpu(f"no_gpu: {uuid} is {why}")
        return None

    def standings(self, now: float, wall: float) -> list[GpuStanding]:
        """Return the state of each GPU."""
        doomed = self.cordons.doomed()
        return [self._standing(uuid, doomed, now, wall) for uuid in sorted(self.cordons.known())]

    def records(self, standings: Iterable[GpuStanding]) -> list[GpuRecord]:
        """Return the records for a restart and for readers of the file."""
        return [self._record(standing) for standing in standings]

    def restore(self, records: Iterable[GpuRecord], now: float) -> None:
        """Restore the records of an earlier life."""
        for record in records:
            self.cordons.restore(record, now)
            if record.sample is not None:
                uuid = record.sample.uuid
                self._seen[uuid] = _Seen(
                    record.sample, record.sample, busy=deque(maxlen=self._limits.hot_window)
                )

    def _places(self, now: float) -> list[Placement]:
        return [self._place(uuid, now) for uuid in self._seen]

    def _place(self, uuid: str, now: float, but: str = "") -> Placement:
        """Return the placement data of a GPU, without one of its workers if given."""
        seen = self._seen.get(uuid)
        if seen is None:
            return Placement(uuid, fresh=False)
        sample, others = seen.sample, [one for one in self.promises.claims(uuid) if one.worker != but]
        full = len(seen.busy) == self._limits.hot_window
        return Placement(
            uuid,
            fresh=now - seen.at <= self._limits.stale_s,
            cordoned=bool(self.cordons[uuid].causes),
            allowed=self._allowed(sample),
            whole=not sample.mig,
            used_bytes=sample.memory_used_bytes,
            free_bytes=sample.memory_free_bytes,
            total_bytes=sample.memory_total_bytes,
            reserved_bytes=sample.memory_reserved_bytes,
            busy_percent=sum(seen.busy) / len(seen.busy) if full else math.nan,
            promised_bytes=self.promises.promised_bytes(uuid, but),
            claimed_bytes=self.promises.claimed_bytes(uuid, but),
            workers=len(others),
            alone=any(not claim.vram_bytes for claim in others),
        )

    def _standing(self, uuid: str, doomed: Mapping[str, str], now: float, wall: float) -> GpuStanding:
        cordon, seen = self.cordons[uuid], self._seen.get(uuid)
        silent_s = math.inf if seen is None else now - seen.at
        notes = [] if not cordon.reason else [cordon.reason]
        if silent_s > self._limits.stale_s:
            notes.append(seen.last.why if seen is not None and seen.last.why else "no recent sample")
        return GpuStanding(
            uuid=uuid,
            host="" if seen is None else seen.sample.host,
            name="" if seen is None else seen.sample.name,
            at=wall,
            causes=cordon.causes,
            reason="; ".join(dict.fromkeys(notes)),
            since=cordon.since if cordon.causes else 0.0,
            draining=uuid in doomed,
            holders=tuple(claim.worker for claim in self.promises.claims(uuid)),
            promised_bytes=self.promises.promised_bytes(uuid),
            ghost_bytes=self.promises.ghost_bytes(uuid),
            order=cordon.order,
        )

    def _record(self, standing: GpuStanding) -> GpuRecord:
        seen = self._seen.get(standing.uuid)
        kept: dict[str, Any] = self.cordons.kept(standing.uuid)
        return GpuRecord(standing=standing, sample=None if seen is None else seen.last, **kept)


def _taken(place: Placement, need: GpuRequest) -> Placement:
    return replace(
        place,
        promised_bytes=place.promised_bytes + need.vram_bytes,
        claimed_bytes=place.claimed_bytes + need.vram_bytes,
        workers=place.workers + 1,
        alone=place.alone or not need.vram_bytes,
    )
