"""The ack log: a producer's record of its acked groups.

Together with the trainer's log it shows lost and doubly trained groups independently of the broker. A line is written
after the ack and before the ack is reported to the caller, so every line is true. A line may be missing: a producer
killed between ack and line leaves none, and a power cut loses unsynced lines. The file is synced only when it is
closed, because the broker keeps the promise of the ack. When the disk is full, lines wait for room and no group is
lost.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from rolloutmq.bus.files import PRIVATE_DIRECTORY, private_file
from rolloutmq.bus.producer.spool import SpoolEntry
from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.wire.envelope import GroupHeader, Split

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 4096


class AckLog:
    """Appends `AckedGroup` lines to a file; does nothing without a path."""

    def __init__(self, path: Path | None, env: str = "", split: Split = Split.TRAIN) -> None:
        """Open the file for the groups of one environment and split."""
        self._env = env
        self._split = split
        self._file = None
        self._path = path
        self._pending = bytearray()
        self._refused = False
        if path is not None:
            path.parent.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            self._file = private_file(path, "a+b", buffering=0)
            _cut_torn_line(self._file)

    def write(self, entries: Sequence[SpoolEntry], session: int) -> None:
        """Append the groups of one ack, in one write."""
        if self._file is None or not entries:
            return
        at = time.time()
        for entry in entries:
            self._pending += msgspec.json.encode(self._line(entry.header, session, at)) + b"\n"
        self._write_pending(self._file)

    def _line(self, header: GroupHeader, session: int, at: float) -> AckedGroup:
        return AckedGroup(
            group_id=header.group_id,
            session=session,
            seq=header.seq,
            at=at,
            env=self._env,
            split=self._split,
            sequences=header.sequences,
            tokens=header.tokens,
            duration_s=header.finished_at - header.started_at if header.started_at else None,
            reward=header.rewards.mean,
        )

    def _write_pending(self, file: BinaryIO) -> None:
        try:
            while self._pending:
                del self._pending[: file.write(self._pending)]
        except OSError as error:
            if not self._refused:
                logger.error("ack log not written, lines wait file=%s error=%s", self._path, error)
            self._refused = True
        else:
            self._refused = False

    def close(self) -> None:
        """Write the waiting lines, sync and close the file. May be called twice."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            self._write_pending(file)
            if self._pending:
                lines = self._pending.count(b"\n")
                logger.error("ack log lost lines file=%s lines=%d", self._path, lines)
            try:
                os.fsync(file.fileno())
            except OSError as error:
                logger.error("ack log not synced file=%s error=%s", self._path, error)


def _cut_torn_line(file: BinaryIO) -> None:
    """Remove the torn last line of a killed process."""
    end = at = file.seek(0, os.SEEK_END)
    while at > 0:
        start = max(0, at - _BLOCK_BYTES)
        file.seek(start)
        newline = file.read(at - start).rfind(b"\n")
        if newline >= 0:
            at = start + newline + 1
            break
        at = start
    if at < end:
        file.truncate(at)
