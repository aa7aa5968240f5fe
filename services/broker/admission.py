"""Admission: how many bytes a producer may send.

`granted + queued + leased <= high_bytes`, always: a group is accepted only against a grant, and a grant is only made
from room. Limits that were told never fall, but a grant whose producer is gone or idle is taken back when others need
the room; should that producer send after all, it gets room on the spot or is refused, and still has the group.
Windows of all live producers together leave half of the mark to the queue, unless their groups are too large for
that; a reserve within the mark serves those that drain, and one stalled producer at a time whose next group may be as
large as a group can be.

The sums of what is granted, in bytes and in rollouts, are kept here too, in one place: `charge`.
"""

from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Wait
from rolloutmq.schemas.envelope import GroupHeader
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.sessions import Session, Sessions

WINDOW_BYTES: Final = 16 << 20
"""Window of a producer whose groups are not known to be large: milliseconds of sending, an ack takes less."""
WINDOW_GROUPS: Final = 4
"""Window in groups, for those that are."""
STALL_S: Final = 0.5
"""A producer that may send and delivers nothing for that long may hold a group larger than its window."""
IDLE_S: Final = 1.0
"""A grant that was not used for that long may be taken back when another producer needs the room."""


class Admission:
    """Grants, and what they add up to."""

    def __init__(self, config: BrokerConfig, lanes: Lanes, sessions: Sessions) -> None:
        self._config = config
        self._lanes = lanes
        self._sessions = sessions
        self._live: dict[int, Session] = {}
        self._of_lane: dict[Lane, dict[int, Session]] = {}
        self._thirsty: dict[int, Session] = {}
        self._topped: tuple[Session, float] | None = None
        self.largest = max(1, min(config.max_group_bytes, config.high_bytes // 2))
        """Largest group that can be accepted; as much is kept in reserve."""
        self.granted_bytes = 0
        self.granted_groups = 0

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

    def producers(self, lane: Lane) -> list[Session]:
        """Return the live sessions of a lane."""
        return list(self._of_lane.get(lane, {}).values())

    def full(self) -> bool:
        """Whether the global mark is reached: nothing can be taken in before something is settled."""
        return (
            self._lanes.held_groups >= self._config.high_groups
            or self._lanes.held_bytes >= self._config.high_bytes
        )

    def revive(self, session: Session, now: float) -> None:
        """Count a session in that is alive (again); its old grants are backed as far as room goes."""
        session.alive = True
        self._live[session.number] = session
        self._of_lane.setdefault(session.lane, {})[session.number] = session
        used = session.window.nbytes
        backed = min(max(0, session.promised_bytes - used), max(0, self.room - self.largest))
        session.granted_bytes = used + backed if session.promised_bytes else 0
        self.charge(session)
        if self.room - self.largest < self.window(session):
            self._narrow_all()
        self.widen(session, now)

    def retire(self, session: Session) -> None:
        """Take back the grants of a session that is gone or silent."""
        session.alive = False
        self._live.pop(session.number, None)
        self._of_lane[session.lane].pop(session.number, None)
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
        if end - session.granted_bytes > self.room:
            return "no_room"
        session.granted_bytes = end
        self.charge(session)
        return ""

    def arrived(self, session: Session, now: float) -> None:
        """Count a group that was just accepted, by the session's window and by its lane."""
        session.accepted_at = now
        self.charge(session)
        self.widen(session, now)

    def abandoned(self, session: Session, total: int) -> None:
        """Note how many rollouts the session gave up in all; a lower number is old news."""
        if total > session.abandoned:
            session.abandoned = min(total, session.start_limit)
            session.touch()
            self.charge(session)

    def window(self, session: Session) -> int:
        """Return how many bytes the session should be able to send without waiting."""
        share = (self._config.high_bytes - self.largest) // (2 * max(1, len(self._live)))
        seen = session.lane.largest_bytes
        usual = min(share, max(WINDOW_BYTES, WINDOW_GROUPS * seen))
        return min(self.largest, max(usual, seen))

    def widen(self, session: Session, now: float) -> None:
        """Grant up to a whole window, as far as there is room; who gets less waits in line."""
        window = self.window(session)
        want = window - session.bytes_out
        if want <= 0 or (want < window // 4 and session.number not in self._thirsty):
            return
        reserve = 0 if session.draining else self.largest
        give = min(want, max(0, self.room - reserve))
        if give > 0:
            self._grant_bytes(session, give, now)
        if give == want:
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

    def pour(self, now: float) -> None:
        """Hand out room: to those that drain, to those that wait in line, then to one that is stalled."""
        if self._thirsty:
            self._narrow_all()
            self._take_back_idle(now)
        for session in sorted(self._thirsty.values(), key=lambda s: not s.draining):
            self.widen(session, now)
        self._top_up(now)

    def _narrow_all(self) -> None:
        """Take back what exceeds the window that is due to each, now that they are more."""
        topped = self._topped[0] if self._topped else None
        for session in self._live.values():
            if session is not topped:
                self._narrow(session)

    def _take_back_idle(self, now: float) -> None:
        """Take back what idle producers hold, as far as others need the room; they wait in line instead."""
        missing = sum(self.window(s) - s.bytes_out for s in self._thirsty.values())
        missing -= max(0, self.room - self.largest)
        for session in self._live.values():
            if missing <= 0:
                return
            idle = now - session.accepted_at > IDLE_S and now - session.granted_at > IDLE_S
            if idle and session.bytes_out and session.number not in self._thirsty:
                missing -= session.bytes_out
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
        if not stalled:
            return
        session = min(stalled, key=lambda s: (not s.draining, s.topped_at))
        want = self.largest - session.bytes_out
        if want > self.room and (session.draining or self._starving()):
            want = self.room
        if 0 < want <= self.room:
            session.topped_at = now
            self._grant_bytes(session, want, now)
            self._topped = session, now

    def _starving(self) -> bool:
        """Whether nothing is leased: then a batch must come together, and the reserve may go into it."""
        return not any(lane.leased.groups for lane in self._lanes)

    def _narrow(self, session: Session) -> None:
        most = session.window.nbytes + self.window(session)
        if session.alive and session.granted_bytes > most:
            session.granted_bytes = most
            self.charge(session)

    def _stalled(self, session: Session, now: float) -> bool:
        waits = now - session.accepted_at > STALL_S and (session.starts_out or session.draining)
        return bool(waits) and session.bytes_out < self.largest

    def wait(self, session: Session) -> Wait:
        """Return why the session has no bytes to send, if it has none."""
        if session.number not in self._thirsty or session.bytes_out:
            return Wait.NONE
        full = self._lanes.held_bytes * 2 >= self._config.high_bytes
        return Wait.GLOBAL_FULL if full else Wait.NO_CREDIT

    def clear(self) -> None:
        """Forget all grants."""
        self._live.clear()
        self._of_lane.clear()
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
            assert lane.granted == sum(s.charged_starts for s in self.producers(lane))
        # What an earlier life saved may exceed the mark by itself; then nothing is granted.
        assert not self.granted_bytes or self.room >= 0
