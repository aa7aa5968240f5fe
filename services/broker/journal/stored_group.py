"""Stored groups and their bodies: in memory, on disk, or both. The core never looks inside a body.

A body starts in memory. Once it is written, memory may drop it; it is read back, and checked, when a batch needs it.
The memory may be a slot in the producer's arena, which the producer reuses as soon as it is free, so never before the
journal has written it. All methods belong to the thread of the data plane; only `place` is set by the commit thread.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from rolloutmq.schemas.errors import DamagedRecordError
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, Split
from rolloutmq.services.broker.journal.format.events import Accepted
from rolloutmq.services.broker.journal.format.records import BLOCK_BYTES

Frames = tuple[Any, ...]


class Source(Protocol):
    """A segment from which bodies can be read."""

    number: int

    def read(self, offset: int) -> Frames:
        """Return the frames of the record at `offset`.

        Raises:
            DamagedRecordError: They differ from the written frames.
            JournalWaitsError: They cannot be read now, and may be sound.
        """
        ...

    def gained(self) -> None:
        """Count one more needed record of the segment."""
        ...

    def lost(self) -> None:
        """Count one needed record less."""
        ...


class ArenaFrames(Protocol):
    """The slot of a body with one frame, in an arena."""

    body: "GroupBody | None"
    offset: int

    def free(self, frames: Frames) -> None:
        """Free the slot: the body no longer reads it; `frames` are the views of it."""
        ...


class BodyMemory:
    """Bytes of bodies in memory, against the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def short(self) -> bool:
        """Whether bodies that can be read back should leave memory."""
        return self.used_bytes > self.budget_bytes


class GroupBody(msgspec.Struct, eq=False):
    """One group's frames.

    Attributes:
        nbytes: Bytes of the frames together.
        slot: Their slot in an arena; None outside of one.
        place: Their segment and offset on disk; None until they are written, and always at durability `memory`.
        shown: A consumer has the address of the slot: it is kept although memory is short.
    """

    _frames: Frames | None
    nbytes: int
    _ram: BodyMemory | None = None
    slot: ArenaFrames | None = None
    place: tuple[Source, int] | None = None
    shown: bool = False
    _leaving: bool = False
    _counted: bool = False
    _released: bool = False

    def __post_init__(self) -> None:
        if self.slot is not None:
            self.slot.body = self
        if self._ram is not None and self._frames is not None:
            self._ram.used_bytes += self.nbytes

    @classmethod
    def stored(cls, source: Source, offset: int, nbytes: int, ram: BodyMemory) -> "GroupBody":
        """Return the body of a record of an earlier life; it is read when a batch needs it."""
        body = cls(None, nbytes, ram)
        body.place = source, offset
        body.settled_on_disk()
        return body

    @property
    def in_memory(self) -> bool:
        return self._frames is not None

    @property
    def frames(self) -> Frames:
        """The frames, which must be in memory: call `load` before."""
        assert self._frames is not None, "the body was not loaded"
        return self._frames

    @property
    def in_blocks(self) -> bool:
        """Whether they begin at a block boundary of memory."""
        return self.slot is not None and not self.slot.offset % BLOCK_BYTES

    @property
    def own_frames(self) -> Frames:
        """The frames, copied out of an arena slot for a reader that may outlive the slot."""
        return self.frames if self.slot is None else _copied(self.frames)

    def load(self) -> bool:
        """Bring the frames into memory; False if they are damaged, or were released.

        Raises:
            JournalWaitsError: They cannot be read now; try again.
        """
        if self._frames is None:
            if self.place is None or self._released:
                return False
            source, offset = self.place
            try:
                self._frames = source.read(offset)
            except DamagedRecordError:
                return False
            if self._ram is not None:
                self._ram.used_bytes += self.nbytes
        return True

    def settled_on_disk(self) -> None:
        """Note that the record at `place` is durable."""
        if self._released:
            self._forget()
        elif self.place is not None and not self._counted:
            self._counted = True
            self.place[0].gained()
            if self._leaving and not self.shown:
                self.shed()
            self.spare()

    def spare(self) -> None:
        """Leave memory if memory is short and the frames can be read back."""
        if self._ram is not None and self._ram.short and not self.shown:
            self.shed()

    def leave_arena(self) -> bool:
        """Copy the frames out of an arena and free the slot; False if the journal must write them first, and then drop
        them.
        """
        if self.slot is None or self._frames is None:
            return True
        self._leaving = self._ram is not None and not self._counted
        if not self._leaving:
            lying, self._frames = self._frames, _copied(self._frames)
            self._free(lying)
        return not self._leaving

    def shed(self) -> None:
        """Leave memory if the frames can be read back."""
        if self._counted:
            self._forget()

    def release(self) -> None:
        """Drop the frames for good, in memory and on disk. May be called twice.

        Frames the journal has yet to write stay until they are written: an event names them.
        """
        self._released = True
        if self._ram is None or self._counted or (self.slot is None and self.place is not None):
            self._forget()
        if self._counted and self.place is not None:
            self._counted = False
            self.place[0].lost()

    def _forget(self) -> None:
        if self._frames is not None and self._ram is not None:
            self._ram.used_bytes -= self.nbytes
        lying, self._frames = self._frames, None
        if lying is not None and self.slot is not None:
            self._free(lying)

    def _free(self, lying: Frames) -> None:
        slot, self.slot, self.shown = self.slot, None, False
        if slot is not None:
            slot.free(lying)


def _copied(frames: Frames) -> Frames:
    return tuple(map(bytes, frames))


class StoredGroup(msgspec.Struct, eq=False, gc=False):
    """One accepted group, from its acceptance until its checkpoint.

    Attributes:
        body: The frames as they arrived; released when the group is settled for good.
        accepted_at: Monotonic seconds of this broker's clock; `accepted_wall` is for people and for the journal.
        deliveries: How often it was delivered.
        failures: How many of its leases were lost.
        requeued: It was dead, and an operator queued it again; it is never too stale.
        order: Number of its acceptance, unique in the run. A returned group takes its old place.
        identity: See `state.groups.identity`; 0 until it is computed.
    """

    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    table: ColumnTable
    body: GroupBody
    accepted_at: float
    accepted_wall: float
    deliveries: int = 0
    failures: int = 0
    requeued: bool = False
    order: int = 0
    identity: int = 0

    def accepted(self) -> Accepted:
        """Return its `Accepted` event, without a place: only the commit thread knows that."""
        return Accepted(
            order=self.order,
            header=self.header,
            env=self.env,
            split=self.split,
            run=self.run,
            producer=self.producer,
            session=self.session,
            at=self.accepted_wall,
            requeued=self.requeued,
        )


def out_of_memory(groups: Sequence[StoredGroup]) -> list[StoredGroup]:
    """Return the groups whose bodies are not in memory."""
    return [group for group in groups if group.body._frames is None]
