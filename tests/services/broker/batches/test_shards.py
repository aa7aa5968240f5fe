from itertools import product

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace
from tests.services.broker.bench import stored

from rolloutmq.services.broker.batches.shards import shard
from rolloutmq.services.broker.journal.stored_group import StoredGroup


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
