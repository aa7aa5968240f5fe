"""Health of one GPU, from its samples. Pure; the caller passes the clock.

    hot      thermal slowdown in `hot_samples` of the last `hot_window` samples, or no thermal margin for
             `hot_margin_s`, or slowdown by the board in all of them (a single one may be a power-state change)
    fatal    lost, or with a fault that only a reset or a repair can clear
    clean    neither, and with thermal margin if reported

Power caps, idling and application clocks are normal; unknown bits are ignored. A missing value is neither good nor bad.
A gap of more than `stale_s` ends every span, so that unobserved time proves neither heat nor cleanliness. A reported
fault stays until a sample clears it. Temperature thresholds are not used: the GPU knows its own limits.

The driver's count of memory errors is not of this run: only errors after its first sample are a fault. They stay one
until the count falls, since only a reset or a reload of the driver sets it to 0.

Telemetry hears driver errors (Xid) from its start on. If it restarts, which its numbers show, those of its predecessor
stay a fault until the GPU was lost and is back.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rolloutmq.schemas.config.orchestrator import HardwareConfig
from rolloutmq.schemas.wire.hardware import FATAL, Cause
from rolloutmq.schemas.wire.telemetry import GpuSample, GpuState

HW_SLOWDOWN: Final = 0x8
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80
"""A slowdown by the board with this bit is a power brake, not heat."""
THERMAL: Final = SW_THERMAL | HW_THERMAL
ACTIONS: Final = {
    1: "reset the GPU",
    2: "reboot the host",
    3: "drain its peers",
    4: "drain and reset it",
    5: "recover its domain",
    6: "reset its bus",
    7: "reboot the system",
}
FATAL_XIDS: Final = frozenset({46, 48, 62, 64, 79, 95, 119, 120, 140, 143})
"""Xid errors after which the GPU has stopped, has lost memory, or is off the bus. Most others concern one application,
not the GPU."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Fault of a GPU.

    Attributes:
        mark: Identifies one event of this cause, for example by an error count.
        says: Description.
    """

    cause: Cause
    mark: str
    says: str

    @property
    def fatal(self) -> bool:
        """Return whether its workers must leave."""
        return self.cause in FATAL


@dataclass(slots=True)
class ErrorCount:
    """Uncorrected memory errors of one GPU since its first sample in this run.

    Attributes:
        before: Errors of the driver's count that are older; None before the first sample.
        last: The driver's count in the last sample.
    """

    before: int | None = None
    last: int = 0

    def see(self, count: int) -> int:
        """Record the driver's count; return the errors since the first sample, or since the count began anew."""
        if self.before is None:
            self.before = count
        elif count < self.last:
            self.before = 0
        self.last = count
        return count - self.before


class Span:
    """Duration of an uninterrupted condition: `see` at each sample, `seconds` up to the last one."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def see(self, holds: bool, now: float) -> None:
        """Record whether the condition holds now."""
        self._since = None if not holds else now if self._since is None else self._since
        self._last = now

    def end(self) -> None:
        """Start anew."""
        self._since = None

    @property
    def holds(self) -> bool:
        """Return whether the condition held at the last sample."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """Return its duration up to the last sample."""
        return 0.0 if self._since is None else self._last - self._since


class Health:
    """Health of one GPU.

    Args:
        limits: Thresholds.
        errors: Count of an earlier life; a new one by default.
    """

    def __init__(self, limits: HardwareConfig, errors: ErrorCount | None = None) -> None:
        self._limits = limits
        self.errors = errors or ErrorCount()
        self._thermal: deque[bool] = deque(maxlen=limits.hot_window)
        self._slowed: deque[bool] = deque(maxlen=limits.hot_window)
        self._tight = Span()
        self._hot = Span()
        self._cool = Span()
        self._whole = Span()
        self._fatal: dict[Cause, Fault] = {}
        self._xids: frozenset[int] = frozenset()
        self._earlier_xids: frozenset[int] = frozenset()
        self._number = 0
        self._seen_at = self._judged_at = -math.inf

    def see(self, sample: GpuSample, now: float) -> None:
        """Apply a sample that arrived now."""
        if sample.number < self._number:
            self._earlier_xids = self._xids
        self._number = sample.number
        if sample.state is GpuState.SILENT:
            return
        if now - self._seen_at > self._limits.stale_s:
            self._whole.end()
        self._seen_at = now
        if sample.state is GpuState.LOST:
            self._fatal[Cause.LOST] = Fault(Cause.LOST, "", sample.why or "the driver cannot reach it")
            self._whole.end()
            self._cool.end()
            return
        if self._fatal.pop(Cause.LOST, None) is not None:
            self._earlier_xids = frozenset()
        self._xids = self._earlier_xids.union(sample.xids)
        for cause, reported in _reported(sample, self.errors, self._xids).items():
            if reported is None:
                continue
            if reported.says:
                self._fatal[cause] = reported
            else:
                self._fatal.pop(cause, None)
        self._whole.see(not self._fatal, now)
        self._feel(sample, now)

    def _feel(self, sample: GpuSample, now: float) -> None:
        bits, margin = sample.clock_event_reasons, sample.margin_c
        if bits is None and margin is None:
            return
        if now - self._judged_at > self._limits.stale_s:
            self._thermal.clear()
            self._slowed.clear()
            for span in (self._tight, self._hot, self._cool):
                span.end()
        self._judged_at = now
        if bits is not None:
            self._thermal.append(bool(bits & THERMAL))
            self._slowed.append(bool(bits & HW_SLOWDOWN) and not bits & HW_POWER_BRAKE)
        self._tight.see(margin is not None and margin <= 0.0, now)
        self._hot.see(self._is_hot(), now)
        calm = bits is None or not (bits & THERMAL or self._slowed[-1])
        roomy = margin is None or margin >= self._limits.cool_margin_c
        self._cool.see(calm and roomy, now)

    def _is_hot(self) -> bool:
        limits = self._limits
        slowed = sum(self._slowed) == limits.hot_window
        tight = self._tight.holds and self._tight.seconds >= limits.hot_margin_s
        return sum(self._thermal) >= limits.hot_samples or slowed or tight

    @property
    def faults(self) -> dict[Cause, Fault]:
        """Return the present faults, as far as reported."""
        found = dict(self._fatal)
        if self._hot.holds:
            found[Cause.HEAT] = Fault(Cause.HEAT, "", self._heat())
        return found

    @property
    def hot_s(self) -> float:
        """Return how long it has been hot."""
        return self._hot.seconds

    @property
    def cool_s(self) -> float:
        """Return how long no sample has shown heat."""
        return self._cool.seconds

    @property
    def whole_s(self) -> float:
        """Return how long samples have arrived without a fatal fault."""
        return self._whole.seconds

    def _heat(self) -> str:
        """Return the sign of heat, as a text that is stable while the sign lasts."""
        if sum(self._thermal) >= self._limits.hot_samples:
            return "hot: thermal slowdown"
        return "hot: no thermal margin" if self._tight.holds else "hot: slowdown by the board"


def _reported(sample: GpuSample, errors: ErrorCount, known: Iterable[int]) -> dict[Cause, Fault | None]:
    """Return, for each fatal cause, the reported fault (without text if there is none), or None without a report."""
    action, failed = sample.recovery_action, sample.remap_failed
    xids = sorted(FATAL_XIDS.intersection(known))
    todo = "" if not action else f"the driver asks to {ACTIONS.get(action, f'take action {action}')}"
    return {
        Cause.RECOVERY: None if action is None else Fault(Cause.RECOVERY, str(action), todo),
        Cause.ECC: None if sample.ecc_uncorrected is None else _memory_fault(sample.ecc_uncorrected, errors),
        Cause.REMAP: None
        if failed is None
        else Fault(Cause.REMAP, "", "a memory row failed and could not be remapped" if failed else ""),
        Cause.XID: Fault(
            Cause.XID,
            ",".join(map(str, xids)),
            f"driver error (Xid) {', '.join(map(str, xids))}" if xids else "",
        ),
    }


def _memory_fault(count: int, errors: ErrorCount) -> Fault:
    new = errors.see(count)
    says = f"{new} new uncorrected memory error{'s' if new > 1 else ''}" if new else ""
    return Fault(Cause.ECC, str(count), says)
