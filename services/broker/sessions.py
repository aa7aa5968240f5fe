"""Sessions of producers: numbers, fencing, and what is remembered of them.

A session number is given once and never again, also by a later life of the broker: numbers start above the epoch's.
One session of a producer is current; opening another fences it. The last `IDLE_SESSIONS` that ended are kept, so that
a saved spool can be resent under the same number and what was accepted is not taken in again; older ones are fenced
by their number alone.
"""

from collections.abc import Iterator
from typing import Final

from rolloutmq.schemas.delivery import RegisterProducer, Wait
from rolloutmq.schemas.envelope import ArenaRef, ColumnTable
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.services.broker.arenas import Arena
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.windows import SequenceWindow

IDLE_SESSIONS: Final = 4
"""Ended sessions of one producer that may still be resumed."""
TABLES_LIMIT: Final = 256
"""Column tables of one session; an environment has one or two."""
PRODUCERS_LIMIT: Final = 1 << 16
"""Producers that are remembered; beyond it the one that is over for longest is forgotten."""
LOST_LIMIT: Final = 1 << 32
"""Most groups that a session can have lost: what it says is not believed beyond."""
_EPOCH_SHIFT: Final = 20
"""A million sessions in each life of the broker before numbers of two lives could meet."""


class Touched:
    """Sessions whose ack has changed since it was published.

    Attributes:
        now: Whose ack is published at the end of the round.
        later: Whose ack can wait, and since when; in the order of that.
    """

    __slots__ = ("later", "now")

    def __init__(self) -> None:
        self.now: dict[int, Session] = {}
        self.later: dict[int, tuple[float, Session]] = {}

    def take(self, now: float, gather_s: float) -> "list[Session]":
        """Remove and return the sessions whose ack is due: at once, or since it has waited for so long."""
        for session in self.now.values():
            self.later.pop(session.number, None)
        due = list(self.now.values())
        self.now.clear()
        while self.later and (first := next(iter(self.later.values())))[0] + gather_s <= now:
            due.append(self.later.pop(first[1].number)[1])
        return due

    def next_due(self, gather_s: float) -> float:
        """Return when `take` has something to return; 0 for at once."""
        if self.now:
            return 0.0
        return next(iter(self.later.values()))[0] + gather_s if self.later else float("inf")

    def clear(self) -> None:
        """Forget all of them."""
        self.now.clear()
        self.later.clear()


class Session:
    """One session of a producer, alive or idle.

    Attributes:
        alive: It is the current one and was heard of lately; only then its grants count.
        closed: It said goodbye.
        promised_bytes: The byte limit that was told; never falls.
        granted_bytes: The byte limit that is backed by room; falls when a grant is taken back.
        start_limit: The rollouts that it may have begun; never falls.
        charged_starts, charged_bytes: What is counted for it in the sums of admission.
        produced: Groups that it says it finished.
        key: Of the last registration; empty after a restart of the broker.
        arena: Memory that its groups may lie in; `arena_ref` is how the producer named it.
    """

    __slots__ = (
        "_later", "_touched", "abandoned", "accepted_at", "acked_at", "alive", "arena", "arena_ref", "charged_bytes",
        "charged_starts", "closed", "draining", "granted_at", "granted_bytes", "heard_at", "host", "key", "lane",
        "number", "pid", "produced", "produced_before", "producer", "promised_bytes", "slots",
        "start_limit", "tables", "topped_at", "wait", "window",
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
        self.wait = Wait.NONE
        self.heard_at = now
        self.accepted_at = now
        self.granted_at = now
        self.topped_at = 0.0
        self.acked_at = 0.0
        self.arena: Arena | None = None
        self.arena_ref: ArenaRef | None = None
        self.without_arena = "not_offered"
        """Why no arena of the session is read; empty if one is."""

    def touch(self) -> None:
        """Have an ack published at the end of this round."""
        self._touched.now[self.number] = self

    def touch_later(self, now: float) -> None:
        """Have an ack published soon, with what else there is to tell by then."""
        self._touched.later.setdefault(self.number, (now, self))

    @property
    def used(self) -> int:
        """Rollouts that have come to an end."""
        return self.window.accepted + self.abandoned

    @property
    def starts_out(self) -> int:
        """Rollouts that it may begin or has begun."""
        return max(0, self.start_limit - self.used)

    @property
    def bytes_out(self) -> int:
        """Bytes that it may send and that have not arrived."""
        return max(0, self.granted_bytes - self.window.nbytes)

    @property
    def lost(self) -> int:
        """Groups that it finished and that never got accepted, if it is over."""
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
        """Highest number it ever had."""
        self.current = 0
        self.idle: list[int] = []


class Sessions:
    """All sessions by number, and the current one of each producer."""

    def __init__(self, epoch: int) -> None:
        shift = max(0, min(_EPOCH_SHIFT, 61 - epoch.bit_length()))
        self._next = (epoch << shift) + 1
        self._sessions: dict[int, Session] = {}
        self._producers: dict[str, _Producer] = {}
        self.lost_of_collapsed = 0
        self.touched = Touched()

    def __iter__(self) -> Iterator[Session]:
        return iter(self._sessions.values())

    def current(self, producer: str) -> Session | None:
        """Return the session that the producer may use, if it has one."""
        known = self._producers.get(producer)
        return self._sessions.get(known.current) if known else None

    def find(self, producer: str, number: int) -> Session | ErrorCode:
        """Return the current session if it has this number, or why not."""
        known = self._producers.get(producer)
        if known is None:
            return ErrorCode.UNKNOWN
        if number != known.current:
            return ErrorCode.FENCED if 0 < number <= known.latest else ErrorCode.UNKNOWN
        session = self._sessions.get(number)
        return ErrorCode.UNKNOWN if session is None or session.closed else session

    def reserve_above(self, number: int) -> None:
        """Give no number up to this one: a group of an earlier life has it."""
        self._next = max(self._next, number + 1)

    def open(self, request: RegisterProducer, lane: Lane, now: float, number: int = 0) -> Session:
        """Make the producer's next session, or bring a saved one back; fences the one before.

        The caller has put the former session to rest. A `number` is that of a session which an earlier life opened.
        """
        known = self._producers.setdefault(request.producer, _Producer())
        session = self._resumable(known, request, lane)
        if known.current and known.current != (session.number if session else 0):
            self._retire(known)
        if session is None:
            session = Session(number or self._next, request, lane, now, self.touched)
            self.reserve_above(session.number)
            self._sessions[session.number] = session
        known.current = session.number
        known.latest = max(known.latest, session.number)
        session.alive, session.closed, session.draining = True, False, False
        session.slots, session.pid, session.host = request.slots, request.pid, request.host
        session.key = request.key
        session.heard_at = session.accepted_at = now
        self._forget_oldest(request.producer)
        return session

    def remembered(self) -> Iterator[tuple[Session, bool]]:
        """Yield every session and whether it is its producer's current one; those of one producer oldest first."""
        for known in self._producers.values():
            for number in (*known.idle, known.current):
                if number in self._sessions:
                    yield self._sessions[number], number == known.current

    def restore(self, session: Session, *, current: bool) -> None:
        """Remember a session of an earlier life; those of one producer come in the order of `remembered`."""
        known = self._producers.setdefault(session.producer, _Producer())
        known.latest = max(known.latest, session.number)
        if current:
            known.current = session.number
        else:
            known.idle.append(session.number)
        self._sessions[session.number] = session
        self.reserve_above(session.number)

    def numbered(self, number: int) -> Session | None:
        """Return a session that is remembered."""
        return self._sessions.get(number)

    def rest(self, now: float) -> None:
        """Begin a life: nobody has been heard of yet."""
        self.touched.clear()
        for session in self:
            session.alive = False
            session.granted_bytes = session.promised_bytes = session.start_limit = 0
            session.heard_at = session.accepted_at = session.granted_at = now

    def _resumable(self, known: _Producer, request: RegisterProducer, lane: Lane) -> Session | None:
        number = request.resume_session
        session = self._sessions.get(number)
        if session is None or session.producer != request.producer or session.lane is not lane:
            return None
        if number in known.idle:
            known.idle.remove(number)
        return session

    def _retire(self, known: _Producer) -> None:
        """Fence the current session and keep it idle, at the cost of the oldest idle one."""
        session = self._sessions.get(known.current)
        known.current = 0
        if session is None:
            return
        session.tables.clear()
        known.idle.append(session.number)
        if len(known.idle) > IDLE_SESSIONS:
            self._collapse(self._sessions[known.idle.pop(0)])

    def _collapse(self, session: Session) -> None:
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

    def full(self, producer: str) -> bool:
        """Whether there is no place for a new producer: all that are remembered live."""
        if producer in self._producers or len(self._producers) < PRODUCERS_LIMIT:
            return False
        return all((s := self.current(name)) and s.alive for name in self._producers)

    def lost_of_silent(self) -> int:
        """Groups that sessions which are not alive had finished and never got accepted."""
        return sum(session.lost for session in self if not session.alive)

    def clear(self) -> None:
        """Forget every session; numbers go on."""
        self._sessions.clear()
        self._producers.clear()
        self.touched.clear()

    def validate(self) -> None:
        """Assert that every session is reachable from its producer, and that few are kept."""
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
