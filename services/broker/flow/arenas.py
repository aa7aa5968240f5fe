"""Producer arenas: shared memory of producers on this host, and the groups that still lie in it.

A group in its producer's arena holds its slot until its body drops its bytes; then the slot is free, once. `released`
is the number up to which all groups are accepted and free. Each ack carries it, and the producer reuses the memory. A
single group that holds back much more memory than it has is copied out.

An arena lives as long as its session, and until no group lies in it; then its descriptor and mapping are closed. The
broker never waits for a producer's memory and never trusts it: unreadable memory or a range outside the arena is
refused with a reason.
"""

import resource
from collections.abc import Callable, Container, Sequence
from typing import Final, Protocol

import msgspec

from rolloutmq.schemas.errors import SegmentGoneError
from rolloutmq.schemas.wire.envelope import ArenaRef, GroupHeader
from rolloutmq.services.broker.flow.sequence_window import SequenceWindow
from rolloutmq.services.broker.journal.stored_group import Frames, GroupBody

STRAGGLER_PARTS: Final = 4
"""A group that holds back more than this many times its bytes is copied out."""
STRAGGLER_BYTES: Final = 1 << 20
"""Any group may hold back this much."""
RELEASE_ACK_BYTES: Final = 1 << 20
"""This much released memory is worth an ack of its own; less waits for the next ack."""


UNREACHABLE: Final = "arena_unreachable"
DESCRIPTORS: Final = "arena_descriptors"
ARENA_REFUSALS: Final = frozenset({UNREACHABLE, DESCRIPTORS})
"""Reasons why an arena that a producer offers is not opened. The session goes on with frames, or with another arena: a
producer that waits too long for the broker connects anew and has closed the one of its first request by then."""


class ArenaMapping(Protocol):
    """An arena opened for reading."""

    fd: int
    ref: ArenaRef
    view: memoryview

    def close(self) -> None: ...


OpenArena = Callable[[ArenaRef], ArenaMapping]
"""Opens an arena; SegmentGoneError if it cannot be read."""


class ArenaSlot(msgspec.Struct, eq=False):
    """The slot of one group in an arena.

    Attributes:
        body: The body in this slot; None when the slot is free.
    """

    arena: "ProducerArena"
    seq: int
    offset: int
    nbytes: int
    env: str
    body: GroupBody | None = None

    def free(self, frames: Frames) -> None:
        """Return the slot to the producer; `frames` are the views of it that readers may still have."""
        self.body = None
        self.arena.freed(self, frames)


class ProducerArena:
    """The arena of one session."""

    def __init__(
        self,
        mapped: ArenaMapping,
        window: SequenceWindow,
        touch: Callable[[], None],
        leaves: Callable[[ArenaSlot, Frames], None],
    ) -> None:
        self.ref = mapped.ref
        """Address of the arena for other processes: the broker's own descriptor."""
        self.over = False
        self._mapped: ArenaMapping | None = mapped
        self._window = window
        self._touch = touch
        self._leaves = leaves
        self._held: dict[int, ArenaSlot] = {}
        self._upto = window.cumulative
        self._behind: dict[int, int] = {}
        """Bytes of free slots that are not yet released, by number."""
        self._behind_bytes = 0
        self._unacked_bytes = 0
        self._copying = False

    @property
    def closed(self) -> bool:
        return self._mapped is None

    def goes_on(self) -> bool:
        """Cancel a pending close; False if the arena is closed."""
        self.over = False
        return not self.closed

    def has(self, offsets: Sequence[int], headers: Sequence[GroupHeader]) -> bool:
        """Return whether groups at these offsets lie within the open arena."""
        if self._mapped is None:
            return False
        end = self.ref.nbytes
        return not any([offset + one.nbytes > end for offset, one in zip(offsets, headers, strict=True)])

    def take(
        self, headers: Sequence[GroupHeader], offsets: Sequence[int], env: str
    ) -> list[tuple[ArenaSlot, Frames]]:
        """Hold groups in their slots; the caller has checked `has`."""
        assert self._mapped is not None
        view, held = self._mapped.view, self._held
        taken: list[tuple[ArenaSlot, Frames]] = []
        for header, offset in zip(headers, offsets, strict=True):
            seq, nbytes = header.seq, header.nbytes
            slot = held[seq] = ArenaSlot(self, seq, offset, nbytes, env)
            taken.append((slot, (view[offset : offset + nbytes],)))
        return taken

    def freed(self, slot: ArenaSlot, frames: Frames) -> None:
        """Note that a slot is free, and copy out groups that hold back too much."""
        self._leaves(slot, frames)
        del self._held[slot.seq]
        if slot.seq == self._upto + 1 <= self._window.cumulative:  # in turn, as most are
            self._upto += 1
            self._unacked_bytes += slot.nbytes
        else:
            self._behind[slot.seq] = slot.nbytes
            self._behind_bytes += slot.nbytes
        if self._behind:
            self._advance()
            if not self._copying:
                self._copying = True
                while self._behind_bytes > STRAGGLER_BYTES and self._copy_first():
                    self._advance()
                self._copying = False
        if self.over:
            self.end()
        elif self._unacked_bytes >= RELEASE_ACK_BYTES:
            self._unacked_bytes = 0
            self._touch()

    def _copy_first(self) -> bool:
        """Copy out the group that holds back all others; False if it is large, being read, or not yet journaled."""
        slot = self._held.get(self._upto + 1)
        if slot is None or slot.body is None or slot.body.shown:
            return False
        return self._behind_bytes > STRAGGLER_PARTS * slot.nbytes and slot.body.leave_arena()

    def _advance(self) -> None:
        while self._upto < self._window.cumulative and self._upto + 1 not in self._held:
            self._upto += 1
            nbytes = self._behind.pop(self._upto, 0)
            self._behind_bytes -= nbytes
            self._unacked_bytes += nbytes

    def released(self) -> int:
        """Return the number up to which all slots are free; never falls."""
        self._advance()
        self._unacked_bytes = 0
        return self._upto

    def end(self) -> None:
        """Close the arena as soon as no group lies in it."""
        self.over = True
        if not self._held:
            self.close()

    def close(self) -> None:
        """Close the descriptor now; views of the arena stay valid."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

    def validate(self) -> None:
        """Assert that released groups are not held, and that the bytes add up."""
        assert all(seq > self._upto for seq in self._held)
        assert self._behind_bytes == sum(self._behind.values())
        assert all(slot.body is not None and slot.body.slot is slot for slot in self._held.values())


class ProducerArenas:
    """All open arenas.

    Args:
        nbytes: Largest size of an arena; 0 disables arenas.
        open_arena: Opens the arena a producer offers.
        leaves: Called with each freed slot and the views of it.
    """

    def __init__(
        self, nbytes: int, open_arena: OpenArena | None, leaves: Callable[[ArenaSlot, Frames], None]
    ) -> None:
        self.nbytes = nbytes if open_arena is not None else 0
        self._open = open_arena
        self._leaves = leaves
        self._arenas: list[ProducerArena] = []

    def __len__(self) -> int:
        return len(self._arenas)

    def claim(self, ref: ArenaRef, window: SequenceWindow, touch: Callable[[], None]) -> ProducerArena | str:
        """Open the arena a producer offers for a session, or return the reason of a refusal."""
        if self._open is None or ref.nbytes > self.nbytes:
            return UNREACHABLE
        try:
            mapped = self._open(ref)
        except SegmentGoneError:
            return UNREACHABLE
        if mapped.fd >= _most_descriptors():
            mapped.close()
            return DESCRIPTORS
        arena = ProducerArena(mapped, window, touch, self._leaves)
        self._arenas.append(arena)
        return arena

    def sweep(self, living: Container[ProducerArena]) -> None:
        """Close the arenas without a live session, as soon as no group lies in them."""
        for arena in self._arenas:
            if arena not in living:
                arena.end()
        self._arenas = [arena for arena in self._arenas if not arena.closed]

    def close(self) -> None:
        """Close all arenas; bodies in one can still be read."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def validate(self) -> None:
        for arena in self._arenas:
            arena.validate()


def _most_descriptors() -> int:
    """Return the descriptor number from which on they are reserved for sockets and the journal."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
