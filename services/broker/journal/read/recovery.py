"""Recovery: reads the journal of an earlier life.

    base   the newest event log with a whole snapshot; the events of later logs follow its own
    tail   groups in the segments behind the last address the events name: a whole record there is an acceptance
           whose event was not yet written

Bodies are not read, except in the tail. If an event log is damaged, the tail is every group without an event that may
be newer than the base; groups of an earlier life are placed where that life ended. A torn end is cut off only from
the last log and the last segment, where the crash stopped the writing; elsewhere it is damage, and quarantined.

A file that cannot be read for want of a descriptor or memory is not damaged: recovery ends with JournalWaitsError. A
file of another version ends it with RecordVersionError, before anything was changed.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolloutmq.schemas.errors import DamagedJournalError, JournalWaitsError
from rolloutmq.schemas.wire.envelope import ColumnTable
from rolloutmq.services.broker.journal.disk import Disk, readable_later
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    GroupMeta,
    GroupSnapshot,
    Numbers,
    RecordAddress,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_meta
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, Record
from rolloutmq.services.broker.journal.read.event_log_reader import EventLogContents, read_log
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import (
    GROUP,
    LAST_NUMBER,
    SPARES,
    SegmentStore,
    is_numbered,
    numbered_files,
)
from rolloutmq.services.broker.journal.read.versions import require_version_of
from rolloutmq.services.broker.journal.stored_group import BodyMemory, GroupBody


class Recovered:
    """Contents of the journal.

    Attributes:
        events: Records of a snapshot, then events in their order, then the acceptances of the tail.
        damage: One line for each damaged stretch.
        empty: There was no journal.
        unsynced: Segments whose end the earlier life may not have synced.
        log_number, segment_number: The highest numbers in use, 0 for none.
    """

    def __init__(self, segments: SegmentStore, ram: BodyMemory) -> None:
        self.events: Iterable[AnyEvent] = ()
        self.damage: list[str] = []
        self.empty = True
        self.log_number = 0
        self.segment_number = 0
        self.unsynced: list[Path] = []
        self._segments = segments
        self._ram = ram

    def body(self, accepted: Accepted) -> GroupBody:
        """Return the body of an accepted group; a batch reads it, and may then find it damaged."""
        nbytes = accepted.header.nbytes
        if accepted.place is None:
            return GroupBody(None, nbytes, self._ram)
        segment = self._segments.find(accepted.place.segment)
        return GroupBody.stored(segment, accepted.place.offset, nbytes, self._ram)

    def table(self, accepted: Accepted) -> ColumnTable | None:
        """Return the column table of a group from its record, where the events have lost it."""
        meta = None if accepted.place is None else self._segments.meta(accepted.place)
        return None if meta is None else meta.table


def recover(directory: Path, segments: SegmentStore, ram: BodyMemory, disk: Disk) -> Recovered:
    """Read a journal; blocks. Everything undamaged is returned.

    Raises:
        DamagedJournalError: A file or an event has the highest number there is, so no other can follow.
        JournalWaitsError: A file cannot be read now.
        RecordVersionError: Another version wrote one of the files; nothing was changed.
    """
    return _Recovery(directory, segments, disk).run(Recovered(segments, ram))


class _Known(NamedTuple):
    """Groups a sequence of events names."""

    orders: set[int]
    last: RecordAddress
    next_order: int
    """Groups below it without an event are gone."""

    @classmethod
    def of(cls, events: Iterable[AnyEvent]) -> "_Known":
        orders: set[int] = set()
        last, next_order = (0, 0), 0
        for event in events:
            accepted = event.accepted if isinstance(event, GroupSnapshot) else event
            if isinstance(accepted, Accepted):
                orders.add(accepted.order)
                if accepted.place is not None:
                    last = max(last, (accepted.place.segment, accepted.place.offset))
            elif isinstance(event, Numbers):
                next_order = event.next_order
        return cls(orders, RecordAddress(*last), next_order)


class _Recovery:
    def __init__(self, directory: Path, segments: SegmentStore, disk: Disk) -> None:
        self._directory = directory
        self._segments = segments
        self._disk = disk
        self._damage: list[str] = []

    def run(self, found: Recovered) -> Recovered:
        require_version_of(self._directory, self._disk)
        for pattern in ("*.tmp", SPARES):
            for leftover in self._directory.glob(pattern):
                self._disk.unlink(leftover)
        logs = numbered_files(self._directory, "events")
        files = numbered_files(self._directory, "groups")
        chain = self._chain(logs)
        known = _Known.of(event for log in chain for event in log.items)
        if not chain or not chain[0].whole:
            known = known._replace(next_order=0)
        tail = [
            accepted
            for accepted in self._tail(files, self._start(chain, known.last), known.last)
            if accepted.order >= known.next_order and accepted.order not in known.orders
        ]
        for number, path in files.items():
            self._segments.add(number, path.stat().st_size).sealed = True
        found.events = list(_join(chain, sorted(tail, key=operator.attrgetter("order"))))
        start = self._start(chain, known.last)
        found.unsynced = [path for number, path in files.items() if number >= start.segment]
        found.damage = self._damage
        found.empty = not logs and not files
        found.log_number = max(logs, default=0)
        found.segment_number = max([known.last.segment, *files, *(log.segment for log in chain)])
        _require_numbers_left(found)
        return found

    def _chain(self, logs: dict[int, Path]) -> list[EventLogContents]:
        """Return the newest log with a whole snapshot and the later ones, in their order; all if none is whole."""
        chain: list[EventLogContents] = []
        for number in reversed(logs):
            chain.insert(0, self._log(number, logs[number], last=not chain))
            if chain[0].whole:
                break
        return [log._replace(snapshot=log.lives) if log is not chain[0] else log for log in chain]

    def _log(self, number: int, path: Path, *, last: bool) -> EventLogContents:
        try:
            with closing(RecordFile(self._disk, path)) as file:
                log = read_log(number, file, last=last)
                size = file.size
        except OSError as error:
            self._unreadable(path, error)
            return EventLogContents(number, 0, [], [], whole=False, damage=[], end=0)
        for damage in log.damage:
            self._note(path, damage.offset, damage.nbytes)
        if last and 0 < log.end < size:
            self._disk.cut(path, log.end)
        if not log.whole:
            self._damage.append(f"{path.name}: the snapshot is incomplete")
        return log

    def _start(self, chain: list[EventLogContents], last: RecordAddress) -> RecordAddress:
        """Return the address from which on there may be groups without events."""
        if not chain or not chain[0].whole:
            return RecordAddress(0, 0)
        begun = RecordAddress(chain[0].segment, 0)
        return begun if len(chain) > 1 or self._damage else max(begun, last, key=_position)

    def _tail(self, files: dict[int, Path], start: RecordAddress, named: RecordAddress) -> Iterator[Accepted]:
        """Yield the groups of the segments from an address on, the last segment first."""
        last = True
        for number in reversed([number for number in files if number >= start.segment]):
            try:
                with closing(RecordFile(self._disk, files[number])) as file:
                    if file.blank():  # prepared ahead of time, or its preparation was cut off
                        if last and number > named.segment and file.size:
                            self._disk.cut(file.path, 0)
                        continue
                    offset = max(start.offset if number == start.segment else 0, FILE_HEADER_BYTES)
                    kept = named.offset + 1 if last and number == named.segment else 0
                    yield from self._groups(file, number, offset, kept if last else file.size)
                    last = last and not any(file.scan(FILE_HEADER_BYTES))
            except OSError as error:
                self._unreadable(files[number], error)

    def _unreadable(self, path: Path, error: OSError) -> None:
        """Note a damaged file; JournalWaitsError if the file may be sound."""
        if readable_later(error):
            raise JournalWaitsError(str(path), str(error)) from error
        self._damage.append(f"{path.name} cannot be read: {error}")

    def _groups(self, file: RecordFile, number: int, offset: int, kept: int) -> Iterator[Accepted]:
        """Yield the groups of a segment from an offset on; a torn end behind `kept` is cut off."""
        if not is_numbered(file.nonce, number):
            self._damage.append(
                f"{file.path.name} has the header of another segment; nothing in it can be read"
            )
            self._segments.quarantine.keep_whole(file.path)
            return
        for found in file.scan(offset):
            if isinstance(found, Record):
                meta = _meta_of(found)
                offset = found.offset + found.span
                if meta is not None:
                    yield _accepted(meta, RecordAddress(number, found.offset))
            elif not found.torn or found.offset < kept:
                self._note(file.path, found.offset, found.nbytes)
                offset = found.offset + found.nbytes
        if kept < file.size and offset < file.size:
            self._disk.cut(file.path, offset)

    def _note(self, path: Path, offset: int, nbytes: int) -> None:
        self._damage.append(f"{path.name}: {nbytes} bytes at {offset} are damaged")
        if offset:
            self._segments.quarantine.keep(path, offset, nbytes)
        else:
            self._segments.quarantine.keep_whole(path)


def _require_numbers_left(found: Recovered) -> None:
    """Raise DamagedJournalError if no number is left for the next log or segment: a damaged name or event took it."""
    for what, number in (("log", found.log_number), ("segment", found.segment_number)):
        if number >= LAST_NUMBER:
            raise DamagedJournalError(f"no number is left for another {what} (the last is {number})")


def _join(chain: list[EventLogContents], tail: list[Accepted]) -> Iterator[AnyEvent]:
    """Yield the events of all logs; groups a life left without events come before the log of the next life."""
    rest = tail
    for log in chain:
        if log is not chain[0]:
            yield from (accepted for accepted in rest if _segment_of(accepted) < log.segment)
            rest = [accepted for accepted in rest if _segment_of(accepted) >= log.segment]
        yield from log.items
    yield from rest


def _position(place: RecordAddress) -> tuple[int, int]:
    return place.segment, place.offset


def _segment_of(accepted: Accepted) -> int:
    return 0 if accepted.place is None else accepted.place.segment


def _meta_of(record: Record) -> GroupMeta | None:
    """Return the group meta of a record; None if it is of another kind or malformed."""
    try:
        return decode_meta(record.meta) if record.kind == GROUP else None
    except msgspec.MsgspecError:
        return None


def _accepted(meta: GroupMeta, place: RecordAddress) -> Accepted:
    return Accepted(
        order=meta.order,
        header=meta.header,
        env=meta.env,
        split=meta.split,
        run=meta.run,
        producer=meta.producer,
        session=meta.session,
        at=meta.at,
        place=place,
        requeued=meta.requeued,
    )
