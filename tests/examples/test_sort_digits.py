"""The quickstart's environment: scores count places, and the configuration finds it."""

from pathlib import Path

import pytest

from rolloutmq.launch.settings import load
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import Environment, SingleTurn
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import END, ScriptedPolicy, play

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def environment() -> Environment:
    config = load(EXAMPLES / "quickstart.toml", environ={})
    return load_environment("sort3", config.environment["sort3"], config.base_dir)


def test_the_right_answer_scores_one(environment: Environment) -> None:
    policy = ScriptedPolicy(lambda prompt: "".join(sorted(prompt[:3])))
    group = play(environment, policy, size=16)
    assert list(group.scores) == [1.0] * 16
    assert len(policy.prompts[0]) == 4
    assert policy.prompts[0].endswith("=")
    assert group["tokens"][0].tolist()[-1] == END


@pytest.mark.parametrize(
    ("places", "score"),
    [("012", 1.0), ("", 0.0), ("0", 0.25), ("01", 0.5), ("0x2", 0.75), ("012x", 0.75), ("2100", 0.25)],
)
def test_a_score_is_the_share_of_right_places(environment: Environment, places: str, score: float) -> None:
    """`places` picks from the sorted digits, `x` is wrong; the end is a place, too."""

    def answer(prompt: str) -> str:
        return "".join("=" if place == "x" else sorted(prompt[:3])[int(place)] for place in places)

    group = play(environment, ScriptedPolicy(answer), size=1, seed=seed_of_three_digits(environment))
    assert group.scores[0] == score


def seed_of_three_digits(environment: Environment) -> int:
    """Return a seed whose task has three different digits."""
    for seed in range(100):
        policy = ScriptedPolicy("")
        play(environment, policy, size=1, seed=seed)
        if len(set(policy.prompts[0])) == 4:
            return seed
    raise AssertionError


def test_the_example_is_as_short_as_promised() -> None:
    assert (EXAMPLES / "sort_digits.py").read_text().count("\n") <= 20


def test_a_token_without_a_text_takes_a_place(environment: Environment) -> None:
    """Else three digits around a token that leaves no trace would score as well as they can, and be learned."""
    assert isinstance(environment, SingleTurn)
    sampled = Completion(
        "347", [1], [9, 30, 10, 13], [-1.0] * 4, finish_reason="length", tokens=["3", "", "4", "7"]
    )
    assert environment.score("473", sampled) == 0.25
