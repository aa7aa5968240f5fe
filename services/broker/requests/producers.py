"""Requests of producers: sessions and incoming groups.

A group is accepted only once, only for the current session of its environment, inside its window and credit, and with
a declared table. Every other message is counted by reason and changes nothing for other peers.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import msgspec

from rolloutmq.schemas.wire.envelope import ArenaRef, Envelope, ErrorCode, Split
from rolloutmq.schemas.wire.replies import Ack, ErrorReply, Ok, Registered
from rolloutmq.schemas.wire.requests import DeclareTables, Goodbye, RegisterProducer, Sync
from rolloutmq.services.broker.broker_state import BrokerState, of_another_run, refuse
from rolloutmq.services.broker.flow.arenas import ArenaSlot, ProducerArena
from rolloutmq.services.broker.flow.credit_windows import OPEN_WINDOW
from rolloutmq.services.broker.flow.sessions import TABLES_LIMIT, ProducerSession
from rolloutmq.services.broker.journal.format.events import Declared, Opened, Produced, Skipped, Told
from rolloutmq.services.broker.journal.stored_group import Frames, GroupBody, StoredGroup
from rolloutmq.services.broker.requests.vacancies import LANES_LIMIT, Vacancies
from rolloutmq.services.broker.state.group_hops import GATHERED
from rolloutmq.services.broker.state.groups import identities
from rolloutmq.services.broker.state.queues import Lane
from rolloutmq.services.broker.state.split_queue import GroupSums

BEGUN_LIMIT: Final = 1 << 40
"""Most rollouts one session can have started; no process lives that long."""


class Arrived(msgspec.Struct, eq=False):
    """Groups of one message, each with its offset in the arena or with its frames.

    Attributes:
        sums: What the groups are together.
        accepted: The new ones, in the runs in which they were accepted.
        entered: Whether the window has one of them now, new or known from before.
    """

    session: ProducerSession
    sums: GroupSums
    offsets: Sequence[int]
    frames: Sequence[Any]
    now: float
    wall: float
    accepted: list[tuple[list[StoredGroup], GroupSums]]
    entered: bool = False

    def each(self) -> Iterator["Arrived"]:
        """Yield each group as a message of its own, with the same list of accepted groups."""
        start = 0
        for index, header in enumerate(self.sums.headers):
            end = start if self.offsets else start + header.frames
            offsets, frames = self.offsets[index : index + 1], self.frames[start:end]
            sums = GroupSums.of((header,))
            yield Arrived(self.session, sums, offsets, frames, self.now, self.wall, self.accepted)
            start = end

    def places(self) -> Sequence[tuple[ArenaSlot | None, Frames]]:
        """Return the slot and the frames of each group; slots in the arena are held from now on."""
        if self.offsets:
            arena = self.session.arena
            assert arena is not None, "the sender was checked"
            return arena.take(self.sums.headers, self.offsets, self.session.lane.env)
        if self.sums.groups == 1:
            return ((None, tuple(self.frames)),)
        return [(None, tuple(one.frames)) for one in self.each()]


class ProducerRequests:
    """Handles the requests and groups of producers."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self.vacancies = Vacancies(state)
        self.on_left: Callable[[ProducerSession, str, float], object] = lambda *_: None
        """Called with a session that has ended, the reason, and the time."""

    def register(self, request: RegisterProducer, now: float) -> Registered | ErrorReply:
        """Open a session, or resume a saved one."""
        state = self._state
        previous = state.sessions.current(request.producer)
        if previous is not None and previous.key == request.key != "" and not previous.closed:
            # The reply was slow and the request was repeated: a new session would fence the one in use.
            self.alive(previous, now)
            return Registered(ack=state.ack_schedule.of(previous), info=state.run.info)
        if (error := self._unacceptable(request, now)) is not None:
            return error
        lane = self.lane(request, now)
        keeps_draining = self._keeps_draining(request, previous)
        if previous is not None and previous.alive:
            state.credits.retire(previous)
        session = state.sessions.open(request, lane, now)
        if previous is not None and previous is not session:
            self.on_left(previous, "was fenced by a newer session", now)
        if session.number == request.resume_session:
            session.abandoned = max(session.abandoned, min(request.abandoned, request.begun, BEGUN_LIMIT))
            most = session.used + max(session.slots, OPEN_WINDOW)
            session.start_limit = max(session.start_limit, min(request.begun, most))
        if keeps_draining:
            session.draining = True
        else:
            self.end_drain(request.producer)
        beat = state.workers.last(request.producer)
        if beat is not None and beat.pid == request.pid:
            session.produced_before = beat.produced - session.window.accepted
        state.events.add(_opened(session, request))
        self._claim(session, request.arena)
        state.credits.revive(session, now)
        state.ack_schedule.schedule(session, now)
        state.permits.pace_new(session, now)
        state.permits_due = True
        return Registered(ack=state.ack_schedule.of(session), info=state.run.info)

    def _claim(self, session: ProducerSession, ref: ArenaRef | None) -> None:
        """Open the arena a producer offers, if it is readable. Groups in a previous arena stay held."""
        if session.arena is not None and session.arena_ref == ref and session.arena.goes_on():
            return
        session.arena, session.arena_ref, session.without_arena = None, None, "not_offered"
        if ref is not None:
            found = self._state.arenas.claim(ref, session.window, session.touch)
            if isinstance(found, ProducerArena):
                session.arena, session.arena_ref, session.without_arena = found, ref, ""
            else:
                session.without_arena = found
                self._state.rejected[found] += 1

    def _keeps_draining(self, request: RegisterProducer, previous: ProducerSession | None) -> bool:
        """Return whether a process that registers again was ordered to drain, in its last session or after it."""
        if previous is not None and previous.draining and request.pid == previous.pid != 0:
            return True
        beat = self._state.workers.last(request.producer)  # of a later process it would have ended the drain
        is_same = beat is not None and beat.pid == request.pid != 0 and beat.host == request.host
        return is_same and self._state.workers.draining(request.producer)

    def end_drain(self, worker: str) -> None:
        """End a drain: the process it was for is over."""
        if self._state.workers.end_drain(worker):
            self._state.events.add(Told(worker, "", told=False))

    def _unacceptable(self, request: RegisterProducer, now: float) -> ErrorReply | None:
        state = self._state
        if not math.isfinite(request.weight):
            return refuse(ErrorCode.INVALID, f"weight: must be a finite number (got {request.weight})")
        if not state.run.serves(request.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        if (error := of_another_run(state, request.run_id)) is not None:
            return error
        if state.sessions.full(request.producer):
            return refuse(ErrorCode.LIMIT, "producer: the broker can register no further producer")
        known = state.lanes.find(request.env, request.split) is not None
        if not known and not self.vacancies.make_room(now):
            return refuse(
                ErrorCode.LIMIT,
                f"env: {LANES_LIMIT} environments hold groups or have live producers, the limit "
                f"(got {request.env}); end some of them, or reuse their names",
            )
        return None

    def lane(self, request: RegisterProducer, now: float) -> Lane:
        """Return the lane of a producer that registers, updated with its settings."""
        state = self._state
        lane = state.lanes.open(request.env, request.split, now)
        lane.connected = True
        if not state.credits.producers(lane):
            lane.arrived_at = now
        state.lanes.apply_producer_settings(lane, request.weight, request.min_share, request.group_size)
        return lane

    def declare(self, request: DeclareTables, now: float) -> Ok | ErrorReply:
        """Remember column tables of a session."""
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        if not session.declare(request.tables):
            return refuse(
                ErrorCode.LIMIT, f"tables: one session declares at most {TABLES_LIMIT} column tables"
            )
        self._state.events.add(Declared(session.number, request.tables))
        return Ok()

    def sync(self, request: Sync, now: float) -> Ack | ErrorReply:
        """Return the present ack."""
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        if request.abandoned > session.abandoned:
            self._state.credits.abandoned(session, request.abandoned)
            self._state.permits_due |= self._state.permits.pace(session.lane, now)
        if request.paused or session.paused:
            self._pause(session, request, now)
        return self._state.ack_schedule.of(session)

    def _pause(self, session: ProducerSession, request: Sync, now: float) -> None:
        """Take unused permits back from a producer that starts no rollouts, and grant some once it goes on."""
        session.paused = request.paused
        if request.paused and session.start_limit > (limit := max(session.used, request.begun)):
            session.start_limit = limit
            self._state.credits.charge(session)
        self._state.permits_due |= self._state.permits.pace(session.lane, now)

    def goodbye(self, request: Goodbye, now: float) -> Ok | ErrorReply:
        """Close a session; a repetition changes nothing."""
        state = self._state
        current = state.sessions.current(request.producer)
        if current is not None and current.number == request.session and current.closed:
            return Ok()
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        state.credits.abandoned(session, request.abandoned)
        session.produced = request.produced
        session.closed = True
        state.events.add(Produced(session.number, session.produced, session.abandoned, closed=True))
        state.credits.retire(session)
        state.permits.note(session.lane)
        state.permits_due = True
        self.on_left(session, "closed its session", now)
        return Ok()

    def heard(self, producer: str, number: int, now: float) -> ProducerSession | ErrorReply:
        """Return the session with a fresh sign of life, or the refusal."""
        session = self._state.sessions.find(producer, number)
        if isinstance(session, ErrorCode):
            known = "is fenced by a newer one" if session is ErrorCode.FENCED else "is not known"
            return refuse(session, f"session {number} of producer {producer} {known}")
        self.alive(session, now)
        return session

    def alive(self, session: ProducerSession, now: float) -> None:
        """Note a sign of life; a session that was taken for dead is revived."""
        session.heard_at = now
        if not session.alive:
            self._claim(session, session.arena_ref)
            self._state.credits.revive(session, now)
            self._state.ack_schedule.schedule(session, now)

    def accept(self, envelope: Envelope, frames: Sequence[Any], now: float, wall: float) -> Arrived | None:
        """Accept the groups of one message; None if its sender is refused. `count` has to follow.

        Groups that plainly follow the accepted ones are accepted together, all others one by one.
        """
        session = self._sender(envelope, frames, now)
        if isinstance(session, str):
            self._state.rejected[session] += 1
            return None
        sums = GroupSums.of(envelope.groups)
        arrived = Arrived(session, sums, envelope.offsets, frames, now, wall, [])
        keys = self._keys_of_clean(arrived)
        if keys is None:
            arrived.entered = self._accept_singly(arrived)
        else:
            arrived.entered = True
            session.window.follow(sums.groups, sums.nbytes)
            self._accept(arrived, keys)
        return arrived

    def count(self, arrived: Arrived) -> None:
        """Do what no trainer waits for: count the accepted groups, and grant credit and permits again, once."""
        state, session, now = self._state, arrived.session, arrived.now
        for groups, sums in arrived.accepted:
            self._count_run(session.lane, groups, sums, now)
        if arrived.entered:
            state.credits.arrived(session, now)
            state.permits_due |= state.permits.arrived(session)
        if state.hops.uncounted >= GATHERED:
            state.hops.gather()
        if state.credits.waits(session):
            session.touch_later(now)
        else:
            session.touch()

    def _count_run(self, lane: Lane, groups: list[StoredGroup], sums: GroupSums, now: float) -> None:
        state = self._state
        lane.count(sums, now)
        state.hops.accepted(groups)
        if lane.split is Split.TRAIN:
            state.produced.add(sums.sequences, now)
        usual = lane.group_size
        if sums.sequences != usual * sums.groups or (
            sums.groups > 1 and any([header.sequences != usual for header in sums.headers])
        ):
            state.permits.note(lane)
            state.permits_due = True

    def _sender(self, envelope: Envelope, frames: Sequence[Any], now: float) -> ProducerSession | str:
        session = self._state.sessions.find(envelope.producer, envelope.session)
        if isinstance(session, ErrorCode):
            return "fenced" if session is ErrorCode.FENCED else "unknown_session"
        if not self._state.run.serves(envelope.run):
            return "wrong_run"
        if envelope.env != session.lane.env or envelope.split != session.lane.split:
            return "wrong_environment"
        if not _fits(envelope, len(frames)):
            return "frames"
        session.heard_at = now
        if not session.alive:
            self.alive(session, now)
        arena = session.arena
        if envelope.offsets and (arena is None or arena.closed or arena.ref.ino != envelope.arena):
            return "no_arena"
        return session

    def _keys_of_clean(self, arrived: "Arrived") -> list[int] | None:
        """Return the identities of groups that can be accepted without a look at each; None if there may be a reason
        against one of them.
        """
        session, sums = arrived.session, arrived.sums
        headers, tables = sums.headers, session.tables
        for header in headers:
            if header.table not in tables:
                return None
        if not session.window.is_next(headers) or not self._state.credits.covers(session, sums):
            return None
        if arrived.offsets and not session.arena_has(arrived.offsets, headers):
            return None
        keys = identities(session.lane.text, headers)
        return keys if self._state.groups.all_new(keys) else None

    def _accept_singly(self, arrived: "Arrived") -> bool:
        """Accept or refuse one group after the other; return whether any entered the window."""
        entered = False
        for one in arrived.each() if arrived.sums.groups > 1 else (arrived,):
            refusal = self._refusal(one)
            if refusal:
                self._state.rejected[refusal] += 1
            else:
                self._accept_unless_known(one)
                entered = True
        return entered

    def _refusal(self, one: "Arrived") -> str:
        session, (header,) = one.session, one.sums.headers
        if header.table not in session.tables:
            return "duplicate" if session.window.seen(header.seq) else "unknown_table"
        if refusal := session.window.refusal(header):
            return refusal
        if one.offsets and not session.arena_has(one.offsets, one.sums.headers):
            return "arena_range"
        return self._state.credits.refusal(session, header)

    def _accept_unless_known(self, one: "Arrived") -> None:
        """Accept a group without a refusal, but queue none that was accepted before."""
        state, session, (header,) = self._state, one.session, one.sums.headers
        keys = identities(session.lane.text, one.sums.headers)
        session.window.accept(header.seq, header.position, header.nbytes)
        if state.groups.all_new(keys):
            self._accept(one, keys)
            return
        state.events.add(Skipped(session.number, header.seq, header.position, header.nbytes, header.group_id))
        state.rejected["duplicate"] += 1
        state.permits.note(session.lane)  # its rollout is over, and nothing more is queued
        state.permits_due = True

    def _accept(self, arrived: "Arrived", keys: Sequence[int]) -> None:
        """Store and queue new groups, which are in the window."""
        state, lane = self._state, arrived.session.lane
        groups = self._stored(arrived, keys)
        state.admit(groups, arrived.sums, lane, arrived.now)
        if state.events.recording:
            state.events.extend(groups)
        arrived.accepted.append((groups, arrived.sums))

    def _stored(self, arrived: "Arrived", keys: Sequence[int]) -> list[StoredGroup]:
        """Return accepted groups with their bodies, in the arena or in frames."""
        state, session, lane = self._state, arrived.session, arrived.session.lane
        env, split, run, ram, now, wall = (
            lane.env,
            lane.split,
            state.run.info.run,
            state.ram,
            arrived.now,
            arrived.wall,
        )
        producer, number, tables = session.producer, session.number, session.tables
        if not arrived.offsets:
            state.as_frames[session.without_arena or "arena_full"] += len(keys)
        places = arrived.places()
        groups = [
            StoredGroup(
                header, env, split, run, producer, number, tables[header.table],
                GroupBody(frames, header.nbytes, ram, slot), now, wall, identity=key,
            )
            for header, (slot, frames), key in zip(arrived.sums.headers, places, keys, strict=True)
        ]  # fmt: skip
        state.newest[env] = groups[-1], places[-1][1]
        return groups

    def sweep(self, now: float) -> None:
        """Reclaim the grants of silent producers and close their arenas; a producer that returns gets both again.

        Then forget lanes that have been vacant for long.
        """
        moment = now - self._state.config.broker.silence_s
        for session in list(self._state.sessions):
            if session.alive and session.heard_at <= moment:
                self._state.credits.retire(session)
                self._state.permits.note(session.lane)
                self._state.permits_due = True
        self.vacancies.sweep(now)
        arenas = self._state.arenas
        if len(arenas):
            arenas.sweep(
                {session.arena for session in self._state.sessions if session.alive and session.arena}
            )


def _fits(envelope: Envelope, frames: int) -> bool:
    """Return whether the frames after an envelope are the ones it announces."""
    if envelope.offsets:
        return not frames and len(envelope.offsets) == len(envelope.groups)
    return sum([header.frames for header in envelope.groups]) == frames


def _opened(session: ProducerSession, request: RegisterProducer) -> Opened:
    return Opened(
        number=session.number,
        producer=request.producer,
        env=request.env,
        split=request.split,
        slots=request.slots,
        group_size=request.group_size,
        weight=request.weight,
        min_share=request.min_share,
        pid=request.pid,
        host=request.host,
        draining=session.draining,
        produced_before=session.produced_before,
    )
