"""The ack schedule: at the end of a round with changes, and repeated while the producer lives.

An ack is absolute state and PUB may drop it, so it is repeated every `ack_interval_s`; less often with many
producers, and always before a producer would ask. An ack without new credit for a producer queued for credit
waits a little: the credit will follow.

A producer that was silent for most of `silence_s` gets no repetition. If it lives, it asks, and so shows life in
time.
"""

import math
from collections.abc import Callable
from typing import Final

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ack
from rolloutmq.services.broker.flow.sessions import ProducerSession, ProducerSessions

REPEATS_PER_S: Final = 1000
"""Acks repeated per second, over all producers."""
LONGEST_INTERVALS: Final = 3
"""Most `ack_interval_s` between two acks, with many producers."""
LONGEST_S: Final = 0.75
"""Longest time between two acks; a producer without one for a second asks."""
GATHER_S: Final = 0.05
"""Longest delay of an ack without new credit.

With many producers it is as long as the repetition: a producer queued for credit gets both in one ack.
"""
_QUIET_PART: Final = 0.7
"""Part of `silence_s` after which the repetition stops; a producer asks a second later."""


class AckSchedule:
    """Makes acks and schedules their repetition."""

    def __init__(
        self,
        config: BrokerConfig,
        epoch: int,
        sessions: ProducerSessions,
        policy: Callable[[], PolicyVersion],
    ) -> None:
        self._durability = config.durability
        self._interval_s = config.ack_interval_s
        self._quiet_s = config.silence_s * _QUIET_PART
        self._epoch = epoch
        self._sessions = sessions
        self._policy = policy
        self._ring: dict[int, ProducerSession] = {}
        """Live sessions by number; the one with the oldest ack comes first."""

    def adopt(self, config: BrokerConfig) -> None:
        """Apply another silence limit."""
        self._quiet_s = config.silence_s * _QUIET_PART

    def of(self, session: ProducerSession) -> Ack:
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

    def schedule(self, session: ProducerSession, now: float) -> None:
        """Repeat the acks of a session from now on, as long as it lives."""
        if session.number not in self._ring:
            self._note_sent(session, now)

    def due(self, now: float) -> list[ProducerSession]:
        """Return the sessions to ack now, each once."""
        due: list[ProducerSession] = []
        touched = self._sessions.touched
        if touched:
            for session in touched.take(now, self._gather_s if touched.later else 0.0):
                if session.alive:
                    self._note_sent(session, now)
                    due.append(session)
        while self.next_repeat() <= now:
            session = next(iter(self._ring.values()))
            if not session.alive:
                del self._ring[session.number]
                continue
            self._note_sent(session, now)
            if now - session.heard_at < self._quiet_s:
                due.append(session)
        return due

    def _note_sent(self, session: ProducerSession, now: float) -> None:
        session.acked_at = now
        self._ring.pop(session.number, None)
        self._ring[session.number] = session

    def next_repeat(self) -> float:
        """Return when the next repetition is due."""
        for oldest in self._ring.values():
            return oldest.acked_at + max(self._interval_s, self._spread_s)
        return math.inf

    @property
    def _spread_s(self) -> float:
        """Time in which every live session can get one ack."""
        return min(len(self._ring) / REPEATS_PER_S, self._interval_s * LONGEST_INTERVALS, LONGEST_S)

    @property
    def _gather_s(self) -> float:
        return max(GATHER_S, self._spread_s)

    def next_due(self) -> float:
        """Return when `due` has something to yield; 0 for at once."""
        touched = self._sessions.touched
        return min(touched.next_due(self._gather_s), self.next_repeat()) if touched else self.next_repeat()

    def clear(self) -> None:
        """Forget the schedule."""
        self._ring.clear()
