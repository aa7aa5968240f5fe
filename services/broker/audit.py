"""Every invariant of the core, asserted against the containers themselves."""

from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.ledger import State as Place
from rolloutmq.services.broker.state import State


def audit(state: State) -> None:
    """Raise AssertionError if any count differs from what it counts."""
    state.ledger.validate()
    state.lanes.validate()
    state.sessions.validate()
    state.admission.validate()
    state.leases.validate()
    state.arenas.validate()
    state.tasks.validate()
    _audit_places(state)
    _audit_loads(state)


def _audit_places(state: State) -> None:
    counts = state.ledger.counts
    queued = [group for lane in state.lanes for group in lane.in_order()]
    returning = [group for batch in state.retained.all_returning() for group in batch.groups]
    leased = [group for lease in state.leases for group in lease.groups]
    kept = [member for batch in state.retained.all_kept() for member in batch.members()]
    assert counts[Place.QUEUED] == len(queued) + len(returning)
    assert counts[Place.LEASED] == len(leased)
    trained = sum(place is Place.TRAINED for _, place in kept)
    assert counts[Place.TRAINED] == trained + state.ledger.forgotten
    everywhere = queued + returning + leased + [group for group, _ in kept]
    assert len(everywhere) == len(set(map(id, everywhere))), "a group is in two places"


def _audit_loads(state: State) -> None:
    ordinary = [g for lease in state.leases if not lease.rewound for g in lease.groups]
    again = [g for lease in state.leases if lease.rewound for g in lease.groups]
    again += [g for batch in state.retained.all_returning() for g in batch.groups]
    kept = [g for batch in state.retained.all_kept() for g, _ in batch.members()]
    assert sum(lane.leased.groups for lane in state.lanes) == len(ordinary)
    assert sum(lane.leased.nbytes for lane in state.lanes) == _nbytes(ordinary)
    assert sum(lane.rewinding.groups for lane in state.lanes) == len(again)
    assert state.retained.nbytes == _nbytes(again) + _nbytes(kept)


def _nbytes(groups: list[StoredGroup]) -> int:
    return sum(group.header.nbytes for group in groups)
