"""The ack schedule: at the end of a round with changes, repeated once, and on while the producer waits.

An ack is absolute state and PUB may drop it, so it is repeated after `ack_interval_s`; later with many producers, and
always before a producer would ask. While the producer waits for credit, permits or tasks, the repetition goes on. Any
other producer asks by itself where it lacks something, and a thousand of them have nothing to hear most of the time.
An ack without new credit for a producer queued for credit waits a little: the credit will follow.

Another policy is news for all live producers: once, each gets an ack within one time of repetition. With many of them
and a trainer of short steps that would be most of the work, so then one policy in `ANNOUNCE_S` goes to all. Whoever
sends, waits or asks hears of the others.

A producer that was silent for most of `silence_s` gets no repetition. If it lives, it asks, and so shows life in time.
"""

import math
from collections import OrderedDict
from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Final

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ack, Wait
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
MANY: Final = 256
"""Live producers from which on it costs too much to tell all of them each policy of a trainer of short steps."""
ANNOUNCE_S: Final = 3.0
"""Time between two policies that many producers are told without another reason; one that is silent asks as often."""
_QUIET_PART: Final = 0.7
"""Part of `silence_s` after which the repetition stops; a producer asks at the latest three seconds later."""


class AckSchedule:
    """Makes acks and schedules their repetition."""

    def __init__(
        self,
        config: BrokerConfig,
        epoch: int,
        sessions: ProducerSessions,
        policy: Callable[[], PolicyVersion],
        live: Callable[[], Collection[ProducerSession]],
    ) -> None:
        self._durability = config.durability
        self._interval_s = config.ack_interval_s
        self._quiet_s = config.silence_s * _QUIET_PART
        self._epoch = epoch
        self._sessions = sessions
        self._policy = policy
        self._live = live
        """Returns the live sessions."""
        self._ring: OrderedDict[int, ProducerSession] = OrderedDict()
        """Sessions by number whose ack is to be repeated; the one with the oldest ack comes first."""
        self._announced = policy()
        """Policy that all live sessions were told last."""
        self._announce_at = 0.0
        """Earliest time for the next one."""

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
        """Repeat the ack that a session gets now as a reply."""
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
        if now >= self._announce_at and (policy := self._policy()) != self._announced:
            self._announced = policy
            self._announce_at = now + (ANNOUNCE_S if len(self._live()) > MANY else 0.0)
            self._tell_all(now)
        while self.next_repeat() <= now:
            _, session = self._ring.popitem(last=False)
            if not session.alive:
                continue
            if session.wait is not Wait.NONE:
                self._note_sent(session, now)
            if now - session.heard_at < self._quiet_s:
                due.append(session)
        return due

    def _tell_all(self, now: float) -> None:
        """Let every live session have an ack within one time of repetition, evenly spread over it."""
        others = [one for one in self._live() if one.number not in self._ring]
        pause_s = self._repeat_s / max(1, len(others))
        for place, session in enumerate(others, 1):
            session.acked_at = now + pause_s * place - self._repeat_s
        by_age = sorted((*self._ring.values(), *others), key=attrgetter("acked_at"))
        self._ring = OrderedDict((session.number, session) for session in by_age)

    def _note_sent(self, session: ProducerSession, now: float) -> None:
        session.acked_at = now
        self._ring.pop(session.number, None)
        self._ring[session.number] = session

    def next_repeat(self) -> float:
        """Return when the next repetition is due."""
        for oldest in self._ring.values():
            return oldest.acked_at + self._repeat_s
        return math.inf

    @property
    def _repeat_s(self) -> float:
        """Time from an ack to its repetition."""
        return max(self._interval_s, self._spread_s)

    @property
    def _spread_s(self) -> float:
        """Time in which every live session can get one ack."""
        return min(len(self._live()) / REPEATS_PER_S, self._interval_s * LONGEST_INTERVALS, LONGEST_S)

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
