"""Requests of workers, the orchestrator and operators: heartbeats, drains, live settings, reset."""

import math
from typing import Any, Final

from rolloutmq.bus.encoding.codec import encode
from rolloutmq.schemas.network.address import port_of
from rolloutmq.schemas.wire.control import (
    Disconnect,
    Drain,
    LatestExample,
    LatestExampleReply,
    Reset,
    RestartWorker,
    SetValues,
    SetWorkers,
    ValueRefused,
    ValuesSet,
    WorkerBeat,
    WorkerBeatReply,
    WorkerState,
)
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.hardware import CordonGpu, GpuOrdered, UncordonGpu
from rolloutmq.schemas.wire.replies import ErrorReply, InfoReply, Ok
from rolloutmq.services.broker.broker_state import BrokerState, refuse
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.journal.format.events import (
    Disconnected,
    Produced,
    Requeued,
    Told,
    Wanted,
    WasReset,
)
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.broker.requests.consumers import ConsumerRequests
from rolloutmq.services.broker.requests.live_settings import LiveSettings
from rolloutmq.services.broker.requests.producers import ProducerRequests
from rolloutmq.services.broker.requests.vacancies import LANES_LIMIT
from rolloutmq.services.broker.state.groups import identity
from rolloutmq.services.broker.state.split_queue import GroupSums

_JOINED_ENGINE: Final = "inference."
"""Begin of the name of an engine of another host, which its own command holds."""
_PLACED_ENGINE: Final = "inference.cluster-"
"""Begin of the name of one that the orchestrator has placed on a cluster."""


class AdminRequests:
    """Handles requests that neither send nor pull groups."""

    def __init__(self, state: BrokerState, producers: ProducerRequests, consumers: ConsumerRequests) -> None:
        self._state = state
        self._producers = producers
        self._consumers = consumers
        self.live_settings = LiveSettings(state.config, state)

    def beat(self, beat: WorkerBeat, now: float, wall: float) -> WorkerBeatReply | ErrorReply:
        """Note a worker's heartbeat; it also keeps the worker's session alive."""
        state = self._state
        if not math.isfinite(beat.blocked_s):
            return refuse(ErrorCode.INVALID, f"blocked_s: must be a finite number (got {beat.blocked_s})")
        if not (math.isfinite(beat.clock_offset_s) and 0 <= beat.clock_error_s < math.inf):
            told = f"{beat.clock_offset_s} +- {beat.clock_error_s}"
            return refuse(ErrorCode.INVALID, f"clock_offset_s: must be finite, with an error (got {told})")
        was_draining = state.workers.draining(beat.worker)
        if not state.workers.beat(beat, now):
            return refuse(ErrorCode.LIMIT, "worker: the table of workers is full")
        state.hops.heard(beat)
        if was_draining and not state.workers.draining(beat.worker):
            state.events.add(Told(beat.worker, "", told=False))
        session = state.sessions.current(beat.worker)
        if session is not None and not session.closed and beat.pid == session.pid:
            self._produced(session, beat)
            if beat.state is WorkerState.DRAINING and not session.draining:
                session.draining = True
                session.touch()
            if beat.state not in {WorkerState.GONE, WorkerState.FAILED}:
                self._producers.alive(session, now)
        return WorkerBeatReply(draining=state.workers.draining(beat.worker), at=wall)

    def sweep(self, now: float) -> None:
        """Forget workers that left long ago, and their drains."""
        for worker in self._state.workers.sweep(now):
            self._state.events.add(Told(worker, "", told=False))

    def _produced(self, session: ProducerSession, beat: WorkerBeat) -> None:
        produced = max(0, beat.produced - session.produced_before)
        if produced != session.produced:
            session.produced = produced
            self._state.events.add(Produced(session.number, produced, session.abandoned))

    def drain(self, drain: Drain) -> Ok | ErrorReply:
        """Order a worker to drain, until it confirms."""
        state = self._state
        session = state.sessions.current(drain.worker)
        if session is None and state.workers.last(drain.worker) is None:
            return refuse(ErrorCode.UNKNOWN, f"worker {drain.worker} is not known")
        if state.workers.order_drain(drain, session.pid if session is not None else 0):
            pid, started = state.workers.life(drain.worker)
            state.events.add(Told(drain.worker, drain.reason, pid, started=started))
        if session is not None and session.alive:
            session.draining = True
            session.touch()
            state.permits.note(session.lane)
            state.permits_due = True
        return Ok()

    def restart(self, request: RestartWorker, now: float) -> Ok | ErrorReply:
        """Keep an order for the orchestrator, which does not own what has joined from another host."""
        beat = self._state.workers.last(request.worker)
        if beat is not None and beat.joined:
            return refuse(
                ErrorCode.INVALID,
                f"worker: joined by itself from host {beat.host} (got {request.worker}); drain it, and start its "
                "command `rolloutmq worker --connect` there again",
            )
        if request.worker.startswith(_JOINED_ENGINE) and not request.worker.startswith(_PLACED_ENGINE):
            return refuse(
                ErrorCode.INVALID,
                f"worker: is an engine of another host (got {request.worker}); end its command "
                "`rolloutmq engine --connect` there, and start it again",
            )
        return self._state.restart_orders.take(request, now)

    def set_workers(self, request: SetWorkers) -> Ok | ErrorReply:
        """Keep the number of workers an operator asks for; the orchestrator reads it from `pressure`."""
        wanted = self._state.wanted
        if request.env not in wanted and len(wanted) >= LANES_LIMIT:
            return refuse(
                ErrorCode.LIMIT,
                f"env: the broker has {LANES_LIMIT} environments, the limit (got {request.env})",
            )
        wanted[request.env] = request.count
        self._state.events.add(Wanted(request.env, request.count))
        return Ok()

    def order_gpu(self, request: CordonGpu | UncordonGpu, wall: float) -> GpuOrdered | ErrorReply:
        """Keep an operator's order for a GPU; the orchestrator reads it from `pressure`."""
        accepted = self._state.gpu_orders.take(request, wall)
        if isinstance(accepted, ErrorReply):
            return accepted
        reply, event = accepted
        self._state.events.add(event)
        return reply

    def set_values(self, request: SetValues, now: float, wall: float) -> ValuesSet | ValueRefused:
        """Change live settings; waiting peers proceed at once where the change allows it."""
        reply = self.live_settings.change(request, now)
        if isinstance(reply, ValuesSet):
            self._state.permits_due = True
            self._consumers.serve(now, wall)
        return reply

    def info(self) -> InfoReply:
        """Return the run's numbers and the addresses of the other sockets."""
        state = self._state
        endpoints, configured = state.endpoints, state.config.environment
        known = {*configured, *(lane.env for lane in state.lanes)} if configured else ()
        return InfoReply(
            epoch=state.epoch,
            info=state.run.info,
            ingest=endpoints.ingest if endpoints else "",
            events=endpoints.events if endpoints else "",
            publish=endpoints.publish if endpoints else "",
            ports=tuple(port_of(address) for address in endpoints.listen[1:]) if endpoints else (),
            max_group_bytes=state.credits.largest,
            arena_bytes=state.arenas.nbytes,
            environments=tuple(sorted(known)),
            run_id=endpoints.run_id if endpoints else "",
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
        return LatestExampleReply(header=group.header, env=group.env, table=encode(group.table)), frames

    def disconnect(self, request: Disconnect) -> Ok | ErrorReply:
        """Disconnect an environment: it loses its weight, and its queued groups only fill up batches."""
        if not self.leave(request.env):
            return refuse(ErrorCode.UNKNOWN, f"environment {request.env} is not known")
        self._state.events.add(Disconnected(request.env))
        self._state.permits_due = True
        return Ok()

    def leave(self, env: str) -> bool:
        """Disconnect an environment; False if there is none of that name."""
        lanes = [lane for lane in self._state.lanes if lane.env == env]
        for lane in lanes:
            lane.connected, lane.min_share = False, 0.0
        return bool(lanes)

    def requeue(self, group: StoredGroup, now: float, wall: float) -> str:
        """Queue a dead group again; return the reason of a refusal, or an empty string."""
        state = self._state
        if state.credits.full() or group.header.nbytes > state.credits.room:
            return "the queue is full; try again after the next batch"
        if state.groups.present(identity(group.env, group.split, group.header)) is not None:
            return "the group is not dead"
        group.body = GroupBody(group.body.frames, group.header.nbytes, state.ram)
        state.events.add(Requeued(group.order))
        state.ledger.requeued()
        group.order = group.failures = group.deliveries = 0
        group.requeued = True
        group.accepted_at, group.accepted_wall = now, wall
        lane = state.lanes.open(group.env, group.split, now)
        sums = GroupSums.of([group.header])
        state.admit([group], sums, lane, now)
        lane.count(sums, now)
        state.events.add(group)
        return ""

    def reset(self, request: Reset, wall: float) -> Ok:
        """Forget the run. Session numbers and the ledger go on, so no old message passes for a new one."""
        self._consumers.reset()
        lost = self._state.sessions.lost_of_silent()
        self._state.events.add(WasReset(request.reason, lost))
        self.forget(wall, lost)
        return Ok()

    def forget(self, wall: float, lost: int) -> None:
        """Clear the state for a reset; `lost` counts the groups of silent sessions.

        Settings that an operator has changed stay: live values, and pinned numbers of workers.
        """
        state = self._state
        state.consumers.clear()
        state.ledger.lost += lost
        state.credits.clear()
        state.permits.clear()
        state.ack_schedule.clear()
        state.sessions.clear()
        state.transitions.reset(wall)
        state.workers.clear()
        state.tasks.reset()
        state.run.reset()
        state.newest.clear()
        state.permits.batch_sequences = state.run.batch_sequences
        state.permits.batch_tokens = state.run.batch_tokens
