"""The journal's history for offline readers: every event log kept, oldest first, and the groups on disk.

Nothing here writes, and the broker may be live: a record being written ends the last log without being damage. Each
log begins with the whole state, so history may begin anywhere. A damaged or missing log is reported, and the next one
is read from its beginning.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Began,
    GroupMeta,
    GroupSnapshot,
    Numbers,
    RecordAddress,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_events, decode_meta
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, Damage, Record
from rolloutmq.services.broker.journal.inspect.packed import PackedEvents
from rolloutmq.services.broker.journal.read.event_log_reader import EVENTS, log_path
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import GROUP, is_numbered, numbered_files
from rolloutmq.services.broker.journal.read.versions import require_version_of

LOGS: Final = "events"
SEGMENTS: Final = "groups"
_RECORD_META: Final = msgspec.msgpack.Decoder(tuple[float, int])


class Commit(NamedTuple):
    """One record of events."""

    at: float
    """Wall-clock seconds of the commit."""
    events: tuple[AnyEvent, ...]


class LogHistory(NamedTuple):
    """One event log. `commits` can be iterated once."""

    number: int
    at: float
    """Wall-clock seconds of the snapshot."""
    snapshot: PackedEvents
    whole: bool
    """The snapshot is complete."""
    commits: Iterator[Commit]

    @property
    def began(self) -> Began | None:
        """The life of the broker that began with this log, if one did."""
        return next(self.snapshot.of(Began), None)


class Sighting(NamedTuple):
    """A whole record of a group, and its address."""

    meta: GroupMeta
    place: RecordAddress
    nbytes: int
    """Bytes of its frames."""

    def is_of(self, accepted: Accepted) -> bool:
        """Return whether it is the record of an acceptance."""
        return self.place == accepted.place and self.meta.header == accepted.header

    def accepted(self) -> Accepted:
        """Return the acceptance the record implies."""
        meta = self.meta
        return Accepted(
            order=meta.order,
            header=meta.header,
            env=meta.env,
            split=meta.split,
            run=meta.run,
            producer=meta.producer,
            session=meta.session,
            at=meta.at,
            place=self.place,
        )


class JournalHistory:
    """The history in a directory. `damage` gains a line for each gap while it is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damage: list[str] = []
        self._torn = ""

    def __iter__(self) -> Iterator[tuple[float, AnyEvent]]:
        """Yield the state at the beginning as records, then every event, each with its wall-clock seconds."""
        for number, log in enumerate(self.logs()):
            if number == 0:
                yield from ((log.at, item) for item in log.snapshot)
            for commit in log.commits:
                yield from ((commit.at, event) for event in commit.events)

    def with_unlogged(self) -> Iterator[tuple[float, AnyEvent]]:
        """Yield the same, and an acceptance for each group whose broker was killed before it could write the event.

        The next life's state has such a group, or else its record in the last segments; both tell when it came.
        The record of a live broker is a moment ahead of its events, so its newest groups come this way too.
        """
        seen = _Seen()
        for number, log in enumerate(self.logs()):
            if number == 0:
                yield from ((log.at, item) for item in log.snapshot)
            elif log.began is not None:
                yield from ((one.at, one) for one in seen.unnoticed(log.snapshot))
            seen.see(log.snapshot)
            for commit in log.commits:
                seen.see(commit.events)
                yield from ((commit.at, event) for event in commit.events)
        if seen.any:
            yield from ((one.at, one) for one in unlogged(self.directory, seen.order, seen.segment))

    def logs(self) -> Iterator[LogHistory]:
        """Yield the logs; iterate each one's commits before asking for the next.

        Raises:
            RecordVersionError: Another version wrote a file of the journal.
        """
        require_version_of(self.directory, Disk())
        paths = files(self.directory, LOGS)
        expected = None
        for number, path in paths.items():
            if expected is not None and number != expected:
                self.damage.append(f"{log_path(self.directory, expected).name} is missing")
            try:
                file = RecordFile(Disk(), path)
            except FileNotFoundError:
                continue  # The live broker has just removed it: the oldest go first.
            expected = number + 1
            try:
                reading = _Reading(number, path.name, file, self.damage)
                log = reading.log()
                self._end_previous(log)
                yield log
                self._torn = reading.torn
            finally:
                file.close()

    def _end_previous(self, log: LogHistory) -> None:
        """Report a torn end unless a new life follows it; the new snapshot shows what was lost."""
        if self._torn and not log.began:
            self.damage.append(self._torn)
        self._torn = ""


class _Seen:
    """The highest order and segment that events named so far."""

    def __init__(self) -> None:
        self.order = 0
        self.segment = 0
        self.any = False

    def see(self, events: Iterable[AnyEvent]) -> None:
        for event in events:
            self.any = True
            accepted = _acceptance(event)
            if accepted is not None:
                self.order = max(self.order, accepted.order)
                self.segment = max(self.segment, accepted.place.segment if accepted.place else 0)
            elif isinstance(event, Numbers):
                self.order = max(self.order, event.next_order - 1)

    def unnoticed(self, snapshot: PackedEvents) -> list[Accepted]:
        """Return the groups of a new life's state that no event named, by order."""
        found = (one.accepted for one in snapshot.of(GroupSnapshot))
        return sorted((one for one in found if one.order > self.order), key=lambda one: one.order)


def _acceptance(event: AnyEvent) -> Accepted | None:
    if isinstance(event, GroupSnapshot):
        return event.accepted
    return event if isinstance(event, Accepted) else None


def commit_of(record: Record) -> tuple[int, Commit]:
    """Return the number and the events of a record of an event log; MsgspecError if it cannot be decoded."""
    at, number = _RECORD_META.decode(record.meta)
    return number, Commit(at, decode_events(b"".join(record.frames)))


class _Reading:
    """One log while it is read."""

    def __init__(self, number: int, name: str, file: RecordFile, damage: list[str]) -> None:
        self._number = number
        self._name = name
        self._file = file
        self._damage = damage
        self._expected = 0
        self.torn = ""

    def log(self) -> LogHistory:
        records = self._records()
        snapshot = PackedEvents()
        at = 0.0
        found = len(self._damage)
        for kind, commit, data in records:
            if kind == EVENTS:
                whole = found == len(self._damage)
                return LogHistory(self._number, commit.at, snapshot, whole, self._walk(commit, records))
            snapshot.add(data, commit.events)
            at = commit.at
        return LogHistory(self._number, at, snapshot, False, iter(()))

    def _walk(self, first: Commit, rest: Iterator[tuple[int, Commit, bytes]]) -> Iterator[Commit]:
        yield first
        yield from (commit for _, commit, _ in rest)

    def _records(self) -> Iterator[tuple[int, Commit, bytes]]:
        if not is_numbered(self._file.nonce, self._number):
            self._damage.append(f"{self._name} has the header of another log")
            return
        for found in self._file.scan(FILE_HEADER_BYTES):
            if isinstance(found, Damage):
                self._note(found)
                continue
            try:
                number, commit = commit_of(found)
            except msgspec.MsgspecError as error:
                self._damage.append(f"{self._name}: the record at {found.offset} cannot be decoded: {error}")
                continue
            if number != self._expected:
                self._damage.append(f"{self._name}: records {self._expected} to {number - 1} are missing")
            self._expected = number + 1
            yield found.kind, commit, b"".join(found.frames)

    def _note(self, found: Damage) -> None:
        what = f"{self._name}: {found.nbytes} bytes at {found.offset} are damaged"
        if found.torn:
            self.torn = what
        else:
            self._damage.append(what)


def files(directory: Path, stem: str) -> dict[int, Path]:
    """Return the logs or the segments of a journal by number, in their order; none if there is no journal."""
    return numbered_files(directory, stem) if directory.is_dir() else {}


@contextmanager
def segment(number: int, path: Path) -> Iterator[RecordFile | None]:
    """Open a segment for the block; None if it is gone by now, or has the header of another segment."""
    try:
        file = RecordFile(Disk(), path)
    except FileNotFoundError:
        yield None
        return
    try:
        yield file if is_numbered(file.nonce, number) else None
    finally:
        file.close()


def sightings(number: int, path: Path) -> Iterator[Sighting]:
    """Yield the whole group records of a segment in their order; none if it is gone by now.

    Every payload is read and checked. Damage is skipped: the reader of a record notices that it is missing.
    """
    with segment(number, path) as file:
        for found in file.scan(FILE_HEADER_BYTES) if file is not None else ():
            if isinstance(found, Record) and found.kind == GROUP:
                sighting = _sighting(number, found)
                if sighting is not None:
                    yield sighting


def stored(directory: Path) -> Iterator[tuple[GroupMeta, tuple[Any, ...]]]:
    """Yield the groups on disk with their frames, each once, in the order of their records. See `sightings`."""
    seen: set[int] = set()
    for number, path in files(directory, SEGMENTS).items():
        with segment(number, path) as file:
            for found in file.scan(FILE_HEADER_BYTES) if file is not None else ():
                if not isinstance(found, Record) or found.kind != GROUP:
                    continue
                sighting = _sighting(number, found)
                if sighting is not None and sighting.meta.order not in seen:
                    seen.add(sighting.meta.order)
                    yield sighting.meta, tuple(found.frames)


def _sighting(number: int, record: Record) -> Sighting | None:
    try:
        meta = decode_meta(record.meta)
    except msgspec.MsgspecError:
        return None
    return Sighting(meta, RecordAddress(number, record.offset), sum(frame.nbytes for frame in record.frames))


def unlogged(directory: Path, order: int, last: int) -> Iterator[Accepted]:
    """Yield the groups whose acceptance is not in an event log yet, from their records.

    Args:
        directory: The journal.
        order: The highest order in the events.
        last: The last segment in the events.
    """
    for number, path in files(directory, SEGMENTS).items():
        if number >= last:
            for sighting in sightings(number, path):
                if sighting.meta.order > order:
                    yield sighting.accepted()
