"""What a broker leaves for its next life: `saved.rmq`, the groups that were accepted and not yet trained for good.

First the batches that were settled and that no checkpoint covers: where their trainer died too, it comes back at its
last checkpoint and they come again. Then the groups that wait.

Written when the broker ends in order, read and removed when it starts. A file with damage in it gives what is whole
and is kept under another name, for a person to look at.
"""

import logging
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, PolicyVersion, Split
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.ledger import State
from rolloutmq.services.broker.retained import Kept
from rolloutmq.services.broker.segment import Damage, Record, read_segment, write_segment

logger = logging.getLogger(__name__)

GROUP: Final = 1
"""Kind of a record that holds one group."""
KEPT: Final = 2
"""Kind of a record that holds one group of a settled batch."""

KeptBatch = tuple[str, Kept]
"""A settled batch, and the consumer group whose checkpoint it waits for."""


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


class SavedMember(msgspec.Struct, frozen=True, array_like=True):
    """Meta of a record of kind KEPT. Those of one batch have its number and follow one another."""

    batch: int
    consumers: str
    version: PolicyVersion
    stepped: bool
    short: bool
    shards: int
    shard: int
    state: State
    group: SavedGroup


_FORMS: Final[dict[int, type[SavedGroup | SavedMember]]] = {GROUP: SavedGroup, KEPT: SavedMember}


class Saved(NamedTuple):
    """What was found: groups and batches in their order, and how many records or stretches could not be read."""

    groups: list[StoredGroup]
    kept: list[KeptBatch]
    damaged: int


def save(path: Path, groups: Iterable[StoredGroup], kept: Iterable[KeptBatch] = ()) -> int:
    """Write batches and groups in their order and return how many groups; without any there is no file."""
    records = [record for number, batch in enumerate(kept) for record in _records(number, *batch)]
    records += [(GROUP, msgspec.msgpack.encode(_meta(group)), group.frames) for group in groups]
    if not records:
        path.unlink(missing_ok=True)
        return 0
    return write_segment(path, records)


def load(path: Path, now: float, wall: float) -> Saved:
    """Read what a former life saved; `now` is this life's monotonic clock, `wall` the clock on the wall."""
    try:
        found = list(read_segment(path))
    except FileNotFoundError:
        return Saved([], [], damaged=0)
    groups: list[StoredGroup] = []
    members: list[tuple[SavedMember, StoredGroup]] = []
    for record in found:
        if isinstance(record, Damage):
            continue
        match _meta_of(record):
            case SavedGroup() as meta:
                groups.append(_group(meta, record, now, wall))
            case SavedMember() as meta:
                members.append((meta, _group(meta.group, record, now, wall)))
    batches = groupby(members, key=lambda member: member[0].batch)
    kept = [_batch(list(batch)) for _, batch in batches]
    return Saved(groups, kept, damaged=len(found) - len(groups) - len(members))


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


def _meta(group: StoredGroup) -> SavedGroup:
    return SavedGroup(
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


def _records(number: int, consumers: str, batch: Kept) -> Iterator[tuple[int, bytes, Sequence[Any]]]:
    for shard, (groups, states) in enumerate(zip(batch.shards, batch.states, strict=True)):
        for group, state in zip(groups, states, strict=True):
            meta = SavedMember(
                batch=number,
                consumers=consumers,
                version=batch.version,
                stepped=batch.stepped,
                short=batch.short,
                shards=len(batch.shards),
                shard=shard,
                state=state,
                group=_meta(group),
            )
            yield KEPT, msgspec.msgpack.encode(meta), group.frames


def _batch(members: Sequence[tuple[SavedMember, StoredGroup]]) -> KeptBatch:
    first, group = members[0]
    batch = Kept(
        version=first.version,
        stepped=first.stepped,
        split=group.split,
        shards=[[] for _ in range(first.shards)],
        states=[[] for _ in range(first.shards)],
        short=first.short,
    )
    for member, stored in members:
        batch.shards[member.shard].append(stored)
        batch.states[member.shard].append(member.state)
    return first.consumers, batch


def _meta_of(record: Record) -> SavedGroup | SavedMember | None:
    """Return what a record says; None if it is of a kind or form that this version does not know."""
    if record.kind not in _FORMS:
        return None
    try:
        return msgspec.msgpack.decode(record.meta, type=_FORMS[record.kind])
    except msgspec.MsgspecError:
        return None


def _group(meta: SavedGroup, record: Record, now: float, wall: float) -> StoredGroup:
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
