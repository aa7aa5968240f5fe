"""Deliveries: a shard as the parts of a `Batch` reply, with its frames or with the addresses of its groups."""

from collections.abc import Iterable
from typing import Any

import msgspec

from rolloutmq.bus.encoding.codec import encode_tables
from rolloutmq.schemas.wire.envelope import ArenaRef, ColumnTable
from rolloutmq.schemas.wire.replies import Delivery
from rolloutmq.services.broker.flow.arenas import ArenaSlot
from rolloutmq.services.broker.journal.stored_group import StoredGroup


class GroupDeliveries(msgspec.Struct, frozen=True):
    """The parts of a `Batch` reply about groups, and the frames that follow it."""

    groups: tuple[Delivery, ...]
    tables: msgspec.Raw
    arenas: tuple[ArenaRef, ...]
    frames: tuple[Any, ...]


def deliveries(groups: Iterable[StoredGroup], *, in_place: bool) -> GroupDeliveries:
    """Describe groups with loaded bodies; `in_place` allows addresses in shared memory.

    Frames leave after this call, when a slot may already be another group's: they are copied out of arenas.
    """
    listed: list[Delivery] = []
    tables: dict[str, ColumnTable] = {}
    arenas: dict[ArenaRef, int] = {}
    frames: list[Any] = []
    table = arena = None  # those of the group before: mostly it is the same one
    number = 0
    for group in groups:
        body, place = group.body, None
        if group.table is not table:
            table = group.table
            tables[table.id] = table
        if in_place and isinstance(slot := body.slot, ArenaSlot):
            body.shown = True
            if slot.arena is not arena:
                arena = slot.arena
                number = arenas.setdefault(arena.ref, len(arenas))
            place = number, slot.offset
        else:
            frames += body.own_frames
        listed.append(
            Delivery(
                header=group.header,
                env=group.env,
                producer=group.producer,
                session=group.session,
                deliveries=group.deliveries,
                place=place,
            )
        )
    encoded = encode_tables(tuple(tables.values()))
    return GroupDeliveries(tuple(listed), encoded, tuple(arenas), tuple(frames))
