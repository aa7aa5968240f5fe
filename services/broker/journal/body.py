"""The frames of one group: in memory, on disk, or both. The core hands them on and never looks inside.

A body is born in memory. Once it is written, memory may let it go, and it is read back, and checked, when a batch
needs it. The memory may be a slot in the arena of its producer, which uses it again as soon as it is free: so that is
never before the journal has written what lies there. All methods belong to the thread of the data plane; only `place`
is set by another one.
"""

from typing import Any, Protocol

from rolloutmq.schemas.errors import DamagedRecordError
from rolloutmq.services.broker.journal.segment import BLOCK_BYTES

Frames = tuple[Any, ...]


class Source(Protocol):
    """A segment that bodies can be read from."""

    number: int

    def read(self, offset: int) -> Frames:
        """Return the frames of the record at `offset`.

        Raises:
            DamagedRecordError: They are not what was written.
            JournalWaitsError: They cannot be read now, which says nothing of them.
        """
        ...

    def gained(self) -> None:
        """One more of the segment's records is needed."""
        ...

    def lost(self) -> None:
        """One of them is not needed any more."""
        ...


class Slot(Protocol):
    """Where the only frame of a body lies in an arena."""

    body: "Body | None"
    offset: int

    def free(self, frames: Frames) -> None:
        """Nobody reads it any more through the body; `frames` are the views of it."""
        ...


class Ram:
    """Bytes of bodies that are in memory, against the budget."""

    def __init__(self, budget_bytes: int) -> None:
        self.budget_bytes = budget_bytes
        self.used_bytes = 0

    @property
    def short(self) -> bool:
        """Whether what can be read back should not stay in memory."""
        return self.used_bytes > self.budget_bytes


class Body:
    """One group's frames.

    Attributes:
        nbytes: Bytes of the frames together.
        place: Where they are on disk, and the offset there; None until they are written, and at `memory` for good.
        slot: Where they lie in an arena, as long as they do.
        shown: Somebody was told of the slot: it is kept although memory is short.
    """

    __slots__ = ("_counted", "_frames", "_leaving", "_ram", "_released", "nbytes", "place", "shown", "slot")

    def __init__(
        self, frames: Frames | None, nbytes: int, ram: Ram | None = None, slot: Slot | None = None
    ) -> None:
        self.nbytes = nbytes
        self.slot = slot
        self.shown = False
        self._leaving = False
        if slot is not None:
            slot.body = self
        self.place: tuple[Source, int] | None = None
        self._frames = frames
        self._ram = ram
        self._counted = False
        self._released = False
        if ram is not None and frames is not None:
            ram.used_bytes += nbytes

    @classmethod
    def stored(cls, source: Source, offset: int, nbytes: int, ram: Ram) -> "Body":
        """Return the body of a record of an earlier life; it is read when it is needed."""
        body = cls(None, nbytes, ram)
        body.place = source, offset
        body.settled_on_disk()
        return body

    @property
    def in_memory(self) -> bool:
        return self._frames is not None

    @property
    def frames(self) -> Frames:
        """The frames, which must be in memory: `load` came before."""
        assert self._frames is not None, "the body was not loaded"
        return self._frames

    @property
    def in_blocks(self) -> bool:
        """Whether they begin where a block of memory does."""
        return self.slot is not None and not self.slot.offset % BLOCK_BYTES

    @property
    def own_frames(self) -> Frames:
        """The frames, for one who may still read them when the slot is another group's."""
        return self.frames if self.slot is None else _copied(self.frames)

    def load(self) -> bool:
        """Bring the frames into memory; False if they are damaged, or were let go for good.

        JournalWaitsError if that cannot be done now: try again, and condemn nothing.
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
        """Note that the record at `place` is as durable as it gets."""
        if self._released:
            self._forget()
        elif self.place is not None and not self._counted:
            self._counted = True
            self.place[0].gained()
            if self._leaving:
                self.shed()
            self.spare()

    def spare(self) -> None:
        """Leave memory if it is short and the frames can be read back."""
        if self._ram is not None and self._ram.short and not self.shown:
            self.shed()

    def leave_arena(self) -> bool:
        """Copy what lies in an arena, and free the slot; False if the journal must write it first: then it is shed."""
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
        """Let the frames go for good, in memory and on disk. May be called twice.

        What a journal has yet to write stays until it is written: the log names it.
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
        if lying is not None:
            self._free(lying)

    def _free(self, lying: Frames) -> None:
        slot, self.slot, self.shown = self.slot, None, False
        if slot is not None:
            slot.free(lying)


def _copied(frames: Frames) -> Frames:
    return tuple(map(bytes, frames))
