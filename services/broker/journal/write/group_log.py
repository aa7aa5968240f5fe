"""The group log: the end of the segments, where groups are appended. Belongs to the commit thread.

The next segment is prepared ahead of time, since reserving its room and syncing its name take longer than a commit.
It reuses the file of an obsolete segment if there is such a spare: writing where the disk was written before changes
only bytes, and takes half the time.

Groups are accepted only into room that is reserved: in the present segment, or in the next one. Without any, from the
first moment of a life on, producers are held back. So no group waits here for room, and the events of trainers, which
make room, never wait behind one.
"""

import logging
import time
from collections import deque
from functools import partial
from pathlib import Path
from typing import Final

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.disk import NO_ROOM, Disk, passes
from rolloutmq.services.broker.journal.format.records import (
    BLOCK_BYTES,
    FILE_HEADER_BYTES,
    file_header,
    room_bytes,
)
from rolloutmq.services.broker.journal.read.segments import GROUP, GroupSegment, SegmentStore, numbered_nonce
from rolloutmq.services.broker.journal.stored_group import BodyMemory, Frames
from rolloutmq.services.broker.journal.write.direct_writer import DirectWriter, StagingBuffer
from rolloutmq.services.broker.journal.write.event_reserve import EventReserve
from rolloutmq.services.broker.journal.write.record_writer import RETRY_S, DiskRetry

logger = logging.getLogger(__name__)

SMALLEST_BYTES: Final = 1 << 20
"""Smallest segment tried on a full disk."""
SPARES_LIMIT: Final = 2
"""Most spares: segments become obsolete in bursts."""


class _Writing:
    """The segment being written, or the next one."""

    def __init__(self, segment: GroupSegment, file: DirectWriter) -> None:
        self.segment = segment
        self.file = file
        self.settled = self.synced = file.offset
        """Everything before this belongs to a finished commit, or is synced."""

    @property
    def rest(self) -> int:
        """Bytes that can be appended."""
        return self.segment.nbytes - self.file.offset

    @property
    def unused(self) -> bool:
        return self.file.end == FILE_HEADER_BYTES


class GroupLog:
    """Appends groups to segments. OSError from any method means that the disk failed.

    Attributes:
        next_number: Number of the next segment to create.
        retry_at: When to retry its allocation, in monotonic seconds; infinite if there was room for all of it.
        wanted_bytes: Room that a held message needs, for any thread to set: the next segment gets at least as much.
    """

    def __init__(
        self,
        segments: SegmentStore,
        config: BrokerConfig,
        ram: BodyMemory,
        disk: Disk,
        patience: DiskRetry,
        number: int,
        reserve: EventReserve,
    ) -> None:
        self.next_number = number
        self.wanted_bytes = 0
        self._reserve = reserve
        self._sealed: list[GroupSegment] = []
        self._segments = segments
        self._directory = segments.path_of(number).parent
        self._config = config
        self._syncs = config.durability is Durability.DISK
        self._ram = ram
        self._disk = disk
        self._patience = patience
        self._current: _Writing | None = None
        self._next: _Writing | None = None
        self._spares: deque[Path] = deque()
        self._renamed: list[Path] = []
        """Spares whose old names may return after a power cut: their content must not change until the rename is
        durable.
        """
        self._stage = StagingBuffer()
        self.retry_at = float("inf")

    def tight(self, behind_bytes: int) -> bool:
        """Return whether no groups should follow the `behind_bytes` that are to be written. For any thread."""
        if self.retry_at == float("inf"):
            return False
        writing = self._current or self._next
        if writing is None or self.wanted_bytes > self.room_bytes():
            return True
        return writing.rest - behind_bytes < writing.segment.nbytes // 4

    def room_bytes(self) -> int:
        """Return the bytes that can be appended without another allocation. For any thread.

        Groups fill the rest of the present segment or move to the next one. So what fits into either fits.
        """
        current, following = self._current, self._next
        rest = 0 if current is None else current.rest
        return rest if following is None else max(rest, following.rest)

    @property
    def number(self) -> int:
        """Number of the segment of the next group, or of the one before it."""
        writing = self._current or self._next
        return self.next_number if writing is None else writing.segment.number

    def append(
        self, meta: bytes, frames: Frames, nbytes: int, crc: int, *, in_blocks: bool = False
    ) -> tuple[GroupSegment, int]:
        """Write a group and return its address; it is durable after `commit`. See `DirectWriter.add_group`."""
        need = room_bytes(len(meta), len(frames), nbytes)
        current = self._current
        if current is None or current.file.offset + need > current.segment.nbytes:
            current = self._next_segment(need)
        return current.segment, current.file.add_group(GROUP, meta, frames, crc, in_blocks=in_blocks)

    def commit(self) -> None:
        """Make the appended groups as durable as configured."""
        current = self._current
        if current is None:
            return
        short = self._ram.short
        current.file.flush(cache=short)
        if self._syncs and current.file.offset > current.synced:
            current.file.sync()
            # Groups in memory need no second copy in the page cache, and pages reused at once are the fastest.
            if not short:
                current.file.forget_cached()
            current.synced = current.file.offset

    def settle(self) -> None:
        """Note that a commit is finished."""
        if self._current is not None:
            self._current.settled = self._current.file.offset

    def take_sealed(self) -> list[GroupSegment]:
        """Return the segments filled since the last call."""
        sealed, self._sealed = self._sealed, []
        return sealed

    def prepare(self, log_bytes: int) -> bool:
        """Prepare room for events and then the next segment; False if there is nothing to do, or no room.

        Args:
            log_bytes: Size of the present event log.
        """
        whole = max(self._config.segment_bytes, self._wanted())
        reserved = self._reserve.wanted(log_bytes)
        if self._has_next(whole) and self._reserve.nbytes >= reserved:
            lacked, self.retry_at = self.retry_at != float("inf"), float("inf")
            return lacked
        lacked = self.retry_at != float("inf")
        if lacked and time.monotonic() < self.retry_at:
            return False
        try:
            self._reserve.keep(reserved)
            if not self._has_next(whole):
                self._make_next(whole)
        except OSError as error:
            if not passes(error):
                raise
        else:
            if self._has_next(whole):
                self.retry_at = float("inf")
                return True
        if not lacked:
            logger.warning("disk full, no room for another segment bytes=%d", whole)
        self.drop_spares()
        self.retry_at = time.monotonic() + RETRY_S
        return False

    @property
    def cramped(self) -> bool:
        """Whether the present segment is nearly full, and so is the disk: see `leave`. For any thread."""
        current = self._current
        if current is None or self.retry_at == float("inf"):
            return False
        return current.rest < max(current.segment.nbytes // 4, self.wanted_bytes)

    def leave(self) -> None:
        """Finish the present segment and return its rest to the disk: nothing removes a segment while it is written.

        Only while no group is on its way: it may have been accepted into that rest.
        """
        if self._current is not None:
            self.commit()
            self._seal(self._current)
            self._current = None

    def _wanted(self) -> int:
        return self.wanted_bytes and self.wanted_bytes + BLOCK_BYTES  # the first block has the file's header

    def _has_next(self, nbytes: int) -> bool:
        return self._next is not None and self._next.segment.nbytes >= nbytes

    def _make_next(self, whole: int) -> None:
        """Create the next segment, smaller if need be, or give it the room it lacks."""
        least = min(whole, max(SMALLEST_BYTES, self._wanted()))
        if self._next is None:
            self._next = self._create_smaller(whole, least)
            return
        self.drop_spares()  # They have the room that it lacks.
        try:
            self._enlarge(self._next, whole)
        except OSError as error:
            if error.errno not in NO_ROOM or self._has_next(least):
                raise
            self._enlarge(self._next, least)

    def _enlarge(self, writing: _Writing, nbytes: int) -> None:
        try:
            writing.file.allocate(nbytes)
        except OSError:
            writing.file.limit(writing.segment.nbytes)  # Some file systems have reserved a part of it.
            raise
        writing.segment.nbytes = nbytes

    def abandon(self, *, cut: bool) -> None:
        """Close the files after a disk failure, and truncate the groups of unfinished commits if possible."""
        for writing in (self._current, self._next):
            if writing is not None:
                writing.file.abandon(writing.settled if cut else None)
        self._current = self._next = None

    def close(self) -> None:
        """Make all groups durable, truncate unused room, and close the files."""
        for writing in (self._current, self._next):
            if writing is not None and writing.unused:
                writing.file.close()
                self._disk.unlink(writing.file.path)
                self._segments.drop(writing.segment)
            elif writing is not None:
                writing.file.flush()
                writing.file.sync()
                self._finish(writing)
        self._current = self._next = None
        self.drop_spares()
        self._disk.sync_directory(self._directory)

    def _next_segment(self, need: int) -> _Writing:
        if self._current is not None:
            self.commit()
            self._seal(self._current)
        least = BLOCK_BYTES + need
        if self._next is None:
            self._current = None
            room = max(self._config.segment_bytes, least)
            self._current = self._patience.persist(partial(self._create_smaller, room, least))
        else:
            self._current, self._next = self._next, None
            if least > self._current.segment.nbytes:
                self._patience.persist(partial(self._enlarge, self._current, least))
        return self._current

    def _seal(self, writing: _Writing) -> None:
        self._finish(writing)
        self._sealed.append(writing.segment)

    def _finish(self, writing: _Writing) -> None:
        writing.file.cut()
        writing.segment.nbytes = writing.file.end
        writing.file.close()

    def _create_smaller(self, nbytes: int, need: int) -> _Writing:
        """Create a segment with `nbytes`, or with as much as there is room for."""
        while True:
            try:
                return self._create(nbytes)
            except OSError as error:
                smaller = max(nbytes // 2, SMALLEST_BYTES, need)
                if error.errno not in NO_ROOM or smaller >= nbytes:
                    raise
                nbytes = smaller

    def _create(self, nbytes: int) -> _Writing:
        number = self.next_number
        nonce, path = numbered_nonce(number), self._segments.path_of(number)
        spare = self._reopen_spare()
        file = DirectWriter(
            self._disk,
            spare[0] if spare else path,
            nonce,
            DiskRetry.none(),
            self._stage,
            for_sync=self._syncs,
            fd=spare[1] if spare else None,
        )
        try:
            file.allocate(nbytes)
            file.add_raw(file_header(nonce))
            file.flush()
            if self._syncs:
                file.sync()
            if spare is not None:
                self._disk.rename(file.path, path)  # Only after its own header has the number.
                file.path = path
            if self._syncs:
                self._disk.sync_directory(path.parent)
        except BaseException:
            self._stage.clear()
            file.close()
            self._disk.unlink(file.path)
            raise
        file.patience = self._patience
        self.next_number += 1
        return _Writing(self._segments.add(number, nbytes), file)

    def _reopen_spare(self) -> tuple[Path, int] | None:
        if not self._spares:
            return None
        fd = self._disk.reopen(self._spares[0])
        return self._spares.popleft(), fd

    def discard(self, segment: GroupSegment) -> None:
        """Keep the file of an obsolete segment as a spare, or remove it."""
        spares = len(self._spares) + len(self._renamed)
        usual = self._config.segment_bytes
        wanted = self._next is None or self.retry_at == float("inf")
        if (
            wanted
            and spares < SPARES_LIMIT
            and usual // 2 < segment.nbytes <= usual
            and self._disk.links(segment.path) == 1  # otherwise a quarantine file shares its content
        ):
            spare = self._segments.spare_path(segment.number)
            self._disk.rename(segment.path, spare)
            self._renamed.append(spare)
        else:
            self._disk.unlink(segment.path)

    def discarded(self) -> None:
        """Note that the renames of discarded segments are durable."""
        self._spares += self._renamed
        self._renamed.clear()

    def drop_spares(self) -> None:
        """Remove all spares."""
        self.discarded()
        while self._spares:
            self._disk.unlink(self._spares.popleft())
