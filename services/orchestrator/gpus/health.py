"""What the samples of one GPU prove about it. Pure; the clock is passed in.

    hot      it slowed itself down for its temperature in `hot_samples` of the last `hot_window` samples, or was without
             margin for `hot_margin_s`, or was slowed down by its board in all of them (a single one may be a change of
             its power state)
    fatal    it is lost, or tells of what only a reset or a repair can undo
    clean    neither, and with margin where it tells one

Power caps, idling and clocks that an application set are how a GPU works; bits that are not known mean nothing.
What a sample does not tell is neither good nor bad. Nothing lasts over silence: a gap of more than `stale_s` ends every
span, so that neither heat nor cleanliness is made of time in which nobody looked. A fault that was told stays until it
is told to be over. Never a temperature: what is hot, the GPU knows.
"""

import math
from collections import deque
from dataclasses import dataclass
from typing import Final

from rolloutmq.schemas.hardware import FATAL, Cause
from rolloutmq.schemas.orchestration import HardwareConfig
from rolloutmq.schemas.telemetry import GpuSample, GpuState

HW_SLOWDOWN: Final = 0x8
SW_THERMAL: Final = 0x20
HW_THERMAL: Final = 0x40
HW_POWER_BRAKE: Final = 0x80
"""It is what a slow-down by the board is for, if it shows with one."""
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
"""Errors of the driver after which the GPU has stopped, has lost memory, or is off the bus. Most others are of one
application, and tell nothing about the GPU."""


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong.

    Attributes:
        mark: Tells one event of this cause from the next: a number of errors, say.
        says: For people.
    """

    cause: Cause
    mark: str
    says: str

    @property
    def fatal(self) -> bool:
        """Whether its workers must go."""
        return self.cause in FATAL


class Span:
    """Since when something has been so without a break: `see` at each look, `seconds` up to the last one."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._last = 0.0

    def see(self, holds: bool, now: float) -> None:
        """Note whether it is so now."""
        self._since = None if not holds else now if self._since is None else self._since
        self._last = now

    def end(self) -> None:
        """Begin anew."""
        self._since = None

    @property
    def holds(self) -> bool:
        """Whether it was so at the last look."""
        return self._since is not None

    @property
    def seconds(self) -> float:
        """How long it has been so; nothing is added after the last look."""
        return 0.0 if self._since is None else self._last - self._since


class Health:
    """The samples of one GPU."""

    def __init__(self, limits: HardwareConfig) -> None:
        self._limits = limits
        self._thermal: deque[bool] = deque(maxlen=limits.hot_window)
        self._slowed: deque[bool] = deque(maxlen=limits.hot_window)
        self._tight = Span()
        self._hot = Span()
        self._cool = Span()
        self._whole = Span()
        self._fatal: dict[Cause, Fault] = {}
        self._seen_at = self._judged_at = -math.inf

    def see(self, sample: GpuSample, now: float) -> None:
        """Take a sample that arrived now."""
        if sample.state is GpuState.SILENT:
            return
        if now - self._seen_at > self._limits.stale_s:
            self._whole.end()
        self._seen_at = now
        if sample.state is GpuState.LOST:
            self._fatal[Cause.LOST] = Fault(Cause.LOST, "", sample.why or "the driver does not reach it")
            self._whole.end()
            self._cool.end()
            return
        self._fatal.pop(Cause.LOST, None)
        for cause, told in _told(sample).items():
            if told is None:
                continue
            if told.says:
                self._fatal[cause] = told
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
        """Return what is wrong, as far as was told."""
        found = dict(self._fatal)
        if self._hot.holds:
            found[Cause.HEAT] = Fault(Cause.HEAT, "", self._heat())
        return found

    @property
    def hot_s(self) -> float:
        """For how long it has been hot."""
        return self._hot.seconds

    @property
    def cool_s(self) -> float:
        """For how long no sample has shown heat."""
        return self._cool.seconds

    @property
    def whole_s(self) -> float:
        """For how long samples have come and none of them told of a fatal fault."""
        return self._whole.seconds

    def _heat(self) -> str:
        """Say how it shows, in words that stay the same while it does."""
        if sum(self._thermal) >= self._limits.hot_samples:
            return "hot: slows down for its temperature"
        return "hot: without margin" if self._tight.holds else "hot: slowed down by its board"


def _told(sample: GpuSample) -> dict[Cause, Fault | None]:
    """Return what a sample tells of each fatal cause: a fault (it says nothing if all is well), or None if nothing."""
    action, errors, failed = sample.recovery_action, sample.ecc_uncorrected, sample.remap_failed
    xids = [xid for xid in sample.xids if xid in FATAL_XIDS]
    todo = "" if not action else f"the driver asks to {ACTIONS.get(action, f'take action {action}')}"
    return {
        Cause.RECOVERY: None if action is None else Fault(Cause.RECOVERY, str(action), todo),
        Cause.ECC: None
        if errors is None
        else Fault(Cause.ECC, str(errors), f"{errors} uncorrected memory errors" if errors else ""),
        Cause.REMAP: None
        if failed is None
        else Fault(Cause.REMAP, "", "a row of its memory failed and could not be replaced" if failed else ""),
        Cause.XID: Fault(
            Cause.XID,
            ",".join(map(str, xids)),
            f"error {', '.join(map(str, xids))} of the driver" if xids else "",
        ),
    }
