"""When acks are published: at the end of a round in which they changed, and again and again while the producer lives.

An ack is absolute state and PUB may drop it, so it is repeated every `ack_interval_s`; where there are many
producers, less often, and before they ask by themselves. What tells a producer in line of its groups alone waits a
little: credit for more will follow. A producer that was not heard of for most of `silence_s` gets no repetition: if
it lives it asks by itself, and so is heard before it is taken for dead.
"""

from collections.abc import Callable, Iterator
from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Ack
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.sessions import Session, Sessions

REPEATS_PER_S: Final = 1000
"""All producers together hear their last ack again about that often."""
LONGEST_INTERVALS: Final = 3
"""So many times `ack_interval_s` may pass between two acks, if there are many producers."""
LONGEST_S: Final = 0.75
"""Longest time between two acks; a producer that hears none for a second asks."""
GATHER_S: Final = 0.05
"""So long an ack may wait that tells of groups and not of new credit. Where there are many producers it waits as long
as acks are repeated: in line for credit, each is told of both at once."""
_QUIET_PART: Final = 0.7
"""Part of `silence_s` after which the repetition stops; a producer asks a second later."""


class Acks:
    """Makes acks and keeps the schedule of their repetition."""

    def __init__(
        self, config: BrokerConfig, epoch: int, sessions: Sessions, policy: Callable[[], PolicyVersion]
    ) -> None:
        self._durability = config.durability
        self._interval_s = config.ack_interval_s
        self._quiet_s = config.silence_s * _QUIET_PART
        self._epoch = epoch
        self._sessions = sessions
        self._policy = policy
        self._ring: dict[int, Session] = {}
        """Living sessions by number; the one whose last ack is oldest comes first."""

    def adopt(self, config: BrokerConfig) -> None:
        """Go on with another patience with the silent."""
        self._quiet_s = config.silence_s * _QUIET_PART

    def of(self, session: Session) -> Ack:
        """Return the present ack of a session."""
        window, arena = session.window, session.arena
        read = arena is not None and not arena.closed
        return Ack(
            epoch=self._epoch,
            session=session.number,
            cumulative=window.cumulative,
            gaps=window.gaps(),
            byte_limit=session.promised_bytes,
            start_limit=session.start_limit,
            policy=self._policy(),
            draining=session.draining,
            wait=session.wait,
            durability=self._durability,
            released=window.cumulative if arena is None else arena.released(),
            arena=read,
        )

    def schedule(self, session: Session, now: float) -> None:
        """Repeat the acks of a session from now on, as long as it lives."""
        if session.number not in self._ring:
            self._said(session, now)

    def due(self, now: float) -> Iterator[Session]:
        """Yield the sessions to ack now, each once."""
        for session in self._sessions.touched.take(now, self._gather_s):
            if session.alive:
                self._said(session, now)
                yield session
        while self._ring and self.next_repeat() <= now:
            session = next(iter(self._ring.values()))
            if not session.alive:
                del self._ring[session.number]
                continue
            self._said(session, now)
            if now - session.heard_at < self._quiet_s:
                yield session

    def _said(self, session: Session, now: float) -> None:
        session.acked_at = now
        self._ring.pop(session.number, None)
        self._ring[session.number] = session

    def next_repeat(self) -> float:
        """Return when the first of those that live is to be told again."""
        if not self._ring:
            return float("inf")
        return next(iter(self._ring.values())).acked_at + max(self._interval_s, self._spread_s)

    @property
    def _spread_s(self) -> float:
        """Time in which all can be told once."""
        return min(len(self._ring) / REPEATS_PER_S, self._interval_s * LONGEST_INTERVALS, LONGEST_S)

    @property
    def _gather_s(self) -> float:
        return max(GATHER_S, self._spread_s)

    def next_due(self) -> float:
        """Return when `due` has something to yield; 0 for at once."""
        return min(self._sessions.touched.next_due(self._gather_s), self.next_repeat())

    def clear(self) -> None:
        """Forget the schedule."""
        self._ring.clear()
