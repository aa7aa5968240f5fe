"""The broker's core, sans I/O: events in, actions out. This file only composes.

    producing   sessions, groups coming in        sessions, windows, admission, pacing, lanes
    consuming   pulls, leases, settlements        consumers, leases, forming, batching, shards, settlement, retained
    operating   workers, drains, status, reset    workers, status, runs, ledger
    tasking     tasks that a trainer submits      tasks

Every call takes the clock: `now` in monotonic seconds decides, `wall` is for records. The core keeps groups as opaque
frames and opens none. It is deterministic, it logs nothing, and whatever a peer says ends in a reply or a count.

The seam of the journal: each call leaves `facts` of what it changed, and marks the actions that tell of a change as
binding. The shell hands the facts to the journal and lets binding actions wait until they are durable. `snapshot` and
`restore` are the two ends of a life; an earlier life is brought back by the very code that serves this one.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

from rolloutmq.bus import topics
from rolloutmq.schemas import delivery
from rolloutmq.schemas.config import BrokerConfig, RunConfig
from rolloutmq.schemas.control import (
    Disconnect,
    Drain,
    GetStatus,
    JournalStatus,
    LatestExample,
    Requeued,
    Reset,
    SetValues,
    SetWorkers,
    Shutdown,
    WorkerBeat,
)
from rolloutmq.schemas.delivery import (
    Commit,
    ConsumerBeat,
    DeclareTables,
    GetInfo,
    Goodbye,
    Ok,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Release,
    Settle,
    Sync,
)
from rolloutmq.schemas.envelope import Envelope
from rolloutmq.schemas.hardware import CordonGpu, UncordonGpu
from rolloutmq.schemas.records import Endpoints
from rolloutmq.schemas.tasks import AwaitTasks, CancelTasks, HandBack, SubmitTasks, TakeTasks
from rolloutmq.services.broker.actions import Action, Publish, Route
from rolloutmq.services.broker.arenas import OpenArena
from rolloutmq.services.broker.audit import audit
from rolloutmq.services.broker.consuming import Consuming
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Ram
from rolloutmq.services.broker.journal.packing import AnyFact
from rolloutmq.services.broker.log import Entry, SnapshotItem
from rolloutmq.services.broker.operating import Operating
from rolloutmq.services.broker.producing import Producing
from rolloutmq.services.broker.restoring import restore
from rolloutmq.services.broker.snapshot import snapshot
from rolloutmq.services.broker.state import State
from rolloutmq.services.broker.status import Status
from rolloutmq.services.broker.tasking import Tasking
from rolloutmq.services.broker.unpacking import Source

POUR_S: Final = 0.05
"""How often room is looked for on behalf of producers that wait for it; what is settled goes to them at once."""
LOOKS_PER_S: Final = 4000
"""So many producers are looked at in a second for that; with more of them it is done less often."""
_TELL_NOTHING: Final = frozenset({GetInfo, WorkerBeat, GetStatus, ConsumerBeat, Shutdown})
"""Requests whose answers bind nobody to anything."""
SWEEP_S: Final = 1.0
"""How often the silent are looked for."""


class BrokerCore:
    """The broker without its sockets.

    Args:
        config: The run's configuration.
        epoch: Number of this life of the broker; larger than that of any life before.
        endpoints: Addresses to tell to those who ask.
        ram: Budget of the groups that are in memory; None if they cannot be anywhere else.
        open_arena: Opens the arenas of producers on this host; None if no arena is to be read.

    Attributes:
        shutdown: Somebody asked the broker to save what it holds and end.
    """

    def __init__(
        self,
        config: RunConfig,
        *,
        epoch: int,
        endpoints: Endpoints | None = None,
        ram: Ram | None = None,
        open_arena: OpenArena | None = None,
    ) -> None:
        self.shutdown = False
        self._pressure_s = config.broker.pressure_interval_s
        self._ack_s = config.broker.ack_interval_s
        self._state = State(config, epoch, endpoints, ram, open_arena)
        self._producing = Producing(self._state)
        self._consuming = Consuming(self._state)
        self._operating = Operating(self._state, self._producing, self._consuming)
        self._status = Status(self._state, self._consuming, self._operating.tuning)
        self._tasking = Tasking(self._state, self._producing)
        self._producing.on_left = self._tasking.left
        self._handlers = self._table()
        self._pressure: Publish | None = None
        self._pressure_due = self._pour_due = self._sweep_due = 0.0

    def _table(self) -> "dict[type, Callable[[Any, float, float], delivery.Reply]]":
        """Return who answers which request. What may be answered later is missing."""
        producing, consuming, operating = self._producing, self._consuming, self._operating
        tasking = self._tasking
        return {
            RegisterProducer: lambda r, now, _: producing.register(r, now),
            DeclareTables: lambda r, now, _: producing.declare(r, now),
            Sync: lambda r, now, _: producing.sync(r, now),
            Goodbye: lambda r, now, _: producing.goodbye(r, now),
            RegisterConsumer: consuming.register,
            Settle: consuming.settle,
            Commit: lambda r, now, _: consuming.commit(r, now),
            Release: consuming.release,
            ConsumerBeat: lambda r, now, _: consuming.beat(r, now),
            GetInfo: lambda *_: operating.info(),
            WorkerBeat: lambda r, now, _: operating.beat(r, now),
            Drain: lambda r, *_: operating.drain(r),
            SetWorkers: lambda r, *_: operating.set_workers(r),
            CordonGpu: lambda r, _, wall: operating.order_gpu(r, wall),
            UncordonGpu: lambda r, _, wall: operating.order_gpu(r, wall),
            SetValues: operating.set_values,
            GetStatus: lambda _, now, wall: self._status.report(now, wall),
            Disconnect: lambda r, *_: operating.disconnect(r),
            Reset: lambda r, _, wall: self._reset(r, wall),
            SubmitTasks: tasking.submit,
            CancelTasks: lambda r, now, _: tasking.cancel(r, now),
            HandBack: lambda r, now, _: tasking.hand_back(r, now),
            Shutdown: lambda *_: self._end(),
        }

    def ingest(self, envelope: Envelope, frames: Sequence[Any], now: float, wall: float) -> list[Action]:
        """Take in the groups of one message. Their acks come with the next `tick`, which is due at once.

        Args:
            envelope: The decoded envelope.
            frames: The frames after it: opaque, kept until the groups are settled. None if they lie in an arena.
            now: Monotonic seconds.
            wall: Seconds since the epoch.
        """
        if self._producing.ingest(envelope, frames, now, wall) and self._state.consumers.any_waiting:
            self._consuming.serve(now, wall)
        self._tasking.serve(now)
        return self._state.outbox.take()

    def request(self, route: Route, request: delivery.Request, now: float, wall: float) -> list[Action]:
        """Serve one request; a pull may be answered by a later call. `route` is opaque and comes back."""
        if isinstance(request, Pull):
            self._consuming.pull(route, request, now, wall)
        elif isinstance(request, TakeTasks):
            self._tasking.take(route, request, now)
        elif isinstance(request, AwaitTasks):
            self._tasking.ask(route, request, now)
        elif isinstance(request, LatestExample):
            self._state.outbox.reply(route, *self._operating.latest(request))
        else:
            reply = self._handlers[type(request)](request, now, wall)
            self._state.outbox.reply(route, reply, binding=type(request) not in _TELL_NOTHING)
        return self._state.outbox.take()

    def _reset(self, request: Reset, wall: float) -> Ok:
        reply = self._operating.reset(request, wall)
        self._tasking.reset()
        return reply

    def _end(self) -> Ok:
        self.shutdown = True
        return Ok()

    def tick(self, now: float, wall: float) -> list[Action]:
        """Do what time demands: expiries, credit, acks, drains, `pressure`."""
        state = self._state
        self._status.begin(now)
        self._consuming.tick(now, wall)
        self._tasking.tick(now)  # as often as room is poured: it asks for no deadline of its own
        if now >= self._sweep_due:
            self._sweep_due = now + SWEEP_S
            self._producing.sweep(now)
            self._consuming.sweep(now)
            self._operating.sweep(now)
            self._tasking.sweep(now)
            state.repace = True
        if now >= self._pour_due:
            self._pour_due = now + min(max(POUR_S, state.admission.live / LOOKS_PER_S), SWEEP_S)
            state.admission.pour(now)
            if state.repace or state.pacing.behind:
                state.pacing.pace_all(now)
        elif state.repace:
            state.admission.flow(now)
            state.pacing.pace_urgent(now)
        state.repace = False
        self._publish_acks(now)
        self._publish_pressure(now, wall)
        return state.outbox.take()

    def _publish_acks(self, now: float) -> None:
        state = self._state
        for session in state.acks.due(now):
            state.outbox.publish(topics.ack(session.producer), state.acks.of(session))
        for drain in state.workers.due(now, self._ack_s):
            state.outbox.publish(topics.control(drain.worker), drain)

    def _publish_pressure(self, now: float, wall: float) -> None:
        if now >= self._pressure_due:
            self._pressure_due = now + self._pressure_s
            self._pressure = Publish(topics.PRESSURE, self._status.pressure(now, wall))
            self._state.outbox.publish(self._pressure.topic, self._pressure.message)

    def next_deadline(self, now: float) -> float:
        """Return the monotonic time at which `tick` has something to do; not after it if that is now."""
        state = self._state
        if state.repace:
            return now
        return min(
            state.acks.next_due(),
            self._pressure_due,
            self._sweep_due,
            self._pour_due,
            self._consuming.next_deadline(),
            state.former.deadline(now) if state.consumers.any_waiting else math.inf,
            state.workers.next_due(),
        )

    def subscribed(self, topic: bytes) -> list[Action]:
        """Return the last value of every state topic that a new subscription to `topic` matches."""
        state = self._state
        found: list[Action] = []
        if self._pressure is not None and topics.PRESSURE.startswith(topic):
            found.append(self._pressure)
        for session in state.sessions:
            name = topics.ack(session.producer)
            if session.alive and name.startswith(topic):
                found.append(Publish(name, state.acks.of(session)))
        for drain in state.workers.told():
            name = topics.control(drain.worker)
            if name.startswith(topic):
                found.append(Publish(name, drain))
        return found

    def reading(self) -> bool:
        """Whether the shell may read `ingest`: the global mark is the last resort, credits come first."""
        return not self._state.admission.full()

    def facts(self) -> list[Entry]:
        """Return what has changed since the last time, for the journal."""
        return self._state.log.take()

    def journaled(self, status: JournalStatus, now: float) -> None:
        """Note how the journal does; while it does not keep up, nothing more is begun."""
        state = self._state
        stalled = status.health in {"slow", "full"}
        state.journal = status
        if stalled != state.pacing.stalled:
            state.pacing.stalled = stalled
            state.pacing.pace_all(now)

    def requeue(
        self, route: Route, dead: Sequence[StoredGroup], refused: dict[str, str], now: float, wall: float
    ) -> tuple[list[Action], list[int]]:
        """Queue dead groups again, which the shell has read back; returns their former orders, too."""
        names: list[str] = []
        orders: list[int] = []
        for group in dead:
            order = group.order
            problem = self._operating.requeue(group, now, wall)
            if problem:
                refused[group.header.group_id] = problem
            else:
                names.append(group.header.group_id)
                orders.append(order)
        self._state.outbox.reply(route, Requeued(requeued=tuple(names), refused=refused), binding=True)
        self._consuming.serve(now, wall)
        return self._state.outbox.take(), orders

    @property
    def disk_full(self) -> bool:
        """Whether nothing becomes durable for now."""
        return self._state.journal.health == "full"

    def close(self) -> None:
        """Close what it has open: the arenas of producers."""
        self._state.arenas.close()

    def rejected(self, reason: str) -> None:
        """Count a message that the shell could not decode."""
        self._state.rejected[reason] += 1

    def snapshot(self) -> "Iterator[SnapshotItem]":
        """Yield the whole state, for the beginning of a log. What is pending in `facts` comes before it."""
        return snapshot(self._state)

    @property
    def config(self) -> BrokerConfig:
        """The settings as they are now: some change while it runs."""
        return self._state.config.broker

    @property
    def held_groups(self) -> int:
        """Groups that still exist, settled ones that wait for their checkpoint included."""
        return len(self._state.groups)

    def lives(self, order: int) -> bool:
        """Whether the group of that acceptance still exists, or was queued again under another."""
        return self._state.groups.find(order) is not None or order in self._state.requeued

    def forget_unclaimed(self) -> None:
        """Let the settled batches of trainers go that make no checkpoints."""
        self._state.settlement.forget_unclaimed()

    def restore(
        self,
        facts: Iterable[AnyFact],
        source: Source,
        now: float,
        wall: float,
    ) -> list[str]:
        """Become what an earlier life was. Before anything else.

        Args:
            facts: The items of a snapshot, then facts in their order.
            source: Where the groups are.
            now: Monotonic seconds; whoever was alive gets the full time to speak up.
            wall: Seconds since the epoch.

        Returns:
            What does not fit together, a line each; something was damaged then.
        """
        return restore(
            self._state, self._operating, self._producing, self._consuming, facts, source, now, wall
        )

    def validate(self) -> None:
        """Assert every invariant; for tests."""
        audit(self._state)
