"""Dead letters: one file for each dead group, with its history and, while there is room, its contents.

A file is a segment of one or two records: the letter, and then the group's frames. A listing therefore reads only the
beginnings of the files, and a file is there whole or not at all. Files are named by the group's order, which is
unique in the run; group ids are chosen by producers.
"""

import logging
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.files import force, open_regular, private_file, read_regular
from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.services.broker.journal.format.events import GroupMeta
from rolloutmq.services.broker.journal.format.records import (
    NONCE_BYTES,
    Buffer,
    Damage,
    Record,
    encode_record,
    file_header,
    require_version,
    scan,
)
from rolloutmq.services.broker.journal.stored_group import StoredGroup

logger = logging.getLogger(__name__)

LETTER: Final = 16
CONTENTS: Final = 17
"""Record kinds no other file of the journal has."""
REASON_CHARS: Final = 2000
HEAD_BYTES: Final = 1 << 16
"""Enough for any letter: a header of 4 KiB, a table of 8 KiB, a reason."""


class DeadLetter(msgspec.Struct, frozen=True, array_like=True):
    """Meta of the first record."""

    group: GroupMeta
    reason: str
    at: float
    """Wall-clock seconds of the death."""
    deliveries: int
    failures: int
    kept: bool
    """Whether the contents follow."""


class DeadEntry(NamedTuple):
    """One file. If the letter is unreadable it is None, and `problem` has the reason."""

    order: int
    path: Path
    nbytes: int
    letter: DeadLetter | None
    problem: str = ""


class DeadGroup(NamedTuple):
    """One dead group; `frames` is None if its contents were not kept, or are damaged."""

    order: int
    letter: DeadLetter
    frames: tuple[memoryview, ...] | None
    damaged: bool = False

    @property
    def meta(self) -> GroupMeta:
        return self.letter.group

    @property
    def reason(self) -> str:
        return self.letter.reason

    @property
    def failures(self) -> int:
        return self.letter.failures


class DeadLetterStore:
    """The files of a directory, created with the first dead group. For one thread; blocks on the disk."""

    def __init__(self, directory: Path, limit_bytes: int, *, sync: bool) -> None:
        self._directory = directory
        self._limit_bytes = limit_bytes
        self._sync = sync
        self._nbytes: int | None = None
        self._orders: dict[str, set[int]] | None = None

    def bury(self, group: StoredGroup, frames: tuple[Any, ...] | None, reason: str, wall: float) -> bool:
        """Write a group's file; it replaces an earlier one of the same order.

        Args:
            group: The dead group.
            frames: Its contents, or None if they are lost.
            reason: Why it died, for people.
            wall: Wall-clock seconds.

        Returns:
            Whether the file was written. A disk error is logged, and the broker goes on.
        """
        path = self._path(group.order)
        before = _size(path)
        kept = frames is not None and self._total() - before + group.header.nbytes <= self._limit_bytes
        letter = DeadLetter(
            group=_meta(group),
            reason=reason[:REASON_CHARS],
            at=wall,
            deliveries=group.deliveries,
            failures=group.failures,
            kept=kept,
        )
        try:
            self._directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            written = self._write(path, letter, frames if kept else None)
        except OSError as error:
            logger.error("dead letter not written group=%s error=%s", group.header.group_id, error)
            return False
        self._nbytes = self._total() + written - before
        if self._orders is not None:
            self._orders.setdefault(group.header.group_id, set()).add(group.order)
        return True

    def find(self, group_id: str) -> DeadGroup | None:
        """Return the dead group of an id, the oldest of several; None if none of them can be read."""
        for order in sorted(self._index().get(group_id, ())):
            if (found := self.open(order)) is not None and found.meta.header.group_id == group_id:
                return found
        return None

    def open(self, order: int) -> DeadGroup | None:
        """Return the dead group of an order, with its contents; None if there is none, or its letter is unreadable."""
        try:
            data = read_regular(self._path(order))
        except OSError:
            return None
        records = list(scan(data, sealed=True))
        letter = _letter(records, order)
        if isinstance(letter, str):
            return None
        contents = next((r for r in records if isinstance(r, Record) and r.kind == CONTENTS), None)
        frames = contents.frames if contents is not None else None
        return DeadGroup(order, letter, frames, damaged=letter.kept and frames is None)

    def entries(self) -> Iterator[DeadEntry]:
        """Yield every file by its order, without the contents.

        A file of another version is a problem like any other: it may lie beside the letters of a living broker.
        """
        for path in self.paths():
            if (entry := self.entry(path)) is not None:
                yield entry

    def paths(self) -> list[Path]:
        """Return every file by its order."""
        return sorted(self._directory.glob("*.rmq"), key=lambda path: (len(path.stem), path.stem))

    def entry(self, path: Path) -> DeadEntry | None:
        """Return one file without the contents; None if it is gone."""
        order = int(path.stem) if path.stem.isdecimal() else 0
        try:
            with open_regular(path) as file:
                nbytes = os.fstat(file.fileno()).st_size
                head = file.read(HEAD_BYTES)
        except FileNotFoundError:
            return None
        except OSError as error:
            return DeadEntry(order, path, 0, None, str(error))
        try:
            require_version(head, path)
        except RecordVersionError as error:
            return DeadEntry(order, path, nbytes, None, str(error))
        letter = _letter(scan(head, sealed=False), order)
        if isinstance(letter, str):
            return DeadEntry(order, path, nbytes, None, letter)
        return DeadEntry(order, path, nbytes, letter)

    def remove(self, order: int) -> None:
        """Remove a group's file, if there is one."""
        path = self._path(order)
        try:
            nbytes = path.stat().st_size
            path.unlink()
        except FileNotFoundError:
            return
        except OSError as error:
            logger.error("dead letter not removed file=%s error=%s", path, error)
            return
        if self._nbytes is not None:
            self._nbytes -= nbytes
        for orders in (self._orders or {}).values():
            orders.discard(order)

    def _path(self, order: int) -> Path:
        return self._directory / f"{order:012d}.rmq"

    def _total(self) -> int:
        if self._nbytes is None:
            self._nbytes = sum(entry.nbytes for entry in self.entries())
        return self._nbytes

    def _index(self) -> dict[str, set[int]]:
        if self._orders is None:
            self._orders = {}
            for entry in self.entries():
                if entry.letter is not None:
                    self._orders.setdefault(entry.letter.group.header.group_id, set()).add(entry.order)
        return self._orders

    def _write(self, path: Path, letter: DeadLetter, frames: Sequence[Buffer] | None) -> int:
        nonce = os.urandom(NONCE_BYTES)
        unfinished = path.with_suffix(f".{os.getpid()}.tmp")
        try:
            with private_file(unfinished, "wb") as file:
                file.write(file_header(nonce))
                meta = msgspec.msgpack.encode(letter)
                file.writelines(encode_record(nonce, file.tell(), LETTER, meta, ()))
                if frames is not None:
                    file.writelines(encode_record(nonce, file.tell(), CONTENTS, b"", frames))
                file.flush()
                nbytes = file.tell()
                if self._sync:
                    os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)
        if self._sync:
            force(self._directory)
        return nbytes


def _letter(records: Iterator[Record | Damage] | Sequence[Record | Damage], order: int) -> DeadLetter | str:
    """Return the letter at the beginning of a file, or the reason why it is unreadable."""
    first = next(iter(records), None)
    if not isinstance(first, Record) or first.kind != LETTER:
        return "the beginning of the file is damaged"
    try:
        letter = msgspec.msgpack.decode(first.meta, type=DeadLetter)
    except msgspec.MsgspecError as error:
        return f"the letter cannot be decoded: {error}"
    return letter if letter.group.order == order else f"the file has the letter of order {letter.group.order}"


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def _meta(group: StoredGroup) -> GroupMeta:
    return GroupMeta(
        order=group.order,
        header=group.header,
        env=group.env,
        split=group.split,
        run=group.run,
        producer=group.producer,
        session=group.session,
        table=group.table,
        at=group.accepted_wall,
    )
