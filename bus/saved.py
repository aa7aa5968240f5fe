"""A producer's unacked groups on disk, for its next life.

File: magic, u64 length and u32 CRC32C of the index, the index in msgpack, then the frames of all groups in their
order. It is written under another name, synced and renamed, so that it is whole or not there. It stays until a later
life has had every group acked, under the numbers that it names: a producer that is killed in between sends them again
and the broker drops what it has.

The next life of the producer loads it by itself; for a name that will have none there is `bus.resend`. A file that
was damaged on disk is kept aside for a person, and what is whole of it is loaded all the same.
"""

import logging
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.bus.codec import checksum
from rolloutmq.bus.durability import force
from rolloutmq.bus.session import Session
from rolloutmq.bus.spool import Entry
from rolloutmq.schemas.delivery import RegisterProducer
from rolloutmq.schemas.envelope import FRAMES_LIMIT, ColumnTable, Count, GroupHeader
from rolloutmq.schemas.errors import MalformedError, UsageError

logger = logging.getLogger(__name__)

MAGIC: Final = b"RMQSPOOL"
DAMAGED: Final = ".damaged-"
"""In the name of a file that was kept aside."""
TEMPORARY: Final = ".tmp"
"""End of the name of a file that is being written."""
_HEAD: Final = struct.Struct("<8sQI")


class _Row(msgspec.Struct, frozen=True, array_like=True):
    header: GroupHeader
    table: ColumnTable
    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=FRAMES_LIMIT)]


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """Whose groups they are, and what the session had come to. What it had in hand counts as abandoned."""

    register: RegisterProducer
    session: Count
    last: Count
    position: Count
    abandoned: Count
    rows: tuple[_Row, ...]


class SpoolFile:
    """The file of one session, or none if there is no path for it. Blocks while it writes."""

    def __init__(self, path: Path | None, session: Session) -> None:
        self._path = path
        self._session = session
        self.is_live = False
        """The file is there, and holds unacked groups of this session."""

    def load(self) -> bool:
        """Fill the spool of a session that was not registered yet; False if nothing was left for it.

        Raises:
            UsageError: The groups are another producer's.
        """
        if self._path is None:
            return False
        try:
            damaged = _load(self._path, self._session)
        except FileNotFoundError:
            return False
        except MalformedError as error:
            keep_aside(self._path, error)
            return False
        self.is_live = len(self._session.spool) > 0
        if damaged:
            self._keep_what_is_whole(self._path, damaged)
        return self.is_live

    def _keep_what_is_whole(self, path: Path, damaged: list[str]) -> None:
        aside = _aside(path)
        if self.is_live:
            shutil.copyfile(path, aside)
            self._write()
        else:
            path.rename(aside)
        whole = len(self._session.spool)
        logger.error(
            "saved groups are damaged groups=%d first=%s whole=%d kept_as=%s",
            len(damaged),
            damaged[0],
            whole,
            aside,
        )

    def renew(self) -> None:
        """Write the file again if it is there: the session has another number.

        If that fails the old file stays, under whose number a next life would send the groups.
        """
        try:
            if self.is_live:
                self._write()
        except OSError as error:
            logger.warning("saved groups keep their old session file=%s error=%s", self._path, error)

    def leave(self) -> None:
        """Save what is unacked at the end; without a path it is lost, which is said.

        Raises:
            OSError: It could not be written, and is lost; the file of an earlier life is still there.
        """
        if len(self._session.spool):
            self._save(self._path)
        else:
            self.remove()

    def set_aside(self) -> None:
        """Save what is unacked of a session that came to a bad end under its own number: another may have the path.

        Raises:
            OSError: It could not be written, and is lost.
        """
        if len(self._session.spool) and not self.is_live:
            path = self._path
            self._save(path and path.with_name(f"{path.name}.session-{self._session.number}"))

    def _save(self, path: Path | None) -> None:
        if path is None:
            self._say_lost()
            return
        try:
            _save(path, self._session)
        except OSError:
            self._say_lost()
            raise
        name, groups = self._session.register.producer, len(self._session.spool)
        logger.warning("saved unacked groups producer=%s groups=%d file=%s", name, groups, path)

    def _say_lost(self) -> None:
        spool, name = self._session.spool, self._session.register.producer
        first = next(iter(spool)).header.group_id
        logger.error("unacked groups are lost producer=%s groups=%d first=%s", name, len(spool), first)

    def remove(self) -> None:
        """Remove the file if it is there: all its groups are acked."""
        if self.is_live and self._path is not None:
            self._path.unlink(missing_ok=True)
        self.is_live = False

    def _write(self) -> None:
        assert self._path is not None
        _save(self._path, self._session)
        self.is_live = True


def keep_aside(path: Path, error: Exception) -> None:
    """Give a file that cannot be read another name, for a person to look at."""
    aside = _aside(path)
    path.rename(aside)
    logger.error("saved groups cannot be read error=%s kept_as=%s", error, aside)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{DAMAGED}{time.time_ns()}")


def _save(path: Path, session: Session) -> None:
    spool = session.spool
    index = msgspec.msgpack.encode(
        _Index(
            register=session.register,
            session=session.number,
            last=spool.last,
            position=spool.position,
            abandoned=session.credit.abandoned + session.credit.in_hand,
            rows=tuple(_Row(e.header, e.table, tuple(_nbytes(f) for f in e.frames)) for e in spool),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with written.open("wb") as file:
            file.write(_HEAD.pack(MAGIC, len(index), checksum([index])))
            file.write(index)
            for entry in spool:
                file.writelines(entry.frames)
            file.flush()
            os.fsync(file.fileno())
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
    force(path.parent)


def _nbytes(frame: Any) -> int:
    return memoryview(frame).nbytes


def owner(path: Path) -> RegisterProducer:
    """Return whose groups a file holds.

    Raises:
        MalformedError: It is no saved spool, or damaged.
    """
    return _read_index(path, memoryview(path.read_bytes()))[0].register


def _load(path: Path, session: Session) -> list[str]:
    """Fill the spool with what is whole; return the ids of the groups that are not."""
    data = memoryview(path.read_bytes())
    index, start = _read_index(path, data)
    _require_own(path, index.register, session.register)
    entries, damaged = [], []
    for row in index.rows:
        frames: list[Any] = []
        for size in row.sizes:
            frames.append(data[start : start + size])
            start += size
        if start > len(data) or checksum(frames) != row.header.crc:
            damaged.append(row.header.group_id)
        else:
            entries.append(Entry(row.header, row.table, tuple(frames)))
    if entries:
        session.number = index.session
        session.spool.restore(entries, index.last, index.position)
        session.credit.restore(index.last, index.abandoned)
    return damaged


def _require_own(path: Path, saved: RegisterProducer, own: RegisterProducer) -> None:
    if (saved.producer, saved.run, saved.env, saved.split) != (own.producer, own.run, own.env, own.split):
        raise UsageError(
            f"{path} holds groups of producer {saved.producer} of {saved.env} in run {saved.run}"
        )


def _read_index(path: Path, data: memoryview) -> tuple[_Index, int]:
    if len(data) < _HEAD.size:
        raise MalformedError(f"{path}: is no saved spool")
    magic, size, crc = _HEAD.unpack_from(data)
    index = data[_HEAD.size : _HEAD.size + size]
    if magic != MAGIC or len(index) != size or checksum([index]) != crc:
        raise MalformedError(f"{path}: is no saved spool, or its index is damaged")
    try:
        return msgspec.msgpack.decode(index, type=_Index), _HEAD.size + size
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedError(f"{path}: {error}") from None
