from collections.abc import Mapping
from itertools import product

from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.services.broker.batches.subset_sum import fit, nearest, reach, sumset

COUNTS = st.dictionaries(st.integers(1, 12), st.integers(1, 4), max_size=4)


def sums(counts: Mapping[int, int]) -> set[int]:
    """Return all reachable sums, by brute force."""
    ranges = [range(0, size * n + 1, size) for size, n in counts.items()]
    return {sum(chosen) for chosen in product(*ranges)}


def as_set(bits: int) -> set[int]:
    return {i for i in range(bits.bit_length()) if bits >> i & 1}


@given(COUNTS, st.integers(0, 80))
def test_reach_is_exact(counts: dict[int, int], limit: int) -> None:
    assert as_set(reach(counts, limit)) == {s for s in sums(counts) if s <= limit}


@given(COUNTS, st.integers(0, 80), st.dictionaries(st.integers(1, 12), st.integers(0, 6)))
def test_fit_finds_a_combination_whenever_there_is_one(
    counts: dict[int, int], target: int, wish: dict[int, int]
) -> None:
    found = fit(counts, wish, target)
    assert (found is not None) == (target in sums(counts))
    if found is not None:
        assert sum(size * n for size, n in found.items()) == target
        assert all(0 <= n <= counts[size] for size, n in found.items())


def test_the_first_sizes_keep_what_is_preferred() -> None:
    assert fit({4: 10, 2: 10}, {4: 3, 2: 4}, 20) == {4: 3, 2: 4}
    assert fit({4: 10, 2: 2}, {4: 3, 2: 2}, 20) == {4: 4, 2: 2}


@given(st.sets(st.integers(0, 20)), st.sets(st.integers(0, 20)))
def test_sumset_is_every_sum_of_two(one: set[int], other: set[int]) -> None:
    bits = [sum(1 << i for i in members) for members in (one, other)]
    expected = {a + b for a in one for b in other if a + b <= 25}
    assert as_set(sumset(bits[0], bits[1], (1 << 26) - 1)) == expected


def test_nearest_goes_outward() -> None:
    assert list(nearest(3, 0, 5)) == [3, 2, 4, 1, 5, 0]
    assert list(nearest(7, 0, 2)) == [2, 1, 0]
