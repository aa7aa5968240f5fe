"""The session of a producer: its acks, permits, sendable groups and syncs. Pure; `now` is an argument.

Syncs: published acks may be lost, so the session sends a `Sync` request
- after `SILENCE_S` without an ack, while a group is unacked or a task waits for credit; a task that has all the permits
  there are gets no more by asking, so it asks ever less often;
- when a sent group is overdue;
- soon after a rollout was abandoned, while a task waits for its permit;
- `ALIVE_S` after the broker last heard of the session, so it does not count as dead.
Only the reply to a Sync decides which groups are resent. The reply can overtake groups that a busy broker has not read,
so slow acks and slow replies extend the time after which a group counts as lost. A broker that may read no groups,
since it has no room, gets one again after `RESEND_MAX_S` more: the group may be the one that its trainer waits for.

Pipes: requests and groups have a connection each. A middlebox may forget the one of the groups and end neither side. So
a broker that answers syncs, and gets no group for `PIPE_S`, needs a new pipe.

Sequence numbers: if the broker knows the session and every group that it acked, the numbers stay and the broker drops
duplicates, also after a restart. Otherwise the unacked groups become the first ones of a new session.

Arena: each registration offers a new arena, and no slot of an old one is reused. A process still reading an old slot,
or writing it to disk, never finds another group there. Unacked groups of an old arena are sent as frames.
"""

import math
import mmap
import os
from collections import Counter
from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.encoding.codec import EncodedGroup, PreparedGroup, encode_envelope, encode_group
from rolloutmq.bus.producer.credit import Credit
from rolloutmq.bus.producer.spool import RESEND_MAX_S, RESEND_S, Spool, SpoolEntry
from rolloutmq.bus.shm.arena import Arena
from rolloutmq.bus.shm.arena_allocator import ArenaBlock
from rolloutmq.schemas.errors import LimitExceededError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import FRAMES_LIMIT, PROTOCOL_VERSION, Envelope, PolicyVersion
from rolloutmq.schemas.wire.replies import Ack, Wait
from rolloutmq.schemas.wire.requests import Goodbye, RegisterProducer, Sync

SILENCE_S: Final = 1.0
"""Time without an ack, four ack intervals, after which acks or the broker count as lost."""
ALIVE_S: Final = 3.0
"""A third of the silence after which the broker treats a producer as dead."""
SLACK_MAX_S: Final = 30.0
"""Most time that slow acks and replies add before a group counts as lost."""
PIPE_S: Final = 10.0
"""Time in which no group gets through to a broker that answers and reads; after it the pipe counts as dead."""
PIPE_MAX_S: Final = 600.0
"""Longest such time. It doubles with each pipe in vain: a slow line may need minutes for a large group."""
REPORT_S: Final = 0.1
"""Least time between two reports of abandoned rollouts."""
PACK_GROUPS: Final = 32
"""Most groups of one message."""
HEADER_BYTES: Final = 105
"""A header in an envelope without the names in it, as a rule."""
PACK_HEADERS_BYTES: Final = 3600
"""Most bytes of the headers of one message by that measure: the envelope has a limit, and one above it is made anew."""
PACK_BYTES: Final = 4 << 20
"""Most bytes of the groups of one message: the broker serves other producers between two messages."""
PACK_FRAMES_BYTES: Final = 1 << 20
"""The same for groups that follow as frames: the broker has none of them before it has all."""


_header: Final = attrgetter("header")
_offset: Final = attrgetter("slot.offset")
_HELD: Final = frozenset({Wait.GLOBAL_FULL, Wait.JOURNAL_SLOW})
"""Waits of a broker that may not read its producers."""


class StagedGroup(msgspec.Struct, frozen=True, eq=False, gc=False):
    """An encoded group, and its slot if it was written into the arena."""

    encoded: EncodedGroup
    slot: ArenaBlock | None

    def cancel(self) -> None:
        """Free the slot, unless the group is in the spool."""
        if self.slot is not None:
            self.slot.cancel()


class SessionState:
    """State of a session and of its undelivered groups."""

    def __init__(self, register: RegisterProducer, spool: Spool) -> None:
        self.register = register
        """Registration of the producer; `registration` adds the state of the session."""
        self.spool = spool
        self.credit = Credit()
        self.number = 0
        """Number of the session; 0 before the first registration."""
        self.epoch = 0
        """Epoch of the broker that gave the number."""
        self.draining = False
        self.declared: set[str] = set()
        """Ids of the column tables that the broker knows in this session."""
        self.arena: Arena | None = None
        self.without_arena = "not_offered"
        """Reason for having no arena."""
        self.as_frames: Counter[str] = Counter()
        """Groups that were not written into the arena, by reason."""
        self._heard_at = 0.0
        self._asked_at = 0.0
        self._known_at = 0.0
        """Send time of the newest group that the broker acked."""
        self._slack_s = 0.0
        """Time added to `RESEND_S` before a group counts as lost."""
        self._reported = 0
        self._blocked_at: float | None = None
        """Time of the first sync that found groups to send, since a group got through."""
        self._pipe_s = PIPE_S
        self._pause_s = SILENCE_S
        """Silence after which a waiting session asks; it doubles with each reply that brings no credit."""

    def registration(self, *, new: bool = False) -> RegisterProducer:
        """Return the request that continues the session, or opens the first or a `new` one."""
        about = replace(self.register, key=os.urandom(8).hex())
        if self.arena is not None:
            about = replace(about, arena=self.arena.ref)
        if new or not self.number:
            return about
        credit = self.credit
        return replace(about, resume_session=self.number, begun=credit.begun, abandoned=credit.abandoned)

    def belongs_to(self, run_id: str) -> None:
        """Note the run of the first broker: the broker of another run refuses the session and its groups."""
        if not self.register.run_id:
            self.register = replace(self.register, run_id=run_id)

    def offer(self, arena: Arena | None, reason: str = "") -> None:
        """Replace the arena by another one, or by none for that reason."""
        former, self.arena = self.arena, arena
        self.without_arena = reason
        if former is not None:
            self.spool.leave_arena()
            former.close()

    def goes_on(self, ack: Ack) -> bool:
        """Whether the broker's answer is consistent: a new session, or this one with every group that it acked."""
        return ack.session != self.number or self.spool.agrees(ack)

    def reconnected(self, *, is_kept: bool = False) -> None:
        """Note sockets to the same broker, new ones or those that were kept.

        With new ones sent groups may be lost, so a sync is due.
        """
        self._blocked_at = None
        if not is_kept:
            self.spool.doubt()

    def forget(self) -> None:
        """Give up the session's number; the next registration opens a new session."""
        self.number = self.epoch = 0

    def registered(self, ack: Ack, now: float, took_s: float = 0.0) -> list[SpoolEntry]:
        """Begin or continue the session, granted in so many seconds; return the groups that the broker already has."""
        if ack.session != self.number:
            self.spool.renumber()
            self.credit.restart(len(self.spool))
            self._reported = 0
        else:
            self.spool.send_all_again()
        self.number, self.epoch = ack.session, ack.epoch
        self.declared.clear()
        self._asked_at = now
        self._blocked_at = None
        self._is_slow(took_s)
        self._heed(ack)
        return self._apply(ack, now)

    def _heed(self, answer: Ack) -> None:
        """Stop using the arena if the broker does not read it.

        Only a reply counts: a published ack may be older than the registration of the arena.
        """
        if self.arena is not None and not answer.arena:
            self.offer(None, "arena_unreachable")

    def acked(self, ack: Ack, now: float) -> list[SpoolEntry]:
        """Apply a published ack; return the groups it covers. Acks of other sessions or epochs change nothing."""
        if ack.session != self.number or ack.epoch != self.epoch:
            return []
        return self._apply(ack, now)

    def strange(self, ack: Ack) -> bool:
        """Whether an ack is of a newer session or of a restarted broker, so a sync is due."""
        return ack.session > self.number or ack.epoch != self.epoch

    def synced(self, ack: Ack, asked: Sync, now: float) -> tuple[list[SpoolEntry], list[SpoolEntry]]:
        """Apply the reply to `asked`; return the groups it covers and the groups to resend."""
        self._reported = asked.abandoned
        if (ack.session, ack.epoch) == (self.number, self.epoch):
            self._heed(ack)
        self._is_slow(now - self._asked_at)
        self._pause_s = min(2 * self._pause_s, ALIVE_S)
        moment = now - self._slack_s - (RESEND_MAX_S if ack.wait in _HELD else 0.0)
        accepted = self.acked(ack, now)
        return accepted, self.spool.send_overdue_again(moment)

    def _is_slow(self, took_s: float) -> None:
        """Note how long a reply took: the broker may have read as late the groups that were sent with the request."""
        if took_s >= RESEND_S:
            self._slack_s = max(self._slack_s, min(2 * took_s, SLACK_MAX_S))

    def pipe_is_dead(self, answer: Ack, now: float) -> bool:
        """Whether groups need a new pipe, after the sync with this answer: call it once for each."""
        if answer.wait in _HELD:
            self._blocked_at = None
            return False
        if next(self.spool.unsent(self.credit.byte_limit), None) is None:
            return False  # all are under way, and not overdue
        if self._blocked_at is None:
            self._blocked_at = now
        if now - self._blocked_at < max(self._pipe_s, 2 * self._slack_s):
            return False
        self._pipe_s = min(2 * self._pipe_s, PIPE_MAX_S)
        return True

    def silent_s(self, now: float) -> float:
        """Return for how many seconds the broker has said nothing; 0 before the first registration."""
        return now - self._heard_at if self._heard_at else 0.0

    def _apply(self, ack: Ack, now: float) -> list[SpoolEntry]:
        self._heard_at = now
        self.draining |= ack.draining
        limits = self.credit.start_limit, self.credit.byte_limit
        self.credit.grant(ack)
        if limits != (ack.start_limit, ack.byte_limit):
            self._pause_s = SILENCE_S
        if self.arena is not None:
            self.arena.slots.release(ack.released)
        accepted = self.spool.accepted(ack, now)
        if accepted or not len(self.spool):
            self._blocked_at, self._pipe_s = None, PIPE_S
        if accepted:
            self._known_at = max(self._known_at, accepted[-1].sent_at)
            if accepted[0].sends == 1 and accepted[0].sent_at > -math.inf:
                took_s = now - accepted[0].sent_at
                self._slack_s = min(max(2 * took_s - RESEND_S, self._slack_s / 2), SLACK_MAX_S)
        return accepted

    def must_ask(self, now: float, waiting: bool) -> bool:
        """Whether to sync now; `waiting` means that a task or a group waits for credit."""
        asked_s = now - self._asked_at
        silent_s = min(now - self._heard_at, asked_s)
        return (
            (
                asked_s >= ALIVE_S
                and (now - self._known_at >= ALIVE_S or self._reported != self.credit.abandoned)
            )
            or (silent_s >= SILENCE_S and len(self.spool) > 0)
            or (waiting and silent_s >= self._pause_s)
            or (waiting and self.credit.abandoned != self._reported and asked_s >= REPORT_S)
            or (asked_s >= RESEND_S and self.spool.overdue(now - self._slack_s))
        )

    def ask(self, now: float) -> Sync:
        """Return a Sync request; pass its reply to `synced`."""
        self._asked_at = now
        credit = self.credit
        return Sync(
            producer=self.register.producer,
            session=self.number,
            abandoned=credit.abandoned,
            begun=credit.begun,
            paused=credit.paused,
        )

    def goodbye(self) -> Goodbye:
        """Return the last request of the session."""
        return Goodbye(
            producer=self.register.producer,
            session=self.number,
            produced=self.spool.last,
            abandoned=self.credit.abandoned,
        )

    def unsent(self, limit_bytes: int) -> list[SpoolEntry]:
        """Return the groups of the next message, all in the arena or all as frames; empty if none may be sent.

        Args:
            limit_bytes: Most bytes of a message's frames at the broker.
        """
        found: list[SpoolEntry] = []
        nbytes = frames = heads = 0
        for entry in self.spool.unsent(self.credit.byte_limit):
            as_frames = entry.slot is None
            header = entry.header
            undeclared = header.table not in self.declared
            nbytes += header.nbytes
            frames += len(entry.frames)
            heads += HEADER_BYTES + len(header.group_id) + len(header.task)
            if found and (
                undeclared
                or as_frames != (found[0].slot is None)
                or nbytes > (min(PACK_FRAMES_BYTES, limit_bytes) if as_frames else PACK_BYTES)
                or (as_frames and frames >= FRAMES_LIMIT)
                or heads > PACK_HEADERS_BYTES
            ):
                break
            found.append(entry)
            if undeclared or len(found) == PACK_GROUPS:
                break
        return found

    def lay(self, group: Group | PreparedGroup, limit: int) -> StagedGroup:
        """Encode a group, into the arena if it has room; raise what `encode_group` raises.

        The caller must pass the result to `take_in` or cancel it.
        """
        arena = self.arena
        if arena is None:
            self.as_frames[self.without_arena] += 1
            return StagedGroup(encode_group(group, limit), None)
        slot: ArenaBlock | None = None

        def room(nbytes: int) -> tuple[mmap.mmap, int] | None:
            nonlocal slot
            slot = arena.slots.allocate(nbytes)
            if slot is None:
                self.as_frames["arena_full"] += 1
                return None
            return arena.memory, slot.offset

        encoded = encode_group(group, limit, room)
        return StagedGroup(encoded, slot)

    def take_in(self, group: Group, laid: StagedGroup, policy: PolicyVersion | None = None) -> None:
        """Put a group into the spool; `policy` stamps a group without policy versions."""
        slot = laid.slot
        current = slot is not None and self.arena is not None and slot.home is self.arena.slots
        self.spool.add(group, laid.encoded, slot if current else None, policy)

    def may_spool(self, nbytes: int) -> bool:
        """Whether a group may enter the spool now: it has room, and there is credit to send it.

        A draining session accepts groups without credit, so they can be saved.
        """
        spool = self.spool
        within = spool.position + nbytes <= self.credit.byte_limit
        return spool.nbytes + nbytes <= spool.capacity_bytes and (within or self.draining)

    def message(self, entries: list[SpoolEntry]) -> tuple[list[Any], list[SpoolEntry]]:
        """Return the frames of a message with these groups, and the groups that fit into it."""
        about = self.register
        while True:
            in_arena = entries[0].slot is not None
            # By position: names cost as much again, and a message may have one small group.
            envelope = Envelope(
                PROTOCOL_VERSION,
                about.producer,
                self.number,
                about.run,
                about.env,
                about.split,
                tuple(map(_header, entries)),
                tuple(map(_offset, entries)) if in_arena else (),
                0 if self.arena is None else self.arena.ref.ino,
            )
            try:
                head = encode_envelope(envelope)
            except LimitExceededError:
                if len(entries) == 1:
                    raise
                entries = entries[: len(entries) // 2]
            else:
                frames = [] if in_arena else [frame for entry in entries for frame in entry.frames]
                return [head, *frames], entries
