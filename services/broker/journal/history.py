"""The journal of a run as its readers see it: every log of facts that is kept, oldest first, and the groups on disk.

Nothing here writes, and the broker may be alive: a record that it is just writing ends the last log without being
damage. Each log begins with the whole state, so that history may begin anywhere; what the first one says was there
before the history does. A log that is damaged or missing is said, and the next one is read from its beginning.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.factlog import FACTS, log_path
from rolloutmq.services.broker.journal.facts import Accepted, Began, GroupMeta, Place
from rolloutmq.services.broker.journal.packing import AnyFact, decode_facts, decode_meta
from rolloutmq.services.broker.journal.reading import RecordFile
from rolloutmq.services.broker.journal.segment import FILE_HEADER_BYTES, Damage, Record
from rolloutmq.services.broker.journal.segments import GROUP, is_numbered, numbered_files

LOGS: Final = "facts"
SEGMENTS: Final = "groups"
_RECORD_META: Final = msgspec.msgpack.Decoder(tuple[float, int])


class Commit(NamedTuple):
    """One record of facts."""

    at: float
    """Wall-clock seconds of the commit."""
    facts: tuple[AnyFact, ...]


class Chapter(NamedTuple):
    """One log of facts. `commits` is read as it is walked through, once."""

    number: int
    at: float
    """Wall-clock seconds of the snapshot."""
    snapshot: tuple[AnyFact, ...]
    whole: bool
    """All of the snapshot is there."""
    commits: Iterator[Commit]

    @property
    def began(self) -> Began | None:
        """The life of the broker that began with this log, if one did."""
        return next((item for item in self.snapshot if isinstance(item, Began)), None)


class Sighting(NamedTuple):
    """A whole record of a group, and where it lies."""

    meta: GroupMeta
    place: Place
    nbytes: int
    """Bytes of its frames."""

    def is_of(self, accepted: Accepted) -> bool:
        """Whether it is the very record that an acceptance tells of."""
        return self.place == accepted.place and self.meta.header == accepted.header

    def accepted(self) -> Accepted:
        """Return the acceptance that the record stands for."""
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


class History:
    """What the journal in a directory tells. `damage` fills with a line for each gap while it is read."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.damage: list[str] = []
        self._torn = ""

    def __iter__(self) -> Iterator[tuple[float, AnyFact]]:
        """Yield the state at the beginning as items, then every fact, each with its wall-clock seconds."""
        for number, chapter in enumerate(self.chapters()):
            if number == 0:
                yield from ((chapter.at, item) for item in chapter.snapshot)
            for commit in chapter.commits:
                yield from ((commit.at, fact) for fact in commit.facts)

    def chapters(self) -> Iterator[Chapter]:
        """Yield the logs; each one's commits must be walked through before the next one is asked for."""
        logs = files(self.directory, LOGS)
        expected = None
        for number, path in logs.items():
            if expected is not None and number != expected:
                self.damage.append(f"{log_path(self.directory, expected).name} is missing")
            try:
                file = RecordFile(Disk(), path)
            except FileNotFoundError:
                continue  # The living broker has just removed it: the oldest go first.
            expected = number + 1
            try:
                reading = _Reading(number, path.name, file, self.damage)
                chapter = reading.chapter()
                self._end_former(chapter)
                yield chapter
                self._torn = reading.torn
            finally:
                file.close()

    def _end_former(self, chapter: Chapter) -> None:
        """A log may end in the middle of a record if its life did; whatever that lost, the snapshot shows."""
        if self._torn and not chapter.began:
            self.damage.append(self._torn)
        self._torn = ""


class _Reading:
    """One log while it is read."""

    def __init__(self, number: int, name: str, file: RecordFile, damage: list[str]) -> None:
        self._number = number
        self._name = name
        self._file = file
        self._damage = damage
        self._expected = 0
        self.torn = ""

    def chapter(self) -> Chapter:
        records = self._records()
        items: list[AnyFact] = []
        at = 0.0
        found = len(self._damage)
        for kind, commit in records:
            if kind == FACTS:
                whole = found == len(self._damage)
                return Chapter(self._number, commit.at, tuple(items), whole, self._walk(commit, records))
            items += commit.facts
            at = commit.at
        return Chapter(self._number, at, tuple(items), False, iter(()))

    def _walk(self, first: Commit, rest: Iterator[tuple[int, Commit]]) -> Iterator[Commit]:
        yield first
        yield from (commit for _, commit in rest)

    def _records(self) -> Iterator[tuple[int, Commit]]:
        if not is_numbered(self._file.nonce, self._number):
            self._damage.append(f"{self._name} is no log of that number")
            return
        for found in self._file.scan(FILE_HEADER_BYTES):
            if isinstance(found, Damage):
                self._note(found)
                continue
            try:
                at, number = _RECORD_META.decode(found.meta)
                facts = decode_facts(b"".join(found.frames))
            except msgspec.MsgspecError as error:
                self._damage.append(f"{self._name}: the record at {found.offset} is not understood: {error}")
                continue
            if number != self._expected:
                self._damage.append(f"{self._name}: records {self._expected} to {number - 1} are missing")
            self._expected = number + 1
            yield found.kind, Commit(at, facts)

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
    """Open a segment for the block; None if it is gone by now, or is not the segment of that number."""
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

    Every payload is read and checked. Damage is passed over: who needs a record notices that it is not there.
    """
    with segment(number, path) as file:
        for found in file.scan(FILE_HEADER_BYTES) if file is not None else ():
            if isinstance(found, Record) and found.kind == GROUP:
                sighting = _sighting(number, found)
                if sighting is not None:
                    yield sighting


def _sighting(number: int, record: Record) -> Sighting | None:
    try:
        meta = decode_meta(record.meta)
    except msgspec.MsgspecError:
        return None
    return Sighting(meta, Place(number, record.offset), sum(frame.nbytes for frame in record.frames))


def unlogged(directory: Path, order: int, last: int) -> Iterator[Accepted]:
    """Yield the groups whose acceptance no log of facts tells yet: their records are the word for it.

    Args:
        directory: The journal.
        order: The highest that the facts name.
        last: The last segment that they name.
    """
    for number, path in files(directory, SEGMENTS).items():
        if number >= last:
            for sighting in sightings(number, path):
                if sighting.meta.order > order:
                    yield sighting.accepted()
