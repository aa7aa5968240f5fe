"""When the process holds more memory than its state explains: a decision, without the means.

What the sockets keep of messages that are not whole is in no count and below no high-water mark. It shows only as the
difference between what the process holds and what the broker can account for. While that stays below the allowance
nothing is done. Beyond it, in this order:

    trim   the allocator gives back what is free; if that was all, that was it
    cut    every connection ends, and with it whatever of a message had come by it

What is still there after a cut was not the sockets'. It is then taken as it is, until it shrinks: the next cut comes
when as much again as the allowance has come on top. So an error in the accounts costs each peer one pause, and a peer
that begins anew after each cut is cut off each time. A look is the sooner due the less room is left.
"""

import math
from enum import Enum, auto
from typing import Final

FILL_BYTES_PER_S: Final = 4 << 30
"""More than one thread of the socket library takes in: 0.4 GiB took 0.1 s over ipc in frames of 0.9 MB."""
LONGEST_S: Final = 0.25
"""Longest time between two looks; one costs about 50 µs."""
SHORTEST_S: Final = 0.01
SETTLE_S: Final = 0.03
"""How long a cut takes: 0.4 GiB were free after 0.03 s. Also the first pause between two trims in vain."""
TRIM_AGAIN_S: Final = 30.0
"""Longest pause between two trims in vain; the pauses double."""
TRIM_FRESH_S: Final = 1.0
"""A cut comes only after a trim that is no older."""


class Remedy(Enum):
    """What to do now."""

    NOTHING = auto()
    TRIM = auto()
    """Let the allocator give back what is free, and look again at once."""
    CUT = auto()
    """End every connection."""


class Overgrowth:
    """Decides from two numbers and the clock.

    Args:
        allowance_bytes: How much may be there that is not accounted for.

    Attributes:
        due: When to look again, in monotonic seconds.
    """

    def __init__(self, allowance_bytes: int) -> None:
        self.due = -math.inf
        self._allowance = allowance_bytes
        self._lasting: float = 0
        """Least that was unaccounted for since the last cut; infinite until it was looked at."""
        self._trimmed_at = self._trim_due = -math.inf
        self._pause_s = SETTLE_S

    def look(self, now: float, held_bytes: int, accounted_bytes: int) -> Remedy:
        """Compare what the process holds with what is accounted for."""
        over = held_bytes - accounted_bytes
        self._lasting = min(self._lasting, over)
        if over <= self._allowance:
            self._trim_due, self._pause_s = -math.inf, SETTLE_S
            self.due = now + _pause_s(self._allowance - over)
            return Remedy.NOTHING
        beyond = over > self._limit
        if now >= self._trim_due or (beyond and now - self._trimmed_at > TRIM_FRESH_S):
            return self._trim(now)
        if beyond:
            return self._cut(now)
        self.due = min(self._trim_due, now + _pause_s(self._limit - over))
        return Remedy.NOTHING

    @property
    def _limit(self) -> float:
        return self._allowance + (self._lasting if self._lasting > self._allowance else 0)

    def _trim(self, now: float) -> Remedy:
        self._trimmed_at = self.due = now
        self._trim_due = now + self._pause_s
        self._pause_s = min(2 * self._pause_s, TRIM_AGAIN_S)
        return Remedy.TRIM

    def _cut(self, now: float) -> Remedy:
        self._lasting = math.inf
        self._pause_s = SETTLE_S
        self._trim_due = now + SETTLE_S
        self.due = now + SHORTEST_S
        return Remedy.CUT


def _pause_s(room_bytes: float) -> float:
    """Return how long nobody can have filled the room."""
    return min(max(room_bytes / FILL_BYTES_PER_S, SHORTEST_S), LONGEST_S)
