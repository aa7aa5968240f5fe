"""The file in which a producer writes down, group by group, what the broker accepted from it.

It is the producer's own witness: with the trainer's log it shows what was lost or trained twice, without asking the
broker. A line is written, and is with the operating system, before anybody hears of the ack.
"""

import time
from collections.abc import Sequence
from pathlib import Path

import msgspec

from rolloutmq.bus.spool import Entry
from rolloutmq.schemas.records import AckedGroup


class AckLog:
    """Appends `AckedGroup` lines to a file, or does nothing where there is no path."""

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("ab", buffering=0)

    def write(self, entries: Sequence[Entry], session: int) -> None:
        """Write down groups that were acked just now, in one write."""
        if self._file is None or not entries:
            return
        at = time.time()
        lines = []
        for entry in entries:
            header = entry.header
            lines.append(
                msgspec.json.encode(
                    AckedGroup(group_id=header.group_id, session=session, seq=header.seq, at=at)
                )
            )
        self._file.write(b"\n".join([*lines, b""]))

    def close(self) -> None:
        """Close the file. May be called twice."""
        if self._file is not None:
            self._file.close()
