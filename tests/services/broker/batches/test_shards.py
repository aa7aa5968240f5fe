from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.services.broker.bench import Bench, config, ids, lasting, stored

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.schemas.wire.requests import Settle
from rolloutmq.schemas.wire.training import BatchSettled
from rolloutmq.services.broker.batches.shards import FILTERED, TRAINED, outcomes, shard
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import StoredGroup

NAMES = st.lists(st.sampled_from("abcd"), max_size=5)


def replace_tokens(group: StoredGroup, tokens: int) -> StoredGroup:
    return replace(group, header=replace(group.header, tokens=tokens))


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_shards_are_disjoint_complete_ordered_and_balanced(lengths: list[int], world: int) -> None:
    groups = [stored(order, tokens=tokens) for order, tokens in enumerate(lengths, 1)]
    shards = shard(groups, world)
    assert len(shards) == world
    assert sorted(g.order for part in shards for g in part) == list(range(1, len(groups) + 1))
    for part in shards:
        assert [g.order for g in part] == sorted(g.order for g in part)
    loads = [sum(g.header.tokens for g in part) for part in shards]
    longest = max(lengths, default=0)
    assert max(loads) - min(loads) <= longest
    assert max(loads) <= sum(lengths) / world + longest * (1 - 1 / world) + 1e-6


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=40), st.data())
def test_every_rank_gets_a_group_where_there_are_enough(lengths: list[int], data: st.DataObject) -> None:
    world = data.draw(st.integers(1, len(lengths)))
    groups = [replace_tokens(stored(order), tokens) for order, tokens in enumerate(lengths, 1)]
    assert all(shard(groups, world))


@given(st.lists(st.integers(1, 30), min_size=1, max_size=7), st.integers(2, 3))
def test_the_longest_shard_is_at_most_a_third_above_the_best_there_is(lengths: list[int], world: int) -> None:
    """Compared with every division: the known bound of longest-first, 4/3 - 1/(3 * ranks)."""
    groups = [stored(order, tokens=tokens) for order, tokens in enumerate(lengths, 1)]
    longest = max(sum(g.header.tokens for g in part) for part in shard(groups, world))
    ways = product(range(world), repeat=len(lengths))
    best = min(
        max(sum(n for n, r in zip(lengths, ranks, strict=True) if r == rank) for rank in range(world))
        for ranks in ways
    )
    assert longest <= best * (4 / 3 - 1 / (3 * world)) + 1e-6


def test_equal_groups_are_dealt_evenly() -> None:
    shards = shard([stored(order) for order in range(16)], 4)
    assert [len(part) for part in shards] == [4, 4, 4, 4]


def test_one_long_group_weighs_as_much_as_many_short_ones() -> None:
    groups = [stored(order, tokens=tokens) for order, tokens in enumerate([2, 6, 2, 2], 1)]
    assert [[g.order for g in part] for part in shard(groups, 2)] == [[2], [1, 3, 4]]


def groups(names: list[str]) -> list[StoredGroup]:
    found = []
    for order, name in enumerate(names, 1):
        one = stored(order)
        one.header = replace(one.header, group_id=name)
        found.append(one)
    return found


def settle(trained: list[str], filtered: list[str], rejected: list[str]) -> Settle:
    bad = tuple(Rejected(group_id=name, reason="bad") for name in rejected)
    return Settle(
        consumer="c",
        lease=1,
        generation=1,
        version=PolicyVersion(0, 1),
        trained=tuple(trained),
        filtered=tuple(filtered),
        rejected=bad,
    )


@given(NAMES, NAMES, NAMES, NAMES)
def test_the_lists_must_name_exactly_the_groups(
    held: list[str], trained: list[str], filtered: list[str], rejected: list[str]
) -> None:
    found = outcomes(groups(held), settle(trained, filtered, rejected))
    matches = Counter(held) == Counter([*trained, *filtered, *rejected])
    assert (found is not None) == matches
    if found is not None:
        assert found.count(TRAINED) == len(trained)
        assert found.count(FILTERED) == len(filtered)
        assert found.count((GroupState.DEAD, "bad")) == len(rejected)


@given(NAMES)
def test_all_trained_in_their_order_is_what_any_other_order_is(held: list[str]) -> None:
    in_order = outcomes(groups(held), settle(held, [], []))
    assert in_order == outcomes(groups(held), settle(sorted(held), [], [])) == [TRAINED] * len(held)


def trained(*, backwards: bool, rewound: bool, lanes: int) -> Bench:
    """Return a bench that has settled a batch of trained groups, in their order or in another one."""
    bench = Bench(config(broker={"retain_bytes": 1 << 20}, e={"max_staleness": 9}, f={"max_staleness": 9}))
    peers = [bench.producer(f"p-{env}", env) for env in "ef"[:lanes]]
    bench.consumer()
    for peer in peers:
        peer.send(4 // lanes, step=0, finished_at=1.0)
    if rewound:
        bench.train(0, 16)
        bench.consumer("c", resume=PolicyVersion())
    batch = bench.batch(0, 16)
    assert batch.rewound is rewound
    bench.settle(batch, trained=tuple(sorted(ids(batch), reverse=backwards)))
    return bench


@pytest.mark.parametrize("rewound", [False, True])
@pytest.mark.parametrize("lanes", [1, 2])
def test_a_settlement_that_is_one_comparison_ends_as_one_that_is_not(lanes: int, rewound: bool) -> None:
    quick, careful = (trained(backwards=one, rewound=rewound, lanes=lanes) for one in (False, True))

    def without_request(bench: Bench) -> list[object]:
        return [one for one in lasting(bench) if type(one).__name__ != "EndedLeaseSnapshot"]

    assert without_request(quick) == without_request(careful)
    assert quick.settled_lines == careful.settled_lines
    assert [one.message for one in quick.published if isinstance(one.message, BatchSettled)] == [
        one.message for one in careful.published if isinstance(one.message, BatchSettled)
    ]
    assert quick.pressure() == careful.pressure()
