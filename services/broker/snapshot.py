"""The whole state of a broker as items, in the order in which `restoring` wants them."""

from collections.abc import Iterator

from msgspec.structs import replace

from rolloutmq.schemas.envelope import Split
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.journal.facts import (
    ConsumerItem,
    EndedItem,
    Fact,
    GroupItem,
    KeptItem,
    LaneItem,
    LeaseItem,
    LedgerItem,
    Numbers,
    ReturningItem,
    SessionItem,
    Table,
    Told,
    Tuned,
    Wanted,
)
from rolloutmq.services.broker.lanes import Lane
from rolloutmq.services.broker.leases import Lease
from rolloutmq.services.broker.log import SnapshotItem
from rolloutmq.services.broker.retained import Kept, Returning
from rolloutmq.services.broker.sessions import Session
from rolloutmq.services.broker.settlement import orders
from rolloutmq.services.broker.state import State


def snapshot(state: State) -> Iterator[SnapshotItem]:
    """Yield the state; nothing may change meanwhile."""
    yield Numbers(
        state.groups.next_order,
        state.leases.last_number,
        state.leases.generation,
        state.former.staleness_max,
    )
    yield from _tables(state)
    yield from map(_lane, state.lanes)
    yield from (_session(session, current=current) for session, current in state.sessions.remembered())
    yield from map(_group, sorted(state.groups, key=lambda group: group.order))
    yield from map(_lease, state.leases)
    for number, ended in state.leases.ended():
        requests = tuple(sorted(ended.requests))
        yield EndedItem(number, ended.generation, ended.step, ended.settles, requests)
    yield from (_kept(group, batch) for group, batch in state.retained.kept())
    yield from (_returning(group, split, batch) for (group, split), batch in state.retained.returning())
    yield _ledger(state)
    for consumer in state.consumers:
        yield ConsumerItem(
            consumer.name,
            consumer.group,
            consumer.rank,
            consumer.world_size,
            consumer.generation,
            consumer.progress,
        )
    yield _run(state)
    if state.tuned:
        yield Tuned(dict(state.tuned))
    yield from (Wanted(env, count) for env, count in state.wanted.items())
    yield from state.gpu_orders.facts()
    yield from state.tasks.items()
    for drain in state.workers.told():
        yield Told(drain.worker, drain.reason, state.workers.pid(drain.worker))


def _tables(state: State) -> Iterator[Fact]:
    tables = {group.table.id: group.table for group in state.groups}
    for session in state.sessions:
        tables |= session.tables
    return map(Table, tables.values())


def _lane(lane: Lane) -> LaneItem:
    return LaneItem(
        env=lane.env,
        split=lane.split,
        connected=lane.connected,
        weight=lane.weight,
        min_share=lane.min_share,
        group_size=lane.group_size,
        carry=lane.carry,
        accepted_groups=lane.accepted_groups,
        trained_groups=lane.trained_groups,
        largest_bytes=lane.largest_bytes,
    )


def _session(session: Session, *, current: bool) -> SessionItem:
    return SessionItem(
        number=session.number,
        current=current,
        producer=session.producer,
        env=session.lane.env,
        split=session.lane.split,
        slots=session.slots,
        pid=session.pid,
        host=session.host,
        tables=tuple(session.tables),
        abandoned=session.abandoned,
        produced=session.produced,
        produced_before=session.produced_before,
        closed=session.closed,
        draining=session.draining,
        **session.window.snapshot()._asdict(),
    )


def _group(group: StoredGroup) -> tuple[GroupItem, Body]:
    return GroupItem(group.accepted(), group.table.id, group.deliveries, group.failures), group.body


def _lease(lease: Lease) -> LeaseItem:
    return LeaseItem(
        number=lease.number,
        generation=lease.generation,
        group=lease.stream[0],
        split=lease.split,
        step=lease.step,
        version=lease.version,
        sequences=lease.sequences,
        shards=orders([part.groups for part in lease.parts]),
        short=lease.short,
        rewound=lease.rewound,
        parts=tuple((part.consumer, part.request_id, part.settle) for part in lease.parts),
        tokens=lease.tokens,
    )


def _kept(group: str, batch: Kept) -> KeptItem:
    states = tuple(tuple(state.value for state in states) for states in batch.states)
    return KeptItem(
        group, batch.version, batch.stepped, batch.split, orders(batch.shards), states, batch.short
    )


def _returning(group: str, split: Split, batch: Returning) -> ReturningItem:
    return ReturningItem(group, split, orders(batch.shards), batch.short)


def _ledger(state: State) -> LedgerItem:
    ledger = state.ledger
    return LedgerItem(
        accepted=ledger.accepted,
        rewound=ledger.rewound,
        lost=ledger.lost,
        forgotten=ledger.forgotten,
        counts={place.value: count for place, count in ledger.counts.items()},
        reasons=dict(ledger.reasons),
        lost_of_collapsed=state.sessions.lost_of_collapsed,
    )


def _run(state: State) -> Fact:
    resumed = tuple(
        (group, version, tuple(sorted(joined)))
        for group, (version, joined) in state.consumers.resumptions.items()
    )
    checkpointing = tuple(sorted(state.retained.checkpointing))
    return replace(state.run.item(), checkpointing=checkpointing, resumed=resumed)
