"""A producer's unacked groups on disk, for its next life.

File: magic, u64 length and u32 CRC32C of the index, the index in msgpack, then the frames of all groups in their
order. It is written under another name, synced and renamed, so that it is whole or not there. It stays until a later
life has had every group acked, under the numbers that it names: a producer that is killed in between sends them again
and the broker drops what it has.
"""

import logging
import os
import struct
import time
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.bus.codec import checksum
from rolloutmq.bus.session import Session
from rolloutmq.bus.spool import Entry
from rolloutmq.schemas.envelope import FRAMES_LIMIT, ColumnTable, Count, GroupHeader, Name, Split
from rolloutmq.schemas.errors import MalformedError, UsageError

logger = logging.getLogger(__name__)

MAGIC: Final = b"RMQSPOOL"
_HEAD: Final = struct.Struct("<8sQI")


class _Row(msgspec.Struct, frozen=True, array_like=True):
    header: GroupHeader
    table: ColumnTable
    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=FRAMES_LIMIT)]


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """Whose groups they are, and what the session had come to."""

    producer: Name
    run: Name
    env: Name
    split: Split
    session: Count
    last: Count
    position: Count
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

        A damaged file is kept under another name, for a person to look at.

        Raises:
            UsageError: The groups are another producer's.
        """
        if self._path is None:
            return False
        try:
            self.is_live = _load(self._path, self._session)
        except MalformedError as error:
            aside = self._path.with_name(f"{self._path.name}.damaged-{time.time_ns()}")
            self._path.rename(aside)
            logger.error("saved groups cannot be read error=%s kept_as=%s", error, aside)
        return self.is_live

    def renew(self) -> None:
        """Write the file again if it is there: the session has another number."""
        if self.is_live:
            self._write()

    def leave(self) -> None:
        """Save what is unacked at the end; without a path it is lost, which is said."""
        spool, name = self._session.spool, self._session.register.producer
        if not len(spool):
            self.remove()
            return
        first = next(iter(spool)).header.group_id
        if self._path is None:
            logger.error("unacked groups are lost producer=%s groups=%d first=%s", name, len(spool), first)
            return
        self._write()
        logger.warning("saved unacked groups producer=%s groups=%d file=%s", name, len(spool), self._path)

    def remove(self) -> None:
        """Remove the file if it is there: all its groups are acked."""
        if self.is_live and self._path is not None:
            self._path.unlink(missing_ok=True)
        self.is_live = False

    def _write(self) -> None:
        assert self._path is not None
        _save(self._path, self._session)
        self.is_live = True


def _save(path: Path, session: Session) -> None:
    about, spool = session.register, session.spool
    index = msgspec.msgpack.encode(
        _Index(
            producer=about.producer,
            run=about.run,
            env=about.env,
            split=about.split,
            session=session.number,
            last=spool.last,
            position=spool.position,
            rows=tuple(_Row(e.header, e.table, tuple(_nbytes(f) for f in e.frames)) for e in spool),
        )
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    with written.open("wb") as file:
        file.write(_HEAD.pack(MAGIC, len(index), checksum([index])))
        file.write(index)
        for entry in spool:
            file.writelines(entry.frames)
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)


def _nbytes(frame: Any) -> int:
    return memoryview(frame).nbytes


def _load(path: Path, session: Session) -> bool:
    try:
        data = memoryview(path.read_bytes())
    except FileNotFoundError:
        return False
    index, start = _read_index(path, data)
    about = session.register
    if (index.producer, index.run, index.env, index.split) != (
        about.producer,
        about.run,
        about.env,
        about.split,
    ):
        raise UsageError(
            f"{path} holds groups of producer {index.producer} of {index.env} in run {index.run}"
        )
    entries = []
    for row in index.rows:
        frames: list[Any] = []
        for size in row.sizes:
            frames.append(data[start : start + size])
            start += size
        if start > len(data) or checksum(frames) != row.header.crc:
            raise MalformedError(f"{path}: group {row.header.group_id} is damaged")
        entries.append(Entry(row.header, row.table, tuple(frames)))
    session.number = index.session
    session.spool.restore(entries, index.last, index.position)
    return True


def _read_index(path: Path, data: memoryview) -> tuple[_Index, int]:
    if len(data) < _HEAD.size:
        raise MalformedError(f"{path}: is no saved spool")
    magic, size, crc = _HEAD.unpack_from(data)
    index = data[_HEAD.size : _HEAD.size + size]
    if magic != MAGIC or len(index) != size or checksum([index]) != crc:
        raise MalformedError(f"{path}: is no saved spool, or its index is damaged")
    try:
        return msgspec.msgpack.decode(index, type=_Index), _HEAD.size + size
    except msgspec.MsgspecError as error:
        raise MalformedError(f"{path}: {error}") from None
