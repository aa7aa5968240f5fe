"""Serving producers: sessions, and the groups that come in.

A group is accepted only for a known, current session of its environment, once, in its window, within its credit, with
a table that was declared. Whatever else arrives is counted by reason and changes nothing for anybody else.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

from rolloutmq.schemas.delivery import (
    Ack,
    DeclareTables,
    ErrorReply,
    Goodbye,
    Ok,
    Registered,
    RegisterProducer,
    Sync,
)
from rolloutmq.schemas.envelope import ArenaRef, Envelope, GroupHeader, Split
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.services.broker.arenas import Arena, Slot
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.journal.facts import Declared, Opened, Produced, Skipped, Told
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.sessions import Session
from rolloutmq.services.broker.shares import OPEN_WINDOW
from rolloutmq.services.broker.state import State, refuse

BEGUN_LIMIT: Final = 1 << 40
"""Rollouts that one session can have begun; no process lives that long."""
LANES_LIMIT: Final = 1024
"""Environments of one broker; names come from peers."""


class Producing:
    """What producers ask and send."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.on_left: Callable[[Session, str, float], object] = lambda *_: None
        """Called with a session that is over, why, and the time."""

    def register(self, request: RegisterProducer, now: float) -> Registered | ErrorReply:
        """Open a session, or bring a saved one back."""
        state = self._state
        former = state.sessions.current(request.producer)
        if former is not None and former.key == request.key != "" and not former.closed:
            # The answer was slow, and the request came again: another session would fence the one that is in use.
            self.alive(former, now)
            return Registered(ack=state.acks.of(former), info=state.run.info)
        if (error := self._unacceptable(request)) is not None:
            return error
        lane = self.lane(request, now)
        keeps_draining = former is not None and former.draining and request.pid == former.pid != 0
        if former is not None and former.alive:
            state.admission.retire(former)
        session = state.sessions.open(request, lane, now)
        if former is not None and former is not session:
            self.on_left(former, "was fenced by a newer session", now)
        if session.number == request.resume_session:
            session.abandoned = max(session.abandoned, min(request.abandoned, request.begun, BEGUN_LIMIT))
            most = session.used + max(session.slots, OPEN_WINDOW)
            session.start_limit = max(session.start_limit, min(request.begun, most))
        if keeps_draining:
            session.draining = True
        else:
            self.untell(request.producer)
        beat = state.workers.last(request.producer)
        if beat is not None and beat.pid == request.pid:
            session.produced_before = beat.produced - session.window.accepted
        state.log.add(_opened(session, request))
        self._claim(session, request.arena)
        state.admission.revive(session, now)
        state.acks.schedule(session, now)
        state.pacing.pace(lane, now)
        state.repace = True
        return Registered(ack=state.acks.of(session), info=state.run.info)

    def _claim(self, session: Session, ref: ArenaRef | None) -> None:
        """Read the arena that a producer offers from now on, if it can be read. What lies in another is still held."""
        if session.arena is not None and session.arena_ref == ref and session.arena.goes_on():
            return
        session.arena, session.arena_ref, session.without_arena = None, None, "not_offered"
        if ref is not None:
            found = self._state.arenas.claim(ref, session.window, session.touch)
            if isinstance(found, Arena):
                session.arena, session.arena_ref, session.without_arena = found, ref, ""
            else:
                session.without_arena = found
                self._state.rejected[found] += 1

    def untell(self, worker: str) -> None:
        """End a drain: the process that it was for is over."""
        if self._state.workers.untell(worker):
            self._state.log.add(Told(worker, "", told=False))

    def _unacceptable(self, request: RegisterProducer) -> ErrorReply | None:
        state = self._state
        if not math.isfinite(request.weight):
            return refuse(ErrorCode.INVALID, "weight must be a finite number")
        if not state.run.serves(request.run):
            return refuse(ErrorCode.INVALID, f"this broker serves run {state.run.name}")
        if state.sessions.full(request.producer):
            return refuse(ErrorCode.LIMIT, "too many producers")
        lanes = state.lanes
        if lanes.find(request.env, request.split) is None and len(lanes) >= LANES_LIMIT:
            return refuse(ErrorCode.LIMIT, "too many environments")
        return None

    def lane(self, request: RegisterProducer, now: float) -> Lane:
        """Return the lane of a producer that registers, with the numbers that it tells."""
        state = self._state
        lane = state.lanes.open(request.env, request.split, now)
        lane.connected = True
        if not state.admission.producers(lane):
            lane.arrived_at = now
        state.lanes.told(lane, request.weight, request.min_share, request.group_size)
        return lane

    def declare(self, request: DeclareTables, now: float) -> Ok | ErrorReply:
        """Remember column tables of a session."""
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        if not session.declare(request.tables):
            return refuse(ErrorCode.LIMIT, "too many column tables in one session")
        self._state.log.add(Declared(session.number, request.tables))
        return Ok()

    def sync(self, request: Sync, now: float) -> Ack | ErrorReply:
        """Return the present ack."""
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        if request.abandoned > session.abandoned:
            self._state.admission.abandoned(session, request.abandoned)
            self._state.pacing.pace(session.lane, now)
        return self._state.acks.of(session)

    def goodbye(self, request: Goodbye, now: float) -> Ok | ErrorReply:
        """Close a session; the same again changes nothing."""
        state = self._state
        current = state.sessions.current(request.producer)
        if current is not None and current.number == request.session and current.closed:
            return Ok()
        session = self.heard(request.producer, request.session, now)
        if isinstance(session, ErrorReply):
            return session
        state.admission.abandoned(session, request.abandoned)
        session.produced = request.produced
        session.closed = True
        state.log.add(Produced(session.number, session.produced, session.abandoned, closed=True))
        state.admission.retire(session)
        state.repace = True
        self.on_left(session, "said goodbye", now)
        return Ok()

    def heard(self, producer: str, number: int, now: float) -> Session | ErrorReply:
        """Return the session with a fresh sign of life, or the refusal."""
        session = self._state.sessions.find(producer, number)
        if isinstance(session, ErrorCode):
            known = "is fenced by a newer one" if session is ErrorCode.FENCED else "is not known"
            return refuse(session, f"session {number} of producer {producer} {known}")
        self.alive(session, now)
        return session

    def alive(self, session: Session, now: float) -> None:
        """Note a sign of life; a session that was taken for dead is back."""
        session.heard_at = now
        if not session.alive:
            self._claim(session, session.arena_ref)
            self._state.admission.revive(session, now)
            self._state.acks.schedule(session, now)

    def ingest(self, envelope: Envelope, frames: Sequence[Any], now: float, wall: float) -> bool:
        """Take in the groups of one message; return whether any was accepted."""
        session = self._sender(envelope, frames, now)
        if isinstance(session, str):
            self._state.rejected[session] += 1
            return False
        accepted = False
        start = 0
        for index, header in enumerate(envelope.groups):
            offset = envelope.offsets[index] if envelope.offsets else None
            end = start if envelope.offsets else start + header.frames
            refusal = self._refusal(session, header, offset)
            if not refusal:
                self._accept(session, header, offset, tuple(frames[start:end]), now, wall)
                accepted = True
            else:
                self._state.rejected[refusal] += 1
            start = end
        if self._state.admission.waits(session):
            session.touch_later(now)
        else:
            session.touch()
        return accepted

    def _sender(self, envelope: Envelope, frames: Sequence[Any], now: float) -> Session | str:
        session = self._state.sessions.find(envelope.producer, envelope.session)
        if isinstance(session, ErrorCode):
            return "fenced" if session is ErrorCode.FENCED else "unknown_session"
        if not self._state.run.serves(envelope.run):
            return "wrong_run"
        if (envelope.env, envelope.split) != (session.lane.env, session.lane.split):
            return "wrong_environment"
        if not _fits(envelope, len(frames)):
            return "frames"
        self.alive(session, now)
        arena = session.arena
        if envelope.offsets and (arena is None or arena.closed or arena.ref.ino != envelope.arena):
            return "no_arena"
        return session

    def _refusal(self, session: Session, header: GroupHeader, offset: int | None) -> str:
        if header.table not in session.tables:
            return "duplicate" if session.window.seen(header.seq) else "unknown_table"
        if refusal := session.window.refusal(header):
            return refusal
        if offset is not None and session.arena is not None and not session.arena.has(offset, header.nbytes):
            return "arena_range"
        return self._state.admission.refusal(session, header)

    def _accept(
        self,
        session: Session,
        header: GroupHeader,
        offset: int | None,
        frames: tuple[Any, ...],
        now: float,
        wall: float,
    ) -> None:
        state, lane = self._state, session.lane
        session.window.accept(header.seq, header.position, header.nbytes)
        if self._held_already(session, header):
            state.log.add(
                Skipped(session.number, header.seq, header.position, header.nbytes, header.group_id)
            )
            state.rejected["duplicate"] += 1
            state.admission.arrived(session, now)
            state.repace |= state.pacing.arrived(session)
            return
        slot: Slot | None = None
        if offset is not None and session.arena is not None:
            slot, frames = session.arena.take(header.seq, offset, header.nbytes, lane.env)
        else:
            state.as_frames[session.without_arena or "arena_full"] += 1
        group = StoredGroup(
            header=header,
            env=lane.env,
            split=lane.split,
            run=state.run.name,
            producer=session.producer,
            session=session.number,
            table=session.tables[header.table],
            body=Body(frames, header.nbytes, state.ram, slot),
            accepted_at=now,
            accepted_wall=wall,
        )
        state.admit(group, lane, now)
        state.log.add(group)
        if lane.split is Split.TRAIN:
            state.produced.add(header.sequences, now)
        state.newest[lane.env] = group, frames
        state.admission.arrived(session, now)
        state.repace |= state.pacing.arrived(session) or header.sequences != lane.group_size

    def _held_already(self, session: Session, header: GroupHeader) -> bool:
        """Whether the same group came under another session of the producer and is still here."""
        held = self._state.known.get(header.group_id)
        return (
            held is not None
            and self._state.groups.find(held.order) is held
            and held.producer == session.producer
            and held.session != session.number
            and (held.header.crc, held.header.nbytes) == (header.crc, header.nbytes)
        )

    def sweep(self, now: float) -> None:
        """Take the grants of silent producers back, and close their arenas; who speaks again gets both again."""
        moment = now - self._state.config.broker.silence_s
        for session in list(self._state.sessions):
            if session.alive and session.heard_at <= moment:
                self._state.admission.retire(session)
                self._state.repace = True
        arenas = self._state.arenas
        if len(arenas):
            arenas.sweep(
                {session.arena for session in self._state.sessions if session.alive and session.arena}
            )


def _fits(envelope: Envelope, frames: int) -> bool:
    """Whether what follows an envelope is what it says."""
    if envelope.offsets:
        return not frames and len(envelope.offsets) == len(envelope.groups)
    return sum(header.frames for header in envelope.groups) == frames


def _opened(session: Session, request: RegisterProducer) -> Opened:
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
