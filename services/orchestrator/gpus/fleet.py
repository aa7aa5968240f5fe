"""The GPUs of one host as its workers need them: samples, orders and ends in; placements, limits and drains out.

Pure: composes `health`, `cordons`, `promises` and `placement`; owns no clock, file or process. All is by UUID.
"""

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any

from rolloutmq.schemas.hardware import GpuOrder, GpuStanding
from rolloutmq.schemas.orchestration import HardwareConfig
from rolloutmq.schemas.records import GpuRecord
from rolloutmq.schemas.telemetry import GpuSample, GpuState
from rolloutmq.services.orchestrator.gpus.cordons import Cordons
from rolloutmq.services.orchestrator.gpus.placement import Need, NoGpu, Place, Unfit, choose, unfit
from rolloutmq.services.orchestrator.gpus.promises import Promises, Stage


@dataclass(frozen=True, slots=True)
class Life:
    """One worker process as the supervisor sees it.

    Attributes:
        pid: Of the living process, or None if there is none.
        ready: The broker heard it say so.
        comes_back: It will be started again.
    """

    pid: int | None
    ready: bool = False
    comes_back: bool = False


@dataclass(frozen=True, slots=True)
class Room:
    """How many more workers could be placed now, at most as many as were asked about, and why no more."""

    count: int
    reason: str = ""


class Wait(Enum):
    """The GPUs of a worker that ended are not ready for it yet."""

    SETTLING = "its memory is not back yet"
    SILENT = "nothing is heard of it"


@dataclass(slots=True)
class _Seen:
    """The last sample of a GPU that answered."""

    sample: GpuSample
    last: GpuSample
    at: float = -math.inf
    busy: deque[float] = field(default_factory=deque)


class Fleet:
    """The GPUs of one host.

    Args:
        limits: The thresholds.
        allowed: Whether workers may be put on the GPU of a sample.
    """

    def __init__(self, limits: HardwareConfig, allowed: Callable[[GpuSample], bool] = lambda _: True) -> None:
        self._limits = limits
        self._allowed = allowed
        self._seen: dict[str, _Seen] = {}
        self._pids: dict[str, int] = {}
        self.cordons = Cordons(limits)
        self.promises = Promises(limits)

    def see(self, sample: GpuSample, now: float, wall: float) -> None:
        """Take a sample that arrived now."""
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
        """Do what operators asked for."""
        self.cordons.carry_out(orders, now, wall)

    def place(self, worker: str, need: Need, now: float) -> tuple[str, ...] | NoGpu:
        """Choose the GPUs of a worker that is about to be started, and promise them to it."""
        chosen = choose(need, self._places(now), self._limits)
        if not isinstance(chosen, NoGpu):
            self.promises.claim(worker, chosen, need.vram_bytes, now)
        return chosen

    def adopt(self, worker: str, uuids: tuple[str, ...], need: Need, pid: int, now: float) -> None:
        """Take over a worker that lives on these GPUs already."""
        self.promises.claim(worker, uuids, need.vram_bytes, now, adopted=True)
        self._pids[worker] = pid

    def room(self, need: Need, count: int, now: float) -> Room:
        """Say how many of `count` more workers could be placed now."""
        trial = self._places(now)
        for placed in range(count):
            chosen = choose(need, trial, self._limits)
            if isinstance(chosen, NoGpu):
                return Room(placed, chosen.reason)
            trial = [_taken(place, need) if place.uuid in chosen else place for place in trial]
        return Room(count)

    def follow(self, lives: Mapping[str, Life], now: float) -> None:
        """Compare the claims with the processes; give back what those that ended had."""
        for worker in self.promises.workers():
            life = lives.get(worker, Life(None))
            known = self._pids.get(worker)
            if life.pid is None:
                self.promises.ended(worker, now, comes_back=life.comes_back)
                self._pids.pop(worker, None)
                continue
            if known is not None and known != life.pid:
                self.promises.ended(worker, now, comes_back=True)
            claim = self.promises.of(worker)
            if claim is not None and claim.stage is Stage.SETTLING:
                self.promises.again(worker, now)
            self._pids[worker] = life.pid
            if life.ready:
                self.promises.ready(worker, now)
        self.promises.settle(now)

    def leaving(self) -> dict[str, str]:
        """Return the workers that must go because of their GPUs, with the reason."""
        doomed = self.cordons.doomed()
        found = {}
        for uuid, reason in doomed.items():
            for claim in self.promises.claims(uuid):
                found[claim.worker] = f"{uuid}: {reason}"
        return found

    def comeback(self, worker: str, now: float) -> NoGpu | Wait | None:
        """Say whether a worker that ended may be started again on its GPUs: None if so, else why not or not yet."""
        claim = self.promises.of(worker)
        if claim is None:
            return None
        if not self.promises.settled(worker):
            return Wait.SETTLING
        need = Need(len(claim.uuids), claim.vram_bytes)
        for uuid in claim.uuids:
            why = unfit(need, self._place(uuid, now, but=worker), self._limits)
            if why is Unfit.SILENT:
                return Wait.SILENT
            if why is not None and why is not Unfit.BUSY:
                return NoGpu(f"no_gpu: {uuid} is {why}")
        return None

    def standings(self, now: float, wall: float) -> list[GpuStanding]:
        """Return how each GPU is treated."""
        doomed = self.cordons.doomed()
        return [self._standing(uuid, doomed, now, wall) for uuid in sorted(self.cordons.known())]

    def records(self, standings: Iterable[GpuStanding]) -> list[GpuRecord]:
        """Return what a restart needs, and what others want to know."""
        return [self._record(standing) for standing in standings]

    def restore(self, records: Iterable[GpuRecord], now: float) -> None:
        """Take over what an earlier life kept."""
        for record in records:
            self.cordons.restore(record, now)
            if record.sample is not None:
                uuid = record.sample.uuid
                self._seen[uuid] = _Seen(
                    record.sample, record.sample, busy=deque(maxlen=self._limits.hot_window)
                )

    def _places(self, now: float) -> list[Place]:
        return [self._place(uuid, now) for uuid in self._seen]

    def _place(self, uuid: str, now: float, but: str = "") -> Place:
        """Return what counts of a GPU, as if one of its workers were not there."""
        seen = self._seen.get(uuid)
        if seen is None:
            return Place(uuid, fresh=False)
        sample, others = seen.sample, [one for one in self.promises.claims(uuid) if one.worker != but]
        full = len(seen.busy) == self._limits.hot_window
        return Place(
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
            notes.append(seen.last.why if seen is not None and seen.last.why else "not heard of lately")
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


def _taken(place: Place, need: Need) -> Place:
    return replace(
        place,
        promised_bytes=place.promised_bytes + need.vram_bytes,
        claimed_bytes=place.claimed_bytes + need.vram_bytes,
        workers=place.workers + 1,
        alone=place.alone or not need.vram_bytes,
    )
