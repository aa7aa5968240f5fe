"""The event log being written: a snapshot of the state, then one record of events for each commit.

    events-NNNNNNNN.rmq   records of kind SNAPSHOT, then of kind EVENTS; the first of these is empty and proves that the
                          snapshot is whole. Meta [wall-clock seconds, number of the record in its log from 0], one
                          frame: the list of events

A log is written under another name and renamed once its snapshot is on disk, so it is whole or not there. Its nonce
holds its number, and the number of the segment being written when it began: groups in that segment and later ones may
be newer than the snapshot, earlier groups are not. The previous log is kept in case the snapshot becomes unreadable.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.services.broker.journal.disk import Disk, passes
from rolloutmq.services.broker.journal.format.events import Event
from rolloutmq.services.broker.journal.format.events_codec import encode
from rolloutmq.services.broker.journal.format.records import file_header
from rolloutmq.services.broker.journal.read.event_log_reader import EVENTS, SNAPSHOT, log_path
from rolloutmq.services.broker.journal.read.segments import numbered_files, numbered_nonce
from rolloutmq.services.broker.journal.write.record_writer import DiskRetry, RecordWriter

CHUNK_BYTES: Final = 1 << 20
"""Most bytes of a record of events, unless one event is larger."""

TOGETHER: Final = 1000
"""This many events are usually smaller than a chunk, and are encoded at once."""

ZEROS_BYTES: Final = 256 << 10
"""Zeros kept ahead of the end: a sync within them takes half the time of a sync of a growing file."""

KEPT_LOGS: Final = 2
"""The present log, and the previous one."""


def chunks(events: Iterable[Event]) -> Iterator[bytes]:
    """Encode events as lists of about `CHUNK_BYTES`; at least one, which may be empty."""
    events = list(events)
    together = encode(events) if len(events) <= TOGETHER else b""
    if 0 < len(together) <= CHUNK_BYTES:
        yield together
        return
    items: list[bytes] = []
    size = 0
    for item in map(encode, events):
        if size + len(item) > CHUNK_BYTES and items:
            yield _list_of(items)
            items, size = [], 0
        items.append(item)
        size += len(item)
    yield _list_of(items)


def _list_of(items: list[bytes]) -> bytes:
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


class EventLog:
    """The log being written. Belongs to the commit thread.

    Attributes:
        snapshot_bytes: Bytes of the snapshot.
        unsynced: Events were appended since the last `sync`.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        segment: int,
        snapshot: Iterable[Event],
        disk: Disk,
        patience: DiskRetry,
        *,
        syncs: bool,
    ) -> None:
        """Write the snapshot. The log counts once this has returned."""
        self.number = number
        self.unsynced = False
        self._records = 0
        self._syncs = syncs
        self._zeros = 0
        self._settled = 0
        path = log_path(directory, number)
        unfinished = path.with_suffix(".tmp")
        disk.unlink(unfinished)
        nonce = numbered_nonce(number, segment.to_bytes(4, "little"))
        self._file = RecordWriter(disk, unfinished, nonce, patience, for_sync=syncs)
        try:
            self._file.add_raw(file_header(nonce))
            for data in chunks(snapshot):
                self._add(SNAPSHOT, data)
            self._add(EVENTS, next(chunks(())))
            self._file.flush()
            if syncs:
                self._file.sync()
            disk.rename(unfinished, path)
        except BaseException:
            self._file.close()
            disk.unlink(unfinished)
            raise
        self._file.path = path
        if syncs:
            disk.sync_directory(directory)
        self.snapshot_bytes = self._settled = self._file.offset

    @property
    def events_bytes(self) -> int:
        """Bytes since the snapshot."""
        return self._file.offset - self.snapshot_bytes

    def append(self, events: Iterable[Event]) -> None:
        """Write the events of one commit."""
        for data in chunks(events):
            self._add(EVENTS, data)
        self._file.flush()
        self.unsynced = True

    def settle(self) -> None:
        """Note that the commit is finished."""
        self._settled = self._file.offset

    def sync(self) -> None:
        """Make the appended events durable."""
        if self.unsynced:
            self._file.sync()
            self.unsynced = False

    def prepare(self) -> bool:
        """Write zeros ahead of the end if few are left; False if there is nothing to do, or no room."""
        end = self._file.offset
        if not self._syncs or self._zeros - end > ZEROS_BYTES // 2:
            return False
        self._zeros = end + ZEROS_BYTES
        try:
            self._file.write_zeros(end, ZEROS_BYTES)
        except OSError as error:
            if not passes(error):
                raise
            return False
        self.unsynced = True
        self.sync()
        return True

    def close(self, *, sync: bool) -> None:
        """Truncate the unused room, and close the file."""
        if sync:
            self._file.sync()
        self._file.cut()
        self._file.close()

    def abandon(self) -> bool:
        """Close the file after a disk failure; return whether events of unfinished commits were cut off."""
        return self._file.abandon(self._settled)

    def _add(self, kind: int, data: bytes) -> None:
        self._file.add(kind, encode((time.time(), self._records)), (data,))
        self._records += 1


def prune(directory: Path, history_bytes: int, disk: Disk) -> bool:
    """Remove the oldest logs while all of them together exceed `history_bytes`; return whether one was removed."""
    logs = numbered_files(directory, "events")
    sizes = {path: path.stat().st_size for path in logs.values()}
    removed = False
    for path in list(sizes)[:-KEPT_LOGS]:
        if sum(sizes.values()) <= history_bytes:
            break
        disk.unlink(path)
        del sizes[path]
        removed = True
    return removed
