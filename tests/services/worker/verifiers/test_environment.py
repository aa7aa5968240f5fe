"""The adapter without verifiers: which row is which task, and what of the sampling is refused."""

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from rolloutmq.schemas.config.environment import EnvironmentConfig, SamplingConfig
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.services.worker.loader import check_abilities
from rolloutmq.services.worker.verifiers import environment as environment_module
from rolloutmq.services.worker.verifiers.environment import VerifiersEnvironment
from rolloutmq.services.worker.verifiers.sampling import sampling_of


class Theirs:
    """An environment of theirs, as far as the adapter sees it before a rollout."""

    def __init__(self, train: int = 5, held_out: int | None = 3) -> None:
        self.rubric = SimpleNamespace(funcs=[], weights=[])
        self.dataset_source = object() if train else None
        self.eval_dataset_source = None if held_out is None else object()
        self.sampling_args: dict[str, Any] = {}
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


def loaded(theirs: Theirs, monkeypatch: pytest.MonkeyPatch, **section: Any) -> VerifiersEnvironment:
    monkeypatch.setattr(environment_module, "load_package", lambda *_: theirs)
    config = EnvironmentConfig(verifiers="wordle", **section)
    return VerifiersEnvironment.loaded("mine", config, {}, Path())


def test_more_tasks_than_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    assert loaded(Theirs(), monkeypatch, task_count=5)
    with pytest.raises(ConfigError, match=r"number of rows of wordle, 5 \(got 6\)") as caught:
        loaded(Theirs(), monkeypatch, task_count=6)
    assert caught.value.path == "environment.mine.task_count"
    assert loaded(Theirs(), monkeypatch, split="eval", task_count=3)


def test_evaluation_data_alone_is_refused_for_training(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r'evaluation data alone .* set split = "eval"') as caught:
        loaded(Theirs(train=0), monkeypatch)
    assert caught.value.path == "environment.mine.split"
    assert loaded(Theirs(train=0), monkeypatch, split="eval")


def test_rollouts_that_are_not_scored_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    theirs: Any = Theirs()
    theirs.score_rollouts = False
    with pytest.raises(
        ConfigError, match=r"wordle does not score .* \(got score_rollouts = False\)"
    ) as caught:
        loaded(theirs, monkeypatch)
    assert caught.value.path == "environment.mine.verifiers"


def test_it_has_what_every_section_needs() -> None:
    config = EnvironmentConfig(verifiers="wordle", tasks="both", group_deadline_s=1.0)
    check_abilities("wordle", config, VerifiersEnvironment(Theirs()))


def test_the_section_wins_over_the_environment() -> None:
    theirs = {
        "n": 1,
        "max_tokens": 64,
        "temperature": 0.5,
        "stop": ["x"],
        "extra_body": {"user": "a", "priority": 1},
    }
    ours = SamplingConfig(max_tokens=8, extra={"priority": 2})
    assert sampling_of("s", theirs, ours) == {
        "n": 1,
        "max_tokens": 8,
        "temperature": 0.5,
        "top_p": 1.0,
        "stop": ["x"],
        "extra_body": {"user": "a", "priority": 2},
    }
    assert sampling_of("s", {"n": 1, "extra_body": {}}, SamplingConfig())["temperature"] == 1.0


@pytest.mark.parametrize(
    ("theirs", "ours", "options", "key"),
    [
        ({}, {"temperature": 0}, {}, "s.temperature"),
        ({"temperature": 0.0}, {}, {}, "s"),
        ({"extra_body": {"temperature": 0}}, {}, {}, "s"),
        (
            {"temperature": 0.0},
            {},
            {"temperature": "o.agent.sampling.temperature"},
            "o.agent.sampling.temperature",
        ),
    ],
)
def test_a_training_is_not_greedy(theirs: Any, ours: Any, options: Any, key: str) -> None:
    """Without differences within a group there is nothing to learn."""
    with pytest.raises(ConfigError, match="temperature must be above 0 in training") as caught:
        sampling_of("s", theirs, SamplingConfig(**ours), options)
    assert caught.value.path == key
    assert sampling_of("s", theirs, SamplingConfig(**ours), options, trains=False)["temperature"] == 0
    assert sampling_of("s", theirs, SamplingConfig(temperature=1))["temperature"] == 1


@pytest.mark.parametrize(
    ("theirs", "extra", "key", "name"),
    [
        ({"top_p": 0.9}, {}, "s", "top_p"),
        ({"extra_body": {"top_k": 20}}, {}, "s", "top_k"),
        ({}, {"min_p": 0.1}, "s.extra", "min_p"),
        ({}, {"logit_bias": {"1": 2}}, "s.extra", "logit_bias"),
        ({"n": 2}, {}, "s", "n"),
        ({}, {"min_tokens": 3}, "s.extra", "min_tokens"),
        ({}, {"ignore_eos": True}, "s.extra", "ignore_eos"),
        ({}, {"bad_words": ["x"]}, "s.extra", "bad_words"),
        ({}, {"response_format": {"type": "json_object"}}, "s.extra", "response_format"),
        ({"tool_choice": "required"}, {}, "s", "tool_choice"),
    ],
)
def test_a_part_of_the_distribution_is_refused(
    theirs: dict[str, Any], extra: dict[str, Any], key: str, name: str
) -> None:
    with pytest.raises(ConfigError, match=f"{name} must not change the distribution") as caught:
        sampling_of(key.partition(".")[0], theirs, SamplingConfig(extra=extra))
    assert caught.value.path == key


@pytest.mark.parametrize(
    ("extra", "problem"),
    [
        (
            {"temperature": 0.5},
            r"temperature has a key of its own \(got 0.5\); set `sampling.temperature` instead",
        ),
        ({"max_tokens": 5}, r"max_tokens has a key of its own \(got 5\); set `sampling.max_tokens` instead"),
        (
            {"logprobs": False},
            r"logprobs must be true, because training needs them \(got False\); leave it out",
        ),
        ({"seed": 7}, r"seed must be left out, because it makes all sequences of a group equal \(got 7\)"),
        ({"messages": []}, r"messages is set for each request \(got \[\]\); leave it out"),
        ({"guided_regex": "x+"}, "guided_regex is not known to leave the distribution unchanged"),
        ({"allowed_token_ids": [5]}, "allowed_token_ids is not known to leave the distribution unchanged"),
    ],
)
def test_a_field_that_the_worker_sets_or_does_not_know_is_refused(
    extra: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem) as caught:
        sampling_of("s", {}, SamplingConfig(extra=extra))
    assert caught.value.path == "s.extra"


def test_a_field_of_the_package_says_so() -> None:
    with pytest.raises(ConfigError, match=r"seed must .* \(got 3\); the package sets it") as caught:
        sampling_of("s", {"seed": 3}, SamplingConfig())
    assert caught.value.path == "s"


def test_the_section_wins_over_the_extra_body_of_the_package() -> None:
    theirs = {"extra_body": {"temperature": 0.5, "max_completion_tokens": 9}}
    found = sampling_of("s", theirs, SamplingConfig())
    assert found == {"temperature": 0.5, "top_p": 1.0, "max_completion_tokens": 9, "extra_body": {}}
    assert sampling_of("s", theirs, SamplingConfig(temperature=0.25))["temperature"] == 0.25


def test_a_part_of_the_distribution_can_be_taken_back() -> None:
    found = sampling_of("s", {"top_p": 0.9}, SamplingConfig(extra={"top_p": 1.0}))
    assert found["extra_body"] == {"top_p": 1.0}
