"""What is due to each producer of what the marks leave: windows, and what is worth telling of.

The windows of all live producers together leave half of the mark to the queue, unless their groups are too large for
that, and a quarter of the mark in groups is as much as they may begin. Two parts of the mark are kept back: `spare`
for one stalled producer at a time, `drains` for those that leave. A window is the same for all of a lane and is kept
until who lives, the marks, or the largest group of the lane are others.
"""

from collections.abc import Mapping, Sized
from typing import Final

from rolloutmq.bus.session import PACK_GROUPS
from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.sessions import Session

WINDOW_BYTES: Final = 8 << 20
"""Window of a producer whose groups are not known to be large. It is what a disk writes in the time of an ack, and no
more, since what lies in the journal before a group of another producer is what that one's ack waits for."""
WINDOW_GROUPS: Final = 8
"""Window in groups, for those that are."""
OPEN_WINDOW: Final = 256
"""Rollouts that a producer may have under way without pacing: bytes and groups bound it, not this."""
OPEN_LEAST: Final = 16
"""The same where there are so many producers that a quarter of the mark in groups is less for each."""
WORTH_PART: Final = 4
"""Less than that part of a window is not worth an ack; see `Shares.worth`."""
WORTH_GROUPS: Final = 4
"""Less than so many groups are not, either, unless that is all of a window."""
MUCH_LARGER: Final = 16
"""A group that is that many times as large as any before is unusual."""
DRAINS_BYTES: Final = 64 << 20
"""Kept for those that drain: the whole spool of a producer, as it is by default."""
DRAINS_PART: Final = 4
"""At most that part of the mark is kept for them."""


class Shares:
    """Windows of all lanes.

    Args:
        config: The marks.
        live: All producers that live; changed by the owner, who says `changed` then.
        of_lane: The same by lane.

    Attributes:
        largest: Largest group that can be accepted. Producers were told: it never falls.
    """

    def __init__(self, config: BrokerConfig, live: Sized, of_lane: Mapping[Lane, Sized]) -> None:
        self._live = live
        self._of_lane = of_lane
        self._windows: dict[Lane, tuple[int, int]] = {}
        """The largest group of each lane, and the window that followed from it."""
        self.largest = 1
        self.adopt(config)

    def adopt(self, config: BrokerConfig) -> None:
        """Go on under other marks."""
        high = config.high_bytes
        self._high_bytes, self._high_groups = high, config.high_groups
        self.largest = max(self.largest, min(config.max_group_bytes, high // 2))
        self.spare = min(self.largest, high // 2)
        self.drains = min(DRAINS_BYTES, high // DRAINS_PART)
        self._windows.clear()

    def changed(self) -> None:
        """Note that others live than before."""
        self._windows.clear()

    @property
    def window_groups(self) -> int:
        """Rollouts that a producer may have under way without pacing, unless it has more slots."""
        share = self._high_groups // (4 * max(1, len(self._live)))
        return min(OPEN_WINDOW, max(OPEN_LEAST, share))

    def window(self, lane: Lane) -> int:
        """Return how many bytes a producer of a lane should be able to send without waiting."""
        largest, window = self._windows.get(lane, (-1, 0))
        if largest != lane.largest_bytes:
            window = self._window(lane)
            self._windows[lane] = lane.largest_bytes, window
        return window

    def _window(self, lane: Lane) -> int:
        share = (self._high_bytes - self.spare - self.drains) // (2 * max(1, len(self._live)))
        if lane.rule.high_bytes:
            share = min(share, lane.rule.high_bytes // (2 * max(1, len(self._of_lane.get(lane, ())))))
        seen = lane.largest_bytes
        usual = min(share, max(WINDOW_BYTES, WINDOW_GROUPS * seen))
        return min(self.largest, max(usual, seen))

    def worth(self, lane: Lane) -> int:
        """Return how many bytes of a window are worth an ack: as many groups as a message carries, or half a window."""
        window, largest = self.window(lane), lane.largest_bytes
        pack = min(window // 2, PACK_GROUPS * largest)
        return max(window // WORTH_PART, pack, min(window, WORTH_GROUPS * largest))

    def low(self, session: Session) -> bool:
        """Whether a session has used up so much of its window that filling it is worth an ack, or needs it now."""
        lane, left = session.lane, session.bytes_out
        window = self.window(lane)
        return left < min(window, lane.largest_bytes) or window - left >= max(1, self.worth(lane))

    def due(self, session: Session, *, in_line: bool) -> int:
        """Return how many bytes a stalled session should be able to send.

        Who is in line has not even its window. Who has, and sends nothing, may be idle or have a group larger than
        any before: it gets enough for one that is much larger, then, if that did not help, for any. What was promised
        stays promised, so each who was told of more than its share can push in.
        """
        if session.draining:
            return self.most(session)
        if in_line:
            return self.window(session.lane)
        larger = MUCH_LARGER * session.lane.largest_bytes
        if larger <= self.window(session.lane) or session.topped_at > session.accepted_at:
            return self.most(session)
        return min(self.most(session), larger)

    def most(self, session: Session) -> int:
        """Return how large the next group of a session may be."""
        mark = session.lane.rule.high_bytes
        return min(self.largest, mark) if mark and not session.draining else self.largest
