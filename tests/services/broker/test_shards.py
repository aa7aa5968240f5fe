from hypothesis import given
from hypothesis import strategies as st
from tests.services.broker.bench import stored

from rolloutmq.services.broker.shards import shard


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 8))
def test_shards_are_disjoint_complete_ordered_and_balanced(lengths: list[int], world: int) -> None:
    groups = [stored(order, tokens=tokens) for order, tokens in enumerate(lengths, 1)]
    shards = shard(groups, world)
    assert len(shards) == world
    assert sorted(g.order for part in shards for g in part) == list(range(1, len(groups) + 1))
    for part in shards:
        assert [g.order for g in part] == sorted(g.order for g in part)
    loads = [sum(g.header.tokens for g in part) for part in shards]
    assert max(loads) - min(loads) <= max(lengths, default=0)


def test_equal_groups_are_dealt_evenly() -> None:
    shards = shard([stored(order) for order in range(16)], 4)
    assert [len(part) for part in shards] == [4, 4, 4, 4]


def test_one_long_group_weighs_as_much_as_many_short_ones() -> None:
    groups = [stored(order, tokens=tokens) for order, tokens in enumerate([2, 6, 2, 2], 1)]
    assert [[g.order for g in part] for part in shard(groups, 2)] == [[2], [1, 3, 4]]
