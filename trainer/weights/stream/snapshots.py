"""Snapshots: copies of versions that stay the same while the trainer writes the next ones.

A snapshot is made when a receiver waits for another write than it has: a version that nobody asks for costs nothing,
and a receiver that was busy for three versions gets the newest. Copying holds the lock of the weights shared, 0.2 s for
a GB; sending holds nothing, so a slow receiver stops no step.

At most `LIMIT` snapshots exist. While a transfer uses one it stays; if all are in use, a receiver gets the newest of
them, or waits if it has that one.
"""

import logging
import threading
import time
from pathlib import Path
from typing import Final

import numpy as np

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import (
    SegmentGoneError,
    WeightsBusyError,
    WeightsMismatchError,
    WeightsTornError,
)
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.stream.chunks import (
    Bytes,
    Digests,
    chunk,
    count_of,
    digest,
    unknown,
)
from rolloutmq.trainer.weights.stream.segment import WeightSegment

logger = logging.getLogger(__name__)

LIMIT: Final = 3
"""Snapshots at a time: two for receivers of different pace, and one for the newest version."""
LOOK_S: Final = 0.005
"""Pause between two looks for another write: another process writes, and there is no event to wait for."""
LOCK_S: Final = 0.5
"""Longest wait for the lock of the weights; then the next look tries again."""


class Snapshot:
    """A version that does not change."""

    def __init__(self, segment: WeightSegment, data: Bytes) -> None:
        self.write = segment.write
        self.version = PolicyVersion()
        self.encoded = segment.encoded
        self.layout = segment.layout
        self.data = data
        self.users = 0
        """Transfers that use it."""
        self._table = unknown(count_of(data.size))

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self._table)

    def chunk(self, index: int) -> Bytes:
        """Return a chunk."""
        return chunk(self.data, index)

    def digest(self, index: int) -> tuple[int, int, int]:
        """Return the digest of a chunk; computed once for all receivers. For any thread."""
        row = self._table[index]
        if not row["known"]:
            self._table[index] = digest(self.chunk(index))
        return row.item()  # type: ignore[no-any-return]

    def table(self) -> Digests:
        """Return all digests."""
        for index in range(len(self)):
            self.digest(index)
        return self._table


class Snapshots:
    """The snapshots of the segment in one address file. For any thread.

    Args:
        address_file: Names the segment.
        limit: Most snapshots at a time.
        run_id: Id of the run whose weights they are.
    """

    def __init__(self, address_file: Path, limit: int = LIMIT, run_id: str = "") -> None:
        self.run_id = run_id
        self._address_file = address_file
        self._limit = limit
        self._lock = threading.Lock()
        self._segment: WeightSegment | None = None
        self._seen: tuple[int, int] | None = None
        self._kept: list[Snapshot] = []
        """Oldest first."""
        self._throttle = LogThrottle()

    def newer(self, write: str) -> Snapshot | None:
        """Return a snapshot of the newest write, or None if the receiver has that; `release` it after use.

        Blocks for the copy. `write` names the write that the receiver has.
        """
        with self._lock:
            self._follow()
            segment = self._segment
            if segment is not None and segment.write not in {write, self._newest()}:
                self._take(segment)
            if not self._kept or self._kept[-1].write == write:
                return None
            found = self._kept[-1]
            found.users += 1
            return found

    def release(self, snapshot: Snapshot) -> None:
        """End the use of a snapshot."""
        with self._lock:
            snapshot.users -= 1

    def close(self) -> None:
        """Release the segment."""
        with self._lock:
            if self._segment is not None:
                self._segment.close()
            self._segment, self._kept = None, []

    def _newest(self) -> str:
        return self._kept[-1].write if self._kept else ""

    def _follow(self) -> None:
        """Open the segment that the address file names now; keep the old one until there is another."""
        try:
            info = self._address_file.stat()
        except OSError:
            return
        seen = info.st_ino, info.st_mtime_ns
        if seen == self._seen:
            return
        try:
            fresh = WeightSegment.read(self._address_file)
        except (SegmentGoneError, WeightsMismatchError) as error:
            self._complain(str(error))
            return
        if self._segment is not None:
            self._segment.close()
        self._segment, self._seen = fresh, seen

    def _take(self, segment: WeightSegment) -> None:
        buffer = self._buffer(segment.data.size)
        if buffer is None:
            return
        try:
            with segment.lock.reading(LOCK_S) as version:
                made = Snapshot(segment, buffer)
                made.version = version
                np.copyto(buffer, segment.data)
        except (WeightsTornError, WeightsBusyError) as error:
            self._complain(str(error))
            return
        self._kept.append(made)

    def _buffer(self, nbytes: int) -> Bytes | None:
        """Return memory for a snapshot, that of one nobody uses if possible; None if all are in use."""
        idle = [one for one in self._kept if not one.users]
        for one in idle:
            self._kept.remove(one)
        reusable = [one.data for one in idle if one.data.size == nbytes]
        if reusable:
            return reusable[0]
        return np.empty(nbytes, np.uint8) if len(self._kept) < self._limit else None

    def _complain(self, why: str) -> None:
        if self._throttle.is_due(why, time.monotonic()):
            logger.warning("weights not offered address=%s reason=%s", self._address_file, why)
