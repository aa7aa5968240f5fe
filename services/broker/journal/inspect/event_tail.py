"""The tail of the event logs: the events that a live broker commits, each once.

It never writes, and reads only whole records: one under way is read the next time. The broker begins a new log from
time to time and removes old ones. A reader that was too slow, or met damage, goes on with the state at the beginning of
a later log, and says so.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES
from rolloutmq.services.broker.journal.inspect.history import LOGS, commit_of, files
from rolloutmq.services.broker.journal.read.event_log_reader import EVENTS
from rolloutmq.services.broker.journal.read.record_file import RecordFile


class EventTail:
    """Follows the event logs in a directory, from the oldest log on.

    Args:
        directory: The journal; it may not exist yet.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._log: int | None = None
        self._offset = FILE_HEADER_BYTES
        self._whole = False
        self.gaps = 0
        """How often events were missed; the events that follow begin with the state of a later log."""

    def new(self) -> Iterator[tuple[float, AnyEvent]]:
        """Yield the events since the last call, each with the wall clock of its commit.

        The first ones, and those behind a gap, are the records of the state at the beginning of a log.

        Raises:
            RecordVersionError: Another version wrote a file of the journal.
            OSError: A file cannot be read.
        """
        while True:
            paths = files(self._directory, LOGS)
            if self._log is None:
                if not paths:
                    return
                self._begin(next(iter(paths)), whole=True)
            assert self._log is not None
            # Looked up before the log is read: what a log has when the next one is there is all that it will have.
            later = [number for number in paths if number > self._log]
            if self._log in paths:
                yield from self._read(paths[self._log])
            if not later:
                return
            missed = later[0] != self._log + 1 or self._log not in paths or self._is_broken(paths[self._log])
            self.gaps += missed
            self._begin(later[0], whole=missed)

    def _begin(self, log: int, *, whole: bool) -> None:
        """Go on with the beginning of a log; `whole` with its state, which is known otherwise."""
        self._log, self._offset, self._whole = log, FILE_HEADER_BYTES, whole

    def _read(self, path: Path) -> Iterator[tuple[float, AnyEvent]]:
        try:
            file = RecordFile(Disk(), path)
        except FileNotFoundError:
            return
        try:
            while (record := file.record(self._offset)) is not None:
                try:
                    _, commit = commit_of(record)
                except msgspec.MsgspecError:
                    return
                self._offset += record.span
                if self._whole or record.kind == EVENTS:
                    yield from ((commit.at, event) for event in commit.events)
        finally:
            file.close()

    def _is_broken(self, path: Path) -> bool:
        """Return whether a log that is over has more than was read of it."""
        try:
            file = RecordFile(Disk(), path)
        except FileNotFoundError:
            return True
        try:
            return self._offset < file.size and not file.ends(self._offset)
        finally:
            file.close()
