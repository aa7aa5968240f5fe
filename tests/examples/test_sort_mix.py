"""The example of a task space: a number is a task, and easy tasks come first."""

import importlib.util
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from rolloutmq import Completion
from rolloutmq.launch.preflight.checks import check
from rolloutmq.launch.settings import load

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture(scope="module")
def environment() -> Any:
    spec = importlib.util.spec_from_file_location("sort_mix", EXAMPLES / "sort_mix.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SortMix(tasks=16_000)


def test_a_number_has_the_same_task_each_time_and_a_higher_one_is_no_easier(environment: Any) -> None:
    lengths = []
    for index in range(0, 16_000, 100):
        task = environment.task_at(index, random.Random(index))
        assert task == environment.task_at(index, random.Random(index))
        lengths.append(len(task))
    assert lengths == sorted(lengths)
    assert Counter(lengths) == {2: 100, 3: 40, 4: 10, 5: 10}


def test_own_tasks_are_of_every_length(environment: Any) -> None:
    rng = random.Random(0)
    assert {len(environment.task(rng)) for _ in range(300)} == {2, 3, 4, 5}


def test_each_right_place_counts(environment: Any) -> None:
    def score(*tokens: str, finish: str = "stop") -> float:
        answer = Completion("", [], [], [], tokens=list(tokens), finish_reason=finish)
        return float(environment.score("312", answer))

    assert score("1", "2", "3", "</s>") == 1.0
    assert score("1", "2", "</s>") == 0.5
    assert score("1", "3", "2", "</s>") == 0.5
    assert score("1", "2", "3", "4", finish="length") == 0.75


def test_its_configuration_passes_the_checks() -> None:
    config = load(EXAMPLES / "sort_mix.toml", environ={})
    check(config)
    assert config.groups_ahead("sort") == 32
