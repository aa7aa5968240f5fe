"""Admission: how many bytes a producer may send.

`granted + queued + leased <= high_bytes`, always: a group is accepted only against a grant, and a grant is only made
from room. Limits that were told never fall, but a grant whose producer is gone or idle is taken back when others need
the room; should that producer send after all, it gets room on the spot or is refused, and still has the group.
Windows of all live producers together leave half of the mark to the queue, unless their groups are too large for
that. A lane may have a mark of its own, which holds for its producers in the same way and for nobody else.

Two parts of the mark are kept back. `spare` is for one stalled producer at a time, whose next group may be as large as
a group can be, while somebody trains. `drains` is for those that leave: whatever the others do, they can empty their
spools, and no mark of a lane holds them. Only a trainer that waits for a batch while nothing is leased may have all.

The sums of what is granted, in bytes and in rollouts, are kept here too, in one place: `charge`.
"""

from collections import defaultdict
from collections.abc import Callable
from enum import Enum, auto
from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Wait
from rolloutmq.schemas.envelope import GroupHeader, Split
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.sessions import Session, Sessions
from rolloutmq.services.broker.shares import Shares

STALL_S: Final = 0.5
"""A producer that may send and delivers nothing for that long may hold a group larger than its window."""
IDLE_S: Final = 1.0
"""A grant that was not used for that long may be taken back when another producer needs the room."""


class Appetite(Enum):
    """What the trainers do with what is queued."""

    NONE = auto()
    """There is a batch, and nobody pulls it."""
    EATS = auto()
    STARVED = auto()
    """One waits for a batch while nothing is leased: all room may go into it."""


class Admission:
    """Grants, and what they add up to."""

    def __init__(
        self, config: BrokerConfig, lanes: Lanes, sessions: Sessions, appetite: Callable[[], Appetite]
    ) -> None:
        self._config = config
        self._appetite = appetite
        self._lanes = lanes
        self._sessions = sessions
        self._live: dict[int, Session] = {}
        self._of_lane: dict[Lane, dict[int, Session]] = {}
        self._thirsty: dict[int, Session] = {}
        self._excess = False
        """Windows have become smaller: somebody may have been granted more than is due to it now."""
        self._topped: tuple[Session, float] | None = None
        self._shares = Shares(config, self._live, self._of_lane)
        self.granted_bytes = 0
        self.granted_groups = 0

    def adopt(self, config: BrokerConfig, now: float) -> None:
        """Go on under other marks: all grants are taken back, and made anew from the room that there is."""
        self._config = config
        self._shares.adopt(config)
        self._topped = None
        for session in self._live.values():
            self._take_back(session)
        self.pour(now)

    @property
    def largest(self) -> int:
        """Bytes of the largest group that can be accepted; never falls."""
        return self._shares.largest

    @property
    def room(self) -> int:
        """Bytes that are neither held nor granted."""
        return self._config.high_bytes - self._lanes.held_bytes - self.granted_bytes

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def room_groups(self) -> int:
        """Groups that may still be granted."""
        return self._config.high_groups - self._lanes.held_groups - self.granted_groups

    def starts(self, lane: Lane) -> tuple[int, Wait]:
        """Return how many rollouts a lane may begin by the marks, and what holds the others back."""
        if lane.room_groups < self.room_groups:
            return max(0, lane.room_groups), Wait.LANE_FULL
        return max(0, self.room_groups), Wait.GLOBAL_FULL

    def producers(self, lane: Lane) -> list[Session]:
        """Return the live sessions of a lane."""
        return list(self._of_lane.get(lane, {}).values())

    def full(self) -> bool:
        """Whether the global mark is reached: nothing can be taken in before something is settled."""
        return (
            self._lanes.held_groups >= self._config.high_groups
            or self._lanes.held_bytes >= self._config.high_bytes
        )

    def exhausted(self, split: Split) -> bool:
        """Whether no lane of a split that has producers can take another group before something is settled."""
        lanes = self._lanes.of_split(split)
        largest = max((lane.largest_bytes for lane in lanes), default=0)
        if self.full() or self._lanes.held_bytes + largest > self._config.high_bytes:
            return True
        fed = [lane for lane in lanes if lane.connected and self._of_lane.get(lane)]
        return bool(fed) and all(lane.full for lane in fed)

    def revive(self, session: Session, now: float) -> None:
        """Count a session in that is alive (again); its old grants are backed as far as room goes."""
        session.alive = True
        self._live[session.number] = session
        self._of_lane.setdefault(session.lane, {})[session.number] = session
        self._shares.changed()
        self._excess = True
        used = session.window.nbytes
        backed = min(max(0, session.promised_bytes - used), max(0, self._open_room(session)))
        session.granted_bytes = used + backed if session.promised_bytes else 0
        self.charge(session)
        if self._open_room(session) < self._shares.window(session.lane):
            self._narrow_all()
        self._widen(session, now)

    def retire(self, session: Session) -> None:
        """Take back the grants of a session that is gone or silent."""
        session.alive = False
        self._live.pop(session.number, None)
        self._of_lane[session.lane].pop(session.number, None)
        self._shares.changed()
        self._thirsty.pop(session.number, None)
        session.granted_bytes = min(session.granted_bytes, session.window.nbytes)
        self.charge(session)

    def charge(self, session: Session) -> None:
        """Bring the sums up to what the session has outstanding now."""
        starts = session.starts_out if session.alive else 0
        nbytes = session.bytes_out if session.alive else 0
        self.granted_bytes += nbytes - session.charged_bytes
        self.granted_groups += starts - session.charged_starts
        session.lane.granted += starts - session.charged_starts
        session.lane.granted_bytes += nbytes - session.charged_bytes
        session.charged_starts, session.charged_bytes = starts, nbytes

    def refusal(self, session: Session, header: GroupHeader) -> str:
        """Return why a group is not covered by credit, or an empty string; finds room if it must."""
        if header.nbytes > self.largest:
            return "too_large"
        if header.position > session.promised_bytes:
            return "beyond_credit"
        end = max(header.position, session.window.nbytes + header.nbytes)
        if end <= session.granted_bytes:
            return ""
        if end > session.promised_bytes:
            return "position"
        room = self.room if session.draining else min(self.room - self._shares.drains, session.lane.room)
        if end - session.granted_bytes > room:
            return "no_room"
        session.granted_bytes = end
        self.charge(session)
        return ""

    def arrived(self, session: Session, now: float) -> None:
        """Count a group that was just accepted, by the session's window and by its lane."""
        session.accepted_at = now
        self.charge(session)
        self._widen(session, now, last=False)

    def open_window(self, session: Session) -> int:
        """Return how many rollouts a session may have under way without pacing."""
        return max(session.slots, self._shares.window_groups)

    def waits(self, session: Session) -> bool:
        """Whether a session is in line for more than it has."""
        return session.number in self._thirsty

    def abandoned(self, session: Session, total: int) -> None:
        """Note how many rollouts the session gave up in all; a lower number is old news."""
        if total > session.abandoned:
            session.abandoned = min(total, session.start_limit)
            session.touch()
            self.charge(session)

    def _open_room(self, session: Session) -> int:
        """Return the room for everyday grants to a session; below 0 if others have more than is left for that."""
        if session.draining:
            return self.room
        return min(self.room - self._kept, session.lane.room)

    @property
    def _kept(self) -> int:
        """Bytes that are kept back from everyday grants; who was topped up has them out of the spare."""
        return (
            max(0, self._shares.spare - (self._topped[0].bytes_out if self._topped else 0))
            + self._shares.drains
        )

    def _widen(self, session: Session, now: float, *, last: bool = True) -> None:
        """Grant up to a whole window, as far as there is room; who still has too little waits in line.

        Unless to the `last` byte, nothing is given that is not worth an ack.
        """
        if not self._shares.low(session):
            self._thirsty.pop(session.number, None)
            return
        want = self._shares.window(session.lane) - session.bytes_out
        give = min(want, max(0, self._open_room(session)))
        if not last and give < min(want, self._shares.worth(session.lane)):
            give = 0
        if give > 0:
            self._grant_bytes(session, give, now)
        if give == want or not self._shares.low(session):
            self._thirsty.pop(session.number, None)
        else:
            self._thirsty[session.number] = session

    def _grant_bytes(self, session: Session, give: int, now: float) -> None:
        session.granted_at = now
        session.granted_bytes = max(session.granted_bytes, session.window.nbytes) + give
        if session.granted_bytes > session.promised_bytes:
            session.promised_bytes = session.granted_bytes
            session.touch()
        self.charge(session)

    def flow(self, now: float) -> None:
        """Hand out what has come free: to those that drain, then in line. Costs what those cost who get something."""
        self._serve_line(now, last=False)

    def pour(self, now: float) -> None:
        """Look for room on behalf of those in line, hand it out to the last byte, then to one that is stalled."""
        if self._thirsty:
            self._narrow_all()
            self._take_back_idle(now)
            self._serve_line(now, last=True)
        self._top_up(now)

    def _serve_line(self, now: float, *, last: bool) -> None:
        for session in [s for s in self._thirsty.values() if s.draining]:
            self._widen(session, now, last=last)
        for session in list(self._thirsty.values()):
            least = 1 if last else self._shares.worth(session.lane)
            if self.room - self._kept < least:
                return
            self._widen(session, now, last=last)

    def _narrow_all(self) -> None:
        """Take back what exceeds the window that is due to each, if they have become more."""
        if not self._excess:
            return
        self._excess = False
        topped = self._topped[0] if self._topped else None
        for session in self._live.values():
            if session is not topped:
                self._narrow(session)

    def _take_back_idle(self, now: float) -> None:
        """Take back what idle producers hold, as far as others need the room; they wait in line instead."""
        missing, of_lane = self._missing()
        if missing <= 0 and all(short <= 0 for short in of_lane.values()):
            return
        for session in self._live.values():
            short = of_lane.get(session.lane, 0)
            if (missing > 0 or short > 0) and self._idle(session, now):
                missing -= session.bytes_out
                of_lane[session.lane] = short - session.bytes_out
                self._take_back(session)

    def _missing(self) -> tuple[int, dict[Lane, int]]:
        """Return what those that wait in line lack under the global mark, and under the marks of their lanes."""
        missing = 0
        of_lane: defaultdict[Lane, int] = defaultdict(int)
        for session in self._thirsty.values():
            want = self._shares.window(session.lane) - session.bytes_out
            if session.lane.rule.high_bytes and not session.draining:
                of_lane[session.lane] += want
                want = min(want, max(0, session.lane.room))
            missing += want
        for lane in of_lane:
            of_lane[lane] -= max(0, lane.room)
        return missing - max(0, self.room - self._kept), of_lane

    def _idle(self, session: Session, now: float) -> bool:
        """Whether a session has a grant, and did nothing with it for long."""
        unused = now - session.accepted_at > IDLE_S and now - session.granted_at > IDLE_S
        return unused and session.bytes_out > 0 and session.number not in self._thirsty

    def _take_back(self, session: Session) -> None:
        session.granted_bytes = session.window.nbytes
        self.charge(session)
        self._thirsty[session.number] = session

    def _top_up(self, now: float) -> None:
        """Let one stalled producer send a group of any size, in turns."""
        if self._topped is not None:
            session, since = self._topped
            used = session.accepted_at > since or not session.alive
            if not used and now - since < IDLE_S:
                return
            self._narrow(session)
            self._topped = None
        stalled = [s for s in self._live.values() if self._stalled(s, now)]
        for session in sorted(stalled, key=lambda s: (not s.draining, s.topped_at)):
            if give := self._extra(session, now):
                session.topped_at = now
                self._grant_bytes(session, give, now)
                if session.bytes_out >= self._shares.window(session.lane):
                    self._thirsty.pop(session.number, None)
                self._topped = session, now
                return

    def _extra(self, session: Session, now: float) -> int:
        """Return what a stalled session gets for its next group, 0 if there is not enough."""
        want = self._shares.due(session, in_line=self.waits(session)) - session.bytes_out
        appetite = self._appetite()
        kept = {
            Appetite.NONE: self._shares.spare + self._shares.drains,
            Appetite.EATS: self._shares.drains,
            Appetite.STARVED: 0,
        }
        if session.draining:
            return min(want, max(0, self.room))
        if want > session.lane.room:
            self._collect(session, now)
            want = min(want, session.lane.room)
        room = self.room - kept[appetite]
        if appetite is Appetite.STARVED:
            want = min(want, room)
        return want if 0 < want <= room else 0

    def _collect(self, session: Session, now: float) -> None:
        """Take back what idle producers of the same lane hold: its mark leaves too little for one large group."""
        for peer in self.producers(session.lane):
            if peer is not session and self._idle(peer, now):
                self._take_back(peer)

    def _narrow(self, session: Session) -> None:
        most = session.window.nbytes + self._shares.window(session.lane)
        if session.alive and session.granted_bytes > most:
            session.granted_bytes = most
            self.charge(session)

    def _stalled(self, session: Session, now: float) -> bool:
        waits = now - session.accepted_at > STALL_S and (session.starts_out or session.draining)
        return bool(waits) and session.bytes_out < self._shares.due(session, in_line=self.waits(session))

    def wait(self, session: Session) -> Wait:
        """Return why the session may not send another group as they usually are, if it may not."""
        lane = session.lane
        if session.number not in self._thirsty or session.bytes_out >= max(1, lane.usual_bytes):
            return Wait.NONE
        if not session.draining and lane.room <= 0 and lane.held_bytes * 2 >= lane.rule.high_bytes:
            return Wait.LANE_FULL
        full = self._lanes.held_bytes * 2 >= self._config.high_bytes
        return Wait.GLOBAL_FULL if full else Wait.NO_CREDIT

    def clear(self) -> None:
        """Forget all grants."""
        self._live.clear()
        self._of_lane.clear()
        self._shares.changed()
        self._thirsty.clear()
        self._topped = None
        self.granted_bytes = self.granted_groups = 0

    def validate(self) -> None:
        """Assert the sums and the mark."""
        assert set(self._live) == {s.number for s in self._sessions if s.alive}
        assert self.granted_bytes == sum(s.charged_bytes for s in self._sessions)
        assert self.granted_groups == sum(s.charged_starts for s in self._sessions)
        for session in self._live.values():
            assert session.charged_bytes == session.bytes_out
            assert session.charged_starts == session.starts_out
        for lane in self._lanes:
            producers = self.producers(lane)
            assert lane.granted == sum(s.charged_starts for s in producers)
            assert lane.granted_bytes == sum(s.charged_bytes for s in producers)
            # Those that drain go beyond the mark of their lane; nobody else is granted anything then.
            drained = any(s.draining for s in self._sessions if s.lane is lane)
            assert not lane.granted_bytes or lane.room >= 0 or drained
        # What an earlier life saved may exceed the mark by itself; then nothing is granted.
        assert not self.granted_bytes or self.room >= 0
