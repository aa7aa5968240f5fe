"""The groups of a batch as a trainer is told of them: by where they lie, or with their frames."""

from collections.abc import Iterable
from typing import Any, NamedTuple

from rolloutmq.schemas.delivery import Delivery
from rolloutmq.schemas.envelope import ArenaRef
from rolloutmq.services.broker.arenas import Slot
from rolloutmq.services.broker.groups import StoredGroup


class Deliveries(NamedTuple):
    """What a `Batch` says of its groups, and the frames that follow it."""

    groups: tuple[Delivery, ...]
    arenas: tuple[ArenaRef, ...]
    frames: tuple[Any, ...]


def deliveries(groups: Iterable[StoredGroup], *, in_place: bool) -> Deliveries:
    """Tell of groups, whose bodies are in memory; `in_place` if the trainer may be told where they lie.

    What follows as frames leaves later than it is handed over: nothing of it lies in an arena.
    """
    told: list[Delivery] = []
    arenas: dict[ArenaRef, int] = {}
    frames: list[Any] = []
    for group in groups:
        slot, place = group.body.slot, None
        if in_place and isinstance(slot, Slot):
            group.body.shown = True
            place = arenas.setdefault(slot.arena.ref, len(arenas)), slot.offset
        else:
            frames += group.body.own_frames
        told.append(
            Delivery(
                header=group.header,
                env=group.env,
                producer=group.producer,
                session=group.session,
                deliveries=group.deliveries,
                place=place,
            )
        )
    return Deliveries(tuple(told), tuple(arenas), tuple(frames))
