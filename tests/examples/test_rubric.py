"""The rubric example: three raters, their ratings in the group, a curriculum, and few lines."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import scenario
from rolloutmq.launch.settings import load
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.worker.environment import Environment
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import ScriptedPolicy, play

EXAMPLES = Path(__file__).parents[2] / "examples" / "rubric"


@pytest.fixture
def environment() -> Environment:
    config = load(EXAMPLES / "rubric.toml", environ={})
    return load_environment("rubric", config.environment["rubric"], config.base_dir)


def rated(environment: Environment, answer: Any) -> tuple[float, list[float]]:
    group = play(environment, ScriptedPolicy(answer), size=1, seed=7)
    return group.scores[0], group["ratings"][0].tolist()


def test_the_right_answer_satisfies_all(environment: Environment) -> None:
    assert rated(environment, lambda prompt: "".join(sorted(prompt[:-1]))) == (1.0, [1.0, 1.0, 1.0])


@pytest.mark.parametrize("seed", range(5))
def test_each_rater_sees_its_own_fault(environment: Environment, seed: int) -> None:
    group = play(
        environment, ScriptedPolicy(lambda prompt: "".join(sorted(prompt[:-1]))[:1]), size=1, seed=seed
    )
    length = len(group["tokens"][0]) - 3  # the prompt's `=`, the answer's one digit and the end token
    assert 2 <= length <= 4
    assert group["ratings"][0].tolist() == [1 / length, 1 / length, 0.0]
    assert group.scores[0] == pytest.approx((2 / length + 1 / length) / 4)


def test_nothing_said_scores_nothing(environment: Environment) -> None:
    assert rated(environment, "") == (0.0, [0.0, 0.0, 0.0])
    assert rated(environment, "=====") == (0.0, [0.0, 0.0, 0.0])


def test_the_ratings_name_their_raters(environment: Environment) -> None:
    group = play(environment, ScriptedPolicy("0"), size=2)
    assert group.columns["raters"].values == [{"order": 2.0, "digits": 1.0, "end": 1.0}] * 2


def test_the_example_is_as_short_as_promised() -> None:
    texts = [(EXAMPLES / name).read_text() for name in ("rubric.py", "rubric.toml")]
    assert sum(bool(line.strip()) for text in texts for line in text.splitlines()) <= 40


def test_tasks_go_from_two_digits_to_four() -> None:
    config = load(EXAMPLES / "rubric.toml", environ={}).environment["rubric"]
    environment: Any = load_environment("rubric", config, EXAMPLES)
    lengths = [
        len(environment.task_at(index, random.Random(index))) for index in range(config.task_count or 0)
    ]
    assert lengths == sorted(lengths)
    assert {lengths.count(length) for length in (2, 3, 4)} == {200}


@pytest.mark.extended
def test_a_run_is_scored_by_the_rubric_and_fed_by_the_curriculum(tmp_path: Path) -> None:
    config = EXAMPLES / "rubric.toml"
    code, summary = scenario.run(tmp_path / "run", ("trainer.steps=40",), config=config)
    assert code == 0
    assert summary["curriculum"]["rubric"]["sampler"] == "learnability"
    assert summary["groups_lost"] == summary["groups_dead"] == 0
    assert (RunLayout(tmp_path / "run").root / "ratings").is_dir()
    assert summary["steps"] == 40
    assert summary["curriculum"]["rubric"]["outcomes"] >= 40 * 16
