"""The availability of workers: the part of their time in which those that were ready once are ready. Pure.

The others crashed, and start again. They crashed within the last start, when more or fewer workers were ready than now,
so they are compared with the mean of that time. Otherwise a growing fleet would seem to crash less than it does.

A few workers crash seldom, so a short mean follows every crash. The long mean spans `CRASHES` crashes, or as many as
tell it to `PRECISE`. If the short one differs from it by more than chance, it replaces it.
"""

import math
from typing import Final

import msgspec
from msgspec.structs import replace

SHORT_S, SHORT_STARTS = 60.0, 3.0
"""Time constant of the short mean, in seconds and in starts; the longer one counts."""
LONGEST_S: Final = 900.0
CRASHES: Final = 40.0
"""Least time constant of the long mean, in crashes."""
PRECISE: Final = 0.03
"""Relative precision that a longer time constant is to reach."""
CHANCE: Final = 4.25
CHANGED: Final = 0.05
"""Difference of the means in standard errors, and at least, that is a change."""

_Times = tuple[float, float, float]
"""Worker time ready, crashed, and crashed with the squares of its weights: how many crashes a mean is worth."""


class Availability(msgspec.Struct, frozen=True):
    """The short and the long mean.

    Attributes:
        lately: Mean of the ready workers within the last start.
        short, long: Worker time ready and crashed; both decay.
        start_s: Time of a start.
    """

    lately: float | None = None
    short: _Times = (0.0, 0.0, 0.0)
    long: _Times = (0.0, 0.0, 0.0)
    start_s: float = 0.0

    def looked(self, ready: int, crashed: int, start_s: float, elapsed_s: float) -> "Availability":
        """Return the means with one more sample.

        Args:
            ready: Ready workers.
            crashed: Those that were ready, and start again.
            start_s: Time of a start; 0 while unknown.
            elapsed_s: Time since the last sample.
        """
        if (
            self.lately is None
        ):  # nobody can have been seen to crash: they count as if they had run for a while
            if not ready:
                return self
            calm = SHORT_S * ready, 0.0, 0.0
            return Availability(0.0, calm, calm, start_s)
        soon = 1.0 - math.exp(-2.0 * elapsed_s / start_s) if start_s else 1.0
        lately = self.lately + (ready - self.lately) * soon
        now = elapsed_s * lately, elapsed_s * crashed, elapsed_s * crashed
        short_s = max(SHORT_S, SHORT_STARTS * start_s)
        new = replace(self, lately=lately, start_s=start_s)
        crashes_per_s = new._crashes(self.long) / max(self.long[0], 1e-9) * ready
        precise = ((1.0 - new.part) / PRECISE) ** 2 / 2.0  # a mean that decays is worth twice what it holds
        crashes = max(CRASHES, precise)
        long_s = min(max(short_s, crashes / max(crashes_per_s, 1e-9)), max(LONGEST_S, short_s))
        short, long = _added(self.short, now, elapsed_s / short_s), _added(self.long, now, elapsed_s / long_s)
        new = replace(new, short=short, long=long)
        return replace(new, long=short) if new._has_changed() else new

    @property
    def part(self) -> float:
        """Return the availability; 1 without crashes."""
        return _part(self.long)

    @property
    def error(self) -> float:
        """Return its relative standard error."""
        return (1.0 - self.part) / math.sqrt(max(1.0, self._crashes(self.long) * _worth(self.long)))

    def _has_changed(self) -> bool:
        expected = self._crashes(self.long) * self.short[0] / max(self.long[0], 1e-9)
        crashes = max(1.0, expected * _worth(self.long), self._crashes(self.short) * _worth(self.short))
        lately, usual = _part(self.short), _part(self.long)
        least = min(lately, usual)
        return abs(lately - usual) > max(CHANGED, CHANCE * least * (1.0 - least) / math.sqrt(crashes))

    def _crashes(self, times: _Times) -> float:
        """Return the crashes in that time: each takes a start."""
        return times[1] / max(self.start_s, 1.0)


def _added(mean: _Times, now: _Times, age: float) -> _Times:
    kept = math.exp(-age)
    return mean[0] * kept + now[0], mean[1] * kept + now[1], mean[2] * kept**2 + now[2]


def _worth(times: _Times) -> float:
    """Return how many crashes, counted once each, are as precise as one of a mean that decays."""
    return times[1] / times[2] if times[2] else 1.0


def _part(times: _Times) -> float:
    return times[0] / (times[0] + times[1]) if times[0] > 0.0 else 1.0
