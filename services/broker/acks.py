"""When acks are published: at the end of a round in which they changed, and again and again while the producer lives.

An ack is absolute state and PUB may drop it, so it is repeated every `ack_interval_s`. A producer that was not heard
of for most of `silence_s` gets no repetition: if it lives it asks by itself, and so is heard before it is taken for
dead.
"""

from collections import deque
from collections.abc import Callable, Iterator

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Ack
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.services.broker.sessions import Session, Sessions

_QUIET_PART = 0.7
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
        self._ring: deque[tuple[float, Session]] = deque()

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
        if not session.scheduled:
            session.scheduled = True
            self._ring.append((now + self._interval_s, session))

    def due(self, now: float) -> Iterator[Session]:
        """Yield the sessions to ack now, each once."""
        touched = list(self._sessions.touched.values())
        self._sessions.touched.clear()
        for session in touched:
            if session.alive:
                session.acked_at = now
                yield session
        while self._ring and self._ring[0][0] <= now:
            _, session = self._ring.popleft()
            if not session.alive:
                session.scheduled = False
                continue
            repeat = now - session.acked_at >= self._interval_s * 0.5
            if repeat and now - session.heard_at < self._quiet_s:
                session.acked_at = now
                yield session
            self._ring.append((now + self._interval_s, session))

    def next_due(self) -> float:
        """Return when `due` has something to yield; 0 for at once."""
        if self._sessions.touched:
            return 0.0
        return self._ring[0][0] if self._ring else float("inf")

    def clear(self) -> None:
        """Forget the schedule."""
        self._ring.clear()
