"""The segment store: the segments of groups, how many records of each are needed, and reading them.

A segment's number is part of the nonce of its file, so a copy under another name is rejected. Numbers are never
reused. Only the thread of the data plane reads; the commit thread writes (see `write.group_log`).

A read that lacks a descriptor or memory says nothing about the disk. It raises JournalWaitsError, and the group is
read again later. That is rare: one descriptor is kept in reserve, and other open segments are closed first.
"""

import errno
import logging
import os
import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.schemas.errors import DamagedRecordError, JournalWaitsError
from rolloutmq.services.broker.journal.disk import Disk, readable_later
from rolloutmq.services.broker.journal.format.events import GroupMeta, RecordAddress
from rolloutmq.services.broker.journal.format.events_codec import decode_meta
from rolloutmq.services.broker.journal.format.records import NONCE_BYTES
from rolloutmq.services.broker.journal.read.quarantine import Quarantine
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.stored_group import Frames

logger = logging.getLogger(__name__)

GROUP: Final = 1
"""Kind of a record that holds a group; its meta is `events.GroupMeta`."""
SPARES: Final = "spare-*.rmq"
"""Names of obsolete segments whose files will be reused."""
OPEN_LIMIT: Final = 16
"""Most segments that are open for reading."""
_NUMBER_BYTES: Final = 4
LAST_NUMBER: Final = (1 << 8 * _NUMBER_BYTES) - 1
"""Highest number of a file. A name with a higher one is not the journal's."""
_NO_DESCRIPTOR: Final = frozenset({errno.EMFILE, errno.ENFILE})


def numbered_nonce(number: int, rest: bytes | None = None) -> bytes:
    """Return the nonce of the file of that number; its other bytes are random unless given."""
    if rest is None:
        rest = os.urandom(NONCE_BYTES - _NUMBER_BYTES)
    return number.to_bytes(_NUMBER_BYTES, "little") + rest


def is_numbered(nonce: bytes | None, number: int) -> bool:
    """Return whether a file with this nonce has that number."""
    return nonce is not None and nonce[:_NUMBER_BYTES] == number.to_bytes(_NUMBER_BYTES, "little")


def numbered_files(directory: Path, stem: str) -> dict[int, Path]:
    """Return the files `stem-NNNNNNNN.rmq` of a directory by number, in their order."""
    pattern = re.compile(rf"{stem}-(\d{{8,}})\.rmq")
    matches = ((pattern.fullmatch(path.name), path) for path in directory.iterdir())
    found = sorted((int(match[1]), path) for match, path in matches if match and path.is_file())
    return {number: path for number, path in found if number <= LAST_NUMBER}


class GroupSegment:
    """One file of groups.

    Attributes:
        nbytes: Bytes of the file.
        live: Number of needed records.
        sealed: No record will be added.
        kept: It is never removed.
    """

    def __init__(self, number: int, path: Path, owner: "SegmentStore", nbytes: int = 0) -> None:
        self.number = number
        self.path = path
        self.nbytes = nbytes
        self.live = 0
        self.sealed = False
        self.kept = False
        self._owner = owner

    def read(self, offset: int) -> Frames:
        """Return the frames of the record at `offset`: see `Source`."""
        return self._owner.read(self, offset)

    def gained(self) -> None:
        self.live += 1

    def lost(self) -> None:
        self.live -= 1
        self._owner.check(self)

    def seal(self) -> None:
        self.sealed = True
        self._owner.check(self)


class SegmentStore:
    """All segments of a journal.

    Attributes:
        dead: Sealed segments without a needed record, for the journal to remove.
    """

    def __init__(self, directory: Path, disk: Disk, *, keep_all: bool) -> None:
        self.quarantine = Quarantine(directory / "quarantine", disk)
        self.dead: list[GroupSegment] = []
        self._directory = directory
        self._disk = disk
        self._keep_all = keep_all
        self._segments: dict[int, GroupSegment] = {}
        self._open: OrderedDict[int, RecordFile] = OrderedDict()
        self._reserve: int | None = None
        """A descriptor to give up when there are no others."""
        self._closed = False
        self._settled = False
        self._waiting = False
        self._take_reserve()

    def __iter__(self) -> Iterator[GroupSegment]:
        return iter(list(self._segments.values()))

    def __len__(self) -> int:
        return len(self._segments)

    @property
    def nbytes(self) -> int:
        return sum(segment.nbytes for segment in self)

    def path_of(self, number: int) -> Path:
        return self._directory / f"groups-{number:08d}.rmq"

    def spare_path(self, number: int) -> Path:
        """Return the name of an obsolete segment."""
        return self._directory / f"spare-{number:08d}.rmq"

    def add(self, number: int, nbytes: int) -> GroupSegment:
        """Add a segment; also for the commit thread."""
        segment = self._segments[number] = GroupSegment(number, self.path_of(number), self, nbytes)
        return segment

    def find(self, number: int) -> GroupSegment:
        """Return the segment of that number; a missing one reads as damaged."""
        found = self._segments.get(number)
        return GroupSegment(number, self.path_of(number), self) if found is None else found

    def keep_present(self) -> None:
        """Never remove the present segments."""
        for segment in self:
            segment.kept = True

    def settle(self) -> None:
        """Start to release segments: while events are applied, the need for each changes with every event."""
        self._settled = True
        for segment in self:
            self.check(segment)

    def check(self, segment: GroupSegment) -> None:
        """Release a segment if no record of it is needed."""
        if not self._settled or self._keep_all or segment.kept:
            return
        if segment.sealed and segment.live <= 0 and segment.number in self._segments:
            self.dead.append(self._segments.pop(segment.number))
            self._shut(segment.number)

    def drop(self, segment: GroupSegment) -> None:
        """Forget a segment whose file was never used; also for the commit thread."""
        self._segments.pop(segment.number, None)

    def meta(self, place: RecordAddress) -> GroupMeta | None:
        """Return the meta of a group's record; None if it is damaged, JournalWaitsError if it cannot be read now."""
        segment = self.find(place.segment)
        try:
            file = self._file(segment)
            record = file.record(place.offset) if is_numbered(file.nonce, segment.number) else None
            return None if record is None or record.kind != GROUP else decode_meta(record.meta)
        except msgspec.MsgspecError:
            return None
        except OSError as error:
            self._wait_if_passes(segment, error)
            return None

    def read(self, segment: GroupSegment, offset: int) -> Frames:
        """Return the frames of a record; damage is quarantined.

        Raises:
            DamagedRecordError: The record on disk differs from the written one.
            JournalWaitsError: There was no descriptor or no memory to read it.
        """
        try:
            file = self._file(segment)
            if is_numbered(file.nonce, segment.number):
                record = file.record(offset)
                if record is not None and record.kind == GROUP:
                    self._waiting = False
                    return record.frames
                self.quarantine.keep(segment.path, offset, file.stretch(offset))
            else:
                self.quarantine.keep_whole(segment.path)
        except FileNotFoundError:
            self.quarantine.missing(segment.path)
        except OSError as error:
            self._wait_if_passes(segment, error)
            logger.error("read failed file=%s offset=%d error=%s", segment.path, offset, error)
            self.quarantine.keep(segment.path, offset, 0)
        finally:
            if self._closed:
                self._shut(segment.number)
        raise DamagedRecordError(str(segment.path), offset)

    def close(self) -> None:
        """Close every descriptor. A later read opens its file for that alone. May be called twice."""
        self._closed = True
        for number in list(self._open):
            self._shut(number)
        self._give_reserve()

    def _file(self, segment: GroupSegment) -> RecordFile:
        file = self._open.get(segment.number)
        if file is None:
            file = self._open_one(segment.path)
            self._open[segment.number] = file
            while len(self._open) > OPEN_LIMIT:
                self._shut(next(iter(self._open)))
        self._open.move_to_end(segment.number)
        return file

    def _open_one(self, path: Path) -> RecordFile:
        while True:
            try:
                file = RecordFile(self._disk, path)
            except OSError as error:
                if error.errno not in _NO_DESCRIPTOR or not (self._open or self._reserve is not None):
                    raise
            else:
                self._take_reserve()
                return file
            if self._open:
                self._shut(next(iter(self._open)))
            else:
                self._give_reserve()

    def _wait_if_passes(self, segment: GroupSegment, error: OSError) -> None:
        """Raise JournalWaitsError if the file may be sound."""
        if not readable_later(error):
            return
        if not self._waiting:
            self._waiting = True
            logger.warning("journal waits to read file=%s error=%s", segment.path, error)
        raise JournalWaitsError(str(segment.path), str(error)) from error

    def _shut(self, number: int) -> None:
        file = self._open.pop(number, None)
        if file is not None:
            file.close()

    def _take_reserve(self) -> None:
        if self._reserve is None and not self._closed:
            with suppress(OSError):  # then the open segments are all the reserve there is
                self._reserve = self._disk.open(self._directory)

    def _give_reserve(self) -> None:
        if self._reserve is not None:
            self._disk.close(self._reserve)
            self._reserve = None
