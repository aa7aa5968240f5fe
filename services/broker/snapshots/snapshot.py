"""The snapshot: the whole state of a broker as records, in the order that `restore` needs."""

from collections.abc import Iterator
from typing import Final

from msgspec.structs import replace

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.batches.leases import Lease
from rolloutmq.services.broker.batches.rewind import RetainedBatch, RewoundBatch
from rolloutmq.services.broker.batches.transitions import orders
from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.flow.sessions import ProducerSession
from rolloutmq.services.broker.journal.event_buffer import SnapshotRecord
from rolloutmq.services.broker.journal.format.events import (
    ConsumerSnapshot,
    EndedGroupsSnapshot,
    EndedLeaseSnapshot,
    Event,
    GroupSnapshot,
    LaneSnapshot,
    LeaseSnapshot,
    LedgerSnapshot,
    Numbers,
    RetainedBatchSnapshot,
    RewoundBatchSnapshot,
    SessionSnapshot,
    Table,
    Told,
    Tuned,
    Wanted,
)
from rolloutmq.services.broker.journal.stored_group import GroupBody, StoredGroup
from rolloutmq.services.broker.state.queues import Lane

IDENTITIES: Final = 10_000
"""Ended groups in one record."""


def snapshot(state: BrokerState) -> Iterator[SnapshotRecord]:
    """Yield the state; nothing may change meanwhile."""
    yield Numbers(
        state.groups.next_order,
        state.leases.last_number,
        state.leases.generation,
        state.staleness.max_delivered,
    )
    yield from _tables(state)
    half_life = state.config.trainer.rewards.half_life_groups
    yield from (_lane(lane, half_life) for lane in state.lanes)
    yield from (_session(session, current=current) for session, current in state.sessions.remembered())
    yield from map(_group, sorted(state.groups, key=lambda group: group.order))
    yield from map(_lease, state.leases)
    for number, ended in state.leases.ended():
        requests = tuple(sorted(ended.requests))
        yield EndedLeaseSnapshot(number, ended.generation, ended.step, ended.settles, requests)
    yield from (_retained(group, batch) for group, batch in state.rewind_buffer.retained())
    yield from (_rewound(group, split, batch) for (group, split), batch in state.rewind_buffer.queued())
    yield _ledger(state)
    for consumer in state.consumers:
        yield ConsumerSnapshot(
            consumer.name,
            consumer.group,
            consumer.rank,
            consumer.world_size,
            consumer.generation,
            consumer.progress,
            consumer.settled_step,
        )
    identities = state.groups.ended
    for start in range(0, len(identities), IDENTITIES):
        yield EndedGroupsSnapshot(identities[start : start + IDENTITIES])
    yield _run(state)
    if state.changed_settings:
        yield Tuned(dict(state.changed_settings))
    yield from (Wanted(env, count) for env, count in state.wanted.items())
    yield from state.gpu_orders.events()
    yield from state.tasks.items()
    for drain in state.workers.drains():
        yield Told(drain.worker, drain.reason, drain.pid, started=drain.started)


def _tables(state: BrokerState) -> Iterator[Event]:
    tables = {group.table.id: group.table for group in state.groups}
    for session in state.sessions:
        tables |= session.tables
    return map(Table, tables.values())


def _lane(lane: Lane, half_life_groups: int | None) -> LaneSnapshot:
    return LaneSnapshot(
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
        rewards=lane.rewards,
        half_life_groups=half_life_groups,
    )


def _session(session: ProducerSession, *, current: bool) -> SessionSnapshot:
    return SessionSnapshot(
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


def _group(group: StoredGroup) -> tuple[GroupSnapshot, GroupBody]:
    return GroupSnapshot(group.accepted(), group.table.id, group.deliveries, group.failures), group.body


def _lease(lease: Lease) -> LeaseSnapshot:
    return LeaseSnapshot(
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
        moments=lease.moments,
        window=lease.window,
    )


def _retained(group: str, batch: RetainedBatch) -> RetainedBatchSnapshot:
    states = tuple(tuple(state.value for state in states) for states in batch.states)
    return RetainedBatchSnapshot(
        group,
        batch.version,
        batch.stepped,
        batch.split,
        orders(batch.shards),
        states,
        batch.short,
        batch.moments,
    )


def _rewound(group: str, split: Split, batch: RewoundBatch) -> RewoundBatchSnapshot:
    return RewoundBatchSnapshot(group, split, orders(batch.shards), batch.short, batch.moments)


def _ledger(state: BrokerState) -> LedgerSnapshot:
    ledger = state.ledger
    return LedgerSnapshot(
        accepted=ledger.accepted,
        rewound=ledger.rewound,
        lost=ledger.lost,
        forgotten=ledger.forgotten,
        counts={place.value: count for place, count in ledger.counts.items()},
        reasons=dict(ledger.reasons),
        lost_of_collapsed=state.sessions.lost_of_collapsed,
    )


def _run(state: BrokerState) -> Event:
    resumed = tuple(
        (group, version, tuple(sorted(joined)))
        for group, (version, joined) in state.consumers.resumptions.items()
    )
    checkpointing = tuple(sorted(state.rewind_buffer.checkpointing))
    void = tuple(
        (consumer, split, one.lease, one.generation, one.step)
        for (consumer, split), one in state.leases.void.items()
    )
    settled = tuple(state.consumers.settled_policies.items())
    return replace(state.run.item(), checkpointing=checkpointing, resumed=resumed, settled=settled, void=void)
