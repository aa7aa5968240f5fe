"""What a batch of several ranks came to."""

import pytest
from tests.trainer.toy import MemoryBatch, some_group

from rolloutmq.schemas.delivery import Rejected
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.trainer.account import Account, Part
from rolloutmq.trainer.lesson import Lesson

FLAT = Lesson(filtered=[some_group("flat", [1.0, 1.0])])
OLD = Lesson(filtered=[some_group("old", [0.0, 1.0])], too_old=1)
BAD = Lesson(rejected=[Rejected(group_id="bad", reason="no tokens")])
KNOWN = Lesson(repeated=["known"])


@pytest.mark.parametrize(
    ("lessons", "reason"),
    [
        ((Lesson(), BAD), "no tokens"),
        ((FLAT, BAD), "no tokens"),
        ((FLAT, OLD), "its groups are older"),
        ((Lesson(), FLAT), "all scores of each group are equal"),
        ((Lesson(), KNOWN), ""),
    ],
)
def test_why_nothing_was_learned_is_told_of_the_batch_of_all_ranks(
    lessons: tuple[Lesson, ...], reason: str
) -> None:
    parts = [Part.of(MemoryBatch(1, [*lesson.filtered]), lesson) for lesson in lessons]
    told = Account(parts, PolicyVersion(), {}).barren_because
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_what_does_not_even_decode_is_a_reason_too() -> None:
    torn = Rejected(group_id="torn", reason="it does not decode")
    parts = [Part.of(MemoryBatch(1, [], rejected=(torn,)), Lesson())]
    assert Account(parts, PolicyVersion(), {}).barren_because == "it does not decode"
