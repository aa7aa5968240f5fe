"""What a rewound batch loses, the share of its first hand-out keeps: its hops may still have to be counted."""

import pytest
from tests.services.broker.bench import Bench, config

from rolloutmq.schemas.wire.envelope import PolicyVersion


@pytest.mark.parametrize("settled", [False, True])
def test_a_group_that_a_rewound_batch_loses_stays_in_the_share_that_was_handed_out(settled: bool) -> None:
    bench = Bench(config(broker={"retain_bytes": 1 << 20}, e={"max_staleness": 9}))
    bench.producer().send(2)
    bench.consumer()
    batch = bench.batch(0)
    state = bench.core._state
    (lease,) = state.leases
    share = lease.parts[0].share
    first, second = share.groups
    if settled:
        bench.settle(batch)
    state.transitions.rewind("trainer", PolicyVersion(), "c", 1.0)
    assert state.rewind_buffer.remove(first)
    assert share.groups == [first, second]
    (left,) = state.rewind_buffer.all_queued()
    assert left.groups == [second]
