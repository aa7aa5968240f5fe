"""Density: whether each version changes nearly all chunks, so that digests find nothing to leave out.

A digest costs as much as sending the chunk. It pays where most chunks stay the same, as with adapters. A sender learns
from the tables of two versions in a row. While they differ nearly everywhere it sends the next versions whole, and
looks again after `AGAIN` of them. Pure.
"""

from typing import Final

from rolloutmq.trainer.weights.stream.chunks import Digests

DENSE: Final = 0.9
"""Part of the chunks that must differ; less than the rest could be saved."""
AGAIN: Final = 64
"""Versions without digests after which two are compared again: three of a hundred cost what all did."""


class Density:
    """What the versions of one segment were like. For one thread at a time."""

    def __init__(self) -> None:
        self._left = 0
        """Versions to be sent without digests."""
        self._last: tuple[str, Digests] | None = None

    def begin(self) -> bool:
        """Begin a version; return whether it is sent whole, without digests."""
        if not self._left:
            return False
        self._left -= 1
        return True

    def learn(self, write: str, table: Digests) -> None:
        """Note the digests of a version; nothing if they were noted before.

        Args:
            write: Name of the write.
            table: All of its digests.
        """
        last, self._last = self._last, (write, table.copy())
        if last is None or last[0] == write or len(last[1]) != len(table):
            return
        if float((last[1] != table).mean()) >= DENSE:
            self._left, self._last = AGAIN, None
