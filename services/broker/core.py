"""The broker's core, sans I/O: requests and groups in, actions out.

    producers   sessions, incoming groups          flow: sessions, credits, permits, acks
    consumers   pulls, leases, settle, commit      batches: builder, staleness, leases, transitions, rewind
    admin       workers, drains, settings, reset   state: workers, ledger, GPU orders
    tasks       tasks submitted by a trainer       state: tasks

This file only composes. Every call takes the clock: `now` in monotonic seconds decides, `wall` is for records. The
core keeps groups as opaque frames and decodes none. It is deterministic and logs nothing. Every message of a peer
ends in a reply or a count.

The seam to the journal: each call leaves `events` for its changes and marks the actions that report a change as
durable. The data plane hands the events to the journal and holds durable actions back until it has committed them.
`snapshot` and `restore` are the two ends of a life: a restart applies the events with the same code.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire.control import (
    Disconnect,
    Drain,
    GetStatus,
    JournalStatus,
    LatestExample,
    Requeued,
    Reset,
    RestartWorker,
    SetValues,
    SetWorkers,
    Shutdown,
    WorkerBeat,
)
from rolloutmq.schemas.wire.envelope import Envelope, PolicyVersion
from rolloutmq.schemas.wire.hardware import CordonGpu, UncordonGpu
from rolloutmq.schemas.wire.joining import NetworkStatus
from rolloutmq.schemas.wire.replies import Ok, Reply, Wait
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    DeclareTables,
    GetInfo,
    Goodbye,
    LogFigures,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Release,
    Request,
    Settle,
    SettleGroups,
    Sync,
)
from rolloutmq.schemas.wire.tasks import AwaitTasks, CancelTasks, HandBack, SubmitTasks, TakeTasks
from rolloutmq.services.broker.actions import Action, Answer, Publish, Route
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.flow.arenas import OpenArena
from rolloutmq.services.broker.invariants import check_invariants
from rolloutmq.services.broker.journal.event_buffer import Entry, SnapshotRecord
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.stored_group import BodyMemory, StoredGroup
from rolloutmq.services.broker.requests.admin import AdminRequests
from rolloutmq.services.broker.requests.consumers import ConsumerRequests
from rolloutmq.services.broker.requests.producers import ProducerRequests
from rolloutmq.services.broker.requests.status import StatusReporter
from rolloutmq.services.broker.requests.tasks import TaskRequests
from rolloutmq.services.broker.snapshots.restore import BodySource, restore
from rolloutmq.services.broker.snapshots.snapshot import snapshot
from rolloutmq.services.broker.state.group_hops import GATHERED
from rolloutmq.services.process.clock_log import Measured

GRANT_S: Final = 0.05
"""How often credits are granted to waiting producers. Room freed by a settle is granted at once."""
LOOKS_PER_S: Final = 4000
"""Producers examined for credit in a second. Beyond it credits are granted less often."""
_STATELESS: Final = frozenset({GetInfo, WorkerBeat, GetStatus, ConsumerBeat, LogFigures, Shutdown})
"""Requests whose replies report no change."""
_AWAITED: Final = (Settle, Commit)
"""Requests after which a trainer does nothing until it has the reply."""
SWEEP_S: Final = 1.0
"""How often silent peers are looked for."""


class BrokerCore:
    """The broker without its sockets.

    Args:
        config: The run's configuration.
        epoch: Number of this life of the broker; larger than that of any earlier life.
        endpoints: Addresses reported to clients.
        ram: Budget of the group bodies in memory; None if there is no journal to read them back from.
        open_arena: Opens the arenas of producers on this host; None disables shared memory.
        host: Name of this host.

    Attributes:
        shutdown: A client asked the broker to save its state and end.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        epoch: int,
        endpoints: Endpoints | None = None,
        ram: BodyMemory | None = None,
        open_arena: OpenArena | None = None,
        host: str = "",
    ) -> None:
        self.shutdown = False
        self._latency_s = config.telemetry.interval_s
        self._pressure_s = config.broker.pressure_interval_s
        self._ack_s = config.broker.ack_interval_s
        self._state = BrokerState(config, epoch, endpoints, ram, open_arena, host)
        self._producers = ProducerRequests(self._state)
        self._consumers = ConsumerRequests(self._state)
        self._admin = AdminRequests(self._state, self._producers, self._consumers)
        self._status = StatusReporter(
            self._state, self._consumers, self._admin.live_settings, self._producers.vacancies
        )
        self._tasks = TaskRequests(self._state, self._producers)
        self._producers.on_left = self._tasks.left
        self._handlers = self._request_handlers()
        self._pressure: Publish | None = None
        self._pressure_due = self._grant_due = self._sweep_due = self._latency_due = 0.0

    def _request_handlers(self) -> "dict[type, Callable[[Any, float, float], Reply]]":
        """Return the handler of each request with an immediate reply."""
        producers, consumers, admin = self._producers, self._consumers, self._admin
        tasks = self._tasks
        return {
            RegisterProducer: lambda r, now, _: producers.register(r, now),
            DeclareTables: lambda r, now, _: producers.declare(r, now),
            Sync: lambda r, now, _: producers.sync(r, now),
            Goodbye: lambda r, now, _: producers.goodbye(r, now),
            RegisterConsumer: consumers.register,
            Settle: consumers.settle,
            SettleGroups: consumers.settle_groups,
            Commit: consumers.commit,
            Release: consumers.release,
            ConsumerBeat: lambda r, now, _: consumers.beat(r, now),
            LogFigures: lambda r, now, _: consumers.settlements.log(r, now),
            GetInfo: lambda *_: admin.info(),
            WorkerBeat: admin.beat,
            Drain: lambda r, *_: admin.drain(r),
            SetWorkers: lambda r, *_: admin.set_workers(r),
            RestartWorker: lambda r, now, _: admin.restart(r, now),
            CordonGpu: lambda r, _, wall: admin.order_gpu(r, wall),
            UncordonGpu: lambda r, _, wall: admin.order_gpu(r, wall),
            SetValues: admin.set_values,
            GetStatus: lambda _, now, wall: self._status.report(now, wall),
            Disconnect: lambda r, *_: admin.disconnect(r),
            Reset: lambda r, _, wall: self._reset(r, wall),
            SubmitTasks: tasks.submit,
            CancelTasks: lambda r, now, _: tasks.cancel(r, now),
            HandBack: lambda r, now, _: tasks.hand_back(r, now),
            Shutdown: lambda *_: self._end(),
        }

    def ingest(self, envelope: Envelope, frames: Sequence[Any], now: float, wall: float) -> list[Action]:
        """Accept the groups of one message. Their acks come with the next `tick`, which is due at once.

        Args:
            envelope: The decoded envelope.
            frames: The frames after it: opaque, kept until the groups are settled. None if they lie in an arena.
            now: Monotonic seconds.
            wall: Seconds since the epoch.
        """
        arrived = self._producers.accept(envelope, frames, now, wall)
        if arrived is not None:
            if arrived.accepted:
                self._consumers.serve(now, wall)
            self._producers.count(arrived)
        self._tasks.serve(now)
        return self._state.outbox.take()

    def answer_by(self, answer: Answer) -> None:
        """Hand each reply to a function as soon as it is made, instead of returning it among the actions.

        A peer waits for it, and the rest of the call can wait. For a data plane without a journal: nothing that a reply
        reports has to become durable before.
        """
        self._state.outbox.answer = answer

    def bound(self, endpoints: Endpoints) -> None:
        """Tell clients these addresses from now on."""
        self._state.endpoints = endpoints

    def request(self, route: Route, request: Request, now: float, wall: float) -> list[Action]:
        """Serve one request; a pull may be answered by a later call. `route` is returned with the reply."""
        if isinstance(request, Pull):
            self._consumers.pull(route, request, now, wall)
            self._state.permits_due |= self._state.credits.starved  # all room is granted at once
        elif isinstance(request, TakeTasks):
            self._tasks.take(route, request, now)
        elif isinstance(request, AwaitTasks):
            self._tasks.ask(route, request, now)
        elif isinstance(request, LatestExample):
            self._state.outbox.reply(route, *self._admin.latest(request))
        else:
            reply = self._handlers[type(request)](request, now, wall)
            durable = type(request) not in _STATELESS
            awaited = isinstance(request, _AWAITED) and self._state.consumers.trains(request.consumer)
            self._state.outbox.reply(route, reply, durable=durable, awaited=awaited)
        return self._state.outbox.take()

    def _reset(self, request: Reset, wall: float) -> Ok:
        reply = self._admin.reset(request, wall)
        self._tasks.reset()
        return reply

    def _end(self) -> Ok:
        self.shutdown = True
        return Ok()

    def tick(self, now: float, wall: float) -> list[Action]:
        """Do the periodic work: expiries, credits, permits, acks, drains, `pressure`."""
        state = self._state
        self._status.begin(now)
        self._consumers.tick(now, wall)
        self._tasks.tick(now)  # needs no deadline of its own: credits are granted as often
        if now >= self._sweep_due:
            self._sweep_due = now + SWEEP_S
            self._producers.sweep(now)
            self._consumers.sweep(now)
            self._admin.sweep(now)
            self._tasks.sweep(now)
            state.permits_due = True
        if now >= self._grant_due:
            self._grant_due = now + min(max(GRANT_S, state.credits.live / LOOKS_PER_S), SWEEP_S)
            state.credits.grant_all(now)
            if state.permits_due or state.permits.behind:
                state.permits.pace_all(now)
        elif state.permits_due:
            state.credits.grant_freed(now)
            state.permits.pace_urgent(now)
        state.permits_due = False
        self._publish_acks(now)
        if now >= self._pressure_due:
            self._publish_pressure(now, wall)
        if state.hops.ungathered >= GATHERED:
            state.hops.gather()
        if now >= self._latency_due:
            self._latency_due = now + self._latency_s
            self._publish_latencies(wall)
        return state.outbox.take()

    def _publish_acks(self, now: float) -> None:
        state = self._state
        for session in state.ack_schedule.due(now):
            state.outbox.publish(session.topic, state.ack_schedule.of(session))
        for drain in state.workers.due(now, self._ack_s):
            state.outbox.publish(topics.control(drain.worker), drain)

    def _publish_pressure(self, now: float, wall: float) -> None:
        self._pressure_due = now + self._pressure_s
        self._pressure = Publish(topics.PRESSURE, self._status.pressure(now, wall))
        self._state.outbox.publish(self._pressure.topic, self._pressure.message)

    def _publish_latencies(self, wall: float) -> None:
        for sample in self._state.hops.samples(wall):
            self._state.outbox.publish(topics.telemetry("latency", sample.name), sample)

    def final_samples(self, wall: float) -> list[Action]:
        """Return what is published at the end of this life: latencies that wait for their sample."""
        self._publish_latencies(wall)
        return self._state.outbox.take()

    def next_deadline(self, now: float) -> float:
        """Return the monotonic time of the next `tick`; at most `now` if one is due."""
        state = self._state
        if state.permits_due or state.sessions.touched.now:
            return now
        return min(
            state.ack_schedule.next_due(),
            self._pressure_due,
            self._sweep_due,
            self._grant_due,
            self._consumers.next_deadline(),
            state.builder.deadline(now) if state.consumers.pulls else math.inf,
            state.workers.next_due(),
        )

    def subscribed(self, topic: bytes) -> list[Action]:
        """Return the last value of every state topic a new subscription matches."""
        state = self._state
        found: list[Action] = []
        if self._pressure is not None and topics.PRESSURE.startswith(topic):
            found.append(self._pressure)
        acked = [one for one in state.sessions.listening(topic) if one.alive]
        found.extend(Publish(session.topic, state.ack_schedule.of(session)) for session in acked)
        for drain in state.workers.drains():
            name = topics.control(drain.worker)
            if name.startswith(topic):
                found.append(Publish(name, drain))
        return found

    def reading(self) -> bool:
        """Return whether the data plane may read `ingest`. The high-water mark is the last resort: credits come
        first.
        """
        return not self._state.credits.full()

    def events(self) -> list[Entry]:
        """Return the events since the last call, for the journal."""
        return self._state.events.take()

    def journaled(self, status: JournalStatus, now: float) -> None:
        """Note the journal's health. While it cannot keep up, no permits are granted."""
        state = self._state
        stalled = status.health in {"slow", "full"}
        state.journal = status
        if stalled != state.permits.stalled:
            state.permits.stalled = stalled
            state.permits.pace_all(now)

    def replies_waited(self, seconds: float, since_s: float) -> None:
        """Note that trainers wait until the journal has written what their replies report.

        Args:
            seconds: Seconds that were not noted yet, of all ranks together.
            since_s: Seconds for which the first of these replies has waited by now; 0 if none waits.
        """
        self._state.trainer_waited(Wait.JOURNAL_SLOW, seconds)
        self._state.replies_wait_s = since_s

    def networked(self, status: NetworkStatus) -> None:
        """Note what is known of other hosts."""
        self._state.network = status

    def clocks(self) -> Mapping[str, Measured]:
        """Return the clocks of the producers of other hosts."""
        return self._state.hops.clocks

    def joined_workers(self) -> list[str]:
        """Return the names of the workers that joined from other hosts."""
        return self._state.workers.joined()

    @property
    def version(self) -> PolicyVersion:
        """Newest version of the policy."""
        return self._state.run.present

    def requeue(
        self, route: Route, dead: Sequence[StoredGroup], refused: dict[str, str], now: float, wall: float
    ) -> tuple[list[Action], list[int]]:
        """Queue dead groups again; return the actions and the orders of the groups."""
        names: list[str] = []
        orders: list[int] = []
        for group in dead:
            order = group.order
            problem = self._admin.requeue(group, now, wall)
            if problem:
                refused[group.header.group_id] = problem
            else:
                names.append(group.header.group_id)
                orders.append(order)
        self._state.outbox.reply(route, Requeued(requeued=tuple(names), refused=refused), durable=True)
        self._consumers.serve(now, wall)
        return self._state.outbox.take(), orders

    @property
    def disk_full(self) -> bool:
        """Whether the disk is full, so nothing becomes durable for now."""
        return self._state.journal.health == "full"

    def close(self) -> None:
        """Close the arenas of producers."""
        self._state.arenas.close()

    def rejected(self, reason: str) -> None:
        """Count a message the data plane could not decode."""
        self._state.rejected[reason] += 1

    def snapshot(self) -> "Iterator[SnapshotRecord]":
        """Yield the whole state, for the beginning of an event log. Pending `events` come before it."""
        return snapshot(self._state)

    @property
    def config(self) -> BrokerConfig:
        """The present settings; some change while the run is live."""
        return self._state.config.broker

    @property
    def held_groups(self) -> int:
        """Groups that still exist, including settled ones that wait for their checkpoint."""
        return len(self._state.groups)

    def lives(self, order: int) -> bool:
        """Return whether the accepted group still exists, or was queued again under another order."""
        return self._state.groups.find(order) is not None or order in self._state.requeued

    def forget_unclaimed(self) -> None:
        """Forget the settled batches of trainers that write no checkpoints."""
        self._state.transitions.forget_unclaimed()

    def restore(
        self,
        events: Iterable[AnyEvent],
        source: BodySource,
        now: float,
        wall: float,
    ) -> list[str]:
        """Restore the state of an earlier life. Call it before anything else.

        Args:
            events: The records of a snapshot, then events in their order.
            source: Reads the bodies of groups.
            now: Monotonic seconds. Every peer gets the full silence limit from here.
            wall: Seconds since the epoch.

        Returns:
            One line for each contradiction; the journal was damaged then.
        """
        return restore(self._state, self._admin, self._producers, self._consumers, events, source, now, wall)

    def validate(self) -> None:
        """Assert every invariant; for tests."""
        check_invariants(self._state)
