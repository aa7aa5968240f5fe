"""A producer's side of its session: what was acked, what may be begun and sent, when to ask. Pure; `now` is passed in.

The law of asking (Sync): acks are published and may be lost, so the session asks by itself after `SILENCE_S` without
one while anything is unacked or somebody waits for credit, when something sent is overdue, soon after a rollout was
abandoned while somebody waits for its permit, and every `ALIVE_S` in any case, so that the broker does not take it for
dead. Only an answer to that question decides what is sent again.

The law of numbers: if the broker knows the session, and all that it acked of it, the numbers stay and it drops what
it had already, also in another life of the broker. If not, the unacked groups become the first ones of a new session.
"""

from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.codec import encode_envelope
from rolloutmq.bus.credit import Credit
from rolloutmq.bus.spool import RESEND_S, Entry, Spool
from rolloutmq.schemas.delivery import Ack, Goodbye, RegisterProducer, Sync
from rolloutmq.schemas.envelope import PROTOCOL_VERSION, Envelope

SILENCE_S: Final = 1.0
"""Four ack intervals: as long without an ack, the acks or the broker are gone."""
ALIVE_S: Final = 3.0
"""A third of the silence after which a broker takes a producer for dead."""
REPORT_S: Final = 0.1
"""Abandoned rollouts are reported at most that often."""


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
        self._heard_at = 0.0
        self._asked_at = 0.0
        self._reported = 0

    def registration(self, *, new: bool = False) -> RegisterProducer:
        """Return what goes on with the session, or opens the first or, if it must be, a `new` one."""
        if new or not self.number:
            return self.register
        credit = self.credit
        return replace(
            self.register, resume_session=self.number, begun=credit.begun, abandoned=credit.abandoned
        )

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
        return self._apply(ack, now)

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
        return self.acked(ack, now), self.spool.send_overdue_again(now)

    def _apply(self, ack: Ack, now: float) -> list[Entry]:
        self._heard_at = now
        self.draining |= ack.draining
        self.credit.grant(ack)
        return self.spool.accepted(ack)

    def must_ask(self, now: float, waiting: bool) -> bool:
        """Whether to sync now; `waiting` says that somebody waits for credit."""
        asked_s = now - self._asked_at
        silent = now - self._heard_at >= SILENCE_S and asked_s >= SILENCE_S
        return (
            asked_s >= ALIVE_S
            or (silent and (waiting or len(self.spool) > 0))
            or (waiting and self.credit.abandoned != self._reported and asked_s >= REPORT_S)
            or (asked_s >= RESEND_S and self.spool.overdue(now))
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

    def next_unsent(self) -> Entry | None:
        """Return the next group that may be sent now, whether or not its table is declared."""
        return self.spool.next_unsent(self.credit.byte_limit)

    def may_spool(self, nbytes: int) -> bool:
        """Whether a group may come into the spool now: there is room, and credit to send it.

        A draining session takes in what is in hand without credit, so that it can be saved.
        """
        within = self.spool.position + nbytes <= self.credit.byte_limit
        return self.spool.fits(nbytes) and (within or self.draining)

    def envelope(self, entry: Entry) -> bytes:
        """Encode the envelope of a message that carries this one group."""
        about = self.register
        return encode_envelope(
            Envelope(
                version=PROTOCOL_VERSION,
                producer=about.producer,
                session=self.number,
                run=about.run,
                env=about.env,
                split=about.split,
                groups=(entry.header,),
            )
        )
