"""The word problems: right answers, held-out pairs, and a policy that learns them."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import scenario
from rolloutmq.launch.settings import load
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

CONFIG = Path(__file__).parents[2] / "examples" / "gsm8k" / "word_problems.toml"


@pytest.fixture
def environment() -> Any:
    config = load(CONFIG, environ={})
    return load_environment("problems", config.environment["problems"], config.base_dir)


def solved(prompt: str) -> str:
    _, _, first, _, verb, second = prompt.removesuffix("=").split()
    return str(int(first) + int(second) if verb in {"gets", "buys"} else int(first) - int(second))


@pytest.mark.parametrize(
    ("answer", "score"), [(solved, 1.0), (lambda prompt: solved(prompt) + "0", 0.0), ("", 0.0)]
)
def test_the_right_number_scores(environment: Any, answer: str | Callable[[str], str], score: float) -> None:
    for seed in range(20):
        assert list(play(environment, ScriptedPolicy(answer), size=2, seed=seed).scores) == [score] * 2


def test_the_evaluation_has_pairs_that_the_training_never_draws(environment: Any) -> None:
    drawn = [environment.task(random.Random(seed)) for seed in range(200)]
    asked = [environment.eval_task_at(index, random.Random(index)) for index in range(20)]
    assert {(one.name, one.thing) for one in asked} == {("eva", "nuts")}
    assert ("eva", "nuts") not in {(one.name, one.thing) for one in drawn}
    assert all(0 <= int(one.answer) <= 9 for one in (*drawn, *asked))


def test_the_example_is_as_short_as_promised() -> None:
    assert len(CONFIG.with_suffix(".py").read_text().splitlines()) <= 60


@pytest.mark.extended
def test_the_policy_learns(tmp_path: Path) -> None:
    code, summary = scenario.run(tmp_path / "run", ("trainer.steps=250",), config=CONFIG, deadline_s=580.0)
    assert code == 0
    assert summary["groups_lost"] == summary["groups_dead"] == 0
    assert summary["reward_last"] > summary["reward_first"] + 0.15
