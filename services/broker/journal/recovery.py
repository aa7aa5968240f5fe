"""What an earlier life left in the journal, read back.

    base   the newest log of facts whose snapshot is whole; the facts of later logs follow its own
    tail   groups that lie in the segments behind the last place that the facts name: whole records are acceptances,
           whose facts the crash came before

Bodies are not read, but for the tail. If a log of facts is damaged, the tail is every group that may be newer than
the base and that no fact names; those of an earlier life come where that life ended. A bad end is cut off the last
log and the last segment only, where the crash stopped the writing; everywhere else it is damage, and kept aside.
A file that cannot be read for want of a descriptor or of memory is not damaged: recovery ends with JournalWaitsError.
"""

import operator
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import msgspec

from rolloutmq.schemas.envelope import ColumnTable
from rolloutmq.schemas.errors import JournalWaitsError
from rolloutmq.services.broker.journal.appender import passes
from rolloutmq.services.broker.journal.body import Body, Ram
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.factlog import LogContents, read_log
from rolloutmq.services.broker.journal.facts import Accepted, GroupItem, GroupMeta, Numbers, Place
from rolloutmq.services.broker.journal.packing import AnyFact, decode_meta
from rolloutmq.services.broker.journal.reading import RecordFile
from rolloutmq.services.broker.journal.segment import FILE_HEADER_BYTES, Record
from rolloutmq.services.broker.journal.segments import GROUP, SPARES, Segments, is_numbered, numbered_files


class Recovered:
    """What was found.

    Attributes:
        facts: Items of a snapshot, then facts in their order, then the acceptances of the tail.
        damage: One line for each damaged stretch.
        empty: There was no journal.
        unsynced: Segments whose end a former life may not have synced any more.
        log_number, segment_number: The highest numbers in use, 0 for none.
    """

    def __init__(self, segments: Segments, ram: Ram) -> None:
        self.facts: Iterable[AnyFact] = ()
        self.damage: list[str] = []
        self.empty = True
        self.log_number = 0
        self.segment_number = 0
        self.unsynced: list[Path] = []
        self._segments = segments
        self._ram = ram

    def body(self, accepted: Accepted) -> Body:
        """Return the body of an accepted group; it is read when it is needed, and may be found damaged then."""
        nbytes = accepted.header.nbytes
        if accepted.place is None:
            return Body(None, nbytes, self._ram)
        segment = self._segments.find(accepted.place.segment)
        return Body.stored(segment, accepted.place.offset, nbytes, self._ram)

    def table(self, accepted: Accepted) -> ColumnTable | None:
        """Return the column table of a group where the facts have lost it: its record has it, too."""
        meta = None if accepted.place is None else self._segments.meta(accepted.place)
        return None if meta is None else meta.table


def recover(directory: Path, segments: Segments, ram: Ram, disk: Disk) -> Recovered:
    """Read a journal; blocks. What is there of it, whatever is damaged, comes back; JournalWaitsError if not now."""
    return _Recovery(directory, segments, disk).run(Recovered(segments, ram))


class _Known(NamedTuple):
    """What a sequence of facts says of groups."""

    orders: set[int]
    last: Place
    next_order: int
    """Groups below it that the facts do not name are gone."""

    @classmethod
    def of(cls, facts: Iterable[AnyFact]) -> "_Known":
        orders: set[int] = set()
        last, next_order = (0, 0), 0
        for fact in facts:
            accepted = fact.accepted if isinstance(fact, GroupItem) else fact
            if isinstance(accepted, Accepted):
                orders.add(accepted.order)
                if accepted.place is not None:
                    last = max(last, (accepted.place.segment, accepted.place.offset))
            elif isinstance(fact, Numbers):
                next_order = fact.next_order
        return cls(orders, Place(*last), next_order)


class _Recovery:
    def __init__(self, directory: Path, segments: Segments, disk: Disk) -> None:
        self._directory = directory
        self._segments = segments
        self._disk = disk
        self._damage: list[str] = []

    def run(self, found: Recovered) -> Recovered:
        for pattern in ("*.tmp", SPARES):
            for leftover in self._directory.glob(pattern):
                self._disk.unlink(leftover)
        logs = numbered_files(self._directory, "facts")
        files = numbered_files(self._directory, "groups")
        chain = self._chain(logs)
        known = _Known.of(fact for log in chain for fact in log.items)
        if not chain or not chain[0].whole:
            known = known._replace(next_order=0)
        tail = [
            accepted
            for accepted in self._tail(files, self._start(chain, known.last), known.last)
            if accepted.order >= known.next_order and accepted.order not in known.orders
        ]
        for number, path in files.items():
            self._segments.add(number, path.stat().st_size).sealed = True
        found.facts = list(_join(chain, sorted(tail, key=operator.attrgetter("order"))))
        start = self._start(chain, known.last)
        found.unsynced = [path for number, path in files.items() if number >= start.segment]
        found.damage = self._damage
        found.empty = not logs and not files
        found.log_number = max(logs, default=0)
        found.segment_number = max([known.last.segment, *files, *(log.segment for log in chain)])
        return found

    def _chain(self, logs: dict[int, Path]) -> list[LogContents]:
        """Return the newest log with a whole snapshot and those after it, in their order; all if none is whole."""
        chain: list[LogContents] = []
        for number in reversed(logs):
            chain.insert(0, self._log(number, logs[number], last=not chain))
            if chain[0].whole:
                break
        return [log._replace(snapshot=log.lives) if log is not chain[0] else log for log in chain]

    def _log(self, number: int, path: Path, *, last: bool) -> LogContents:
        try:
            with closing(RecordFile(self._disk, path)) as file:
                log = read_log(number, file, last=last)
                size = file.size
        except OSError as error:
            self._unreadable(path, error)
            return LogContents(number, 0, [], [], whole=False, damage=[], end=0)
        for damage in log.damage:
            self._note(path, damage.offset, damage.nbytes)
        if last and 0 < log.end < size:
            self._disk.cut(path, log.end)
        if not log.whole:
            self._damage.append(f"{path.name}: its snapshot is not whole")
        return log

    def _start(self, chain: list[LogContents], last: Place) -> Place:
        """Return the place from which on there may be groups that no fact names."""
        if not chain or not chain[0].whole:
            return Place(0, 0)
        begun = Place(chain[0].segment, 0)
        return begun if len(chain) > 1 or self._damage else max(begun, last, key=_position)

    def _tail(self, files: dict[int, Path], start: Place, named: Place) -> Iterator[Accepted]:
        """Yield the groups that lie in the segments from a place on, the last segment first."""
        last = True
        for number in reversed([number for number in files if number >= start.segment]):
            try:
                with closing(RecordFile(self._disk, files[number])) as file:
                    if file.blank():  # made ahead of time, or its making was cut off
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
        """Note a damaged file; JournalWaitsError if the error tells nothing of it."""
        if passes(error):
            raise JournalWaitsError(str(path), str(error)) from error
        self._damage.append(f"{path.name} cannot be read: {error}")

    def _groups(self, file: RecordFile, number: int, offset: int, kept: int) -> Iterator[Accepted]:
        """Yield the groups of a segment from an offset on. What is torn behind `kept` is cut off."""
        if not is_numbered(file.nonce, number):
            self._damage.append(
                f"{file.path.name} does not begin like that segment: nothing in it can be read"
            )
            self._segments.quarantine.keep_whole(file.path)
            return
        for found in file.scan(offset):
            if isinstance(found, Record):
                meta = _meta_of(found)
                offset = found.offset + found.span
                if meta is not None:
                    yield _accepted(meta, Place(number, found.offset))
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


def _join(chain: list[LogContents], tail: list[Accepted]) -> Iterator[AnyFact]:
    """Yield the facts of all logs; what a life left unnamed comes before the log of the next life."""
    rest = tail
    for log in chain:
        if log is not chain[0]:
            yield from (accepted for accepted in rest if _segment_of(accepted) < log.segment)
            rest = [accepted for accepted in rest if _segment_of(accepted) >= log.segment]
        yield from log.items
    yield from rest


def _position(place: Place) -> tuple[int, int]:
    return place.segment, place.offset


def _segment_of(accepted: Accepted) -> int:
    return 0 if accepted.place is None else accepted.place.segment


def _meta_of(record: Record) -> GroupMeta | None:
    """Return what a record says of its group; None if it is of another kind or form."""
    try:
        return decode_meta(record.meta) if record.kind == GROUP else None
    except msgspec.MsgspecError:
        return None


def _accepted(meta: GroupMeta, place: Place) -> Accepted:
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
