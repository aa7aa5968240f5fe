"""Logs of facts: each begins with the whole state as a snapshot, and then has one record of facts for each commit.

    facts-NNNNNNNN.rmq   records of kind SNAPSHOT, then of kind FACTS, of which the first is empty: it shows that the
                         snapshot is whole. Meta [wall-clock seconds, number of the record in its log from 0], one
                         frame: the list of facts.

A log is written under another name and renamed once its snapshot is on disk, so that it is whole or not there. Its
nonce has its number, and that of the segment which was being written when it began: the groups of that segment and
the ones after it may be newer than the snapshot, those before it are not. The one before stays for the case that the
snapshot becomes unreadable.
"""

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.appender import Appender, Patience, passes
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.facts import Began, Fact
from rolloutmq.services.broker.journal.packing import AnyFact, decode_facts, encode
from rolloutmq.services.broker.journal.reading import RecordFile
from rolloutmq.services.broker.journal.segment import FILE_HEADER_BYTES, Damage, Record, file_header
from rolloutmq.services.broker.journal.segments import is_numbered, numbered_files, numbered_nonce

SNAPSHOT: Final = 2
FACTS: Final = 3
CHUNK_BYTES: Final = 1 << 20
"""A record of facts is not made larger, unless one fact is."""
TOGETHER: Final = 1000
"""So many facts are mostly less than that, and are encoded in one go."""
ZEROS_BYTES: Final = 256 << 10
"""So much is kept written behind the end: to sync bytes alone takes half as long as to sync a file that grows."""
KEPT_LOGS: Final = 2
"""The present log, and the one before it."""

_meta: Final = msgspec.msgpack.Decoder(tuple[float, int])


def log_path(directory: Path, number: int) -> Path:
    return directory / f"facts-{number:08d}.rmq"


def chunks(facts: Iterable[Fact]) -> Iterator[bytes]:
    """Encode facts as lists of about `CHUNK_BYTES`; at least one, which may be empty."""
    facts = list(facts)
    together = encode(facts) if len(facts) <= TOGETHER else b""
    if 0 < len(together) <= CHUNK_BYTES:
        yield together
        return
    items: list[bytes] = []
    size = 0
    for item in map(encode, facts):
        if size + len(item) > CHUNK_BYTES and items:
            yield _list_of(items)
            items, size = [], 0
        items.append(item)
        size += len(item)
    yield _list_of(items)


def _list_of(items: list[bytes]) -> bytes:
    return b"\xdd" + len(items).to_bytes(4, "big") + b"".join(items)


class FactLog:
    """The log that is being written. Belongs to the thread that writes.

    Attributes:
        snapshot_bytes: Bytes of the snapshot.
        unsynced: Something was appended since the last `sync`.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        segment: int,
        snapshot: Iterable[Fact],
        disk: Disk,
        patience: Patience,
        *,
        syncs: bool,
    ) -> None:
        """Write the snapshot. The log counts as soon as this returned."""
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
        self._file = Appender(disk, unfinished, nonce, patience, for_sync=syncs)
        try:
            self._file.add_raw(file_header(nonce))
            for data in chunks(snapshot):
                self._add(SNAPSHOT, data)
            self._add(FACTS, next(chunks(())))
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
    def facts_bytes(self) -> int:
        """Bytes since the snapshot."""
        return self._file.offset - self.snapshot_bytes

    def append(self, facts: Iterable[Fact]) -> None:
        """Write one commit's facts."""
        for data in chunks(facts):
            self._add(FACTS, data)
        self._file.flush()
        self.unsynced = True

    def settle(self) -> None:
        """Note that the commit is finished."""
        self._settled = self._file.offset

    def sync(self) -> None:
        """Make all that was appended last."""
        if self.unsynced:
            self._file.sync()
            self.unsynced = False

    def prepare(self) -> bool:
        """Write zeros behind the end if few are left; False if there is nothing to do, or no room."""
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
        """Give back the room that was not used, and close the file."""
        if sync:
            self._file.sync()
        self._file.cut()
        self._file.close()

    def abandon(self) -> bool:
        """Close the file after the disk failed; return whether what no finished commit covers could be taken back."""
        return self._file.abandon(self._settled)

    def _add(self, kind: int, data: bytes) -> None:
        self._file.add(kind, encode((time.time(), self._records)), (data,))
        self._records += 1


class LogContents(NamedTuple):
    """What is left of one log of facts."""

    number: int
    segment: int
    """Number of the segment that was being written when it began, 0 if that cannot be told."""
    snapshot: list[AnyFact]
    facts: list[AnyFact]
    whole: bool
    """All of the snapshot is there."""
    damage: list[Damage]
    end: int
    """Where the last whole record ends."""

    @property
    def items(self) -> list[AnyFact]:
        return self.snapshot + self.facts

    @property
    def lives(self) -> list[AnyFact]:
        """What the snapshot says of lives that began: that is true without the rest of it."""
        return [item for item in self.snapshot if isinstance(item, Began)]


def read_log(number: int, file: RecordFile, *, last: bool) -> LogContents:
    """Read a log; a bad end of the last one is where the writing stopped, and no damage."""
    if not is_numbered(file.nonce, number):
        whole_file = Damage(0, file.size, torn=False)
        return LogContents(number, 0, [], [], whole=False, damage=[whole_file], end=0)
    assert file.nonce is not None
    reader = _Reader()
    for found in file.scan(FILE_HEADER_BYTES):
        if isinstance(found, Record):
            reader.take(found)
        elif not (found.torn and last):
            reader.damage.append(found)
    segment = int.from_bytes(file.nonce[4:], "little")
    return LogContents(
        number, segment, reader.snapshot, reader.facts, reader.whole, reader.damage, reader.end
    )


class _Reader:
    """Sorts what is in a log."""

    def __init__(self) -> None:
        self.snapshot: list[AnyFact] = []
        self.facts: list[AnyFact] = []
        self.whole = False
        self.damage: list[Damage] = []
        self.end = 0
        self._count = 0

    def take(self, record: Record) -> None:
        try:
            _, number = _meta.decode(record.meta)
            items = decode_facts(b"".join(record.frames))
        except msgspec.MsgspecError:
            self.damage.append(Damage(record.offset, record.span, torn=False))
            return
        if record.kind == FACTS and number == self._count and not self.facts:
            self.whole = self.whole or not self.damage
        (self.snapshot if record.kind == SNAPSHOT else self.facts).extend(items)
        self._count += 1
        self.end = record.offset + record.span


def prune(directory: Path, history_bytes: int, disk: Disk) -> bool:
    """Remove the oldest logs while all of them together are larger; False if none was."""
    logs = numbered_files(directory, "facts")
    sizes = {path: path.stat().st_size for path in logs.values()}
    removed = False
    for path in list(sizes)[:-KEPT_LOGS]:
        if sum(sizes.values()) <= history_bytes:
            break
        disk.unlink(path)
        del sizes[path]
        removed = True
    return removed
