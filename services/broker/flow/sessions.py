"""Producer sessions: numbering, fencing, and resumption.

A session number is never given twice, not even by a later life of the broker: numbers start above the epoch's. One
session of a producer is current; opening another fences it. The last `IDLE_SESSIONS` ended ones are remembered, so
 a saved spool can be resent under the same number and accepted groups are not accepted again. Older ones are
fenced by their number alone.
"""

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Final

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.wire.envelope import ArenaRef, ColumnTable, ErrorCode, GroupHeader, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import RegisterProducer
from rolloutmq.services.broker.flow.arenas import ProducerArena
from rolloutmq.services.broker.flow.sequence_window import SequenceWindow
from rolloutmq.services.broker.state.queues import Lane

IDLE_SESSIONS: Final = 4
"""Ended sessions of one producer that may still be resumed."""
TABLES_LIMIT: Final = 256
"""Column tables of one session; an environment has one or two."""
PRODUCERS_LIMIT: Final = 1 << 16
"""Most remembered producers; beyond it the one that ended longest ago is forgotten."""
LOST_LIMIT: Final = 1 << 32
"""Most groups a session can report as lost; higher reports are not believed."""
_EPOCH_SHIFT: Final = 20
"""A million sessions in each life of the broker before numbers of two lives could meet."""


class Touched:
    """Sessions with an ack that changed since it was published.

    Attributes:
        now: Sessions acked at the end of the round.
        later: Sessions whose ack can wait, with the time of the change, in that order.
    """

    __slots__ = ("later", "now")

    def __init__(self) -> None:
        self.now: dict[int, ProducerSession] = {}
        self.later: dict[int, tuple[float, ProducerSession]] = {}

    def __bool__(self) -> bool:
        return bool(self.now or self.later)

    def take(self, now: float, gather_s: float) -> "list[ProducerSession]":
        """Remove and return the sessions whose ack is due: at once, or after waiting for `gather_s`."""
        due = list(self.now.values())
        self.now.clear()
        if not self.later:
            return due
        for session in due:
            self.later.pop(session.number, None)
        while self.later and (first := next(iter(self.later.values())))[0] + gather_s <= now:
            due.append(self.later.pop(first[1].number)[1])
        return due

    def next_due(self, gather_s: float) -> float:
        """Return when `take` has a session to return; 0 for at once."""
        if self.now:
            return 0.0
        return next(iter(self.later.values()))[0] + gather_s if self.later else float("inf")

    def clear(self) -> None:
        self.now.clear()
        self.later.clear()


class ProducerSession:
    """One session of a producer, alive or idle.

    Attributes:
        alive: It is the current one and has shown life lately; only then its grants count.
        closed: The producer closed it.
        promised_bytes: The announced byte limit; never falls.
        granted_bytes: The byte limit backed by room; falls when a grant is reclaimed.
        start_limit: Rollouts it may have started; falls while it is paused alone.
        paused: It starts no rollouts, and has no unused permits.
        charged_starts, charged_bytes: Its part of the sums in `ByteCredits`.
        produced: Groups it reports as finished.
        takes: Its requests that wait for a task.
        topic: The topic of its acks.
        key: Of the last registration; empty after a restart of the broker.
        arena: Memory its groups may lie in; `arena_ref` is the producer's address of it.
    """

    __slots__ = (
        "_later", "_touched", "abandoned", "accepted_at", "acked_at", "alive", "arena", "arena_ref", "charged_bytes",
        "charged_starts", "closed", "draining", "granted_at", "granted_bytes", "heard_at", "host", "key", "lane",
        "number", "paused", "pid", "produced", "produced_before", "producer", "promised_bytes", "slots",
        "start_limit", "tables", "takes", "topic", "topped_at", "wait", "window",
        "without_arena",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        request: RegisterProducer,
        lane: Lane,
        now: float,
        touched: "Touched",
    ) -> None:
        self.number = number
        self._touched = touched
        self.producer = request.producer
        self.topic = topics.ack(request.producer)
        self.lane = lane
        self.slots = request.slots
        self.pid = request.pid
        self.host = request.host
        self.key = ""
        self.window = SequenceWindow()
        self.tables: dict[str, ColumnTable] = {}
        self.abandoned = 0
        self.produced = 0
        self.produced_before = 0
        self.start_limit = 0
        self.granted_bytes = 0
        self.promised_bytes = 0
        self.charged_starts = 0
        self.charged_bytes = 0
        self.alive = True
        self.closed = False
        self.draining = False
        self.paused = False
        self.wait = Wait.NONE
        self.takes = 0
        self.heard_at = now
        self.accepted_at = now
        self.granted_at = now
        self.topped_at = 0.0
        self.acked_at = 0.0
        self.arena: ProducerArena | None = None
        self.arena_ref: ArenaRef | None = None
        self.without_arena = "not_offered"
        """Why the session has no arena; empty if it has one."""

    def touch(self) -> None:
        """Publish an ack at the end of this round."""
        self._touched.now[self.number] = self

    def touch_later(self, now: float) -> None:
        """Publish an ack soon, together with later changes."""
        self._touched.later.setdefault(self.number, (now, self))

    def arena_has(self, offsets: Sequence[int], headers: Sequence[GroupHeader]) -> bool:
        """Return whether groups can lie at these offsets of the session's arena."""
        return self.arena is not None and self.arena.has(offsets, headers)

    @property
    def evaluates(self) -> bool:
        """Whether its groups are for evaluation: no trainer consumes them."""
        return self.lane.split is Split.EVAL

    @property
    def begins(self) -> bool:
        """Whether it starts rollouts as it gets permits."""
        return not self.draining and not self.paused

    @property
    def used(self) -> int:
        """Rollouts that have ended."""
        return self.window.accepted + self.abandoned

    @property
    def starts_out(self) -> int:
        """Rollouts it may start or has under way."""
        return max(0, self.start_limit - self.window.accepted - self.abandoned)

    @property
    def bytes_out(self) -> int:
        """Bytes it may send, not yet arrived."""
        return max(0, self.granted_bytes - self.window.nbytes)

    @property
    def lost(self) -> int:
        """Groups finished and never accepted, once it is over."""
        return min(LOST_LIMIT, max(0, self.produced - self.window.accepted))

    def declare(self, tables: tuple[ColumnTable, ...]) -> bool:
        """Remember column tables; False if there would be too many."""
        new = {table.id: table for table in tables}
        if len(self.tables.keys() | new.keys()) > TABLES_LIMIT:
            return False
        self.tables.update(new)
        return True


class _Producer:
    __slots__ = ("current", "idle", "latest")

    def __init__(self) -> None:
        self.latest = 0
        """Highest session number it ever had."""
        self.current = 0
        self.idle: list[int] = []


class ProducerSessions:
    """All sessions by number, and the current one of each producer."""

    def __init__(self, epoch: int) -> None:
        shift = max(0, min(_EPOCH_SHIFT, 61 - epoch.bit_length()))
        self._next = (epoch << shift) + 1
        self._sessions: dict[int, ProducerSession] = {}
        self._producers: dict[str, _Producer] = {}
        self.lost_of_collapsed = 0
        self.touched = Touched()

    def __iter__(self) -> Iterator[ProducerSession]:
        return iter(self._sessions.values())

    def current(self, producer: str) -> ProducerSession | None:
        """Return the producer's current session, if it has one."""
        known = self._producers.get(producer)
        return self._sessions.get(known.current) if known else None

    def find(self, producer: str, number: int) -> ProducerSession | ErrorCode:
        """Return the current session if it has this number, or the reason of a refusal."""
        known = self._producers.get(producer)
        if known is None:
            return ErrorCode.UNKNOWN
        if number != known.current:
            return ErrorCode.FENCED if 0 < number <= known.latest else ErrorCode.UNKNOWN
        session = self._sessions.get(number)
        return ErrorCode.UNKNOWN if session is None or session.closed else session

    def listening(self, topic: bytes) -> Iterable[ProducerSession]:
        """Return the sessions whose acks a subscription gets.

        That of a producer is found by its name: a thousand producers subscribe at once to a restarted broker.
        """
        if (name := topics.acked_producer(topic)) is not None:
            session = self.current(name)
            return () if session is None else (session,)
        return [session for session in self if session.topic.startswith(topic)]

    def reserve_above(self, number: int) -> None:
        """Give no number up to this one: a group of an earlier life has it."""
        self._next = max(self._next, number + 1)

    def open(self, request: RegisterProducer, lane: Lane, now: float, number: int = 0) -> ProducerSession:
        """Open the producer's next session, or resume a remembered one; fences the one before.

        The caller has retired the previous session. A `number` is that of a session of an earlier life.
        """
        known = self._producers.setdefault(request.producer, _Producer())
        session = self._resumable(known, request, lane)
        if known.current and known.current != (session.number if session else 0):
            self._retire(known)
        if session is None:
            session = ProducerSession(number or self._next, request, lane, now, self.touched)
            self.reserve_above(session.number)
            self._sessions[session.number] = session
        known.current = session.number
        known.latest = max(known.latest, session.number)
        session.alive, session.closed, session.draining, session.paused = True, False, False, False
        session.slots, session.pid, session.host = request.slots, request.pid, request.host
        session.key = request.key
        session.heard_at = session.accepted_at = now
        self._forget_oldest(request.producer)
        return session

    def remembered(self) -> Iterator[tuple[ProducerSession, bool]]:
        """Yield every session and whether it is its producer's current one; those of one producer oldest first."""
        for known in self._producers.values():
            for number in (*known.idle, known.current):
                if number in self._sessions:
                    yield self._sessions[number], number == known.current

    def restore(self, session: ProducerSession, *, current: bool) -> None:
        """Add a session of an earlier life; those of one producer come in the order of `remembered`."""
        known = self._producers.setdefault(session.producer, _Producer())
        known.latest = max(known.latest, session.number)
        if current:
            known.current = session.number
        else:
            known.idle.append(session.number)
        self._sessions[session.number] = session
        self.reserve_above(session.number)

    def numbered(self, number: int) -> ProducerSession | None:
        """Return a remembered session."""
        return self._sessions.get(number)

    def rest(self, now: float) -> None:
        """Begin a life of the broker: no producer has shown life yet."""
        self.touched.clear()
        for session in self:
            session.alive = session.paused = False
            session.granted_bytes = session.promised_bytes = session.start_limit = 0
            session.heard_at = session.accepted_at = session.granted_at = now

    def _resumable(self, known: _Producer, request: RegisterProducer, lane: Lane) -> ProducerSession | None:
        number = request.resume_session
        session = self._sessions.get(number)
        if session is None or session.producer != request.producer or session.lane is not lane:
            return None
        if number in known.idle:
            known.idle.remove(number)
        return session

    def _retire(self, known: _Producer) -> None:
        """Fence the current session and remember it as idle; forget the oldest idle one."""
        session = self._sessions.get(known.current)
        known.current = 0
        if session is None:
            return
        session.tables.clear()
        known.idle.append(session.number)
        if len(known.idle) > IDLE_SESSIONS:
            self._collapse(self._sessions[known.idle.pop(0)])

    def _collapse(self, session: ProducerSession) -> None:
        self.lost_of_collapsed += session.lost
        del self._sessions[session.number]

    def _forget_oldest(self, opened: str) -> None:
        if len(self._producers) <= PRODUCERS_LIMIT:
            return
        for name, known in self._producers.items():
            current = self._sessions.get(known.current)
            if name != opened and (current is None or not current.alive):
                self._retire(known)
                for number in known.idle:
                    self._collapse(self._sessions[number])
                del self._producers[name]
                return

    def forget(self, lanes: Container[Lane]) -> None:
        """Forget the sessions of lanes; none of them is alive. Their producers are unknown, not fenced."""
        for session in [session for session in self if session.lane in lanes]:
            known = self._producers[session.producer]
            if session.number in known.idle:
                known.idle.remove(session.number)
            self._collapse(session)
            if not known.idle and known.current not in self._sessions:
                del self._producers[session.producer]

    def full(self, producer: str) -> bool:
        """Return whether the broker can remember no further producer: all remembered ones are alive."""
        if producer in self._producers or len(self._producers) < PRODUCERS_LIMIT:
            return False
        return all((s := self.current(name)) and s.alive for name in self._producers)

    def lost_of_silent(self) -> int:
        """Return the groups that silent sessions had finished and that were never accepted."""
        return sum(session.lost for session in self if not session.alive)

    def clear(self) -> None:
        """Forget every session; numbers go on."""
        self._sessions.clear()
        self._producers.clear()
        self.touched.clear()

    def validate(self) -> None:
        """Assert that every session is reachable from its producer, and that few are remembered."""
        kept = [n for p in self._producers.values() for n in (*p.idle, p.current) if n]
        assert len(kept) == len(set(kept))
        assert set(self._sessions) <= set(kept)
        for known in self._producers.values():
            assert len(known.idle) <= IDLE_SESSIONS
            assert all(number in self._sessions for number in known.idle)
        for session in self:
            session.window.validate()
            assert session.number < self._next
            assert session.granted_bytes <= session.promised_bytes
            assert session.alive or not (session.charged_starts or session.charged_bytes)
