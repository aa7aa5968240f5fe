"""Cordons: GPUs that take no new workers, and GPUs whose workers must leave. Pure.

    hot                 cordon; if hot for `drain_hot_s`, drain its workers, too
    fatal               cordon, and drain its workers at once
    by an operator      cordon until the operator lifts it; drain nobody
    clean for `clean_s` uncordon. The time doubles with each relapse within `relapse_s`, up to `hold_off_max_s`, and
                        halves after each such time without one
    uncordoned by hand  use at once, for any cause; the same event does not cordon it again. Heat is the same event
                        until the GPU was clean for `clean_s`, a fatal fault while its mark is unchanged
    silence             change nothing: neither cordon nor uncordon

The breaker: heat alone never cordons more than max(1, `breaker`) of the GPUs. If more are hot, the room is hot, and a
stopped run does not cool it; the other GPUs stay in use, with a note. Fatal faults are exempt, since a lost GPU runs
nothing anyway, but each takes one of the breaker's places.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.files import Dismissed, GpuRecord
from rolloutmq.schemas.wire.hardware import FATAL, Cause, GpuOrder
from rolloutmq.schemas.wire.telemetry import GpuSample
from rolloutmq.services.orchestrator.gpus.health import ErrorCount, Fault, Health

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cordon:
    """Cordon state of one GPU.

    Attributes:
        automatic: Faults it is cordoned for.
        manual: Reason of the operator's cordon, or None.
        dismissed: Events an operator dismissed by uncordoning.
        level: Doublings of the required clean time.
        lifted_at: Time of the last uncordon.
        spared: It is hot, and the breaker keeps it in use.
        since: Wall-clock time of the cordon, for display.
        order: Number of the last applied order.
    """

    health: Health
    automatic: dict[Cause, Fault] = field(default_factory=dict)
    manual: str | None = None
    dismissed: set[tuple[Cause, str]] = field(default_factory=set)
    level: int = 0
    lifted_at: float = -math.inf
    spared: bool = False
    since: float = 0.0
    order: int = 0

    @property
    def causes(self) -> tuple[Cause, ...]:
        """Return the causes of the cordon, the operator's first."""
        return (*((Cause.MANUAL,) if self.manual is not None else ()), *sorted(self.automatic))

    @property
    def reason(self) -> str:
        """Return the causes as text."""
        parts = [] if self.manual is None else [f"by hand: {self.manual or 'asked'}"]
        parts += [self.automatic[cause].says for cause in sorted(self.automatic)]
        if self.spared and not self.automatic:
            parts.append("hot, but in use: the breaker allows no more cordons")
        ignored = sorted({cause.value for cause, _ in self.dismissed if cause not in self.automatic})
        if ignored:
            parts.append(f"uncordoned by hand despite: {', '.join(ignored)}")
        return "; ".join(parts)


class Cordons:
    """Cordons of the GPUs of one host."""

    def __init__(self, limits: HardwareConfig) -> None:
        self._limits = limits
        self._gpus: dict[str, Cordon] = {}

    def __getitem__(self, uuid: str) -> Cordon:
        return self._gpus[uuid]

    def see(self, uuid: str, sample: GpuSample, now: float, wall: float) -> None:
        """Apply a sample: cordon or uncordon its GPU."""
        gpu = self._known(uuid)
        gpu.health.see(sample, now)
        self._close_events(gpu)
        faults = gpu.health.faults
        fresh = [fault for fault in faults.values() if (fault.cause, fault.mark) not in gpu.dismissed]
        gpu.spared = False
        for fault in fresh:
            self._take(uuid, gpu, fault, now, wall)
        self._lift(uuid, gpu, faults, now)

    def carry_out(self, orders: Mapping[str, GpuOrder], now: float, wall: float) -> None:
        """Apply the operators' new orders on known GPUs."""
        for uuid, order in orders.items():
            gpu = self._gpus.get(uuid)
            if gpu is None or order.number <= gpu.order:
                continue
            gpu.order = order.number
            if order.cordoned:
                gpu.since = gpu.since if gpu.causes else wall
                gpu.manual = order.reason
                logger.warning("gpu cordoned gpu=%s by hand reason=%s", uuid, order.reason)
            else:
                self._release(uuid, gpu, now)

    def doomed(self) -> dict[str, str]:
        """Return the GPUs whose workers must leave, with the reason."""
        found = {}
        for uuid, gpu in self._gpus.items():
            fatal = [fault.says for cause, fault in gpu.automatic.items() if cause in FATAL]
            if fatal:
                found[uuid] = "; ".join(fatal)
            elif Cause.HEAT in gpu.automatic and gpu.health.hot_s >= self._limits.drain_hot_s:
                found[uuid] = f"hot for {gpu.health.hot_s:.0f} s"
        return found

    def known(self) -> Collection[str]:
        """Return every GPU with a sample or an order."""
        return self._gpus.keys()

    def restore(self, record: GpuRecord, now: float) -> None:
        """Restore a GPU from the record of an earlier life. Durations start anew."""
        standing = record.standing
        self._gpus[standing.uuid] = Cordon(
            Health(self._limits, ErrorCount(record.errors_before, record.errors_last)),
            {cause: Fault(cause, mark, says) for cause, (mark, says) in record.automatic.items()},
            record.manual,
            {(event.cause, event.mark) for event in record.dismissed},
            record.level,
            now if record.relapsing else -math.inf,
            since=standing.since,
            order=standing.order,
        )

    def kept(self, uuid: str) -> dict[str, object]:
        """Return the cordon fields of a `GpuRecord`."""
        gpu = self._gpus[uuid]
        return {
            "automatic": {cause: (fault.mark, fault.says) for cause, fault in gpu.automatic.items()},
            "manual": gpu.manual,
            "dismissed": tuple(Dismissed(*event) for event in sorted(gpu.dismissed)),
            "level": gpu.level,
            "relapsing": gpu.lifted_at > -math.inf,
            "errors_before": gpu.health.errors.before,
            "errors_last": gpu.health.errors.last,
        }

    def _known(self, uuid: str) -> Cordon:
        return self._gpus.setdefault(uuid, Cordon(Health(self._limits)))

    def _close_events(self, gpu: Cordon) -> None:
        """Forget ended events: a recurrence is a new event."""
        faults = gpu.health.faults
        for cause, mark in list(gpu.dismissed):
            lasts = cause in faults and faults[cause].mark == mark
            over = (
                gpu.health.cool_s >= self._limits.clean_s if cause is Cause.HEAT else gpu.health.whole_s > 0
            )
            if not lasts and over:
                gpu.dismissed.discard((cause, mark))

    def _take(self, uuid: str, gpu: Cordon, fault: Fault, now: float, wall: float) -> None:
        if fault.cause in gpu.automatic:
            gpu.automatic[fault.cause] = fault
            return
        if not fault.fatal and self._is_full(gpu):
            gpu.spared = True
            return
        if not gpu.automatic:
            gpu.level = self._level(gpu, now)
        if not gpu.causes:
            gpu.since = wall
        gpu.automatic[fault.cause] = fault
        logger.warning("gpu cordoned gpu=%s cause=%s reason=%s", uuid, fault.cause, fault.says)

    def _is_full(self, but: Cordon) -> bool:
        most = max(1, int(self._limits.breaker * len(self._gpus)))
        return sum(bool(gpu.automatic) for gpu in self._gpus.values() if gpu is not but) >= most

    def _level(self, gpu: Cordon, now: float) -> int:
        """Return the doublings of the hold-off: one more, less one for each calm period since the last cordon."""
        if math.isinf(gpu.lifted_at):
            return 0
        calm = int((now - gpu.lifted_at) / self._limits.relapse_s)
        return max(0, min(gpu.level + 1 - calm, 32))

    def _hold_off_s(self, gpu: Cordon) -> float:
        return float(min(self._limits.clean_s * 2.0**gpu.level, self._limits.hold_off_max_s))

    def _lift(self, uuid: str, gpu: Cordon, faults: Mapping[Cause, Fault], now: float) -> None:
        if not gpu.automatic:
            return
        clean_s = self._hold_off_s(gpu)
        for cause in list(gpu.automatic):
            calm_s = gpu.health.cool_s if cause is Cause.HEAT else gpu.health.whole_s
            if cause not in faults and calm_s >= clean_s:
                del gpu.automatic[cause]
        if not gpu.automatic:
            gpu.lifted_at = now
            logger.warning("gpu uncordoned gpu=%s clean for %.0f s", uuid, clean_s)

    def _release(self, uuid: str, gpu: Cordon, now: float) -> None:
        """Uncordon by hand: dismiss the events of all present faults."""
        known = [*gpu.health.faults.values(), *gpu.automatic.values()]
        gpu.dismissed |= {(fault.cause, fault.mark) for fault in known}
        if gpu.automatic:
            gpu.lifted_at = now
        gpu.automatic.clear()
        gpu.manual = None
        gpu.spared = False
        logger.warning("gpu uncordoned gpu=%s by hand", uuid)
