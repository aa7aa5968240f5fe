"""What a producer has sent, or means to send, and the broker has not acked. Pure: no socket, no clock.

The law: a group leaves the spool only by an ack that names its number. Groups are numbered from 1 in the order in
which they came, and the position of a group is the bytes of all groups of the session up to its end. A group may be
sent when its position is within the credit, and its number within the window that the broker remembers. What was sent
and is still unacked after `RESEND_S` is overdue: the producer syncs, and what the broker then still lacks is sent
again, after a pause that doubles, since a broker that reads slowly is not helped by more messages.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import chain
from typing import Any, Final

import msgspec

from rolloutmq.bus.codec import EncodedGroup, header_of
from rolloutmq.bus.slots import Slot
from rolloutmq.schemas.delivery import GAP_WINDOW, Ack
from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, PolicyVersion
from rolloutmq.schemas.trajectory import Group

RESEND_S: Final = 1.0
"""A group that was sent and is not acked for that long may be lost; four ack intervals."""
RESEND_MAX_S: Final = 15.0
"""Longest pause between two sends of one group."""


@dataclass(slots=True)
class Entry:
    """One unacked group."""

    header: GroupHeader
    table: ColumnTable
    frames: tuple[Any, ...]
    sent_at: float = 0.0
    """Monotonic seconds of the last send; meaningless while `sends` is 0."""
    sends: int = 0
    slot: Slot | None = None
    """Where the only frame lies in the arena of the session; None if the frames are to be sent."""

    def overdue(self, now: float) -> bool:
        """Whether it was sent so long ago that it may be lost."""
        pause = min(RESEND_S * 2 ** (self.sends - 1), RESEND_MAX_S) if self.sends else 0.0
        return self.sends > 0 and now - self.sent_at >= pause


class Spool:
    """Unacked groups of one session, bounded in bytes."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.nbytes = 0
        """Bytes of the unacked groups."""
        self.last = 0
        """Number of the newest group; 0 before the first."""
        self.position = 0
        """Position of the newest group, in bytes."""
        self.cumulative = 0
        """Every group up to this number is acked."""
        self._entries: OrderedDict[int, Entry] = OrderedDict()
        self._unsent: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[Entry]:
        """Yield the unacked groups in their order."""
        return iter(self._entries.values())

    def fits(self, nbytes: int) -> bool:
        """Whether there is room for a group of that size."""
        return self.nbytes + nbytes <= self.capacity_bytes

    def add(
        self,
        group: Group,
        encoded: EncodedGroup,
        slot: Slot | None = None,
        policy: PolicyVersion | None = None,
    ) -> Entry:
        """Take in a group and number it. The caller has asked `fits`.

        Args:
            group: What it says of itself goes into the header.
            encoded: The group as frames.
            slot: Where it lies in the arena.
            policy: Stands for the versions of a group that does not tell its own.
        """
        nbytes = encoded.nbytes
        self.last = seq = self.last + 1
        self.position += nbytes
        header = header_of(group, encoded, seq=seq, position=self.position, policy=policy)
        entry = Entry(header, encoded.table, encoded.frames, slot=slot)
        if slot is not None:
            slot.number(seq)
        self._entries[seq] = entry
        self._unsent.append(seq)
        self.nbytes += nbytes
        return entry

    def restore(self, entries: Iterable[Entry], last: int, position: int) -> None:
        """Fill an empty spool with what an earlier process saved; all of it is to be sent."""
        self._entries = OrderedDict((entry.header.seq, entry) for entry in entries)
        self._unsent = deque(self._entries)
        self.nbytes = sum(entry.header.nbytes for entry in self._entries.values())
        self.last, self.position = last, position

    def agrees(self, ack: Ack) -> bool:
        """Whether the numbers can stay with a broker that says this of the session.

        It must have whatever left the spool, or it would wait for that for ever, and nothing that was never numbered
        here, or it would take a new group for an old one.
        """
        named = set(_numbers(ack))
        if ack.cumulative < self.cumulative or max(named, default=ack.cumulative) > self.last:
            return False
        return all(seq in self._entries or seq in named for seq in range(ack.cumulative + 1, self.last + 1))

    def accepted(self, ack: Ack) -> list[Entry]:
        """Remove and return what an ack of this session covers. An older ack than the last covers nothing."""
        self.cumulative = max(self.cumulative, ack.cumulative)
        first = next(iter(self._entries), self.last + 1)
        covered: Iterable[int] = range(first, min(ack.cumulative, self.last) + 1)
        if ack.gaps:
            covered = chain(covered, _numbers(ack))
        take = self._entries.pop
        entries = [entry for seq in covered if (entry := take(seq, None))]
        self.nbytes -= sum([entry.header.nbytes for entry in entries])
        return entries

    def unsent(self, byte_limit: int) -> Iterator[Entry]:
        """Yield the groups that may be sent now, in their order; call `sent` for each that was."""
        while self._unsent and self._unsent[0] not in self._entries:
            self._unsent.popleft()
        for seq in self._unsent:
            entry = self._entries.get(seq)
            if entry is None:
                continue
            if entry.header.position > byte_limit or seq > self.cumulative + GAP_WINDOW:
                return
            yield entry

    def sent(self, entry: Entry, now: float) -> None:
        """Note that the first group which `unsent` yielded is on its way."""
        while self._unsent.popleft() != entry.header.seq:
            pass
        entry.sends += 1
        entry.sent_at = now

    def leave_arena(self) -> None:
        """Have every group sent as frames: its slot is not the session's any more."""
        for entry in self._entries.values():
            entry.slot = None

    def overdue(self, now: float) -> bool:
        """Whether anything that was sent may be lost."""
        return any(entry.overdue(now) for entry in self._entries.values())

    def send_overdue_again(self, now: float) -> list[Entry]:
        """Queue again what is overdue; the caller has synced just now. Returns what was queued."""
        waiting = set(self._unsent)
        again = [e for seq, e in self._entries.items() if seq not in waiting and e.overdue(now)]
        self._unsent = deque(sorted(waiting | {entry.header.seq for entry in again}))
        return again

    def doubt(self) -> None:
        """Take whatever was sent for overdue: the pipe that it was sent into is gone."""
        for entry in self._entries.values():
            entry.sent_at = -math.inf

    def send_all_again(self) -> None:
        """Queue everything again: the broker that it was sent to is gone."""
        for entry in self._entries.values():
            entry.sends = 0
        self._unsent = deque(self._entries)

    def renumber(self) -> None:
        """Make the unacked groups the first ones of a new session, all of them to be sent."""
        entries = list(self._entries.values())
        self.position = 0
        for seq, entry in enumerate(entries, 1):
            self.position += entry.header.nbytes
            entry.header = msgspec.structs.replace(entry.header, seq=seq, position=self.position)
        self._entries = OrderedDict((entry.header.seq, entry) for entry in entries)
        self.last = len(entries)
        self.cumulative = 0
        self.send_all_again()


def _numbers(ack: Ack) -> Iterator[int]:
    """Yield the numbers that the gap bitmap names."""
    bits = int.from_bytes(ack.gaps[: GAP_WINDOW // 8], "little")
    while bits:
        lowest = bits & -bits
        yield ack.cumulative + 1 + lowest.bit_length()
        bits ^= lowest
