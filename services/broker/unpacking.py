"""Unpacking a snapshot: from its items to the containers of a new state."""

from collections.abc import Callable
from typing import Any, Protocol

from rolloutmq.schemas.delivery import RegisterProducer
from rolloutmq.schemas.envelope import ColumnTable
from rolloutmq.services.broker.consumers import Consumer
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal import facts as f
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.leases import Ended, Lease, Part
from rolloutmq.services.broker.ledger import State as Place
from rolloutmq.services.broker.retained import Kept, Returning
from rolloutmq.services.broker.sessions import Session
from rolloutmq.services.broker.state import State
from rolloutmq.services.broker.windows import WindowState

Shards = tuple[tuple[int, ...], ...]


class Source(Protocol):
    """Where the groups of an earlier life are."""

    def body(self, accepted: f.Accepted, /) -> Body:
        """Return the frames of a group."""
        ...

    def table(self, accepted: f.Accepted, /) -> ColumnTable | None:
        """Return the column table of a group that no fact declares."""
        ...


class Unpacking:
    """Takes the items of a snapshot, one at a time, in their order."""

    def __init__(self, state: State, source: Source, now: float, wall: float) -> None:
        self._state = state
        self._source = source
        self._now = now
        self._wall = wall
        self._tables: dict[str, ColumnTable] = {}
        self._loose: dict[int, StoredGroup] = {}
        """Groups of which no item has said yet where they are."""
        self._apply: dict[type[f.Fact], Callable[[Any], object]] = self._of_items()

    def _of_items(self) -> dict[type[f.Fact], Callable[[Any], object]]:
        return {
            f.Numbers: self._numbers,
            f.Table: lambda item: self._tables.update({item.table.id: item.table}),
            f.LaneItem: self._lane,
            f.SessionItem: self._session,
            f.GroupItem: self._group,
            f.LeaseItem: self._lease,
            f.EndedItem: self._ended,
            f.KeptItem: self._kept,
            f.ReturningItem: self._returning,
            f.LedgerItem: self._ledger,
            f.ConsumerItem: self._consumer,
            f.RunItem: self._run,
        }

    def queue_loose(self) -> None:
        """Queue the groups that no item spoke of."""
        state, groups = self._state, list(self._loose.values())
        self._loose.clear()
        for group in groups:
            state.lanes.held_groups += 1
            state.lanes.held_bytes += group.header.nbytes
        state.lanes.put_back(groups)

    def _numbers(self, item: f.Numbers) -> None:
        state = self._state
        state.groups.next_order = item.next_order
        state.leases.last_number, state.leases.generation = item.next_lease, item.generation
        state.former.staleness_max = item.staleness_max

    def _lane(self, item: f.LaneItem) -> None:
        lane = self._state.lanes.open(item.env, item.split, self._now)
        lane.connected, lane.carry = item.connected, item.carry
        configured = self._state.lanes.configured(item.env)
        if not configured:
            lane.group_size = item.group_size
        if not configured or not item.connected:
            lane.weight, lane.min_share = item.weight, item.min_share
        lane.accepted_groups, lane.trained_groups = item.accepted_groups, item.trained_groups
        lane.largest_bytes = item.largest_bytes

    def _session(self, item: f.SessionItem) -> None:
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
        session = Session(item.number, asked, lane, self._now, state.sessions.touched)
        session.tables = {name: self._tables[name] for name in item.tables}
        session.abandoned, session.closed, session.draining = item.abandoned, item.closed, item.draining
        session.produced, session.produced_before = item.produced, item.produced_before
        above = item.above
        session.window.restore(WindowState(item.cumulative, item.accepted, item.nbytes, item.position, above))
        state.sessions.restore(session, current=item.current)

    def _group(self, item: f.GroupItem) -> None:
        group = self._stored(item.accepted)
        group.deliveries, group.failures = item.deliveries, item.failures
        self._state.lanes.open(group.env, group.split, self._now)
        self._state.groups.add(group)
        self._state.known[group.header.group_id] = group
        self._loose[group.order] = group

    def _table(self, fact: f.Accepted) -> ColumnTable:
        name = fact.header.table
        if name not in self._tables:
            found = self._source.table(fact)
            if found is None or found.id != name:
                return ColumnTable(
                    ()
                )  # What it describes is gone as well, but the group was there and counts.
            self._tables[name] = found
        return self._tables[name]

    def _stored(self, fact: f.Accepted) -> StoredGroup:
        return StoredGroup(
            header=fact.header,
            env=fact.env,
            split=fact.split,
            run=fact.run,
            producer=fact.producer,
            session=fact.session,
            table=self._table(fact),
            body=self._source.body(fact),
            accepted_at=self._now - max(0.0, self._wall - fact.at),
            accepted_wall=fact.at,
            requeued=fact.requeued,
            order=fact.order,
        )

    def _place(self, shards: Shards) -> list[list[StoredGroup]]:
        return [[self._loose.pop(order) for order in rank if order in self._loose] for rank in shards]

    def _rewinding(self, shards: list[list[StoredGroup]]) -> None:
        state = self._state
        for group in (group for groups in shards for group in groups):
            state.lanes.of(group).rewinding.add(group)
            state.retained.charge(group.header.nbytes)

    def _lease(self, item: f.LeaseItem) -> None:
        state, shards = self._state, self._place(item.shards)
        lease = Lease(
            number=item.number,
            generation=item.generation,
            stream=(item.group, item.split),
            step=item.step,
            version=item.version,
            sequences=item.sequences,
            tokens=item.tokens,
            parts=[Part(groups, self._now) for groups in shards],
            short=item.short,
            rewound=item.rewound,
        )
        for part, (consumer, request_id, settle) in zip(lease.parts, item.parts, strict=True):
            part.consumer, part.request_id, part.settle = consumer, request_id, settle
        if item.rewound:
            self._rewinding(shards)
        else:
            for group in lease.groups:
                state.lanes.of(group).leased.add(group)
                state.lanes.held_groups += 1
                state.lanes.held_bytes += group.header.nbytes
        state.leases.open(lease)

    def _ended(self, item: f.EndedItem) -> None:
        ended = Ended(item.generation, item.step, item.settles, frozenset(item.requests))
        self._state.leases.remember(item.number, ended)

    def _kept(self, item: f.KeptItem) -> None:
        batch = Kept(
            version=item.version,
            stepped=item.stepped,
            split=item.split,
            shards=self._place(item.shards),
            states=[[Place(state) for state in states] for states in item.states],
            short=item.short,
        )
        self._state.retained.keep(item.group, batch)
        self._state.retained.charge(batch.nbytes)

    def _returning(self, item: f.ReturningItem) -> None:
        stream, shards = (item.group, item.split), self._place(item.shards)
        self._rewinding(shards)
        self._state.retained.append(stream, Returning(shards, item.short))

    def _ledger(self, item: f.LedgerItem) -> None:
        self._state.ledger.restore(item)
        self._state.sessions.lost_of_collapsed = item.lost_of_collapsed

    def _consumer(self, item: f.ConsumerItem) -> None:
        self._state.consumers.register(
            Consumer(
                name=item.consumer,
                group=item.group,
                rank=item.rank,
                world_size=item.world_size,
                generation=item.generation,
                heard_at=self._now,
                progress=item.progress,
            )
        )

    def _run(self, item: f.RunItem) -> None:
        state = self._state
        state.run.restore(item)
        state.retained.checkpointing.update(item.checkpointing)
        for group, version, joined in item.resumed:
            state.consumers.resumptions[group] = version, set(joined)
        self.queue_loose()
