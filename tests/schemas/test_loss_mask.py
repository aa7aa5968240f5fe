from typing import Any

import pytest
from numpy.testing import assert_array_equal

from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import marked_tokens, trained_tokens


@pytest.mark.parametrize(
    "mask",
    [
        [[False, False, True], [True, True]],
        [[0, 0, 1], [1, 1]],
        [[0.0, 0.0, 1.0], [1.0, 1.0]],
        [[-100, -100, 0], [7, 8]],  # labels: a token id of 0 is trained
    ],
)
def test_masks_of_every_kind(mask: list[list[Any]]) -> None:
    group = Group.build("g", tokens=[[5, 6, 0], [7, 8]], mask=mask, scores=[0, 1])
    before = group.columns["mask"].values.copy()
    assert trained_tokens(group).tolist() == [False, False, True, False, True]
    assert_array_equal(group.columns["mask"].values, before)


def test_a_first_token_can_be_marked_and_is_never_trained() -> None:
    group = Group.build("g", tokens=[[5, 6], [], [7]], mask=[[-100, 6], [], [7]], scores=[0, 1, 2])
    assert marked_tokens(group).tolist() == [False, True, True]
    assert trained_tokens(group).tolist() == [False, True, False]
