"""The file in which a producer writes down, group by group, what the broker accepted from it.

It is the producer's own witness: with the trainer's log it shows what was lost or trained twice, without asking the
broker. A line is written, and is with the operating system, before anybody hears of the ack; it never precedes the
ack. So every line is true. A line may be missing: a producer that is killed between ack and line leaves none, and a
power cut takes those that were not synced; lines are synced when the file is closed, and no sooner, since what the ack
promises is the broker's to keep. A disk that is full costs no group: the lines wait for room.
"""

import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO, Final

import msgspec

from rolloutmq.bus.spool import Entry
from rolloutmq.schemas.envelope import GroupHeader, Split
from rolloutmq.schemas.records import AckedGroup

logger = logging.getLogger(__name__)

_BLOCK_BYTES: Final = 4096


class AckLog:
    """Appends `AckedGroup` lines to a file, or does nothing where there is no path."""

    def __init__(self, path: Path | None, env: str = "", split: Split = Split.TRAIN) -> None:
        """Open the file; all groups are of one environment and split."""
        self._env = env
        self._split = split
        self._file = None
        self._path = path
        self._pending = bytearray()
        self._refused = False
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b", buffering=0)
            _cut_torn_line(self._file)

    def write(self, entries: Sequence[Entry], session: int) -> None:
        """Write down groups that were acked just now, in one write."""
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
                logger.error("acks cannot be written down, they wait file=%s error=%s", self._path, error)
            self._refused = True
        else:
            self._refused = False

    def close(self) -> None:
        """Write what waits, sync and close the file. May be called twice."""
        if self._file is None:
            return
        file, self._file = self._file, None
        with file:
            self._write_pending(file)
            if self._pending:
                lines = self._pending.count(b"\n")
                logger.error("acks were not written down file=%s lines=%d", self._path, lines)
            try:
                os.fsync(file.fileno())
            except OSError as error:
                logger.error("written acks may not survive a power cut file=%s error=%s", self._path, error)


def _cut_torn_line(file: BinaryIO) -> None:
    """Remove what an earlier life wrote of a last line before it was killed."""
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
