"""Short rounds of both sides, so that a change which breaks one of them shows before somebody measures."""

import pytest

from benchmarks.training import trl

STEPS = 2


@pytest.mark.extended
def test_ours_takes_its_steps() -> None:
    found = trl.figures("ours", "mixed", STEPS)
    assert found.tokens_per_s > 0
    assert found.peak_mb > 0


@pytest.mark.rival
@pytest.mark.skipif(bool(trl.missing()), reason=trl.missing())
def test_both_learn_the_same_and_theirs_takes_its_steps_too() -> None:
    ours, theirs = (trl.figures(side, "mixed", STEPS) for side in ("ours", "theirs"))
    assert theirs.tokens_per_s > 0
    assert theirs.peak_mb > 0
    assert ours.gradient_norm == pytest.approx(theirs.gradient_norm, rel=1e-3)


def test_the_memory_of_a_round_is_that_of_its_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    told = iter([trl.Figures(5.0, 70.0, 1.0), trl.Figures(6.0, 80.0, 1.0)])
    monkeypatch.setattr(trl, "figures", lambda *_given: next(told))
    rounds = trl._Rounds("ours", "equal")
    assert [rounds.rate(), rounds.rate()] == [5.0, 6.0]
    assert [rounds.peak(), rounds.peak()] == [70.0, 80.0]
