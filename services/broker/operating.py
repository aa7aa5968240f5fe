"""Serving workers, the orchestrator and people: beats, drains, status, and what changes a run by hand."""

import math
from typing import Any

from rolloutmq.bus.codec import encode
from rolloutmq.schemas.control import (
    Disconnect,
    Drain,
    LatestExample,
    LatestExampleReply,
    Reset,
    SetValues,
    SetWorkers,
    ValueRefused,
    ValuesSet,
    WorkerBeat,
    WorkerBeatReply,
    WorkerState,
)
from rolloutmq.schemas.delivery import ErrorReply, InfoReply, Ok
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.schemas.hardware import CordonGpu, GpuOrdered, UncordonGpu
from rolloutmq.services.broker.consuming import Consuming
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.journal.facts import (
    Disconnected,
    Produced,
    Requeued,
    Told,
    Wanted,
    WasReset,
)
from rolloutmq.services.broker.producing import LANES_LIMIT, Producing
from rolloutmq.services.broker.sessions import Session
from rolloutmq.services.broker.state import State, refuse
from rolloutmq.services.broker.tuning import Tuning


class Operating:
    """What is asked by those who neither produce nor consume."""

    def __init__(self, state: State, producing: Producing, consuming: Consuming) -> None:
        self._state = state
        self._producing = producing
        self._consuming = consuming
        self.tuning = Tuning(state.config, state)

    def beat(self, beat: WorkerBeat, now: float) -> WorkerBeatReply | ErrorReply:
        """Note how a worker is; its session lives as long as it does."""
        state = self._state
        if not math.isfinite(beat.blocked_s):
            return refuse(ErrorCode.INVALID, "blocked_s must be a finite number")
        told = state.workers.draining(beat.worker)
        if not state.workers.beat(beat, now):
            return refuse(ErrorCode.LIMIT, "too many workers")
        if told and not state.workers.draining(beat.worker):
            state.log.add(Told(beat.worker, "", told=False))
        session = state.sessions.current(beat.worker)
        if session is not None and not session.closed and beat.pid == session.pid:
            self._produced(session, beat)
            if beat.state is WorkerState.DRAINING and not session.draining:
                session.draining = True
                session.touch()
            if beat.state not in {WorkerState.GONE, WorkerState.FAILED}:
                self._producing.alive(session, now)
        return WorkerBeatReply(draining=state.workers.draining(beat.worker))

    def sweep(self, now: float) -> None:
        """Forget workers that are long gone, and their drains with them."""
        for worker in self._state.workers.sweep(now):
            self._state.log.add(Told(worker, "", told=False))

    def _produced(self, session: Session, beat: WorkerBeat) -> None:
        produced = max(0, beat.produced - session.produced_before)
        if produced != session.produced:
            session.produced = produced
            self._state.log.add(Produced(session.number, produced, session.abandoned))

    def drain(self, drain: Drain) -> Ok | ErrorReply:
        """Tell a worker to finish and go, until it says that it does."""
        state = self._state
        session = state.sessions.current(drain.worker)
        if session is None and state.workers.last(drain.worker) is None:
            return refuse(ErrorCode.UNKNOWN, f"worker {drain.worker} is not known")
        if state.workers.tell(drain):
            state.log.add(Told(drain.worker, drain.reason, state.workers.pid(drain.worker)))
        if session is not None and session.alive:
            session.draining = True
            session.touch()
            state.repace = True
        return Ok()

    def set_workers(self, request: SetWorkers) -> Ok | ErrorReply:
        """Remember how many workers an operator wants; the orchestrator reads it from `pressure`."""
        wanted = self._state.wanted
        if request.env not in wanted and len(wanted) >= LANES_LIMIT:
            return refuse(ErrorCode.LIMIT, "too many environments")
        wanted[request.env] = request.count
        self._state.log.add(Wanted(request.env, request.count))
        return Ok()

    def order_gpu(self, request: CordonGpu | UncordonGpu, wall: float) -> GpuOrdered | ErrorReply:
        """Remember what an operator wants with a GPU; the orchestrator reads it from `pressure`."""
        taken = self._state.gpu_orders.take(request, wall)
        if isinstance(taken, ErrorReply):
            return taken
        reply, fact = taken
        self._state.log.add(fact)
        return reply

    def set_values(self, request: SetValues, now: float, wall: float) -> ValuesSet | ValueRefused:
        """Change settings; whoever waits and need not any more gets on at once."""
        reply = self.tuning.change(request, now)
        if isinstance(reply, ValuesSet):
            self._state.repace = True
            self._consuming.serve(now, wall)
        return reply

    def info(self) -> InfoReply:
        """Say what the run is and where the other sockets are."""
        state = self._state
        places = state.endpoints
        return InfoReply(
            epoch=state.epoch,
            info=state.run.info,
            ingest=places.ingest if places else "",
            events=places.events if places else "",
            publish=places.publish if places else "",
            max_group_bytes=state.admission.largest,
            arena_bytes=state.arenas.nbytes,
        )

    def latest(self, request: LatestExample) -> tuple[LatestExampleReply, tuple[Any, ...]]:
        """Return the newest accepted group, of one environment or of all."""
        newest = self._state.newest
        if request.env:
            found = newest.get(request.env)
        else:
            found = max(newest.values(), key=lambda example: example[0].order, default=None)
        if found is None:
            return LatestExampleReply(), ()
        group, frames = found
        return LatestExampleReply(header=group.header, env=group.env, table=encode(group.table)), tuple(
            map(bytes, frames)
        )

    def disconnect(self, request: Disconnect) -> Ok | ErrorReply:
        """Take an environment out of the weights; what it has queued only fills up batches."""
        if not self.leave(request.env):
            return refuse(ErrorCode.UNKNOWN, f"environment {request.env} is not known")
        self._state.log.add(Disconnected(request.env))
        self._state.repace = True
        return Ok()

    def leave(self, env: str) -> bool:
        """Take an environment out of the weights; False if there is none of that name."""
        lanes = [lane for lane in self._state.lanes if lane.env == env]
        for lane in lanes:
            lane.connected, lane.min_share = False, 0.0
        return bool(lanes)

    def requeue(self, group: StoredGroup, now: float, wall: float) -> str:
        """Queue a dead group again; return why it cannot be, or an empty string."""
        state = self._state
        if state.admission.full() or group.header.nbytes > state.admission.room:
            return "the queue is full"
        held = state.known.get(group.header.group_id)
        if held is not None and state.groups.find(held.order) is held:
            return "it is not dead"
        group.body = Body(group.body.frames, group.header.nbytes, state.ram)
        state.log.add(Requeued(group.order))
        state.ledger.requeued()
        group.order = group.failures = group.deliveries = 0
        group.requeued = True
        group.accepted_at, group.accepted_wall = now, wall
        state.admit(group, state.lanes.open(group.env, group.split, now), now)
        state.log.add(group)
        return ""

    def reset(self, request: Reset, wall: float) -> Ok:
        """Forget the run. Session numbers and the ledger go on, so that nothing old passes for new."""
        self._consuming.reset()
        lost = self._state.sessions.lost_of_silent()
        self._state.log.add(WasReset(request.reason, lost))
        self.forget(wall, lost)
        return Ok()

    def forget(self, wall: float, lost: int) -> None:
        """Forget all but what goes on; `lost` are the groups of sessions that fell silent."""
        state = self._state
        state.consumers.clear()
        state.ledger.lost += lost
        state.admission.clear()
        state.acks.clear()
        state.sessions.clear()
        state.settlement.reset(wall)
        state.workers.clear()
        state.tasks.reset()
        state.run.reset()
        state.newest.clear()
        state.wanted.clear()
        state.pacing.batch_sequences = state.run.batch_sequences
        state.pacing.batch_tokens = state.run.batch_tokens
