"""Memory of producers on this host: which of their groups are still needed where they lie.

A group that lies in its producer's arena is held there until its body forgets its bytes: then its slot is free, once.
`released` is the number up to which all are accepted and free; it is told with each ack, and the producer uses the
memory again. A single group that holds much more back than it has is copied out of the way.

An arena lives while its session does, and until nothing of it is held: then its descriptor and its mapping go. It is
never waited for, and never believed: what cannot be read, or lies outside, is refused with a reason.
"""

import resource
from collections.abc import Callable, Container
from typing import Final, Protocol

from rolloutmq.schemas.envelope import ArenaRef
from rolloutmq.schemas.sharing import SegmentGoneError
from rolloutmq.services.broker.journal.body import Body, Frames
from rolloutmq.services.broker.windows import SequenceWindow

STRAGGLER_PARTS: Final = 4
"""A group that holds back more than that many times its bytes is copied."""
STRAGGLER_BYTES: Final = 1 << 20
"""Less than that may be held back by anybody."""
SAID_BYTES: Final = 1 << 20
"""So much that came free is worth an ack of its own; less waits for the next."""


class Mapped(Protocol):
    """An arena that was opened for reading."""

    fd: int
    ref: ArenaRef
    view: memoryview

    def close(self) -> None: ...


OpenArena = Callable[[ArenaRef], Mapped]
"""Opens an arena; SegmentGoneError if it cannot be read."""


class Slot:
    """One group's bytes in an arena."""

    __slots__ = ("arena", "body", "env", "nbytes", "offset", "seq")

    def __init__(self, arena: "Arena", seq: int, offset: int, nbytes: int, env: str) -> None:
        self.arena = arena
        self.seq = seq
        self.offset = offset
        self.nbytes = nbytes
        self.env = env
        self.body: Body | None = None
        """Whose bytes they are, as long as it lies here."""

    def free(self, frames: Frames) -> None:
        """Let the producer use it again; `frames` are the views of it that somebody may still have."""
        self.body = None
        self.arena.freed(self, frames)


class Arena:
    """The arena of one session."""

    def __init__(
        self,
        mapped: Mapped,
        window: SequenceWindow,
        touch: Callable[[], None],
        leaves: Callable[[Slot, Frames], None],
    ) -> None:
        self.ref = mapped.ref
        """By which others open it: the broker's own descriptor."""
        self.over = False
        self._mapped: Mapped | None = mapped
        self._window = window
        self._touch = touch
        self._leaves = leaves
        self._held: dict[int, Slot] = {}
        self._upto = window.cumulative
        self._behind: dict[int, int] = {}
        """Bytes of the slots that came free and are not released, by number."""
        self._behind_bytes = 0
        self._unsaid_bytes = 0
        self._copying = False

    @property
    def closed(self) -> bool:
        return self._mapped is None

    def goes_on(self) -> bool:
        """Have it stay, whatever was to end it; False if it is closed."""
        self.over = False
        return not self.closed

    def has(self, offset: int, nbytes: int) -> bool:
        """Whether a group can lie there."""
        return not self.closed and offset + nbytes <= self.ref.nbytes

    def take(self, seq: int, offset: int, nbytes: int, env: str) -> tuple[Slot, Frames]:
        """Hold a group where it lies; `has` came before."""
        assert self._mapped is not None
        slot = self._held[seq] = Slot(self, seq, offset, nbytes, env)
        return slot, (self._mapped.view[offset : offset + nbytes],)

    def freed(self, slot: Slot, frames: Frames) -> None:
        """Note that a slot is free, and copy what holds too much back."""
        self._leaves(slot, frames)
        del self._held[slot.seq]
        self._behind[slot.seq] = slot.nbytes
        self._behind_bytes += slot.nbytes
        self._advance()
        if not self._copying:
            self._copying = True
            while self._behind_bytes > STRAGGLER_BYTES and self._copy_first():
                self._advance()
            self._copying = False
        if self.over:
            self.end()
        elif self._unsaid_bytes >= SAID_BYTES:
            self._unsaid_bytes = 0
            self._touch()

    def _copy_first(self) -> bool:
        """Copy the group that all others wait for; False if it is large, is read, or is yet to be written."""
        slot = self._held.get(self._upto + 1)
        if slot is None or slot.body is None or slot.body.shown:
            return False
        return self._behind_bytes > STRAGGLER_PARTS * slot.nbytes and slot.body.leave_arena()

    def _advance(self) -> None:
        while self._upto < self._window.cumulative and self._upto + 1 not in self._held:
            self._upto += 1
            nbytes = self._behind.pop(self._upto, 0)
            self._behind_bytes -= nbytes
            self._unsaid_bytes += nbytes

    def released(self) -> int:
        """Return the number up to which nothing is needed any more; never falls."""
        self._advance()
        self._unsaid_bytes = 0
        return self._upto

    def end(self) -> None:
        """Close it as soon as nothing of it is held."""
        self.over = True
        if not self._held:
            self.close()

    def close(self) -> None:
        """Close the descriptor now; views of it stay what they are."""
        mapped, self._mapped = self._mapped, None
        if mapped is not None:
            mapped.close()

    def validate(self) -> None:
        """Assert that what is released is not held, and that the bytes add up."""
        assert all(seq > self._upto for seq in self._held)
        assert self._behind_bytes == sum(self._behind.values())
        assert all(slot.body is not None and slot.body.slot is slot for slot in self._held.values())


class Arenas:
    """All arenas that are open.

    Args:
        nbytes: Size that an arena may have; 0 if none is read.
        open_arena: Opens what a producer names.
        leaves: Called with each slot that comes free, and the views of it.
    """

    def __init__(
        self, nbytes: int, open_arena: OpenArena | None, leaves: Callable[[Slot, Frames], None]
    ) -> None:
        self.nbytes = nbytes if open_arena is not None else 0
        self._open = open_arena
        self._leaves = leaves
        self._arenas: list[Arena] = []

    def __len__(self) -> int:
        return len(self._arenas)

    def claim(self, ref: ArenaRef, window: SequenceWindow, touch: Callable[[], None]) -> Arena | str:
        """Open the arena that a producer offers for a session, or return why not."""
        if self._open is None or ref.nbytes > self.nbytes:
            return "arena_unreachable"
        try:
            mapped = self._open(ref)
        except SegmentGoneError:
            return "arena_unreachable"
        if mapped.fd >= _most_descriptors():
            mapped.close()
            return "arena_descriptors"
        arena = Arena(mapped, window, touch, self._leaves)
        self._arenas.append(arena)
        return arena

    def sweep(self, living: Container[Arena]) -> None:
        """Let go of the arenas of which no session lives, as far as nothing of them is held."""
        for arena in self._arenas:
            if arena not in living:
                arena.end()
        self._arenas = [arena for arena in self._arenas if not arena.closed]

    def close(self) -> None:
        """Close all of them; bodies that lie in one can still be read."""
        for arena in self._arenas:
            arena.close()
        self._arenas.clear()

    def validate(self) -> None:
        """Assert the counts of each."""
        for arena in self._arenas:
            arena.validate()


def _most_descriptors() -> int:
    """Return the descriptor from which on they are kept for sockets and for the journal."""
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] * 3 // 4
