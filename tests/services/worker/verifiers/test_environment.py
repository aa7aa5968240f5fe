"""The adapter without verifiers: which row is which task, and what of the sampling is refused."""

import random
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig, SamplingConfig
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.services.worker.loader import check_abilities
from rolloutmq.services.worker.verifiers.environment import VerifiersEnvironment
from rolloutmq.services.worker.verifiers.sampling import sampling_of


class Theirs:
    """An environment of theirs, as far as the adapter sees it before a rollout."""

    def __init__(self, train: int = 5, held_out: int | None = 3) -> None:
        self.rubric = SimpleNamespace(funcs=[], weights=[])
        self.eval_dataset_source = None if held_out is None else object()
        self._train = [
            {"example_id": n, "prompt": [{"role": "user", "content": f"train {n}"}]} for n in range(train)
        ]
        self._eval = [{"example_id": n, "prompt": f"eval {n}"} for n in range(held_out or 0)]

    def get_dataset(self) -> list[dict[str, Any]]:
        return self._train

    def get_eval_dataset(self) -> list[dict[str, Any]]:
        return self._eval


RNG = random.Random(0)


def test_tasks_are_rows_by_number() -> None:
    environment = VerifiersEnvironment(Theirs())
    assert [environment.task_at(n, RNG)["example_id"] for n in range(5)] == [0, 1, 2, 3, 4]
    assert environment.prompt(environment.task_at(3, RNG)) == [{"role": "user", "content": "train 3"}]
    assert {environment.task(RNG)["example_id"] for _ in range(100)} == {0, 1, 2, 3, 4}
    with pytest.raises(LookupError):
        environment.task_at(5, RNG)


def test_evaluations_have_the_held_out_rows() -> None:
    environment = VerifiersEnvironment(Theirs())
    assert environment.prompt(environment.eval_task_at(2, RNG)) == "eval 2"
    with pytest.raises(LookupError):
        environment.eval_task_at(3, RNG)


def test_the_split_chooses_the_rows() -> None:
    environment = VerifiersEnvironment(Theirs(), split="eval")
    assert {environment.prompt(environment.task(RNG)) for _ in range(100)} == {"eval 0", "eval 1", "eval 2"}


@pytest.mark.parametrize("split", ["train", "eval"])
def test_without_held_out_rows_those_of_the_training_are_evaluated(split: str) -> None:
    environment = VerifiersEnvironment(Theirs(held_out=None), split=split)
    assert environment.eval_task_at(4, RNG)["example_id"] == 4
    assert environment.task(RNG)["prompt"][0]["content"].startswith("train")


def test_a_submitted_task_is_a_number_or_a_row() -> None:
    environment = VerifiersEnvironment(Theirs())
    assert environment.submitted(2)["example_id"] == 2
    assert environment.submitted({"prompt": "1+1", "answer": "2"}) == {
        "example_id": 0,
        "prompt": "1+1",
        "answer": "2",
    }
    with pytest.raises(LookupError):
        environment.submitted(5)
    for wrong in (-1, True, "1+1", {"answer": "2"}, None):
        with pytest.raises(UsageError, match="payload: a task for an environment of verifiers"):
            environment.submitted(wrong)


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="the data set for `train` has no row"):
        VerifiersEnvironment(Theirs(train=0))


def test_it_has_what_every_section_needs() -> None:
    config = EnvironmentConfig(verifiers="wordle", tasks="both", group_deadline_s=1.0)
    check_abilities("wordle", config, VerifiersEnvironment(Theirs()))


def test_the_section_wins_over_the_environment() -> None:
    theirs = {"n": 1, "max_tokens": 64, "temperature": 0.5, "stop": ["x"], "extra_body": {"a": 1, "b": 1}}
    ours = SamplingConfig(max_tokens=8, extra={"b": 2})
    assert sampling_of("s", theirs, ours) == {
        "n": 1,
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["x"],
        "extra_body": {"a": 1, "b": 2},
    }
    assert sampling_of("s", {"n": 1, "extra_body": {}}, SamplingConfig())["temperature"] == 1.0
    assert sampling_of("s", {}, SamplingConfig(temperature=0))["temperature"] == 0


@pytest.mark.parametrize(
    ("theirs", "extra", "key", "name"),
    [
        ({"top_p": 0.9}, {}, "s", "top_p"),
        ({"extra_body": {"top_k": 20}}, {}, "s", "top_k"),
        ({}, {"min_p": 0.1}, "s.extra", "min_p"),
        ({}, {"logit_bias": {"1": 2}}, "s.extra", "logit_bias"),
        ({"n": 2}, {}, "s", "n"),
    ],
)
def test_a_part_of_the_distribution_is_refused(
    theirs: dict[str, Any], extra: dict[str, Any], key: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not change the distribution") as caught:
        sampling_of(key.partition(".")[0], theirs, SamplingConfig(extra=extra))
    assert caught.value.path == key


def test_a_part_of_the_distribution_can_be_taken_back() -> None:
    found = sampling_of("s", {"top_p": 0.9}, SamplingConfig(extra={"top_p": 1.0}))
    assert found["extra_body"] == {"top_p": 1.0}
