"""Admission: how many bytes a producer may send and how many rollouts it may begin.

Bytes. `granted + queued + leased <= high_bytes`, always: a group is accepted only against a grant, and a grant is only
made from room. Limits that were told never fall, but a grant whose producer is gone or idle is taken back when others
need the room; should that producer send after all, it gets room on the spot or is refused, and still has the group.
Windows of all live producers together leave at least half of the mark to the queue; a reserve within the mark serves
those that drain, and one stalled producer at a time whose next group may be as large as a group can be.

Rollouts. With pacing, what lies between grant and settlement of a lane stays within
`(max_staleness + 1) * batch_sequences * share` sequences: a rollout begun now is then learned from at most
`max_staleness` steps later. It is shared evenly among the lane's producers, each with at most its `slots`.
"""

from heapq import heapify, heappop, heapreplace
from math import ceil
from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.delivery import Wait
from rolloutmq.schemas.envelope import GroupHeader
from rolloutmq.services.broker.lanes import Lane, Lanes
from rolloutmq.services.broker.sessions import Session, Sessions

OPEN_WINDOW: Final = 256
"""Rollouts that a producer may have under way without pacing: bytes and groups bound it, not this."""
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
        self._thirsty: dict[int, Session] = {}
        self._topped: tuple[Session, float] | None = None
        self.largest = max(1, min(config.max_group_bytes, config.high_bytes // 2))
        """Largest group that can be accepted; as much is kept in reserve."""
        self.granted_bytes = 0
        self.granted_groups = 0
        self.batch_sequences = 1

    @property
    def room(self) -> int:
        """Bytes that are neither held nor granted."""
        return self._config.high_bytes - self._lanes.held_bytes - self.granted_bytes

    @property
    def live(self) -> int:
        return len(self._live)

    def producers(self, lane: Lane) -> list[Session]:
        """Return the live sessions of a lane."""
        return [session for session in self._live.values() if session.lane is lane]

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
        used = session.window.nbytes
        backed = min(max(0, session.promised_bytes - used), max(0, self.room - self.largest))
        session.granted_bytes = used + backed if session.promised_bytes else 0
        self._charge(session)
        self.widen(session, now)

    def retire(self, session: Session) -> None:
        """Take back the grants of a session that is gone or silent."""
        session.alive = False
        self._live.pop(session.number, None)
        self._thirsty.pop(session.number, None)
        session.granted_bytes = min(session.granted_bytes, session.window.nbytes)
        self._charge(session)

    def _charge(self, session: Session) -> None:
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
        self._charge(session)
        return ""

    def arrived(self, session: Session, now: float) -> None:
        """Count a group that was just accepted, by the session's window and by its lane."""
        session.accepted_at = now
        self._charge(session)
        self.widen(session, now)
        if not session.lane.rule.pacing and session.starts_out * 2 <= session.slots + OPEN_WINDOW:
            free = self._config.high_groups - self._lanes.held_groups - self.granted_groups
            if not session.draining:
                self._share_starts([session], free, paced=False)

    def abandoned(self, session: Session, total: int) -> None:
        """Note how many rollouts the session gave up in all; a lower number is old news."""
        if total > session.abandoned:
            session.abandoned = min(total, session.start_limit)
            session.touch()
            self._charge(session)

    # Bytes

    def window(self, session: Session) -> int:
        """Return how many bytes the session should be able to send without waiting."""
        share = (self._config.high_bytes - self.largest) // (2 * max(1, len(self._live)))
        return min(self.largest, max(share, session.lane.largest_bytes))

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
        self._charge(session)

    def pour(self, now: float) -> None:
        """Hand out room: to those that drain, to those that wait in line, then to one that is stalled."""
        for session in sorted(self._thirsty.values(), key=lambda s: not s.draining):
            self.widen(session, now)
        if self._thirsty:
            self._take_back_idle(now)
        self._top_up(now)

    def _take_back_idle(self, now: float) -> None:
        """Take back what idle producers hold while others wait for room."""
        for session in self._live.values():
            idle = now - session.accepted_at > IDLE_S and now - session.granted_at > IDLE_S
            if idle and session.bytes_out and session.number not in self._thirsty:
                session.granted_bytes = session.window.nbytes
                self._charge(session)
                self._thirsty[session.number] = session
                return

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
            want = self.largest - session.bytes_out
            if want > self.room:
                return
            session.topped_at = now
            self._grant_bytes(session, want, now)
            self._topped = session, now
            return

    def _narrow(self, session: Session) -> None:
        most = session.window.nbytes + self.window(session)
        if session.alive and session.granted_bytes > most:
            session.granted_bytes = most
            self._charge(session)

    def _stalled(self, session: Session, now: float) -> bool:
        waits = now - session.accepted_at > STALL_S and (session.starts_out or session.draining)
        return bool(waits) and session.bytes_out < self.largest

    # Rollouts

    def share(self, lane: Lane, now: float, silent_s: float) -> float:
        """Return the part of every batch that a lane may expect, next to the others that deliver."""
        peers = [
            peer
            for peer in self._lanes.of_split(lane.split)
            if peer is lane or (peer.connected and (peer.queued.groups or not peer.silent(now, silent_s)))
        ]
        total = sum(peer.weight for peer in peers if peer.connected)
        by_weight = lane.weight / total if total else 1.0 / len(peers)
        return min(1.0, max(by_weight, lane.min_share))

    def pace(self, lane: Lane, now: float) -> None:
        """Grant what the lane may begin, evenly; sets the reason why its producers wait."""
        sessions = [s for s in self.producers(lane) if not s.draining]
        free, reason = self._free_starts(lane, now)
        most = min(free, self._config.high_groups - self._lanes.held_groups - self.granted_groups)
        if most < free:
            reason = Wait.GLOBAL_FULL
        self._share_starts(sessions, most, paced=lane.rule.pacing)
        for session in sessions:
            wait = self._wait(session, reason)
            if wait is not session.wait:
                session.wait = wait
                session.touch()

    def _free_starts(self, lane: Lane, now: float) -> tuple[int, Wait]:
        if not lane.rule.pacing:
            return self._config.high_groups, Wait.GLOBAL_FULL
        share = self.share(lane, now, self._config.silent_env_s)
        budget = (lane.rule.max_staleness + 1) * self.batch_sequences * share
        free = ceil((budget - lane.pending_sequences) / lane.group_size - 1e-9)
        return max(0, free), Wait.STALE_GUARD

    def _share_starts(self, sessions: list[Session], free: int, *, paced: bool) -> None:
        """Give one rollout at a time to whoever has fewest, within its limit."""
        heap = []
        for session in sessions:
            limit = session.slots if paced else max(session.slots, OPEN_WINDOW)
            if session.starts_out < limit:
                heap.append((session.starts_out, session.number, limit, session))
        heapify(heap)
        while heap and free > 0:
            out, number, limit, session = heap[0]
            session.start_limit = max(session.start_limit, session.used) + 1
            session.touch()
            free -= 1
            if out + 1 < limit:
                heapreplace(heap, (out + 1, number, limit, session))
            else:
                heappop(heap)
        for session in sessions:
            self._charge(session)

    def _wait(self, session: Session, reason: Wait) -> Wait:
        if session.number in self._thirsty and not session.bytes_out:
            held = self._lanes.held_bytes * 2 >= self._config.high_bytes
            return Wait.GLOBAL_FULL if held else Wait.NO_CREDIT
        return reason if session.starts_out < session.slots else Wait.NONE

    def clear(self) -> None:
        """Forget all grants."""
        self._live.clear()
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
