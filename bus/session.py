"""A producer's side of its session: what was acked, what may be begun and sent, when to ask. Pure; `now` is passed in.

The law of asking (Sync): acks are published and may be lost, so the session asks by itself after `SILENCE_S` without
one while anything is unacked or somebody waits for credit, when something sent is overdue, soon after a rollout was
abandoned while somebody waits for its permit, and `ALIVE_S` after the broker has heard of it for the last time, by a
question or by a group that it acked, so that it does not take it for dead. Only an answer to that question decides what
is sent again. It overtakes groups that a busy broker has not looked at yet: where acks take long, more patience.

The law of numbers: if the broker knows the session, and all that it acked of it, the numbers stay and it drops what
it had already, also in another life of the broker. If not, the unacked groups become the first ones of a new session.

The law of the arena: each registration offers a new one, and no slot of a former one is ever used again. So nobody
who still reads what an earlier life of the broker told him, or writes it to disk, finds another group there. What was
laid into a former one, and is not acked, goes as frames.
"""

import mmap
import secrets
from collections import Counter
from typing import Any, Final, NamedTuple

from msgspec.structs import replace

from rolloutmq.bus.arena import Arena
from rolloutmq.bus.codec import EncodedGroup, encode_envelope, encode_group
from rolloutmq.bus.credit import Credit
from rolloutmq.bus.slots import Slot
from rolloutmq.bus.spool import RESEND_S, Entry, Spool
from rolloutmq.schemas.delivery import Ack, Goodbye, RegisterProducer, Sync
from rolloutmq.schemas.envelope import PROTOCOL_VERSION, Envelope, PolicyVersion
from rolloutmq.schemas.errors import LimitExceededError
from rolloutmq.schemas.trajectory import Group

SILENCE_S: Final = 1.0
"""Four ack intervals: as long without an ack, the acks or the broker are gone."""
ALIVE_S: Final = 3.0
"""A third of the silence after which a broker takes a producer for dead."""
SLACK_MAX_S: Final = 4.0
"""Most that slow acks add to the time after which a group may be lost."""
REPORT_S: Final = 0.1
"""Abandoned rollouts are reported at most that often."""
PACK_GROUPS: Final = 16
"""Most groups of one message; their headers fit into an envelope unless their names are very long."""
PACK_BYTES: Final = 4 << 20
"""Most bytes of the groups of one message: the broker looks after others between two messages."""


class Laid(NamedTuple):
    """An encoded group, and its slot if it was laid into the arena."""

    encoded: EncodedGroup
    slot: Slot | None

    def cancel(self) -> None:
        """Give the slot back, unless the group is in the spool."""
        if self.slot is not None:
            self.slot.cancel()


class Session:
    """State of a session and of the groups that it must bring home."""

    def __init__(self, register: RegisterProducer, spool: Spool) -> None:
        self.register = register
        """What the producer says of itself; `registration` adds what the session has come to."""
        self.spool = spool
        self.credit = Credit()
        self.number = 0
        """Number of the session; 0 before the first registration."""
        self.epoch = 0
        """Life of the broker that gave the number."""
        self.draining = False
        self.declared: set[str] = set()
        """Column tables that this session has made known."""
        self.arena: Arena | None = None
        self.without_arena = "not_offered"
        """Why there is no arena, if there is none."""
        self.as_frames: Counter[str] = Counter()
        """Groups that were not laid into the arena, by reason."""
        self._heard_at = 0.0
        self._asked_at = 0.0
        self._known_at = 0.0
        """When that was sent of which the broker told last that it had come."""
        self._slack_s = 0.0
        """Groups get so much longer to be acked than `RESEND_S`."""
        self._reported = 0

    def registration(self, *, new: bool = False) -> RegisterProducer:
        """Return what goes on with the session, or opens the first or, if it must be, a `new` one."""
        about = replace(self.register, key=secrets.token_hex(8))
        if self.arena is not None:
            about = replace(about, arena=self.arena.ref)
        if new or not self.number:
            return about
        credit = self.credit
        return replace(about, resume_session=self.number, begun=credit.begun, abandoned=credit.abandoned)

    def offer(self, arena: Arena | None, reason: str = "") -> None:
        """Take another arena in place of the present one, or none, for that reason."""
        former, self.arena = self.arena, arena
        self.without_arena = reason
        if former is not None:
            self.spool.leave_arena()
            former.close()

    def goes_on(self, ack: Ack) -> bool:
        """Whether the session that the broker offers can be: another one, or the same with all that it acked."""
        return ack.session != self.number or self.spool.agrees(ack)

    def reconnected(self) -> None:
        """Note that the sockets are new, and the broker is not: what was under way may be lost, or not. Ask."""
        self.spool.doubt()

    def forget(self) -> None:
        """Give up the session's number; the next registration gives another one."""
        self.number = self.epoch = 0

    def registered(self, ack: Ack, now: float) -> list[Entry]:
        """Begin, or go on with, the session that the broker gave; returns what it has already."""
        if ack.session != self.number:
            self.spool.renumber()
            self.credit.restart(len(self.spool))
            self._reported = 0
        else:
            self.spool.send_all_again()
        self.number, self.epoch = ack.session, ack.epoch
        self.declared.clear()
        self._asked_at = now
        self._heed(ack)
        return self._apply(ack, now)

    def _heed(self, answer: Ack) -> None:
        """Lay nothing into the arena any more if it is not read.

        Only an answer tells: what was published may be from before the registration, of whose arena it knows nothing.
        """
        if self.arena is not None and not answer.arena:
            self.offer(None, "arena_unreachable")

    def acked(self, ack: Ack, now: float) -> list[Entry]:
        """Apply a published ack; returns the groups that it covers. Acks of other sessions or lives change nothing."""
        if ack.session != self.number or ack.epoch != self.epoch:
            return []
        return self._apply(ack, now)

    def strange(self, ack: Ack) -> bool:
        """Whether an ack tells of a newer session or another life of the broker: ask."""
        return ack.session > self.number or ack.epoch != self.epoch

    def synced(self, ack: Ack, asked: Sync, now: float) -> tuple[list[Entry], list[Entry]]:
        """Apply the answer to `asked`; returns the groups that it covers, and those that are sent again."""
        self._reported = asked.abandoned
        if (ack.session, ack.epoch) == (self.number, self.epoch):
            self._heed(ack)
        moment = now - self._slack_s
        return self.acked(ack, now), self.spool.send_overdue_again(moment)

    def _apply(self, ack: Ack, now: float) -> list[Entry]:
        self._heard_at = now
        self.draining |= ack.draining
        self.credit.grant(ack)
        if self.arena is not None:
            self.arena.slots.release(ack.released)
        accepted = self.spool.accepted(ack)
        if accepted:
            self._known_at = max(self._known_at, accepted[-1].sent_at)
            if accepted[0].sends == 1:
                took_s = now - accepted[0].sent_at
                self._slack_s = min(max(0.0, 2 * took_s - RESEND_S), SLACK_MAX_S)
        return accepted

    def must_ask(self, now: float, waiting: bool) -> bool:
        """Whether to sync now; `waiting` says that somebody waits for credit."""
        asked_s = now - self._asked_at
        silent = now - self._heard_at >= SILENCE_S and asked_s >= SILENCE_S
        return (
            (
                asked_s >= ALIVE_S
                and (now - self._known_at >= ALIVE_S or self._reported != self.credit.abandoned)
            )
            or (silent and (waiting or len(self.spool) > 0))
            or (waiting and self.credit.abandoned != self._reported and asked_s >= REPORT_S)
            or (asked_s >= RESEND_S and self.spool.overdue(now - self._slack_s))
        )

    def ask(self, now: float) -> Sync:
        """Return the question; its answer goes to `synced`."""
        self._asked_at = now
        return Sync(producer=self.register.producer, session=self.number, abandoned=self.credit.abandoned)

    def goodbye(self) -> Goodbye:
        """Return the last message of the session."""
        return Goodbye(
            producer=self.register.producer,
            session=self.number,
            produced=self.spool.last,
            abandoned=self.credit.abandoned,
        )

    def unsent(self) -> list[Entry]:
        """Return the groups of the next message that may be sent now.

        It is one, whether or not its table is declared; or several that lie in the arena.
        """
        found: list[Entry] = []
        nbytes = 0
        for entry in self.spool.unsent(self.credit.byte_limit):
            alone = entry.slot is None or entry.header.table not in self.declared
            nbytes += entry.header.nbytes
            if found and (alone or nbytes > PACK_BYTES):
                break
            found.append(entry)
            if alone or len(found) == PACK_GROUPS:
                break
        return found

    def lay(self, group: Group, limit: int) -> Laid:
        """Encode a group, into the arena if there is room; raises what `encode_group` does.

        It is to be taken in or cancelled.
        """
        arena = self.arena
        if arena is None:
            self.as_frames[self.without_arena] += 1
            return Laid(encode_group(group, limit), None)
        slot: Slot | None = None

        def room(nbytes: int) -> tuple[mmap.mmap, int] | None:
            nonlocal slot
            slot = arena.slots.allocate(nbytes)
            if slot is None:
                self.as_frames["arena_full"] += 1
                return None
            return arena.memory, slot.offset

        encoded = encode_group(group, limit, room)
        return Laid(encoded, slot)

    def take_in(self, group: Group, laid: Laid, policy: PolicyVersion | None = None) -> None:
        """Put a group into the spool; `policy` is for one that does not tell its own."""
        slot = laid.slot
        current = slot is not None and self.arena is not None and slot.home is self.arena.slots
        self.spool.add(group, laid.encoded, slot if current else None, policy)

    def may_spool(self, nbytes: int) -> bool:
        """Whether a group may come into the spool now: there is room, and credit to send it.

        A draining session takes in what is in hand without credit, so that it can be saved.
        """
        within = self.spool.position + nbytes <= self.credit.byte_limit
        return self.spool.fits(nbytes) and (within or self.draining)

    def message(self, entries: list[Entry]) -> tuple[list[Any], list[Entry]]:
        """Return the frames of a message that carries these groups, and those of them that have a place in it."""
        while True:
            try:
                envelope = self._envelope(entries)
            except LimitExceededError:
                if len(entries) == 1:
                    raise
                entries = entries[: len(entries) // 2]
            else:
                first = entries[0]
                return [envelope] if first.slot is not None else [envelope, *first.frames], entries

    def _envelope(self, entries: list[Entry]) -> bytes:
        about = self.register
        return encode_envelope(
            Envelope(
                version=PROTOCOL_VERSION,
                producer=about.producer,
                session=self.number,
                run=about.run,
                env=about.env,
                split=about.split,
                groups=tuple(entry.header for entry in entries),
                offsets=tuple(entry.slot.offset for entry in entries if entry.slot is not None),
                arena=0 if self.arena is None else self.arena.ref.ino,
            )
        )
