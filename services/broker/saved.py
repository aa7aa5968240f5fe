"""What a broker leaves for its next life: `saved.rmq`, the groups that were accepted and not yet trained.

Written when the broker ends in order, read and removed when it starts. A file with damage in it gives what is whole
and is kept under another name, for a person to look at.
"""

import logging
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final, NamedTuple

import msgspec

from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, Split
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.segment import Record, read_segment, write_segment

logger = logging.getLogger(__name__)

GROUP: Final = 1
"""Kind of a record that holds one group."""


class SavedGroup(msgspec.Struct, frozen=True, array_like=True):
    """Meta of such a record; the frames are the group's."""

    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    table: ColumnTable
    accepted_wall: float
    deliveries: int
    failures: int


class Saved(NamedTuple):
    """What was found: the groups in their order, and how many records or stretches could not be read."""

    groups: list[StoredGroup]
    damaged: int


def save(path: Path, groups: Iterable[StoredGroup]) -> int:
    """Write the groups in their order and return how many; without any there is no file."""
    waiting = list(groups)
    if not waiting:
        path.unlink(missing_ok=True)
        return 0
    return write_segment(path, ((GROUP, _meta(group), group.frames) for group in waiting))


def load(path: Path, now: float, wall: float) -> Saved:
    """Read what a former life saved; `now` is this life's monotonic clock, `wall` the clock on the wall."""
    try:
        found = list(read_segment(path))
    except FileNotFoundError:
        return Saved([], damaged=0)
    groups = [_group(item, now, wall) for item in found if isinstance(item, Record)]
    whole = [group for group in groups if group is not None]
    return Saved(whole, damaged=len(found) - len(whole))


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
        len(saved.groups),
        aside,
    )


def _meta(group: StoredGroup) -> bytes:
    return msgspec.msgpack.encode(
        SavedGroup(
            header=group.header,
            env=group.env,
            split=group.split,
            run=group.run,
            producer=group.producer,
            session=group.session,
            table=group.table,
            accepted_wall=group.accepted_wall,
            deliveries=group.deliveries,
            failures=group.failures,
        )
    )


def _group(record: Record, now: float, wall: float) -> StoredGroup | None:
    """Return the group of a record; None if the record is of a kind or form that this version does not know."""
    if record.kind != GROUP:
        return None
    try:
        meta = msgspec.msgpack.decode(record.meta, type=SavedGroup)
    except msgspec.MsgspecError:
        return None
    return StoredGroup(
        header=meta.header,
        env=meta.env,
        split=meta.split,
        run=meta.run,
        producer=meta.producer,
        session=meta.session,
        table=meta.table,
        frames=tuple(bytes(frame) for frame in record.frames),
        accepted_at=now - max(0.0, wall - meta.accepted_wall),
        accepted_wall=meta.accepted_wall,
        deliveries=meta.deliveries,
        failures=meta.failures,
    )
