"""The event log reader: snapshot, events and damage of one log. See `write.event_log` for the format."""

from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.format.events import Began
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_events
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, Damage, Record
from rolloutmq.services.broker.journal.read.record_file import RecordFile
from rolloutmq.services.broker.journal.read.segments import is_numbered

SNAPSHOT: Final = 2

EVENTS: Final = 3


_meta: Final = msgspec.msgpack.Decoder(tuple[float, int])


def log_path(directory: Path, number: int) -> Path:
    return directory / f"events-{number:08d}.rmq"


class EventLogContents(NamedTuple):
    """Readable contents of one event log."""

    number: int
    segment: int
    """Number of the segment being written when the log began, 0 if unknown."""
    snapshot: list[AnyEvent]
    events: list[AnyEvent]
    whole: bool
    """The snapshot is complete."""
    damage: list[Damage]
    end: int
    """Where the last whole record ends."""

    @property
    def items(self) -> list[AnyEvent]:
        return self.snapshot + self.events

    @property
    def lives(self) -> list[AnyEvent]:
        """The `Began` records of the snapshot: they hold without the rest of it."""
        return [item for item in self.snapshot if isinstance(item, Began)]


def read_log(number: int, file: RecordFile, *, last: bool) -> EventLogContents:
    """Read a log; a torn end of the last log is where the writing stopped, and no damage."""
    if not is_numbered(file.nonce, number):
        whole_file = Damage(0, file.size, torn=False)
        return EventLogContents(number, 0, [], [], whole=False, damage=[whole_file], end=0)
    assert file.nonce is not None
    reader = _Reader()
    for found in file.scan(FILE_HEADER_BYTES):
        if isinstance(found, Record):
            reader.take(found)
        elif not (found.torn and last):
            reader.damage.append(found)
    segment = int.from_bytes(file.nonce[4:], "little")
    return EventLogContents(
        number, segment, reader.snapshot, reader.events, reader.whole, reader.damage, reader.end
    )


class _Reader:
    """Sorts the records of a log."""

    def __init__(self) -> None:
        self.snapshot: list[AnyEvent] = []
        self.events: list[AnyEvent] = []
        self.whole = False
        self.damage: list[Damage] = []
        self.end = 0
        self._count = 0

    def take(self, record: Record) -> None:
        try:
            _, number = _meta.decode(record.meta)
            items = decode_events(b"".join(record.frames))
        except msgspec.MsgspecError:
            self.damage.append(Damage(record.offset, record.span, torn=False))
            return
        if record.kind == EVENTS and number == self._count and not self.events:
            self.whole = self.whole or not self.damage
        (self.snapshot if record.kind == SNAPSHOT else self.events).extend(items)
        self._count += 1
        self.end = record.offset + record.span
