"""The files of a curriculum: a snapshot of its state, and a log of the events since.

    curriculum/NAME.state    `CurriculumState`, msgpack, replaced atomically
    curriculum/NAME.log      one event a line, JSON, appended before it takes effect outside

An event is in the log before its tasks are submitted, and before its outcome is forgotten: so a kill at any point loses
nothing. It is in the log only after it was applied: an event that the sampler cannot hear is on no file, so no later
life meets it there. A torn last line is an event without effect, and is cut off. After enough events a new snapshot
replaces the old one and the log begins anew; a kill between the two leaves events that are in the snapshot already, and
these are skipped. Nothing is synced: a power cut may lose the last seconds, and then the tasks drawn in them are
answered without an outcome.

A curriculum that was configured anew leaves the files as they are until its caller has cancelled the open tasks in
them: killed before, it finds these tasks again.
"""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import PRIVATE_DIRECTORY, append_whole, decode_json, read_regular, write_private
from rolloutmq.schemas.errors import DamagedFileError, UnusablePathError
from rolloutmq.services.curriculum.core import Curriculum, CurriculumState, Event

logger = logging.getLogger(__name__)

SNAPSHOT_BYTES: Final = 1 << 20
"""Least length of a log that is replaced by a snapshot."""
GROWTH: Final = 2
"""A log is replaced once it is so many times as long as the snapshot: the cost of an event stays bounded."""


class EventLog:
    """State and log of one curriculum. One process writes them; blocks while it does.

    Args:
        directory: Directory of the files; made if missing.
        curriculum: The curriculum, as new; `load` brings it up to date.
        snapshot_bytes: Least length of a log that is replaced by a snapshot.
    """

    def __init__(self, directory: Path, curriculum: Curriculum, snapshot_bytes: int = SNAPSHOT_BYTES) -> None:
        directory.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
        name = curriculum.identity.env
        self._snapshot = directory / f"{name}.state"
        self._log = directory / f"{name}.log"
        self._curriculum = curriculum
        self._least = snapshot_bytes
        self._state_bytes = 0
        self._log_bytes = 0

    def load(self) -> list[str]:
        """Continue the state on file, or begin one.

        Returns:
            Ids of the open tasks of a curriculum that was configured otherwise. If there are any, the files still have
            that one: cancel the tasks, then call `begin` before the first event.

        Raises:
            DamagedFileError: A file does not decode, or contradicts the other.
            ConfigError: The sampler of another package raised.
            UnusablePathError: A file cannot be written.
        """
        found = self._read_snapshot()
        if found is None:
            self.begin()
            return []
        if difference := found.identity.difference(self._curriculum.identity):
            logger.warning(
                "curriculum configured anew, it forgets all outcomes env=%s outcomes=%d change=%s",
                found.identity.env,
                found.figures.outcomes,
                difference,
            )
            left = self._left_open(found)
            if not left:
                self.begin()
            return left
        try:
            self._curriculum.restore(found, self._events())
        except (ValueError, IndexError, msgspec.DecodeError) as error:
            raise DamagedFileError(str(self._snapshot), 1, str(error)) from None
        self.begin()
        return []

    def append(self, event: Event) -> None:
        """Apply an event, then log it.

        After an error the curriculum in memory and that on file differ: the caller ends, and begins from the files.

        Raises:
            ConfigError: The sampler of another package raised; the event is on no file.
            UnusablePathError: The log cannot be written, for example because the disk is full; it is as before.
        """
        line = msgspec.json.encode(event) + b"\n"
        self._curriculum.apply(event)
        with _usable(self._log):
            append_whole(self._log, line)
        self._log_bytes += len(line)
        if self._log_bytes >= max(self._least, GROWTH * self._state_bytes):
            self.begin()

    def begin(self) -> None:
        """Write a snapshot, then an empty log. UnusablePathError: One of them cannot be written."""
        data = msgspec.msgpack.encode(self._curriculum.state())
        for path, content in ((self._snapshot, data), (self._log, b"")):
            written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
            with _usable(path):
                try:
                    write_private(written, content)
                    written.replace(path)
                finally:
                    written.unlink(missing_ok=True)
        self._state_bytes, self._log_bytes = len(data), 0

    def _read_snapshot(self) -> CurriculumState | None:
        try:
            data = read_regular(self._snapshot)
        except FileNotFoundError:
            return None
        try:
            return msgspec.msgpack.decode(data, type=CurriculumState)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise DamagedFileError(str(self._snapshot), 1, str(error)) from None

    def _events(self) -> Iterator[Event]:
        """Yield the events of the log; a torn last line is none."""
        try:
            data = read_regular(self._log)
        except FileNotFoundError:
            return
        lines = data.split(b"\n")
        for number, line in enumerate(lines[:-1], 1):
            try:
                yield decode_json(line, Event)  # type: ignore[arg-type] # a union is a type for msgspec
            except msgspec.DecodeError as error:
                raise DamagedFileError(str(self._log), number, str(error)) from None

    def _left_open(self, state: CurriculumState) -> list[str]:
        """Return the open tasks of a state and the events after it, without its sampler."""
        left = dict(state.open)
        for event in self._events():
            if event.number > state.events:
                left |= getattr(event, "tasks", {})
                left.pop(getattr(event, "id", ""), None)
        return list(left)


@contextmanager
def _usable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UnusablePathError(f"state of the curriculum {path}", error.strerror or str(error)) from error
