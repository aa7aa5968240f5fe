"""Invariants of the core, asserted against the containers themselves."""

from rolloutmq.services.broker.broker_state import BrokerState
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup


def check_invariants(state: BrokerState) -> None:
    """Raise AssertionError if any count differs from its containers."""
    state.ledger.validate()
    state.lanes.validate()
    state.sessions.validate()
    state.credits.validate()
    state.leases.validate()
    state.arenas.validate()
    state.tasks.validate()
    _check_containers(state)
    _check_loads(state)
    _check_moments(state)


def _check_containers(state: BrokerState) -> None:
    counts = state.ledger.counts
    queued = [group for lane in state.lanes for group in lane.in_order()]
    queued_again = [group for batch in state.rewind_buffer.all_queued() for group in batch.groups]
    leased = [group for lease in state.leases for group in lease.groups]
    retained = [member for batch in state.rewind_buffer.all_retained() for member in batch.members()]
    assert counts[GroupState.QUEUED] == len(queued) + len(queued_again)
    assert counts[GroupState.LEASED] == len(leased)
    trained = sum(place is GroupState.TRAINED for _, place in retained)
    assert counts[GroupState.TRAINED] == trained + state.ledger.forgotten
    everywhere = queued + queued_again + leased + [group for group, _ in retained]
    assert len(everywhere) == len(set(map(id, everywhere))), "a group is in two containers"


def _check_loads(state: BrokerState) -> None:
    ordinary = [g for lease in state.leases if not lease.rewound for g in lease.groups]
    again = [g for lease in state.leases if lease.rewound for g in lease.groups]
    again += [g for batch in state.rewind_buffer.all_queued() for g in batch.groups]
    retained = [g for batch in state.rewind_buffer.all_retained() for g, _ in batch.members()]
    assert sum(lane.leased.groups for lane in state.lanes) == len(ordinary)
    assert sum(lane.leased.nbytes for lane in state.lanes) == _nbytes(ordinary)
    assert sum(lane.rewinding.groups for lane in state.lanes) == len(again)
    assert state.rewind_buffer.nbytes == _nbytes(again) + _nbytes(retained)


def _check_moments(state: BrokerState) -> None:
    """Each accepted group is in the moments of its lane at most once, and a group left out spoils none."""
    for lane in state.lanes:
        found = lane.rewards
        assert found.groups + found.left_out <= lane.accepted_groups, lane.env
        assert found.finite, f"{lane.env}: {found}"
        assert found.low <= found.mean <= found.high, f"{lane.env}: {found}"
        assert found.m2 >= 0.0, f"{lane.env}: {found}"


def _nbytes(groups: list[StoredGroup]) -> int:
    return sum(group.header.nbytes for group in groups)
