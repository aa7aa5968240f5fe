"""Clock offset between two hosts by round trips, as NTP does it (RFC 5905, section 8). Pure.

A request leaves at t0, is answered at the other host's time t, and the answer arrives at t1: the other clock is
t - (t0 + t1) / 2 ahead, with an error of at most half the round trip, however long each way took. Of the last round
trips the shortest one counts: it has the smallest bound.
"""

from collections import deque
from math import isfinite
from typing import Final, NamedTuple

KEPT: Final = 64
"""Round trips that count: about a minute of heartbeats, in which clocks drift apart by a few milliseconds at most."""


class RoundTrip(NamedTuple):
    """One measurement.

    Attributes:
        error_s: Half the round trip, seconds.
        offset_s: Seconds that the other clock is ahead.
    """

    error_s: float
    offset_s: float


class ClockOffset:
    """Offset of another host's wall clock."""

    def __init__(self) -> None:
        self._trips: deque[RoundTrip] = deque(maxlen=KEPT)

    def answered(self, sent_at: float, answered_at: float, round_trip_s: float) -> None:
        """Note an answer.

        Args:
            sent_at: Own wall clock at the request.
            answered_at: Wall clock of the other host; 0 if it does not say.
            round_trip_s: Seconds from the request to its answer, by a monotonic clock.
        """
        if answered_at > 0 and isfinite(answered_at) and round_trip_s > 0:
            half_s = round_trip_s / 2
            self._trips.append(RoundTrip(half_s, answered_at - sent_at - half_s))

    @property
    def best(self) -> RoundTrip | None:
        """The measurement with the smallest error; None before the first answer."""
        return min(self._trips, default=None)
