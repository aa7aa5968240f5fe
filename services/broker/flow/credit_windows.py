"""Credit windows: the share of the marks due to each producer, and the least grant worth an ack.

The windows of all live producers together leave half of the high-water mark to the queue, unless their groups are too
large for that. Rollouts are bounded by a quarter of the mark in groups. Two parts of the mark are reserved: `spare`
for one stalled producer at a time, `drains` for draining ones. All producers of a lane have the same window. It is
recomputed when the live producers, the marks, the spare, or the lane's largest group change.
"""

from collections.abc import Mapping, Sized
from typing import Final

from rolloutmq.bus.producer.session import PACK_GROUPS
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.state.queues import Lane

WINDOW_BYTES: Final = 8 << 20
"""Window of a producer whose groups are not known to be large.

A disk writes about this much in the time of an ack. More would delay the acks of other producers, whose groups lie
behind it in the journal.
"""
WINDOW_GROUPS: Final = 8
"""Window in groups, for producers of large groups."""
OPEN_WINDOW: Final = 256
"""Most rollouts of a producer under way without pacing; bytes and groups usually bound it first."""
OPEN_LEAST: Final = 16
"""Least rollouts of a producer under way without pacing, however many producers share the mark."""
WORTH_PART: Final = 4
"""A grant below this part of a window is not worth an ack; see `CreditWindows.worth`."""
WORTH_GROUPS: Final = 4
"""Neither is a grant below this many groups, unless the window is smaller."""
MUCH_LARGER: Final = 16
"""A group this many times as large as any before is unusual."""
SPARE_GROUPS: Final = 2
"""Room for one stalled producer at a time, in groups of the largest size so far. Before the first group: any group."""
DRAINS_BYTES: Final = 64 << 20
"""Reserved for draining producers: the whole spool of a producer, at its default size."""
DRAINS_PART: Final = 4
"""At most this part of the mark is reserved for them."""


class CreditWindows:
    """Windows of all lanes.

    Args:
        config: The marks.
        live: All live producers; the owner calls `changed` after each change.
        of_lane: The same by lane.

    Attributes:
        largest: Bytes of the largest group that can be accepted. It was announced to producers: it never falls.
    """

    def __init__(self, config: BrokerConfig, live: Sized, of_lane: Mapping[Lane, Sized]) -> None:
        self._live = live
        self._of_lane = of_lane
        self._windows: dict[Lane, tuple[int, int, int]] = {}
        """The largest group of each lane, and the window and the least worth an ack computed from it."""
        self.largest = 1
        self._seen = 0
        self.adopt(config)

    def adopt(self, config: BrokerConfig) -> None:
        """Apply other marks."""
        high = config.high_bytes
        self._high_bytes, self._high_groups = high, config.high_groups
        self.largest = max(self.largest, min(config.max_group_bytes, high // 2))
        self._set_spare()
        self.drains = min(DRAINS_BYTES, high // DRAINS_PART)
        self._windows.clear()

    def seen(self, nbytes: int) -> bool:
        """Note the size of a group; return whether the windows have changed."""
        if nbytes <= self._seen:
            return False
        self._seen = nbytes
        before = self.spare
        self._set_spare()
        if self.spare != before:
            self._windows.clear()
        return self.spare != before

    def _set_spare(self) -> None:
        most = min(self.largest, self._high_bytes // 2)
        self.spare = min(most, SPARE_GROUPS * self._seen) if self._seen else most

    def changed(self) -> None:
        """Note that the live producers have changed."""
        self._windows.clear()

    @property
    def window_groups(self) -> int:
        """Rollouts a producer may have under way without pacing, unless it has more slots."""
        share = self._high_groups // (4 * max(1, len(self._live)))
        return min(OPEN_WINDOW, max(OPEN_LEAST, share))

    def window(self, lane: Lane) -> int:
        """Return the bytes a producer of a lane should be able to send without waiting."""
        return self._of(lane)[1]

    def _of(self, lane: Lane) -> tuple[int, int, int]:
        """Return the largest group, the window, and the least worth an ack."""
        found = self._windows.get(lane)
        if found is None or found[0] != lane.largest_bytes:
            window = self._window(lane)
            found = self._windows[lane] = lane.largest_bytes, window, _worth(window, lane.largest_bytes)
        return found

    def _window(self, lane: Lane) -> int:
        share = (self._high_bytes - self.spare - self.drains) // (2 * max(1, len(self._live)))
        if lane.rule.high_bytes:
            share = min(share, lane.rule.high_bytes // (2 * max(1, len(self._of_lane.get(lane, ())))))
        seen = lane.largest_bytes
        usual = min(share, max(WINDOW_BYTES, WINDOW_GROUPS * seen))
        return min(self.largest, max(usual, seen))

    def worth(self, lane: Lane) -> int:
        """Return the least bytes worth an ack: the groups of one message, or half a window."""
        return self._of(lane)[2]

    def low(self, session: ProducerSession) -> bool:
        """Return whether filling a session's window is worth an ack, or is needed for its next group."""
        largest, window, worth = self._of(session.lane)
        left = session.bytes_out
        return left < min(window, largest) or window - left >= max(1, worth)

    def due(self, session: ProducerSession, *, queued: bool) -> int:
        """Return the bytes a stalled session should be able to send.

        A queued session lacks even its window. A session with a full window that sends nothing is idle, or has a
        group larger than any before: it gets enough for a much larger group, then, if that did not help, for any
        group. Announced limits stay valid, so each session with more than its share can push in.
        """
        if session.draining:
            return self.most(session)
        if queued:
            return self.window(session.lane)
        larger = MUCH_LARGER * session.lane.largest_bytes
        if larger <= self.window(session.lane) or session.topped_at > session.accepted_at:
            return self.most(session)
        return min(self.most(session), larger)

    def most(self, session: ProducerSession) -> int:
        """Return the largest size of a session's next group."""
        mark = session.lane.rule.high_bytes
        return min(self.largest, mark) if mark and not session.draining else self.largest


def _worth(window: int, largest: int) -> int:
    pack = min(window // 2, PACK_GROUPS * largest)
    return max(window // WORTH_PART, pack, min(window, WORTH_GROUPS * largest))
