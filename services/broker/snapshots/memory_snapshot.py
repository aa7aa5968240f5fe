"""The memory snapshot `saved.rmq`: state and groups of a broker without a journal, for its next life.

It is written when the broker ends in order, and read and removed when it starts: snapshot records like those of an
event log, then one record for each group, named by its order. From a damaged file the whole records are restored, and
the file is kept under another name for people.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.event_buffer import SnapshotRecord
from rolloutmq.services.broker.journal.format.events import Accepted, Event, GroupSnapshot, LedgerSnapshot
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent, decode_events, encode
from rolloutmq.services.broker.journal.format.records import Damage, read_segment, write_segment
from rolloutmq.services.broker.journal.stored_group import Frames, GroupBody

logger = logging.getLogger(__name__)

BODY: Final = 1
"""Kind of a record that holds the frames of one group; its meta is the order."""
STATE: Final = 2
"""Kind of a record that holds snapshot records."""
ITEMS: Final = 1000
"""Snapshot records in one record of the file."""


class MemorySnapshot(NamedTuple):
    """Contents of the file: snapshot records, frames by order, and the number of damaged stretches."""

    events: tuple[AnyEvent, ...] = ()
    frames: dict[int, Frames] = {}
    damaged: int = 0

    def body(self, accepted: Accepted) -> GroupBody:
        """Return the body of a group; without frames it is damaged."""
        return GroupBody(self.frames.get(accepted.order), accepted.header.nbytes)

    def table(self, accepted: Accepted) -> None:
        """Return None: the state names every table."""

    @property
    def ids(self) -> list[str]:
        """Ids of the groups that were not settled, or may be rewound."""
        return [event.accepted.header.group_id for event in self.events if isinstance(event, GroupSnapshot)]


def save(path: Path, snapshot: Iterable[SnapshotRecord]) -> int:
    """Write a state with its groups and return how many groups; a state without any history leaves no file."""
    items: list[Event] = []
    bodies: list[tuple[int, GroupBody]] = []
    for item in snapshot:
        if isinstance(item, tuple):
            group, body = item
            items.append(group)
            bodies.append((group.accepted.order, body))
        else:
            items.append(item)
    if not any(isinstance(item, LedgerSnapshot) and item.accepted for item in items):
        path.unlink(missing_ok=True)
        return 0
    write_segment(path, _records(items, bodies))
    return len(bodies)


def _records(
    items: list[Event], bodies: list[tuple[int, GroupBody]]
) -> Iterator[tuple[int, bytes, Sequence[Any]]]:
    for start in range(0, len(items), ITEMS):
        yield STATE, b"", [encode(items[start : start + ITEMS])]
    for order, body in bodies:
        if body.in_memory:  # one that an earlier file had lost is lost in this one, too
            yield BODY, encode(order), body.frames


def load(path: Path) -> MemorySnapshot:
    """Read the file of the previous life; RecordVersionError if another version wrote it."""
    try:
        found = list(read_segment(path))
    except FileNotFoundError:
        return MemorySnapshot()
    events: list[AnyEvent] = []
    frames: dict[int, Frames] = {}
    damaged = 0
    for record in found:
        try:
            if isinstance(record, Damage):
                damaged += 1
            elif record.kind == STATE:
                events += decode_events(record.frames[0])
            else:
                frames[msgspec.msgpack.decode(record.meta, type=int)] = tuple(map(bytes, record.frames))
        except (msgspec.MsgspecError, IndexError):
            damaged += 1
    return MemorySnapshot(tuple(events), frames, damaged)


def retire(path: Path, saved: MemorySnapshot) -> None:
    """Remove the file after its groups were restored, or keep it under another name if it is damaged."""
    if not saved.damaged:
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    logger.error(
        "saved state damaged file=%s stretches=%d groups_read=%d kept_as=%s",
        path,
        saved.damaged,
        len(saved.frames),
        aside,
    )
