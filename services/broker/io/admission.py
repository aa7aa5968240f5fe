"""Admission: groups reach the core only when the journal has reserved room for them.

The core accepts a group at once, and all later events of the run follow it. A group without room on the disk would
hold up every one of them, also the commits that make room. A message without room therefore waits here, group by
group, and nothing more is read from producers. It is not acked; a broker that ends forgets it, and it is sent again.
"""

from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from msgspec.structs import replace

from rolloutmq.schemas.wire.envelope import Envelope, GroupHeader
from rolloutmq.services.broker.journal.journal import Journal


class Arrived(NamedTuple):
    """A message of a producer, or one group of it."""

    envelope: Envelope
    frames: Sequence[Any]


class Admission:
    """At most one message that waits for room; without a journal none ever does.

    Args:
        journal: Has the room; None at durability `memory`.
        max_group_bytes: The core refuses a larger group, so it needs no room.
    """

    def __init__(self, journal: Journal | None, max_group_bytes: int) -> None:
        self._journal = journal
        self._max_group_bytes = max_group_bytes
        self._waiting: deque[Arrived] = deque()

    @property
    def is_open(self) -> bool:
        """Whether no message ever waits."""
        return self._journal is None

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def blocked(self) -> bool:
        """Whether the oldest group has no room yet."""
        return bool(self._waiting) and not self._has_room(self._waiting[0])

    def put(self, envelope: Envelope, frames: Sequence[Any]) -> None:
        """Add a message; only while none waits."""
        arrived = Arrived(envelope, frames)
        self._waiting.extend([arrived] if self._has_room(arrived) else _apart(arrived))

    def take(self) -> Iterator[Arrived]:
        """Yield what has room, the oldest first; the caller hands each to the core before it asks for the next."""
        while self._waiting and self._has_room(self._waiting[0]):
            yield self._waiting.popleft()
        if self._journal is not None:
            self._journal.want(self._sized(self._waiting[0]) if self._waiting else ())

    def _has_room(self, arrived: Arrived) -> bool:
        return self._journal is None or self._journal.admits(self._sized(arrived))

    def _sized(self, arrived: Arrived) -> list[GroupHeader]:
        return [header for header in arrived.envelope.groups if header.nbytes <= self._max_group_bytes]


def _apart(arrived: Arrived) -> Iterator[Arrived]:
    """Yield each group of a message as a message of its own."""
    envelope, frames = arrived
    start = 0
    for index, header in enumerate(envelope.groups):
        end = start if envelope.offsets else start + header.frames
        offsets = envelope.offsets[index : index + 1]
        yield Arrived(replace(envelope, groups=(header,), offsets=offsets), frames[start:end])
        start = end
