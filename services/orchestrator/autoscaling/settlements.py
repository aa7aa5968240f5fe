"""The trainer's pace: sequences per second of the time in which it did not wait, from its settlements. Pure.

A trainer consumes a batch at once and trains on it, so its pace shows at settlements only. The last few are compared
with those before: if they clearly differ, the pace has changed, and the older ones are forgotten. Clearly is more than
the grain of the samples: a window of four seconds, seen once a second, is not precise. It is also more than chance:
batches of unlike size differ without a change. One settlement that took far
longer than usual is a pause, for an evaluation or a checkpoint, and says nothing about the pace; two in a row are a
slower trainer. Until the next one comes, it counts.
"""

import math
from itertools import pairwise
from statistics import fmean, median
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

CHANGED: Final = 0.15
"""Relative difference of the windows that counts as a change."""
LARGE_S, LARGE_STEPS, LARGE = 1.5, 2, 0.45
"""Window of a large change, and its relative difference from the settlements before: two settlements vary."""
WINDOWS: Final = ((4.0, 2), (8.0, 3))
"""Short windows, the shortest first: so much time without waits, and so many settlements."""
LONE_S: Final = 10.0
"""A settlement that took this long is a short window by itself: its time was measured precisely."""
LONG_S, LONG_STEPS = 10.0, 4
"""The long window."""
GRAIN: Final = 1.0
"""Samples by which the ends of a window are uncertain."""
CHANCE: Final = 2.5
"""Factor on the spread of the earlier settlements, over the square root of those in the window."""
SPREAD_OF: Final = 16
LEAST_SPREAD: Final = 4
"""Most and fewest earlier settlements from which the spread is measured."""
PRECISE: Final = 0.03
"""Relative precision of the pace that a longer window is to reach where settlements differ by chance."""
OF_NEIGHBOURS: Final = 2.0 / math.sqrt(math.pi)
"""Mean difference of two values of a normal distribution, in standard deviations."""
LEAST_S: Final = 1e-3
"""Least time of settlements: divided by none, their pace would be infinite."""
KEPT: Final = 64
"""Settlements remembered."""
PAUSE, PAUSE_S = 3.0, 4.0
"""Factor on the usual time, and seconds beyond it, from which a settlement includes a pause."""
LATE: Final = 1.5
"""Factor on the usual time from which a late settlement lowers the pace before it comes."""


class Settlement(msgspec.Struct, frozen=True):
    """Sequences consumed at once, the time since the one before without waits, and how precisely that was seen."""

    sequences: int
    awake_s: float
    grain_s: float


class Settlements(msgspec.Struct, frozen=True):
    """The last settlements, oldest first."""

    last: tuple[Settlement, ...] = ()
    pace: float | None = None
    """Sequences per second; None before the first settlement whose beginning was observed."""
    noise: float = 0.0
    """Relative standard deviation of the pace of one settlement; known after a few, and remembered over a change."""

    used: int = 1
    """Settlements that tell the pace."""

    @property
    def error(self) -> float:
        """Return the relative standard error of the pace by chance."""
        return self.noise / math.sqrt(self.used)

    def added(self, sequences: int, awake_s: float, grain_s: float) -> "Settlements":
        """Return the settlements with one more; the last samples came `grain_s` seconds apart."""
        last = (*self.last[1 - KEPT :], Settlement(sequences, awake_s, grain_s))
        long = _long(last)
        if long[-1] and len(last) > 1 and not long[-2]:  # until the next one tells whether it was a pause
            return replace(self, last=last, pace=sequences / max(awake_s, LEAST_S), used=1)
        sound = _without_pauses(last, long)
        noise = _spread(sound[:SPREAD_OF]) if len(sound) >= LEAST_SPREAD else self.noise
        usual = _window(sound, LONG_S, min(max(LONG_STEPS, math.ceil((noise / PRECISE) ** 2)), SPREAD_OF))
        shorts = [(_window(sound, least_s, least, LONE_S), usual, CHANGED) for least_s, least in WINDOWS]
        large = _window(sound, LARGE_S, LARGE_STEPS, LONE_S)
        if earlier := sound[large.number :]:
            shorts.insert(0, (large, _window(earlier, LONG_S, LONG_STEPS), LARGE))
        for short, long_window, changed in shorts:
            spread = changed + GRAIN * short.grain_s / max(short.awake_s, LEAST_S)
            spread += CHANCE * noise / math.sqrt(short.number)
            if abs(short.pace / long_window.pace - 1.0) > spread:
                last = tuple(reversed(sound[: short.number]))
                return replace(self, last=last, pace=short.pace, used=short.number)
        return replace(self, last=last, pace=usual.pace, noise=noise, used=usual.number)

    @property
    def usual_s(self) -> float:
        """Return the usual time of a batch like the last one; 0 without one."""
        return self.last[-1].sequences / self.pace if self.pace else 0.0

    def now(self, open_s: float) -> float | None:
        """Return the pace at present, `open_s` after the last settlement without waits."""
        if self.pace is None:
            return None
        late_s = open_s - LATE * self.usual_s
        return self.pace if late_s <= 0.0 else self.last[-1].sequences / (self.usual_s + late_s)


def _long(last: tuple[Settlement, ...]) -> list[bool]:
    """Return which settlements took far longer than usual."""
    usual = median([one.awake_s / one.sequences for one in last])
    least = PAUSE * usual
    return [
        one.awake_s > least * one.sequences and one.awake_s > usual * one.sequences + PAUSE_S for one in last
    ]


def _without_pauses(last: tuple[Settlement, ...], long: list[bool]) -> list[Settlement]:
    """Return settlements, newest first, without lone long ones."""
    if not any(long):
        return list(last[::-1])
    kept = [
        one
        for place, one in enumerate(last)
        if not long[place] or any(long[max(0, place - 1) : place] + long[place + 1 : place + 2])
    ]
    return (kept or list(last))[::-1]


class _Window(NamedTuple):
    """The newest settlements: their number, sequences, time without waits, and the coarsest grain."""

    number: int
    sequences: int
    awake_s: float
    grain_s: float

    @property
    def pace(self) -> float:
        """Return the sequences per second."""
        return self.sequences / max(self.awake_s, LEAST_S)


def _window(newest: list[Settlement], least_s: float, least: int, lone_s: float = math.inf) -> _Window:
    """Return the newest settlements that span so much time and number so many."""
    number, sequences, awake_s, grain_s = 0, 0, 0.0, 0.0
    for one in newest:
        number += 1
        sequences += one.sequences
        awake_s += one.awake_s
        if one.grain_s > grain_s:
            grain_s = one.grain_s
        if awake_s >= lone_s or (awake_s >= least_s and number >= least):
            break
    return _Window(number, sequences, awake_s, grain_s)


def _spread(settlements: list[Settlement]) -> float:
    """Return the relative standard deviation of the paces, from the differences of neighbours: a trend is no spread."""
    paces = [one.sequences / max(one.awake_s, LEAST_S) for one in settlements]
    differences = [abs(late - early) for late, early in pairwise(paces)]
    return fmean(differences) / OF_NEIGHBOURS / fmean(paces)
