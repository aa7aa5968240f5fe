"""The spool: the unacked groups of a producer session. Pure: no socket, no clock.

Only an ack that covers its number removes a group. Groups are numbered from 1 in order of arrival; the position of a
group is the number of bytes of the session up to its end. A group may be sent when its position is within the credit
and its number within the broker's window. A sent group is overdue after `RESEND_S` without an ack: the producer syncs
and resends what the broker still lacks. The pause doubles each time, because more messages do not help a slow broker.

Groups arrive in their order. So where later ones are not accepted either, those that are under way count from the last
one that was: a busy broker reads them one after the other.
"""

import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator
from itertools import chain
from typing import Any, Final

import msgspec

from rolloutmq.bus.encoding.codec import EncodedGroup, header_of
from rolloutmq.bus.shm.arena_allocator import ArenaBlock
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, PolicyVersion
from rolloutmq.schemas.wire.replies import GAP_WINDOW, Ack

RESEND_S: Final = 1.0
"""Time without an ack, four ack intervals, after which a sent group may be lost."""
RESEND_MAX_S: Final = 15.0
"""Longest pause before a group is sent again."""


class SpoolEntry(msgspec.Struct, eq=False):
    """One unacked group."""

    header: GroupHeader
    table: ColumnTable
    frames: tuple[Any, ...]
    sent_at: float = 0.0
    """Monotonic seconds of the last send; meaningless while `sends` is 0."""
    sends: int = 0
    slot: ArenaBlock | None = None
    """Slot of its only frame in the session's arena; None if the frames are sent."""
    ordinal: int = 0
    """Number among all groups of the spool, over all sessions."""

    def overdue(self, now: float, accepted_at: float = -math.inf) -> bool:
        """Whether it was sent so long ago that it may be lost, and so long after the last group that was accepted."""
        pause = min(RESEND_S * 2 ** (self.sends - 1), RESEND_MAX_S) if self.sends else 0.0
        since = max(self.sent_at, accepted_at) if self.sent_at > -math.inf else self.sent_at
        return self.sends > 0 and now - since >= pause


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
        self.added = 0
        """Number of groups that were ever in the spool, over all sessions."""
        self._entries: OrderedDict[int, SpoolEntry] = OrderedDict()
        self._unsent: deque[int] = deque()
        self._highest = 0
        """Highest number that is acked."""
        self._accepted_at = -math.inf
        """Time of the last ack of a group."""

    def __len__(self) -> int:
        return len(self._entries)

    def __iter__(self) -> Iterator[SpoolEntry]:
        """Yield the unacked groups in their order."""
        return iter(self._entries.values())

    def done(self, ordinal: int) -> bool:
        """Whether the group of that ordinal, and all before it, came into the spool and are acked."""
        oldest = next(iter(self._entries.values()), None)
        return self.added >= ordinal and (oldest is None or oldest.ordinal > ordinal)

    def fits(self, nbytes: int) -> bool:
        """Whether a group of that size fits."""
        return self.nbytes + nbytes <= self.capacity_bytes

    def add(
        self,
        group: Group,
        encoded: EncodedGroup,
        slot: ArenaBlock | None = None,
        policy: PolicyVersion | None = None,
    ) -> SpoolEntry:
        """Add a group and number it. The caller has checked `fits`.

        Args:
            group: Source of the header.
            encoded: The group as frames.
            slot: Its slot in the arena.
            policy: Policy version for a group without its own.
        """
        nbytes = encoded.nbytes
        self.last = seq = self.last + 1
        self.position += nbytes
        header = header_of(group, encoded, seq=seq, position=self.position, policy=policy)
        entry = SpoolEntry(header, encoded.table, encoded.frames, slot=slot, ordinal=self.added + 1)
        if slot is not None:
            slot.number(seq)
        self._entries[seq] = entry
        self.added += 1
        self._unsent.append(seq)
        self.nbytes += nbytes
        return entry

    def restore(self, entries: Iterable[SpoolEntry], last: int, position: int) -> None:
        """Fill an empty spool with the saved groups of an earlier process; all of them are unsent."""
        self._entries = OrderedDict((entry.header.seq, entry) for entry in entries)
        for ordinal, entry in enumerate(self._entries.values(), self.added + 1):
            entry.ordinal = ordinal
        self.added += len(self._entries)
        self._unsent = deque(self._entries)
        self.nbytes = sum(entry.header.nbytes for entry in self._entries.values())
        self.last, self.position = last, position

    def agrees(self, ack: Ack) -> bool:
        """Whether the numbers are consistent with an ack of a restarted broker.

        The broker must have every group that left the spool, or it would wait for it for ever. It must not have numbers
        that were never assigned, or it would drop a new group as a duplicate.
        """
        named = set(_numbers(ack))
        if ack.cumulative < self.cumulative or max(named, default=ack.cumulative) > self.last:
            return False
        return all(seq in self._entries or seq in named for seq in range(ack.cumulative + 1, self.last + 1))

    def accepted(self, ack: Ack, now: float = -math.inf) -> list[SpoolEntry]:
        """Remove and return the groups that an ack of this session covers. An outdated ack covers nothing."""
        self.cumulative = max(self.cumulative, ack.cumulative)
        first = next(iter(self._entries), self.last + 1)
        covered: Iterable[int] = range(first, min(ack.cumulative, self.last) + 1)
        if ack.gaps:
            covered = chain(covered, _numbers(ack))
        take = self._entries.pop
        entries = [entry for seq in covered if (entry := take(seq, None))]
        self.nbytes -= sum([entry.header.nbytes for entry in entries])
        if entries:
            self._accepted_at = now
            self._highest = max(self._highest, entries[-1].header.seq)
        return entries

    def unsent(self, byte_limit: int) -> Iterator[SpoolEntry]:
        """Yield the groups that may be sent now, in order; call `sent` for each one sent."""
        while self._unsent and self._unsent[0] not in self._entries:
            self._unsent.popleft()
        for seq in self._unsent:
            entry = self._entries.get(seq)
            if entry is None:
                continue
            if entry.header.position > byte_limit or seq > self.cumulative + GAP_WINDOW:
                return
            yield entry

    @property
    def has_unsent(self) -> bool:
        """Whether a group may be waiting to be sent, credit or not."""
        return bool(self._unsent)

    def sent(self, entries: Iterable[SpoolEntry], now: float) -> None:
        """Note that the first groups of `unsent` were sent."""
        following = self._unsent.popleft
        for entry in entries:
            while following() != entry.header.seq:
                pass
            entry.sends += 1
            entry.sent_at = now

    def leave_arena(self) -> None:
        """Send every group as frames from now on: the session has lost its arena."""
        for entry in self._entries.values():
            entry.slot = None

    def overdue(self, now: float) -> bool:
        """Whether any sent group may be lost."""
        return any(self._is_overdue(seq, entry, now) for seq, entry in self._entries.items())

    def _is_overdue(self, seq: int, entry: SpoolEntry, now: float) -> bool:
        return entry.overdue(now, self._accepted_at if seq > self._highest else -math.inf)

    def send_overdue_again(self, now: float) -> list[SpoolEntry]:
        """Queue overdue groups again and return them. The caller has just synced."""
        waiting = set(self._unsent)
        again = [
            entry
            for seq, entry in self._entries.items()
            if seq not in waiting and self._is_overdue(seq, entry, now)
        ]
        self._unsent = deque(sorted(waiting | {entry.header.seq for entry in again}))
        return again

    def doubt(self) -> None:
        """Mark every sent group as overdue: its pipe is gone."""
        for entry in self._entries.values():
            entry.sent_at = -math.inf

    def send_all_again(self) -> None:
        """Queue every group again: the broker has restarted."""
        for entry in self._entries.values():
            entry.sends = 0
        self._unsent = deque(self._entries)

    def renumber(self) -> None:
        """Make the unacked groups the first ones of a new session, all unsent."""
        entries = list(self._entries.values())
        self.position = 0
        for seq, entry in enumerate(entries, 1):
            self.position += entry.header.nbytes
            entry.header = msgspec.structs.replace(entry.header, seq=seq, position=self.position)
        self._entries = OrderedDict((entry.header.seq, entry) for entry in entries)
        self.last = len(entries)
        self.cumulative = self._highest = 0
        self.send_all_again()


def _numbers(ack: Ack) -> Iterator[int]:
    """Yield the numbers in the gap bitmap."""
    bits = int.from_bytes(ack.gaps[: GAP_WINDOW // 8], "little")
    while bits:
        lowest = bits & -bits
        yield ack.cumulative + 1 + lowest.bit_length()
        bits ^= lowest
