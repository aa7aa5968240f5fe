import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rolloutmq.trainer.step.packing import WORTH, Pass, plan

LENGTHS = st.lists(st.integers(0, 40), max_size=60).map(lambda found: np.array(found, np.uint32))


@given(LENGTHS, st.integers(1, 200), st.booleans())
def test_every_sequence_is_in_one_row_whole_and_no_pass_is_too_large(
    lengths: "np.typing.NDArray[np.uint32]", tokens: int, share: bool
) -> None:
    passes = plan(lengths, tokens, share=share)
    assert sorted(n for one in passes for row in one.rows for n in row) == np.flatnonzero(lengths).tolist()
    for one in passes:
        assert one.area <= tokens or len(one.rows) == 1
        assert one.width == max(int(lengths[n]) for row in one.rows for n in row)
        assert all(sum(int(lengths[n]) for n in row) <= one.width for row in one.rows)
        assert share or not one.shared


@given(LENGTHS, st.integers(1, 200))
def test_rows_are_shared_only_where_that_saves_a_part_of_what_is_read(
    lengths: "np.typing.NDArray[np.uint32]", tokens: int
) -> None:
    together, alone = (sum(one.area for one in plan(lengths, tokens, share=share)) for share in (True, False))
    passes = plan(lengths, tokens)
    if any(one.shared for one in passes):
        assert together <= (1 - WORTH) * alone
    else:
        assert together == alone


def test_what_fits_into_one_pass_keeps_its_order() -> None:
    assert plan(np.array([3, 4, 3]), 12) == [Pass(((0,), (1,), (2,)), 4)]


def test_short_sequences_share_the_rows_beside_a_long_one() -> None:
    assert plan(np.array([2, 8, 3, 3, 5]), 24) == [Pass(((1,), (4, 2), (3, 0)), 8)]
    assert plan(np.array([2, 8, 3, 3, 5]), 16) == [Pass(((1,), (4, 2)), 8), Pass(((3,), (0,)), 3)]


def test_a_plan_of_many_lengths_wastes_little() -> None:
    lengths = np.random.default_rng(0).integers(100, 2000, 400)
    passes = plan(lengths, 1 << 30)
    (one,) = passes
    assert one.area <= 1.1 * int(lengths.sum())


def test_the_same_lengths_give_the_same_plan() -> None:
    lengths = np.random.default_rng(1).integers(1, 50, 200)
    assert plan(lengths, 500) == plan(lengths.copy(), 500)


@pytest.mark.parametrize("lengths", [[], [0, 0]])
def test_nothing_gives_no_pass(lengths: list[int]) -> None:
    assert plan(np.array(lengths, np.uint32), 10) == []
