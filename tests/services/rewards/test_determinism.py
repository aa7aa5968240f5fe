"""Two scorings compared: bit for bit, by rater, and rollouts that are not even the same."""

from typing import Any

import msgspec

from rolloutmq.schemas.group import Group
from rolloutmq.services.rewards.determinism import Difference, ScoredGroup, differences

NO = float("nan")


def scored(scores: list[float], ratings: list[list[float]] | None = None, token: int = 1) -> ScoredGroup:
    columns: dict[str, Any] = {}
    if ratings is not None:
        columns = {"ratings": ratings, "raters": [{"a": 1.0, "b": 2.0}] * len(scores)}
    tokens = [[token, 2]] * len(scores)
    group = Group.build("g", tokens=tokens, mask=[[0, 1]] * len(scores), scores=scores, **columns)
    # through JSON, as from another process
    return msgspec.json.decode(msgspec.json.encode(ScoredGroup.of(group)), type=ScoredGroup)


def test_equal_scorings_have_no_difference() -> None:
    first = [scored([0.1, 1 / 3], [[0.1, NO], [1 / 3, 7.0]]), scored([5e-324, 1e308])]
    again = [scored([0.1, 1 / 3], [[0.1, NO], [1 / 3, 7.0]]), scored([5e-324, 1e308])]
    assert list(differences(first, again)) == []


def test_the_rater_is_named_and_the_last_bit_counts() -> None:
    one, other = (
        scored([0.3, 1.0], [[0.1, 0.2], [1.0, NO]]),
        scored([0.1 + 0.2, 1.0], [[0.1, 0.25], [1.0, 1.0]]),
    )
    found = list(differences([one], [other]))
    assert [each.is_missing for each in found] == [False, False, True]
    assert found == [
        Difference(group=0, row=0, what="b", values=(0.2, 0.25)),
        Difference(group=0, row=0, what="score", values=(0.3, 0.1 + 0.2)),
        Difference(group=0, row=1, what="b", values=(None, 1.0)),
    ]


def test_other_rollouts_are_told_and_not_compared() -> None:
    found = list(differences([scored([1.0, 1.0])], [scored([0.0, 0.0], token=9)]))
    assert [(one.row, one.what, one.is_missing) for one in found] == [
        (0, "tokens", False),
        (1, "tokens", False),
    ]
    (shorter,) = differences([scored([1.0, 1.0])], [scored([1.0])])
    assert (shorter.what, shorter.values) == ("tokens", (2, 1))
