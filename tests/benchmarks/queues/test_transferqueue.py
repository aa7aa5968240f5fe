"""Short rounds of both sides, so that a change which breaks one of them shows before somebody measures."""

import pytest

from benchmarks.queues import transferqueue

LASTS_S = 0.2


@pytest.mark.parametrize("part", ["single", "batch"])
def test_ours_puts_and_gets(part: str) -> None:
    assert transferqueue.our_rate(part, LASTS_S) > 0


@pytest.mark.rival
@pytest.mark.skipif(bool(transferqueue.missing()), reason=transferqueue.missing())
def test_theirs_puts_and_gets() -> None:
    with transferqueue.their_side(batch=16, lasts_s=LASTS_S) as rival:
        assert transferqueue.their_rate(rival, "single") > 0
        assert transferqueue.their_rate(rival, "batch") > 0
