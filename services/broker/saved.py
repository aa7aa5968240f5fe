"""What a broker without a journal leaves for its next life: `saved.rmq`, its state and its groups.

Written when the broker ends in order, read and removed when it starts: a snapshot as a journal begins with, then one
record for each group, named by its order. A file with damage in it gives what is whole and is kept under another name,
for a person to look at.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.services.broker.journal.body import Body, Frames
from rolloutmq.services.broker.journal.facts import Accepted, Fact, GroupItem
from rolloutmq.services.broker.journal.packing import AnyFact, decode_facts, encode
from rolloutmq.services.broker.journal.segment import Damage, read_segment, write_segment
from rolloutmq.services.broker.log import SnapshotItem

logger = logging.getLogger(__name__)

BODY: Final = 1
"""Kind of a record that holds the frames of one group; its meta is the order."""
STATE: Final = 2
"""Kind of a record that holds items of the snapshot."""
ITEMS: Final = 1000
"""Items of one record."""


class Saved(NamedTuple):
    """What was found: the items, frames by order, and how many stretches of the file could not be read."""

    facts: tuple[AnyFact, ...] = ()
    frames: dict[int, Frames] = {}
    damaged: int = 0

    def body(self, accepted: Accepted) -> Body:
        """Return the frames of a group; without them it is damaged."""
        return Body(self.frames.get(accepted.order), accepted.header.nbytes)

    def table(self, accepted: Accepted) -> None:
        """Return nothing: a table that the state does not name is lost."""

    @property
    def ids(self) -> list[str]:
        """Ids of the groups that were not yet settled, or may come again."""
        return [fact.accepted.header.group_id for fact in self.facts if isinstance(fact, GroupItem)]


def save(path: Path, snapshot: Iterable[SnapshotItem]) -> int:
    """Write a state with its groups and return how many groups; without any there is no file."""
    items: list[Fact] = []
    bodies: list[tuple[int, Body]] = []
    for item in snapshot:
        if isinstance(item, tuple):
            group, body = item
            items.append(group)
            bodies.append((group.accepted.order, body))
        else:
            items.append(item)
    if not bodies:
        path.unlink(missing_ok=True)
        return 0
    write_segment(path, _records(items, bodies))
    return len(bodies)


def _records(items: list[Fact], bodies: list[tuple[int, Body]]) -> Iterator[tuple[int, bytes, Sequence[Any]]]:
    for start in range(0, len(items), ITEMS):
        yield STATE, b"", [encode(items[start : start + ITEMS])]
    for order, body in bodies:
        yield BODY, encode(order), body.frames


def load(path: Path) -> Saved:
    """Read what a former life saved."""
    try:
        found = list(read_segment(path))
    except FileNotFoundError:
        return Saved()
    facts: list[AnyFact] = []
    frames: dict[int, Frames] = {}
    damaged = 0
    for record in found:
        try:
            if isinstance(record, Damage):
                damaged += 1
            elif record.kind == STATE:
                facts += decode_facts(record.frames[0])
            else:
                frames[msgspec.msgpack.decode(record.meta, type=int)] = tuple(map(bytes, record.frames))
        except (msgspec.MsgspecError, IndexError):
            damaged += 1
    return Saved(tuple(facts), frames, damaged)


def retire(path: Path, saved: Saved) -> None:
    """Put the file away, now that its groups are in the queue again: remove it, or keep it aside if damaged."""
    if not saved.damaged:
        path.unlink(missing_ok=True)
        return
    aside = path.with_name(f"{path.name}.damaged-{time.time_ns()}")
    path.rename(aside)
    logger.error(
        "damaged file=%s stretches=%d groups_read=%d kept_as=%s",
        path,
        saved.damaged,
        len(saved.frames),
        aside,
    )
