"""Byte credits: how many bytes a producer may still send.

`granted + queued + leased <= high_bytes`, always: a group is accepted only against a grant, and a grant is made only
from room. Announced limits never fall. A grant whose producer is gone or idle is reclaimed when other producers need
the room; if that producer sends after all, it gets room on the spot or is refused, and still has the group in its
spool. Among many producers the groups of each come seldom. So a producer is idle after several times of the usual pause
between its groups, and unless a trainer starves, its grant is left to it until then.

The windows of all live producers together leave half of the high-water mark to the queue, unless their groups are too
large for that. A lane may have a mark of its own; it binds the lane's producers in the same way.

A part of the mark is reserved while a trainer trains. `spare` is for one stalled producer at a time: two groups of the
largest size seen so far. `drains` is for draining producers, so they can always empty their spools; no mark of a lane
holds them. Producers of the split `eval` may use both: their groups wait for no trainer, and a trainer may wait for
them. A trainer that waits for a batch while nothing is leased starves: then nothing is reserved, and all room is
granted at once, to those that send before those that are idle.

A group may be larger than all before. A silent producer with a full window is allowed to send one, without room for it.
If it does, the group is refused, and its size is known: room that comes free is kept for it (a claim). Until then the
producer is told that there is no room, and then it sends the group again.

The sums of granted bytes and rollouts are kept here, in one place: `charge`.
"""

from collections import defaultdict
from collections.abc import Callable, Collection
from enum import Enum, auto
from typing import Final

import msgspec

from rolloutmq.bus.producer.session import SLACK_MAX_S
from rolloutmq.bus.producer.spool import RESEND_MAX_S
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import GroupHeader, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.services.broker.flow.credit_windows import CreditWindows
from rolloutmq.services.broker.flow.sessions import ProducerSession, ProducerSessions
from rolloutmq.services.broker.state.queues import Lane, Lanes
from rolloutmq.services.broker.state.split_queue import GroupSums

STALL_S: Final = 0.5
"""A producer with credit that sends nothing for this long may hold a group larger than its window."""
IDLE_S: Final = 1.0
"""A grant unused for this long may be reclaimed when another producer needs the room, at the earliest."""
IDLE_PAUSES: Final = 4
"""Usual pauses between two groups of a producer without one, after which it is idle."""
IDLE_MAX_S: Final = 20.0
MANY: Final = 64
"""Live producers from which on that counts. Among fewer each has a large part of the room, which goes round sooner."""
RATED_S: Final = 2.0
"""Time over which arrivals are counted for that pause."""
CLAIM_S: Final = 3 * RESEND_MAX_S + SLACK_MAX_S
"""Room is kept this long for a refused group: its producer sends it again in this time."""


class TrainerDemand(Enum):
    """Use of the queue by the trainers."""

    NONE = auto()
    """There is a batch, and no trainer pulls it."""
    CONSUMING = auto()
    STARVED = auto()
    """A trainer waits for a batch while nothing is leased: all room may go into it."""


class RoomClaim(msgspec.Struct, eq=False):
    """A group refused for want of room.

    Attributes:
        end: The byte limit that covers it.
        since: When it was refused, in monotonic seconds.
    """

    session: ProducerSession
    end: int
    since: float

    @property
    def need(self) -> int:
        """Bytes it lacks."""
        return max(0, self.end - self.session.granted_bytes)

    def over(self, now: float) -> bool:
        """Return whether the group has come, or will not."""
        session = self.session
        return not session.alive or session.window.nbytes >= self.end or now - self.since > CLAIM_S


class ByteCredits:
    """Grants and their sums."""

    def __init__(
        self,
        config: BrokerConfig,
        lanes: Lanes,
        sessions: ProducerSessions,
        demand: Callable[[], TrainerDemand],
    ) -> None:
        self._config = config
        self._trainer_demand = demand
        self._lanes = lanes
        self._sessions = sessions
        self._live: dict[int, ProducerSession] = {}
        self._of_lane: dict[Lane, dict[int, ProducerSession]] = {}
        self._credit_queue: dict[int, ProducerSession] = {}
        self._claims: dict[int, RoomClaim] = {}
        """At most one of each session, the oldest first."""
        self._excess = False
        """Windows have shrunk: a session may hold more than its window."""
        self._topped: tuple[ProducerSession, float] | None = None
        self._windows = CreditWindows(config, self._live, self._of_lane)
        self.granted_bytes = 0
        self.granted_groups = 0
        self._idle_s = IDLE_S
        """Time without a group after which a producer is idle, unless a trainer starves."""
        self._arrivals, self._rated_at = 0, 0.0
        """Messages with groups since then."""

    def adopt(self, config: BrokerConfig, now: float) -> None:
        """Apply other marks: all grants are reclaimed, and made anew from the present room."""
        self._config = config
        self._windows.adopt(config)
        self._topped = None
        for session in self._live.values():
            self._reclaim(session)
        self.grant_all(now)

    @property
    def largest(self) -> int:
        """Bytes of the largest group that can be accepted; never falls."""
        return self._windows.largest

    @property
    def room(self) -> int:
        """Bytes that are neither held nor granted."""
        return self._config.high_bytes - self._lanes.held_bytes - self.granted_bytes

    @property
    def sessions(self) -> Collection[ProducerSession]:
        """The live sessions."""
        return self._live.values()

    @property
    def live(self) -> int:
        return len(self._live)

    @property
    def room_groups(self) -> int:
        """Groups that may still be granted."""
        return self._config.high_groups - self._lanes.held_groups - self.granted_groups

    def starts(self, lane: Lane) -> tuple[int, Wait]:
        """Return how many rollouts the marks allow a lane, and the wait reason beyond that."""
        if lane.room_groups < self.room_groups:
            return max(0, lane.room_groups), Wait.LANE_FULL
        return max(0, self.room_groups), Wait.GLOBAL_FULL

    def producers(self, lane: Lane) -> list[ProducerSession]:
        """Return the live sessions of a lane."""
        return list(self._of_lane.get(lane, {}).values())

    def full(self) -> bool:
        """Return whether the high-water mark is reached: nothing is accepted before a batch is settled."""
        return (
            self._lanes.held_groups >= self._config.high_groups
            or self._lanes.held_bytes >= self._config.high_bytes
        )

    def exhausted(self, split: Split) -> bool:
        """Return whether no lane of a split with producers can take another group before a batch is settled."""
        queue = self._lanes.of_split(split)
        if self.full() or self._lanes.held_bytes + queue.largest_bytes > self._config.high_bytes:
            return True
        fed = (lane for lane in queue.lanes if self._is_fed(lane))
        first = next(fed, None)
        return first is not None and first.full and all(lane.full for lane in fed)

    def _is_fed(self, lane: Lane) -> bool:
        return lane.connected and bool(self._of_lane.get(lane))

    def revive(self, session: ProducerSession, now: float) -> None:
        """Count a session as alive; its old grants are backed as far as there is room."""
        session.alive = True
        self._live[session.number] = session
        self._of_lane.setdefault(session.lane, {})[session.number] = session
        self._windows.changed()
        self._excess = True
        used = session.window.nbytes
        backed = min(max(0, session.promised_bytes - used), max(0, self._open_room(session)))
        session.granted_bytes = used + backed if session.promised_bytes else 0
        self.charge(session)
        if self._open_room(session) < self._windows.window(session.lane):
            self._shrink_all()
        self._grant_window(session, now)

    def retire(self, session: ProducerSession) -> None:
        """Reclaim the grants of a session that is gone or silent."""
        session.alive = False
        self._live.pop(session.number, None)
        self._of_lane[session.lane].pop(session.number, None)
        self._windows.changed()
        self._credit_queue.pop(session.number, None)
        session.granted_bytes = min(session.granted_bytes, session.window.nbytes)
        self.charge(session)

    def forget(self, lane: Lane) -> None:
        """Forget a lane without live sessions."""
        self._of_lane.pop(lane, None)
        self._windows.changed()

    def charge(self, session: ProducerSession) -> None:
        """Update the sums to the session's present grants."""
        starts = session.starts_out if session.alive else 0
        nbytes = session.bytes_out if session.alive else 0
        more_starts, more_bytes = starts - session.charged_starts, nbytes - session.charged_bytes
        session.charged_starts, session.charged_bytes = starts, nbytes
        self.granted_bytes += more_bytes
        self.granted_groups += more_starts
        session.lane.granted += more_starts
        session.lane.granted_bytes += more_bytes

    def covers(self, session: ProducerSession, sums: GroupSums) -> bool:
        """Return whether the credit of a session plainly covers its next groups: then none has a `refusal`."""
        granted = session.granted_bytes  # which is never above what was promised
        return (
            sums.headers[-1].position <= granted
            and session.window.nbytes + sums.nbytes <= granted
            and self._lanes.held_groups + sums.groups <= self._config.high_groups
            and sums.largest <= self._windows.largest
        )

    def refusal(self, session: ProducerSession, header: GroupHeader) -> str:
        """Return why credit does not cover a group, or an empty string; makes room if it must."""
        if header.nbytes > self.largest:
            return "too_large"
        if self._lanes.held_groups >= self._config.high_groups:
            return "no_room"  # its producer was silent, and others got the room of its permits
        if header.position > session.promised_bytes:
            return "beyond_credit"
        end = max(header.position, session.window.nbytes + header.nbytes)
        if end <= session.granted_bytes:
            return ""
        if end > session.promised_bytes:
            return "position"
        self.charge(session)  # groups of the same message have come
        if end - session.granted_bytes > self._claimable_room(session):
            self._claims.setdefault(session.number, RoomClaim(session, end, session.heard_at))
            return "no_room"
        session.granted_bytes = end
        self.charge(session)
        return ""

    def arrived(self, session: ProducerSession, now: float) -> None:
        """Update the grants after accepted groups."""
        session.accepted_at = now
        self._arrivals += 1
        if now - self._rated_at >= RATED_S:
            self._rate(now)
        if self._windows.seen(session.lane.largest_bytes):
            self._excess = True
        self.charge(session)
        if self._windows.low(session):
            self._grant_window(session, now, last=self.starved)
        else:
            self._credit_queue.pop(session.number, None)

    def _rate(self, now: float) -> None:
        """Set how long a producer may be silent, by the arrivals of late."""
        pause_s = len(self._live) * (now - self._rated_at) / self._arrivals
        is_known = self._rated_at and len(self._live) >= MANY
        self._idle_s = min(max(IDLE_S, IDLE_PAUSES * pause_s), IDLE_MAX_S) if is_known else IDLE_S
        self._arrivals, self._rated_at = 0, now

    def open_window(self, session: ProducerSession) -> int:
        """Return how many rollouts a session may have under way without pacing."""
        return max(session.slots, self._windows.window_groups)

    def waits(self, session: ProducerSession) -> bool:
        """Return whether a session is queued for more credit."""
        return session.number in self._credit_queue

    def abandoned(self, session: ProducerSession, total: int) -> None:
        """Note the total of abandoned rollouts of a session; a lower number is stale."""
        if total > session.abandoned:
            session.abandoned = min(total, session.start_limit)
            session.touch()
            self.charge(session)

    def _open_room(self, session: ProducerSession) -> int:
        """Return the room for ordinary grants to a session; below 0 if the reserve is in use."""
        if session.draining:
            return self.room
        return min(self.room - (0 if session.evaluates else self._reserved), session.lane.room)

    def _claimable_room(self, session: ProducerSession) -> int:
        """Return the room for a group that has come, or that is known to come."""
        if session.draining:
            return self.room
        kept = 0 if self.starved or session.evaluates else self._windows.drains
        return min(self.room - kept, session.lane.room)

    @property
    def starved(self) -> bool:
        """Whether a trainer waits for a batch while nothing is leased."""
        return self._trainer_demand() is TrainerDemand.STARVED

    @property
    def reserved(self) -> int:
        """Bytes that ordinary grants leave free at present."""
        return max(0, min(self._reserved, self._config.high_bytes))

    @property
    def _reserved(self) -> int:
        """Bytes reserved from ordinary grants; a topped-up session already has its part of the spare."""
        if self.starved:
            return 0
        claimed = next((claim.need for claim in self._claims.values() if claim.need), 0)
        topped = self._topped[0].bytes_out if self._topped else 0
        return max(0, self._windows.spare - topped, claimed) + self._windows.drains

    def _grant_window(self, session: ProducerSession, now: float, *, last: bool = True) -> None:
        """Grant up to a whole window, as far as there is room; queue the session if it still has too little.

        Unless `last`, grant nothing that is not worth an ack.
        """
        if not self._windows.low(session):
            self._credit_queue.pop(session.number, None)
            return
        want = self._windows.window(session.lane) - session.bytes_out
        give = min(want, max(0, self._open_room(session)))
        if not last and give < min(want, self._windows.worth(session.lane)):
            give = 0
        if give > 0:
            self._grant_bytes(session, give, now)
        if give == want or not self._windows.low(session):
            self._credit_queue.pop(session.number, None)
        else:
            self._credit_queue[session.number] = session

    def _grant_bytes(self, session: ProducerSession, give: int, now: float) -> None:
        session.granted_at = now
        session.granted_bytes = max(session.granted_bytes, session.window.nbytes) + give
        if session.granted_bytes > session.promised_bytes:
            session.promised_bytes = session.granted_bytes
            session.touch()
        self.charge(session)

    def grant_freed(self, now: float) -> None:
        """Grant freed room: to draining sessions, then to the queue. The cost depends on the grants made, not on the
        sessions.
        """
        self._serve_claims(now)
        if self._credit_queue:
            self._serve_queue(now, last=self.starved)

    def grant_all(self, now: float) -> None:
        """Reclaim idle grants for the queue, grant room to the last byte, then top up one stalled session."""
        self._serve_claims(now)
        if self._credit_queue:
            self._shrink_all()
            self._reclaim_idle(now)
            self._serve_queue(now, last=True)
        self._top_up(now)

    def _serve_claims(self, now: float) -> None:
        """Grant room for refused groups, the oldest first."""
        if not self._claims:
            return
        for claim in list(self._claims.values()):
            session = claim.session
            if claim.over(now):
                del self._claims[session.number]
            elif need := claim.need:
                if need > self._claimable_room(session):
                    return
                self._grant_bytes(session, need, now)
                session.touch()

    def _serve_queue(self, now: float, *, last: bool) -> None:
        """Grant in the order of the queue: to draining and evaluating sessions first.

        While a trainer starves, nothing goes to an idle session that may send its next group anyway: it gets room for
        it on the spot.
        """
        for session in [s for s in self._credit_queue.values() if s.draining or s.evaluates]:
            self._grant_window(session, now, last=last)
        starved = self.starved
        for session in list(self._credit_queue.values()):
            if starved and self._may_rest(session, now):
                continue
            least = 1 if last else self._windows.worth(session.lane)
            if self.room - self._reserved < least:
                return
            self._grant_window(session, now, last=last)

    def _may_rest(self, session: ProducerSession, now: float) -> bool:
        """Return whether a session is idle and its promise covers a group of its environment."""
        covered = session.promised_bytes - session.window.nbytes >= max(1, session.lane.largest_bytes)
        return covered and not session.draining and now - session.accepted_at > IDLE_S

    def _shrink_all(self) -> None:
        """Reclaim grants above each session's window, if windows have shrunk."""
        if not self._excess:
            return
        self._excess = False
        topped = self._topped[0] if self._topped else None
        for session in self._live.values():
            if session is not topped:
                self._shrink(session)

    def _reclaim_idle(self, now: float) -> None:
        """Reclaim the grants of idle sessions, as far as queued ones need room; the idle ones are queued instead."""
        missing, of_lane = self._missing()
        if missing <= 0 and all(short <= 0 for short in of_lane.values()):
            return
        for session in self._live.values():
            short = of_lane.get(session.lane, 0)
            if (missing > 0 or short > 0) and self._idle(session, now):
                missing -= session.bytes_out
                of_lane[session.lane] = short - session.bytes_out
                self._reclaim(session)

    def _missing(self) -> tuple[int, dict[Lane, int]]:
        """Return the bytes that queued sessions lack under the global mark, and under the marks of their lanes."""
        missing = 0
        of_lane: defaultdict[Lane, int] = defaultdict(int)
        for session in self._credit_queue.values():
            want = self._windows.window(session.lane) - session.bytes_out
            if session.lane.rule.high_bytes and not session.draining:
                of_lane[session.lane] += want
                want = min(want, max(0, session.lane.room))
            missing += want
        for lane in of_lane:
            of_lane[lane] -= max(0, lane.room)
        return missing - max(0, self.room - self._reserved), of_lane

    def _idle(self, session: ProducerSession, now: float) -> bool:
        """Return whether a session has a grant and has not used it for long."""
        limit_s = IDLE_S if self.starved else self._idle_s
        unused = now - session.accepted_at > limit_s and now - session.granted_at > limit_s
        queued = session.number in self._credit_queue or session.number in self._claims
        return unused and session.bytes_out > 0 and not queued

    def _reclaim(self, session: ProducerSession) -> None:
        session.granted_bytes = session.window.nbytes
        self.charge(session)
        self._credit_queue[session.number] = session

    def _top_up(self, now: float) -> None:
        """Let one stalled session at a time send a group of any size."""
        if self._topped is not None:
            session, since = self._topped
            used = session.accepted_at > since or not session.alive
            short = self.starved and self._credit_queue and not self.waits(session)
            if not used and now - since < IDLE_S and not short:
                return
            self._shrink(session)
            self._topped = None
        demand = self._trainer_demand()
        stalled = [s for s in self._live.values() if self._stalled(s, now)]
        if demand is TrainerDemand.STARVED and self._credit_queue:
            stalled = [s for s in stalled if self.waits(s)]  # the room is for those that send
        stalled.sort(key=lambda s: (not s.draining, s.topped_at))
        for session in stalled:
            if give := self._top_up_bytes(session, demand, now):
                self._grant_bytes(session, give, now)
                if session.bytes_out >= self._windows.window(session.lane):
                    self._credit_queue.pop(session.number, None)
                self._topped = session, now
                session.topped_at = now
                return
        if demand is not TrainerDemand.NONE:
            self._promise(stalled, now)

    def _promise(self, stalled: list[ProducerSession], now: float) -> None:
        """Let one silent session with a full window send a larger group; there is no room for it yet."""
        for session in stalled:
            if self.waits(session) or session.draining or now - session.topped_at < IDLE_S:
                continue
            promised = session.window.nbytes + self._windows.due(session, queued=False)
            session.topped_at = now
            if promised > session.promised_bytes:
                session.promised_bytes = promised
                session.touch()
                return

    def _top_up_bytes(self, session: ProducerSession, demand: TrainerDemand, now: float) -> int:
        """Return the bytes for the next group of a stalled session; 0 if there is not enough room."""
        want = self._windows.due(session, queued=self.waits(session)) - session.bytes_out
        reserve = {
            TrainerDemand.NONE: self._windows.spare + self._windows.drains,
            TrainerDemand.CONSUMING: self._windows.drains,
            TrainerDemand.STARVED: 0,
        }
        if session.draining:
            return min(want, max(0, self.room))
        if want > session.lane.room:
            self._reclaim_lane(session, now)
            want = min(want, session.lane.room)
        room = self.room - reserve[demand]
        if demand is TrainerDemand.STARVED:
            want = min(want, room)
        return want if 0 < want <= room else 0

    def _reclaim_lane(self, session: ProducerSession, now: float) -> None:
        """Reclaim idle grants of the same lane: its mark leaves too little for one large group."""
        for peer in self.producers(session.lane):
            if peer is not session and self._idle(peer, now):
                self._reclaim(peer)

    def _shrink(self, session: ProducerSession) -> None:
        most = session.window.nbytes + self._windows.window(session.lane)
        if session.alive and session.granted_bytes > most:
            session.granted_bytes = most
            self.charge(session)

    def _stalled(self, session: ProducerSession, now: float) -> bool:
        waits = now - session.accepted_at > STALL_S and (session.starts_out or session.draining)
        return bool(waits) and session.bytes_out < self._windows.due(session, queued=self.waits(session))

    def wait(self, session: ProducerSession) -> Wait:
        """Return why the session may not send another group of usual size, or a refused one again; NONE if it may."""
        lane = session.lane
        claim = self._claims.get(session.number)
        is_refused = claim is not None and claim.need > 0
        has_credit = session.number not in self._credit_queue or session.bytes_out >= max(1, lane.usual_bytes)
        if has_credit and not is_refused:
            return Wait.NONE
        if not session.draining and lane.room <= 0 and lane.held_bytes * 2 >= lane.rule.high_bytes:
            return Wait.LANE_FULL
        full = self._lanes.held_bytes * 2 >= self._config.high_bytes
        return Wait.GLOBAL_FULL if full or is_refused else Wait.NO_CREDIT

    def clear(self) -> None:
        """Forget all grants."""
        self._live.clear()
        self._of_lane.clear()
        self._windows.changed()
        self._credit_queue.clear()
        self._claims.clear()
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
            # Draining sessions may exceed the mark of their lane; no other session is granted anything then.
            drained = any(s.draining for s in self._sessions if s.lane is lane)
            assert not lane.granted_bytes or lane.room >= 0 or drained
        # The groups of an earlier life may exceed the mark by themselves; then nothing is granted.
        assert not self.granted_bytes or self.room >= 0
