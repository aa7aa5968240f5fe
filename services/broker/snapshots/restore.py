"""The restorer: rebuilds the state of an earlier broker from the records of its snapshot and its events.

After damage on disk, events may refer to unknown groups, leases or sessions. Such an event is skipped and reported;
the others are applied.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

from rolloutmq.schemas.errors import DamagedJournalError
from rolloutmq.schemas.wire.control import Drain
from rolloutmq.schemas.wire.envelope import ColumnTable
from rolloutmq.schemas.wire.requests import RegisterProducer
from rolloutmq.services.broker.batches.consumers import Consumer
from rolloutmq.services.broker.batches.leases import EndedLease, Lease, RankShard, VoidSettlement
from rolloutmq.services.broker.batches.rewind import RetainedBatch, RewoundBatch
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.flow.sequence_window import WindowState
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.invariants import check_invariants
from rolloutmq.services.broker.journal.format import events as f
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.broker.requests.admin import AdminRequests
from rolloutmq.services.broker.requests.consumers import ConsumerRequests
from rolloutmq.services.broker.requests.producers import ProducerRequests
from rolloutmq.services.broker.state.batch_share import BatchShare
from rolloutmq.services.broker.state.rates import Rate
from rolloutmq.services.broker.state.split_queue import GroupSums
from rolloutmq.services.broker.state.tasks import TASK_EVENTS

Shards = tuple[tuple[int, ...], ...]


class BodySource(Protocol):
    """Source of the group bodies of an earlier life."""

    def body(self, accepted: f.Accepted, /) -> GroupBody:
        """Return the body of a group."""
        ...

    def table(self, accepted: f.Accepted, /) -> ColumnTable | None:
        """Return the column table of a group without a `Declared` event."""
        ...


class UnknownReferenceError(Exception):
    """An event refers to an unknown group, lease or session."""


def restore(
    state: BrokerState,
    admin: AdminRequests,
    producers: ProducerRequests,
    consumers: ConsumerRequests,
    events: Iterable[AnyEvent],
    source: BodySource,
    now: float,
    wall: float,
) -> list[str]:
    """Apply records and events to a new state; return one line for each contradiction."""
    restorer = StateRestorer(state, admin, producers, consumers, source, now, wall)
    recording, state.events.recording, state.outbox.muted = state.events.recording, False, True
    for event in events:
        restorer.apply(event)
    restorer.finish()
    if restorer.problems:
        _require_sound(state)
    state.events.recording, state.outbox.muted = recording, False
    state.outbox.drop_all()
    return restorer.problems


def _require_sound(state: BrokerState) -> None:
    """Raise DamagedJournalError if the state contradicts itself."""
    try:
        check_invariants(state)
    except (AssertionError, ArithmeticError, LookupError, TypeError, ValueError) as error:
        raise DamagedJournalError(f"the remaining events contradict each other: {error}") from None


class StateRestorer:
    """Applies snapshot records, then events, one at a time, in their order."""

    def __init__(
        self,
        state: BrokerState,
        admin: AdminRequests,
        producers: ProducerRequests,
        consumers: ConsumerRequests,
        source: BodySource,
        now: float,
        wall: float,
    ) -> None:
        self._state = state
        self._source = source
        self._now = now
        self._wall = wall
        self.problems: list[str] = []
        self._admin = admin
        self._producers = producers
        self._consumers = consumers
        self._tables: dict[str, ColumnTable] = {}
        self._unplaced: dict[int, StoredGroup] = {}
        """Groups no snapshot record has placed yet."""
        self._apply: dict[type[f.Event], Callable[[Any], object]] = (
            self._record_handlers() | self._event_handlers()
        )

    def _event_handlers(self) -> dict[type[f.Event], Callable[[Any], object]]:
        state = self._state
        return {
            f.Accepted: self._accepted,
            f.Skipped: self._skipped,
            f.Opened: self._opened,
            f.Declared: self._declared,
            f.Produced: self._produced,
            f.Joined: lambda event: self._consumers.join(event, self._now),
            f.Leased: self._leased,
            f.Pulled: self._pulled,
            f.Settles: self._settles,
            f.Carved: self._carved,
            f.Lost: self._lost,
            f.Dropped: self._dropped,
            f.Committed: lambda event: state.transitions.commit(event.group, event.version),
            f.Forgot: lambda event: state.transitions.forget_oldest(event.group, event.batches),
            f.Rewound: self._rewound,
            f.Requeued: self._requeued,
            f.Disconnected: lambda event: self._admin.leave(event.env),
            f.WasReset: lambda event: self._admin.forget(self._wall, event.lost),
            f.Wanted: lambda event: state.wanted.update({event.env: event.count}),
            f.GpuAsked: state.gpu_orders.apply,
            f.Told: self._told,
            f.Tuned: lambda event: self._admin.live_settings.restore(event.values, self._now),
            f.Vacated: self._producers.vacancies.apply,
            f.Began: lambda _: None,
            **dict.fromkeys(TASK_EVENTS, lambda event: state.tasks.apply(event, self._now, self._wall)),
        }

    def apply(self, event: AnyEvent) -> None:
        """Apply an event, or report why it does not fit."""
        try:
            self._apply[type(event)](event)
        except (UnknownReferenceError, KeyError, ValueError, IndexError) as error:
            self.problems.append(f"{type(event).__name__} does not fit: {error}")

    def finish(self) -> None:
        """Queue the unplaced groups, and start the new life: no peer has shown life yet."""
        self.queue_unplaced()
        state = self._state
        state.sessions.rest(self._now)
        for lane in state.lanes:
            lane.arrivals = Rate()
        state.permits.batch_sequences = state.run.batch_sequences
        state.permits.batch_tokens = state.run.batch_tokens
        state.permits_due = True

    def _accepted(self, event: f.Accepted) -> None:
        state = self._state
        session = state.sessions.numbered(event.session)
        header = event.header
        if session is not None and not event.requeued and not session.window.seen(header.seq):
            session.window.accept(header.seq, header.position, header.nbytes)
        if state.groups.find(event.order) is not None:
            return
        group = self._stored(event)
        lane = state.lanes.open(group.env, group.split, self._now)
        late = event.order < state.groups.next_order
        sums = GroupSums.of([group.header])
        state.admit([group], sums, lane, self._now)
        lane.count(sums, self._now)
        if late:  # its event was lost, and recovery found its record after those of later groups
            lane.remove(group)
            lane.put_back([group])

    def _skipped(self, event: f.Skipped) -> None:
        session = self._state.sessions.numbered(event.session)
        if session is not None and not session.window.seen(event.seq):
            session.window.accept(event.seq, event.position, event.nbytes)

    def _opened(self, event: f.Opened) -> None:
        state = self._state
        asked = RegisterProducer(
            producer=event.producer,
            env=event.env,
            split=event.split,
            slots=event.slots,
            group_size=event.group_size,
            weight=event.weight,
            min_share=event.min_share,
            resume_session=event.number,
            pid=event.pid,
            host=event.host,
        )
        lane = self._producers.lane(asked, self._now)
        session = state.sessions.open(asked, lane, self._now, event.number)
        session.draining, session.produced_before = event.draining, event.produced_before

    def _declared(self, event: f.Declared) -> None:
        self._tables.update({table.id: table for table in event.tables})
        session = self._state.sessions.numbered(event.session)
        if session is not None:
            session.declare(event.tables)

    def _produced(self, event: f.Produced) -> None:
        session = self._state.sessions.numbered(event.session)
        if session is not None:
            session.produced, session.closed = event.produced, event.closed
            session.abandoned = max(session.abandoned, event.abandoned)

    def _leased(self, event: f.Leased) -> None:
        state = self._state
        stream = event.group, event.split
        if not event.window and (previous := state.leases.of(stream)) is not None:
            state.transitions.apply_loss(previous, failed=False)
            self.problems.append(
                f"the outcome of lease {previous.number} is lost: its groups are queued again"
            )
        shards = state.transitions.take_leased(event)
        if shards is None:
            raise UnknownReferenceError(f"lease {event.number} is no batch of the rewind queue")
        lease = Lease(
            number=event.number,
            generation=event.generation,
            stream=stream,
            step=event.step,
            version=event.version,
            sequences=event.sequences,
            tokens=event.tokens,
            window=event.window,
            parts=[RankShard(BatchShare(groups), self._now) for groups in shards],
            short=event.short,
            rewound=event.again,
            moments=event.moments,
        )
        state.transitions.apply_lease(lease)
        if not event.again and not event.window:
            for part in lease.parts:
                state.staleness.record(part.share, state.staleness.age(part.share, event.version))
        if event.split == 0:
            if not event.window:
                state.run.pulled(event.sequences, event.tokens)
            state.run.leased(lease)

    def _find(self, lease: int) -> Lease:
        found = self._state.leases.numbered(lease)
        if found is None:
            raise UnknownReferenceError(f"lease {lease} is not known")
        return found

    def _pulled(self, event: f.Pulled) -> None:
        lease = self._find(event.lease)
        self._state.leases.hand_out(lease, event.rank, event.consumer, event.request_id)

    def _settles(self, event: f.Settles) -> None:
        lease = self._find(event.settle.lease)
        part = lease.parts[event.settle.rank]
        if not part.settled_by(event.settle):
            self._state.transitions.apply_loss(lease, failed=False)
            raise UnknownReferenceError(f"lease {lease.number} was settled with other groups")
        if lease.window and not lease.rewound:
            settle = event.settle
            self._state.staleness.note_trained(part.share, set(settle.trained), settle.version)
        if lease.settled:
            self._state.transitions.apply_settle(lease, self._wall)
            self._consumers.moved_on(lease)

    def _carved(self, event: f.Carved) -> None:
        leased = {
            group.order: (group, lease.number)
            for lease in self._state.leases
            if lease.window
            for group in lease.groups
        }
        found = [leased[order] for order in event.orders if order in leased]
        if len(found) < len(event.orders) or not found:
            raise UnknownReferenceError(f"lease {event.number} has groups that are in no window")
        share = BatchShare([group for group, _ in found])
        self._state.transitions.apply_carve(event, share, {number for _, number in found})

    def _lost(self, event: f.Lost) -> None:
        transitions, lease = self._state.transitions, self._find(event.lease)
        if event.recalled:
            transitions.apply_recall(lease, failed=event.failed, split_up=event.apart)
        else:
            transitions.apply_loss(lease, failed=event.failed, split_up=event.apart)

    def _dropped(self, event: f.Dropped) -> None:
        group = self._state.groups.find(event.order)
        if group is None:
            raise UnknownReferenceError(f"group {event.order} is not known")
        self._state.dropper.drop([group], GroupState(event.state), event.reason, self._wall)

    def _rewound(self, event: f.Rewound) -> None:
        state = self._state
        state.transitions.apply_rewind(event.group, event.version)
        state.consumers.resumptions[event.group] = event.version, {event.consumer}
        state.run.resumed(event.version)
        state.consumers.settled(event.group, event.version)

    def _requeued(self, event: f.Requeued) -> None:
        self._state.ledger.requeued()
        self._state.requeued.add(event.order)

    def _told(self, event: f.Told) -> None:
        workers = self._state.workers
        if event.told:
            workers.order_drain(Drain(worker=event.worker, reason=event.reason), event.pid, event.started)
        else:
            workers.end_drain(event.worker)

    def _record_handlers(self) -> dict[type[f.Event], Callable[[Any], object]]:
        state = self._state
        return {
            f.Numbers: self._numbers,
            f.Table: lambda item: self._tables.update({item.table.id: item.table}),
            f.LaneSnapshot: self._lane,
            f.SessionSnapshot: self._session,
            f.GroupSnapshot: self._group,
            f.LeaseSnapshot: self._lease,
            f.EndedLeaseSnapshot: self._ended,
            f.RetainedBatchSnapshot: self._retained,
            f.RewoundBatchSnapshot: self._rewound_batch,
            f.LedgerSnapshot: self._ledger,
            f.ConsumerSnapshot: self._consumer,
            f.RunSnapshot: self._run,
            f.EndedGroupsSnapshot: lambda item: state.groups.remember(item.identities),
        }

    def queue_unplaced(self) -> None:
        """Queue the groups no record has placed."""
        state, groups = self._state, list(self._unplaced.values())
        self._unplaced.clear()
        for group in groups:
            state.lanes.held_groups += 1
            state.lanes.held_bytes += group.header.nbytes
        state.lanes.put_back(groups)

    def _numbers(self, item: f.Numbers) -> None:
        state = self._state
        state.groups.next_order = item.next_order
        state.leases.last_number, state.leases.generation = item.next_lease, item.generation
        state.staleness.max_delivered = item.staleness_max

    def _lane(self, item: f.LaneSnapshot) -> None:
        lane = self._state.lanes.open(item.env, item.split, self._now)
        lane.connected, lane.carry = item.connected, item.carry
        configured = self._state.lanes.configured(item.env)
        if not configured:
            lane.group_size = item.group_size
        if not configured or not item.connected:
            lane.weight, lane.min_share = item.weight, item.min_share
        lane.accepted_groups, lane.trained_groups = item.accepted_groups, item.trained_groups
        lane.rewards = item.rewards
        lane.note_size(item.largest_bytes)

    def _session(self, item: f.SessionSnapshot) -> None:
        state = self._state
        asked = RegisterProducer(
            producer=item.producer,
            env=item.env,
            split=item.split,
            slots=item.slots,
            pid=item.pid,
            host=item.host,
        )
        lane = state.lanes.open(item.env, item.split, self._now)
        session = ProducerSession(item.number, asked, lane, self._now, state.sessions.touched)
        session.tables = {name: self._tables[name] for name in item.tables}
        session.abandoned, session.closed, session.draining = item.abandoned, item.closed, item.draining
        session.produced, session.produced_before = item.produced, item.produced_before
        above = item.above
        session.window.restore(WindowState(item.cumulative, item.accepted, item.nbytes, item.position, above))
        state.sessions.restore(session, current=item.current)

    def _group(self, item: f.GroupSnapshot) -> None:
        group = self._stored(item.accepted)
        group.deliveries, group.failures = item.deliveries, item.failures
        self._state.lanes.open(group.env, group.split, self._now)
        self._state.groups.add(group)
        self._unplaced[group.order] = group

    def _table(self, event: f.Accepted) -> ColumnTable:
        name = event.header.table
        if name not in self._tables:
            found = self._source.table(event)
            if found is None or found.id != name:
                return ColumnTable(())  # Its record is gone as well, but the group was accepted and counts.
            self._tables[name] = found
        return self._tables[name]

    def _stored(self, event: f.Accepted) -> StoredGroup:
        return StoredGroup(
            header=event.header,
            env=event.env,
            split=event.split,
            run=event.run,
            producer=event.producer,
            session=event.session,
            table=self._table(event),
            body=self._source.body(event),
            accepted_at=self._now - max(0.0, self._wall - event.at),
            accepted_wall=event.at,
            requeued=event.requeued,
            order=event.order,
        )

    def _place(self, shards: Shards) -> list[list[StoredGroup]]:
        return [[self._unplaced.pop(order) for order in rank if order in self._unplaced] for rank in shards]

    def _rewinding(self, shards: list[list[StoredGroup]]) -> None:
        state = self._state
        for group in (group for groups in shards for group in groups):
            state.lanes.of(group).rewinding.add(group)
            state.rewind_buffer.charge(group.header.nbytes)

    def _lease(self, item: f.LeaseSnapshot) -> None:
        state, shards = self._state, self._place(item.shards)
        lease = Lease(
            number=item.number,
            generation=item.generation,
            stream=(item.group, item.split),
            step=item.step,
            version=item.version,
            sequences=item.sequences,
            tokens=item.tokens,
            window=item.window,
            parts=[RankShard(BatchShare(groups), self._now) for groups in shards],
            short=item.short,
            rewound=item.rewound,
            moments=item.moments,
        )
        for part, (consumer, request_id, settle) in zip(lease.parts, item.parts, strict=True):
            part.consumer, part.request_id, part.settle = consumer, request_id, settle
        if item.rewound:
            self._rewinding(shards)
        else:
            for totals in (totals for part in lease.parts for totals in part.share.lanes):
                state.lanes.of(totals.first).leased.count(totals)
                state.lanes.held_groups += totals.groups
                state.lanes.held_bytes += totals.nbytes
        state.leases.open(lease)

    def _ended(self, item: f.EndedLeaseSnapshot) -> None:
        ended = EndedLease(item.generation, item.step, item.settles, frozenset(item.requests))
        self._state.leases.remember(item.number, ended)

    def _retained(self, item: f.RetainedBatchSnapshot) -> None:
        """Retain the batch with those of its groups that are left; without any there is nothing to retain."""
        states = [
            [GroupState(state) for order, state in zip(rank, named, strict=True) if order in self._unplaced]
            for rank, named in zip(item.shards, item.states, strict=True)
        ]
        if not any(states):
            return
        batch = RetainedBatch(
            version=item.version,
            stepped=item.stepped,
            split=item.split,
            shares=tuple(map(BatchShare, self._place(item.shards))),
            states=states,
            short=item.short,
            moments=item.moments,
        )
        self._state.rewind_buffer.retain(item.group, batch)
        self._state.rewind_buffer.charge(batch.nbytes)

    def _rewound_batch(self, item: f.RewoundBatchSnapshot) -> None:
        stream, shards = (item.group, item.split), self._place(item.shards)
        self._rewinding(shards)
        self._state.rewind_buffer.append(stream, RewoundBatch(shards, item.short, item.moments))

    def _ledger(self, item: f.LedgerSnapshot) -> None:
        self._state.ledger.restore(item)
        self._state.sessions.lost_of_collapsed = item.lost_of_collapsed

    def _consumer(self, item: f.ConsumerSnapshot) -> None:
        self._state.consumers.register(
            Consumer(
                name=item.consumer,
                group=item.group,
                rank=item.rank,
                world_size=item.world_size,
                generation=item.generation,
                heard_at=self._now,
                progress=item.progress,
                settled_step=item.settled_step,
            )
        )

    def _run(self, item: f.RunSnapshot) -> None:
        state = self._state
        state.run.restore(item)
        state.rewind_buffer.checkpointing.update(item.checkpointing)
        for group, version, joined in item.resumed:
            state.consumers.resumptions[group] = version, set(joined)
        state.consumers.settled_policies.update(item.settled)
        for consumer, split, lease, generation, step in item.void:
            state.leases.void[consumer, split] = VoidSettlement(lease, generation, step)
        self.queue_unplaced()
