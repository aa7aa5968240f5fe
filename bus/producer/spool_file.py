"""The spool file: a producer's unacked groups on disk, for its next process.

Format: magic, u32 version, u64 length of the index, u32 CRC32C of version, length and index, the index in msgpack, then
the frames of all groups in order. Every version starts with the same header, so a file of another version differs from
a damaged one; it is refused and left unchanged. A file is written under a temporary name, synced and renamed: it is
whole or absent. It stays until the next process has every group acked under the sequence numbers in the file. If that
process is killed, the groups are sent again and the broker drops duplicates.

The next process of the same producer loads the file. `bus.producer.resend` sends the files of names that have no next
process. A damaged file is renamed for inspection; its intact groups are still loaded.
"""

import logging
import os
import struct
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.bus.files import (
    PRIVATE_DIRECTORY,
    force,
    open_regular,
    private_file,
    read_regular,
    write_private,
)
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import SpoolEntry
from rolloutmq.schemas.errors import MalformedError, RecordVersionError, UnackedError, UsageError
from rolloutmq.schemas.wire.envelope import FRAMES_LIMIT, ColumnTable, Count, GroupHeader
from rolloutmq.schemas.wire.requests import RegisterProducer

logger = logging.getLogger(__name__)

MAGIC: Final = b"RMQSAVED"
VERSION: Final = 3
DAMAGED: Final = ".damaged-"
"""Part of the name of a damaged file."""
SET_ASIDE: Final = ".session-"
"""Part of the name of a file of a fenced session, before its number."""
CLOSED: Final = "the producer closed"
"""Default reason for which groups are not acked."""
TEMPORARY: Final = ".tmp"
"""Suffix of an unfinished file."""
REMEDY: Final = "send its groups with the RolloutMQ that wrote it, or move the file away"
_HEAD: Final = struct.Struct("<8sIQI")
_COVERED: Final = struct.Struct("<IQ")
_V1_MAGIC: Final = b"RMQSPOOL"
_V1_VERSION: Final = 1
_V1_HEAD: Final = struct.Struct("<8sQI")
"""Version 1 had another magic and no version field: magic, length and CRC32C of the index."""


class _Row(msgspec.Struct, frozen=True, array_like=True):
    header: GroupHeader
    table: ColumnTable
    sizes: Annotated[tuple[Count, ...], Meta(min_length=1, max_length=FRAMES_LIMIT)]


class _Index(msgspec.Struct, frozen=True, array_like=True):
    """Producer and session state of the saved groups. Open permits count as abandoned."""

    register: RegisterProducer
    session: Count
    last: Count
    position: Count
    abandoned: Count
    rows: tuple[_Row, ...]


class SpoolFile:
    """The spool file of one session; without a path nothing is saved. Writing blocks."""

    def __init__(self, path: Path | None, session: SessionState) -> None:
        self._path = path
        self._session = session
        self.is_live = False
        """The file exists and has unacked groups of this session."""

    def load(self) -> bool:
        """Load the groups into the spool of a session before its registration; False if there are none.

        Raises:
            UsageError: The groups belong to another producer.
            RecordVersionError: Another version wrote the file; it is unchanged.
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
            write_private(aside, read_regular(path))
            self._write()
        else:
            path.rename(aside)
        whole = len(self._session.spool)
        logger.error(
            "spool file damaged groups=%d first=%s whole=%d kept_as=%s",
            len(damaged),
            damaged[0],
            whole,
            aside,
        )

    def renew(self) -> None:
        """Rewrite an existing file for the new number of the session.

        If that fails, the old file stays, and the next process sends the groups under the old number.
        """
        try:
            if self.is_live:
                self._write()
        except OSError as error:
            logger.warning("spool file not renewed, old session kept file=%s error=%s", self._path, error)

    def leave(self, why: str = CLOSED) -> None:
        """Save the unacked groups at the end.

        Args:
            why: Reason for which they are not acked.

        Raises:
            UnackedError: There is no path, or they could not be written. The file of an earlier process still exists.
        """
        if len(self._session.spool):
            self._save(self._path, why)
        else:
            self.remove()

    def set_aside(self, why: str = CLOSED) -> None:
        """Save the unacked groups of a failed session under its number, because a newer session may own the path.

        Raises:
            UnackedError: There is no path, or they could not be written.
        """
        if len(self._session.spool) and not self.is_live:
            path = self._path
            self._save(path and path.with_name(f"{path.name}{SET_ASIDE}{self._session.number}"), why)

    def _save(self, path: Path | None, why: str) -> None:
        if path is None:
            raise self._unacked(why)
        try:
            _save(path, self._session)
        except OSError as error:
            raise self._unacked(f"{why}, and {path} could not be written: {error}") from error
        name, groups = self._session.register.producer, len(self._session.spool)
        logger.warning("unacked groups saved producer=%s groups=%d file=%s", name, groups, path)

    def _unacked(self, why: str) -> UnackedError:
        ids = [entry.header.group_id for entry in self._session.spool]
        return UnackedError(self._session.register.producer, ids, why)

    def remove(self) -> None:
        """Remove the file, if it exists: all its groups are acked."""
        if self.is_live and self._path is not None:
            self._path.unlink(missing_ok=True)
        self.is_live = False

    def _write(self) -> None:
        assert self._path is not None
        _save(self._path, self._session)
        self.is_live = True


def keep_aside(path: Path, error: Exception) -> None:
    """Rename an unreadable file for inspection."""
    aside = _aside(path)
    path.rename(aside)
    logger.error("spool file unreadable error=%s kept_as=%s", error, aside)


def _aside(path: Path) -> Path:
    return path.with_name(f"{path.name}{DAMAGED}{time.time_ns()}")


def _save(path: Path, session: SessionState) -> None:
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
    path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
    written = path.with_name(f"{path.name}.{os.getpid()}{TEMPORARY}")
    try:
        with private_file(written, "wb") as file:
            file.write(_HEAD.pack(MAGIC, VERSION, len(index), _index_crc(VERSION, index)))
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
    """Return the registration in a spool file.

    Raises:
        MalformedError: It is not a spool file, or it is damaged.
        RecordVersionError: Another version wrote it.
    """
    with open_regular(path) as file:
        head = file.read(_HEAD.size)
        if len(head) < _HEAD.size or not head.startswith(MAGIC):
            return _read_index(path, memoryview(head + file.read()))[0].register
        size = _HEAD.unpack(head)[2]
        there = os.fstat(file.fileno()).st_size - _HEAD.size
        return _read_index(path, memoryview(head + file.read(min(size, there))))[0].register


def require_own_spools(directory: Path) -> None:
    """Refuse a directory with a spool file of another version; damaged files are left to their reader.

    Raises:
        RecordVersionError: The first file of another version.
    """
    for path in spool_files(directory):
        with suppress(MalformedError, OSError):
            owner(path)


def spool_files(directory: Path) -> list[Path]:
    """Return the files of a directory that producers saved, without unfinished and damaged ones."""
    if not directory.is_dir():
        return []
    found = sorted(path for path in directory.iterdir() if path.is_file())
    return [path for path in found if not path.name.endswith(TEMPORARY) and DAMAGED not in path.name]


def _load(path: Path, session: SessionState) -> list[str]:
    """Load the intact groups into the spool; return the ids of the damaged ones."""
    data = memoryview(read_regular(path))
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
            entries.append(SpoolEntry(row.header, row.table, tuple(frames)))
    if entries:
        session.belongs_to(index.register.run_id)
        session.number = index.session
        session.spool.restore(entries, index.last, index.position)
        session.credit.restore(index.last, index.abandoned)
    return damaged


def _require_own(path: Path, saved: RegisterProducer, own: RegisterProducer) -> None:
    if (saved.producer, saved.run, saved.env, saved.split) != (own.producer, own.run, own.env, own.split):
        raise UsageError(
            f"{path}: holds groups of another producer (got producer {saved.producer} of {saved.env} in run "
            f"{saved.run}); open it under that name, or use another file"
        )


def _read_index(path: Path, data: memoryview) -> tuple[_Index, int]:
    if len(data) < _HEAD.size:
        raise MalformedError(f"{path}: not a spool file (got {len(data)} bytes)")
    magic, version, size, crc = _HEAD.unpack_from(data)
    index = data[_HEAD.size : _HEAD.size + size]
    if magic == _V1_MAGIC and _is_v1(data):
        raise RecordVersionError(str(path), _V1_VERSION, VERSION, REMEDY)
    if magic != MAGIC or len(index) != size or _index_crc(version, index) != crc:
        raise MalformedError(f"{path}: not a spool file, or its index is damaged")
    if version != VERSION:
        raise RecordVersionError(str(path), version, VERSION, REMEDY)
    try:
        return msgspec.msgpack.decode(index, type=_Index), _HEAD.size + size
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise MalformedError(f"{path}: {error}") from None


def _is_v1(data: memoryview) -> bool:
    """Return whether the file has an intact index of version 1."""
    _, size, crc = _V1_HEAD.unpack_from(data)
    index = data[_V1_HEAD.size : _V1_HEAD.size + size]
    return len(index) == int(size) and checksum([index]) == int(crc)


def _index_crc(version: int, index: bytes | memoryview) -> int:
    return checksum([_COVERED.pack(version, len(index)), index])
