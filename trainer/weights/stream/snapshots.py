"""Snapshots: versions that stay the same while the trainer writes the next ones.

A snapshot is made when a receiver waits for another write than it has: a version that nobody asks for costs nothing,
and a receiver that was busy for three versions gets the newest.

It is no copy at first. It holds the lock of the weights shared, and transfers read the weights themselves. Once a
writer waits for the lock, or after `HOLD_S`, it becomes a copy and lets go of the lock: 0.1 s for a GB. So most
versions are never copied, and a slow receiver stops no step: a transfer waits for its peer only while it reads nothing.

At most `LIMIT` snapshots exist. While a transfer uses one it stays; if all are in use, a receiver gets the newest of
them, or waits if it has that one.
"""

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
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
    HERE,
    Bytes,
    Digests,
    chunk,
    count_of,
    digest,
    unknown,
)
from rolloutmq.trainer.weights.stream.density import Density
from rolloutmq.trainer.weights.stream.segment import WeightSegment, copy_parts

logger = logging.getLogger(__name__)

LIMIT: Final = 3
"""Snapshots at a time: two for receivers of different pace, and one for the newest version."""
LOOK_S: Final = 0.005
"""Pause between two looks for another write: another process writes, and there is no event to wait for."""
WATCH_S: Final = 0.001
"""Pause between two looks for a waiting writer, while the lock is held."""
HOLD_S: Final = 2.0
"""Longest time that the lock is held: two GB at 10 Gbit/s. A step that begins later need not wait for the copy."""
LOCK_S: Final = 0.5
"""Longest wait for the lock of the weights; then the next look tries again."""


class Snapshot:
    """A version that does not change: the weights, while their lock is held, and then a copy of them.

    Args:
        segment: The weights, locked.
        version: Their version.
        memory: Memory for the copy.
    """

    def __init__(self, segment: WeightSegment, version: PolicyVersion, memory: Bytes) -> None:
        self.write = segment.write
        self.version = version
        self.encoded = segment.encoded
        self.layout = segment.layout
        self.users = 0
        """Transfers that use it."""
        self.whole = False
        """It is sent whole, without digests."""
        self.digests = unknown(count_of(segment.data.size))
        """Digests of the chunks, as far as they are known; `table` has all."""
        self._data = segment.data
        self._memory = memory
        self._turn = threading.Condition()
        self._readers = 0
        """Uses of the weights themselves."""

    def __len__(self) -> int:
        """Number of chunks."""
        return len(self.digests)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' memory."""
        return self._memory.size

    @property
    def memory(self) -> Bytes:
        """Memory of the copy, if there is one, or for it."""
        return self._memory

    @contextmanager
    def chunk(self, index: int) -> Iterator[Bytes]:
        """Yield a chunk, which stays as it is during the block. For any thread.

        The block must not wait for a peer: until it ends, the trainer may wait for it.
        """
        with self._turn:
            data = self._data
            held = data is not self._memory
            self._readers += held
        try:
            yield chunk(data, index)
        finally:
            if held:
                with self._turn:
                    self._readers -= 1
                    self._turn.notify_all()

    def copy(self) -> None:
        """Become a copy. Blocks until nobody reads the weights themselves, which are locked meanwhile."""
        copy_parts(self._memory, [(0, self._data)])
        with self._turn:
            self._data = self._memory
            self._turn.wait_for(lambda: not self._readers)

    def digest(self, index: int) -> tuple[int, int, int]:
        """Return the digest of a chunk; computed once for all receivers. For any thread."""
        row = self.digests[index]
        if row["known"] != 1:
            with self.chunk(index) as data:
                found = digest(data)
            with self._turn:
                self.digests[index] = found
            return found
        return row.item()  # type: ignore[no-any-return]

    def known_checksum(self, index: int) -> int | None:
        """Return the CRC32C of a chunk, or None if nobody has computed it. For any thread."""
        row = self.digests[index]
        return int(row["crc"]) if row["known"] else None

    def note_checksum(self, index: int, crc: int) -> None:
        """Note the CRC32C of a chunk for the other receivers, unless its digest is known by now. For any thread."""
        with self._turn:
            if not self.digests[index]["known"]:
                self.digests[index] = (crc, 0, HERE)

    def table(self) -> Digests:
        """Return all digests."""
        for index in range(len(self)):
            self.digest(index)
        return self.digests


class Snapshots:
    """The snapshots of the segment in one address file. For any thread. Close it.

    Args:
        address_file: Names the segment.
        limit: Most snapshots at a time.
        run_id: Id of the run whose weights they are.
    """

    def __init__(self, address_file: Path, limit: int = LIMIT, run_id: str = "") -> None:
        self.run_id = run_id
        self._address_file = address_file
        self._limit = limit
        self._turn = threading.Condition()
        self._segment: WeightSegment | None = None
        self._seen: tuple[int, int] | None = None
        self._kept: list[Snapshot] = []
        """Oldest first."""
        self._held: Snapshot | None = None
        """The last of them, while it holds the lock of the weights."""
        self._until = 0.0
        self._spare: Bytes | None = None
        self._known = "", unknown(0), False
        """The last write that was held, its digests, and whether it is sent whole; the same for each snapshot of it."""
        self._watching: threading.Thread | None = None
        self._closed = False
        self._throttle = LogThrottle()
        self._density = Density()

    def learn(self, snapshot: Snapshot) -> None:
        """Note that all digests of a snapshot are known."""
        with self._turn:
            self._density.learn(snapshot.write, snapshot.digests)

    def newer(self, write: str) -> Snapshot | None:
        """Return a snapshot of the newest write, or None if the receiver has that; `release` it after use.

        Blocks while another one is copied. `write` names the write that the receiver has.
        """
        with self._turn:
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
        """End the use of a snapshot. If nobody else uses it, the weights are unlocked without a copy."""
        with self._turn:
            snapshot.users -= 1
            if snapshot is self._held and not snapshot.users:
                self._kept.remove(snapshot)
                self._spare = snapshot.memory
                self._unlock()

    def close(self) -> None:
        """Release the segment. No transfer uses a snapshot any more."""
        with self._turn:
            self._closed = True
            self._unlock()
            if self._segment is not None:
                self._segment.close()
            self._segment, self._kept, self._spare = None, [], None
            self._turn.notify_all()
        if self._watching is not None:
            self._watching.join()

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
            self._copy()
            self._segment.close()
        self._segment, self._seen = fresh, seen

    def _take(self, segment: WeightSegment) -> None:
        """Hold the weights as the newest snapshot. None is held: its lock would have prevented another write."""
        memory = self._memory(segment.data.size)
        if memory is None:
            return
        try:
            version = segment.lock.begin_reading(LOCK_S)
        except (WeightsTornError, WeightsBusyError) as error:
            self._spare = memory
            self._complain(str(error))
            return
        made = Snapshot(segment, version, memory)
        if self._known[0] == made.write:
            made.digests, made.whole = self._known[1:]
        else:
            made.whole = self._density.begin()
        self._known = made.write, made.digests, made.whole
        self._kept.append(made)
        self._held, self._until = made, time.monotonic() + HOLD_S
        if self._watching is None:
            self._watching = threading.Thread(target=self._watch, name="weights-lock")
            self._watching.start()
        self._turn.notify_all()

    def _watch(self) -> None:
        """Copy the weights that are held, once a writer waits for them, or after `HOLD_S`."""
        with self._turn:
            while not self._closed:
                if self._held is None or self._segment is None:
                    self._turn.wait()
                elif self._segment.lock.write_at_hand() is not None or time.monotonic() > self._until:
                    self._copy()
                else:
                    self._turn.wait(WATCH_S)

    def _copy(self) -> None:
        """Let the snapshot that holds the weights become a copy, and unlock them."""
        if self._held is not None:
            self._held.copy()
            self._unlock()

    def _unlock(self) -> None:
        if self._held is not None:
            assert self._segment is not None
            self._held = None
            self._segment.lock.end_reading()

    def _memory(self, nbytes: int) -> Bytes | None:
        """Return memory for a copy, that of a snapshot nobody uses if possible; None if all are in use."""
        idle = [one for one in self._kept if not one.users]
        for one in idle:
            self._kept.remove(one)
            self._spare = one.memory
        spare, self._spare = self._spare, None
        if len(self._kept) >= self._limit:
            return None
        return spare if spare is not None and spare.size == nbytes else np.empty(nbytes, np.uint8)

    def _complain(self, why: str) -> None:
        if self._throttle.is_due(why, time.monotonic()):
            logger.warning("weights not offered address=%s reason=%s", self._address_file, why)
