"""Reports of a batch over several ranks."""

import pytest
from tests.trainer.support.toy import MemoryBatch, some_group

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected
from rolloutmq.trainer.step.advantages import BatchAdvantages
from rolloutmq.trainer.step.report import StepPart, StepReport

FLAT = BatchAdvantages(filtered=[some_group("flat", [1.0, 1.0])])
OLD = BatchAdvantages(filtered=[some_group("old", [0.0, 1.0])], too_old=1)
BAD = BatchAdvantages(rejected=[Rejected(group_id="bad", reason="no tokens")])
KNOWN = BatchAdvantages(repeated=["known"])


@pytest.mark.parametrize(
    ("lessons", "reason"),
    [
        ((BatchAdvantages(), BAD), "no tokens"),
        ((FLAT, BAD), "no tokens"),
        ((FLAT, OLD), "its groups are older"),
        ((BatchAdvantages(), FLAT), "all scores of each group are equal"),
        ((BatchAdvantages(), KNOWN), ""),
    ],
)
def test_why_nothing_was_learned_is_told_of_the_batch_of_all_ranks(
    lessons: tuple[BatchAdvantages, ...], reason: str
) -> None:
    parts = [StepPart.of(MemoryBatch(1, [*lesson.filtered]), lesson) for lesson in lessons]
    told = StepReport(parts, PolicyVersion(), {}).barren_because
    assert told.startswith(reason)
    assert bool(told) == bool(reason)


def test_what_does_not_even_decode_is_a_reason_too() -> None:
    torn = Rejected(group_id="torn", reason="it does not decode")
    parts = [StepPart.of(MemoryBatch(1, [], rejected=(torn,)), BatchAdvantages())]
    report = StepReport(parts, PolicyVersion(), {})
    assert report.barren_because == "it does not decode"
    skipped = report.skipped("r", 1.0)
    assert (skipped.groups, skipped.rejected) == (1, 1)


def test_a_batch_that_was_no_step_tells_of_all_ranks() -> None:
    parts = [StepPart.of(MemoryBatch(1, [*one.filtered]), one) for one in (FLAT, BAD, OLD)]
    told = StepReport(parts, PolicyVersion(2, 7), {}).skipped("r", 1.0)
    assert (told.run, told.incarnation, told.step, told.at) == ("r", 2, 7, 1.0)
    assert (told.filtered, told.rejected, told.reason) == (2, 1, "no tokens")
