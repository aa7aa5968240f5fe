"""Which GPUs take no new workers, and whose workers must go: the law of the cordon. Pure.

    hot                 cordoned; hot for `drain_hot_s`: its workers are drained, too
    fatal               cordoned, and its workers are drained at once
    an operator's       cordoned until the operator says otherwise, and nobody is drained
    clean for `clean_s` used again. Twice as long for each relapse within `relapse_s`, up to `hold_off_max_s`, and half
                        as long again for each such time without one
    uncordoned by hand  used at once, whatever it was; the same event does not cordon it again: heat is the same event
                        until the GPU was clean for `clean_s`, a fatal fault while its mark is the same
    silence             nothing changes. No cordon is made of it, and none is lifted

The breaker: heat alone never cordons more than max(1, `breaker`) of the GPUs. If more are hot it is the room, and a run
that stands still does not cool it; the others are used on, and say so. Fatal faults are exempt, since a lost GPU runs
nothing whether it is cordoned or not, but each of them takes one of the breaker's places.
"""

import logging
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from rolloutmq.schemas.hardware import FATAL, Cause, GpuOrder
from rolloutmq.schemas.orchestration import HardwareConfig
from rolloutmq.schemas.records import Dismissed, GpuRecord
from rolloutmq.schemas.telemetry import GpuSample
from rolloutmq.services.orchestrator.gpus.health import Fault, Health

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Cordon:
    """One GPU under the law.

    Attributes:
        automatic: Faults for which it is cordoned.
        manual: Reason of the operator's cordon, or None.
        dismissed: Events that an operator uncordoned it in spite of.
        level: How often the time that it must be clean has doubled.
        lifted_at: When it was last used again.
        spared: It is hot, and the breaker keeps it in use.
        since: Wall clock of the cordon, for people.
        order: Number of the last order that was carried out.
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
        """Why it is cordoned, the operator first."""
        return (*((Cause.MANUAL,) if self.manual is not None else ()), *sorted(self.automatic))

    @property
    def reason(self) -> str:
        """The same for people."""
        parts = [] if self.manual is None else [f"by hand: {self.manual or 'asked'}"]
        parts += [self.automatic[cause].says for cause in sorted(self.automatic)]
        if self.spared and not self.automatic:
            parts.append("hot, but used on: as many are cordoned as the breaker allows")
        ignored = sorted({cause.value for cause, _ in self.dismissed if cause not in self.automatic})
        if ignored:
            parts.append(f"used on by hand in spite of: {', '.join(ignored)}")
        return "; ".join(parts)


class Cordons:
    """The GPUs of one host."""

    def __init__(self, limits: HardwareConfig) -> None:
        self._limits = limits
        self._gpus: dict[str, Cordon] = {}

    def __getitem__(self, uuid: str) -> Cordon:
        return self._gpus[uuid]

    def see(self, uuid: str, sample: GpuSample, now: float, wall: float) -> None:
        """Take a sample, and cordon or uncordon its GPU."""
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
        """Do what operators asked for and what was not done yet, with the GPUs that are known."""
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
        """Return the GPUs whose workers must go, with the reason."""
        found = {}
        for uuid, gpu in self._gpus.items():
            fatal = [fault.says for cause, fault in gpu.automatic.items() if cause in FATAL]
            if fatal:
                found[uuid] = "; ".join(fatal)
            elif Cause.HEAT in gpu.automatic and gpu.health.hot_s >= self._limits.drain_hot_s:
                found[uuid] = f"hot for {gpu.health.hot_s:.0f} s"
        return found

    def known(self) -> Collection[str]:
        """Return every GPU that was ever heard of."""
        return self._gpus.keys()

    def restore(self, record: GpuRecord, now: float) -> None:
        """Take over what an earlier life knew of a GPU. Whatever must last begins anew."""
        standing = record.standing
        self._gpus[standing.uuid] = Cordon(
            Health(self._limits),
            {cause: Fault(cause, mark, says) for cause, (mark, says) in record.automatic.items()},
            record.manual,
            {(event.cause, event.mark) for event in record.dismissed},
            record.level,
            now if record.relapsing else -math.inf,
            since=standing.since,
            order=standing.order,
        )

    def kept(self, uuid: str) -> dict[str, object]:
        """Return what a `GpuRecord` keeps of a GPU."""
        gpu = self._gpus[uuid]
        return {
            "automatic": {cause: (fault.mark, fault.says) for cause, fault in gpu.automatic.items()},
            "manual": gpu.manual,
            "dismissed": tuple(Dismissed(*event) for event in sorted(gpu.dismissed)),
            "level": gpu.level,
            "relapsing": gpu.lifted_at > -math.inf,
        }

    def _known(self, uuid: str) -> Cordon:
        return self._gpus.setdefault(uuid, Cordon(Health(self._limits)))

    def _close_events(self, gpu: Cordon) -> None:
        """Forget the events that are over: from now on the same thing is another event."""
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
        """Return how often the hold-off has doubled: once more, less once for each calm while since the last time."""
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
        """Uncordon it by hand: every fault that it has now is known, and its event dismissed."""
        known = [*gpu.health.faults.values(), *gpu.automatic.values()]
        gpu.dismissed |= {(fault.cause, fault.mark) for fault in known}
        if gpu.automatic:
            gpu.lifted_at = now
        gpu.automatic.clear()
        gpu.manual = None
        gpu.spared = False
        logger.warning("gpu uncordoned gpu=%s by hand", uuid)
