"""The sequence window: the accepted groups of a session, in bounded memory.

Numbers start at 1. All up to `cumulative` are accepted. Above it at most `GAP_WINDOW` numbers are remembered one by
one; groups beyond are refused, and their producer still has them. Positions must agree with sizes, since credits
are positions.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rolloutmq.schemas.wire.envelope import GroupHeader
from rolloutmq.schemas.wire.replies import GAP_WINDOW


class WindowState(NamedTuple):
    """A window as plain numbers."""

    cumulative: int
    accepted: int
    nbytes: int
    position: int
    above: tuple[tuple[int, int], ...]


class SequenceWindow:
    """Accepted sequence numbers of one session.

    Attributes:
        cumulative: Every number up to this one is accepted.
        accepted: Groups accepted in all.
        nbytes: Bytes of the accepted groups.
    """

    __slots__ = ("_above", "_position", "accepted", "cumulative", "nbytes")

    def __init__(self) -> None:
        self.cumulative = 0
        self.accepted = 0
        self.nbytes = 0
        self._position = 0
        self._above: dict[int, int] = {}

    def seen(self, seq: int) -> bool:
        """Return whether this number was accepted before."""
        return seq <= self.cumulative or seq in self._above

    def refusal(self, header: GroupHeader) -> str:
        """Return why the group cannot be accepted, or an empty string."""
        missing = header.seq - self.cumulative - 1
        if missing < 0 or header.seq in self._above:
            return "duplicate"
        if missing >= GAP_WINDOW:
            return "beyond_window"
        least = self._position + header.nbytes + missing
        if header.position < least or (not missing and header.position != least):
            return "position"
        return ""

    def is_next(self, headers: Sequence[GroupHeader]) -> bool:
        """Return whether these are exactly the next groups, so that none of them has a `refusal`."""
        seq, position = self.cumulative, self._position
        for header in headers:
            seq += 1
            position += header.nbytes
            if header.seq != seq or header.position != position:
                return False
        return not self._above

    def follow(self, groups: int, nbytes: int) -> None:
        """Remember groups for which `is_next` holds; `nbytes` together."""
        self.accepted += groups
        self.nbytes += nbytes
        self.cumulative += groups
        self._position += nbytes

    def accept(self, seq: int, position: int, nbytes: int) -> None:
        """Remember a group without a `refusal`."""
        self.accepted += 1
        self.nbytes += nbytes
        if seq != self.cumulative + 1:
            self._above[seq] = position
            return
        self.cumulative += 1
        self._position = position
        while self._above and (position := self._above.pop(self.cumulative + 1, -1)) >= 0:
            self.cumulative += 1
            self._position = position

    def snapshot(self) -> WindowState:
        """Return the whole window."""
        above = tuple(self._above.items())
        return WindowState(self.cumulative, self.accepted, self.nbytes, self._position, above)

    def restore(self, state: WindowState) -> None:
        """Become the window that `snapshot` returned."""
        self.cumulative, self.accepted, self.nbytes, self._position, above = state
        self._above = dict(above)

    def gaps(self) -> bytes:
        """Return the bitmap of `Ack.gaps`: bit `i` is number `cumulative + 2 + i`."""
        if not self._above:
            return b""
        bits = sum(1 << (seq - self.cumulative - 2) for seq in self._above)
        return bits.to_bytes((bits.bit_length() + 7) // 8, "little")

    def validate(self) -> None:
        """Assert that the numbers above are above, and few."""
        assert all(1 < seq - self.cumulative <= GAP_WINDOW for seq in self._above)
        assert self.accepted == self.cumulative + len(self._above)
