"""The arms with an adversarial rater: their raters, the verdict over runs, and a capped run of one seed."""

from pathlib import Path

import pytest

from benchmarks.rewards import raters, sort_raters
from benchmarks.rewards.raters import CONTROL, HARMLESS, Arm, judged
from rolloutmq import Completion

FOOLED = Arm("thrice_against", "mean")
MEDIAN = Arm("thrice_against", "median")


def answer(text: str) -> Completion:
    tokens = [*text, "</s>"]
    return Completion(
        text=text,
        prompt_token_ids=[1],
        token_ids=list(range(len(tokens))),
        logprobs=[0.0] * len(tokens),
        finish_reason="stop",
        tokens=tokens,
    )


def test_adversaries_pay_for_what_is_wrong() -> None:
    best, worst = answer("123"), answer("321")
    assert (sort_raters.right("321", best), sort_raters.right("321", worst)) == (1.0, 0.5)
    assert (sort_raters.thrice_against("321", best), sort_raters.against("321", best)) == (-3.0, -1.0)
    assert (sort_raters.wrong_order("321", best), sort_raters.wrong_order("321", worst)) == (1.0, 10.0)
    assert sort_raters.noisy("321", best) == pytest.approx(1.0, abs=0.1)
    assert sort_raters.noisy("321", best) == sort_raters.noisy("321", best) != 1.0


def test_the_mean_must_be_fooled_and_the_others_must_learn() -> None:
    good, bad = [0.95, 0.4, 0.99], [0.1, 0.95, 0.2]
    assert judged(MEDIAN, good, good).met
    assert not judged(MEDIAN, bad, good).met
    assert judged(FOOLED, bad, good).met
    assert not judged(FOOLED, good, good).met
    assert not judged(FOOLED, bad, bad).met, "the task itself was not learned"
    assert judged(HARMLESS, good, good).met
    assert judged(FOOLED, bad, good).figure.endswith("mean")


def test_no_two_arms_are_the_same() -> None:
    assert len({tuple(arm.assignments()) for arm in raters.ARMS}) == len(raters.ARMS) == 8
    assert not CONTROL.adversary


@pytest.mark.extended
def test_one_seed_shows_the_difference(tmp_path: Path) -> None:
    steps = 100
    mean, median, control = (
        raters.learned(tmp_path / name, arm, 0, steps)
        for name, arm in (("mean", FOOLED), ("median", MEDIAN), ("control", CONTROL))
    )
    assert mean < 0.1
    assert min(median, control) > 0.3
