"""The policy that looks values up: two turns, scored apart; and a whole run that learns them."""

import random
from pathlib import Path
from typing import Any

import pytest

from benchmarks.end_to_end import scenario
from rolloutmq import ScriptedPolicy, play
from rolloutmq.launch.settings import load
from rolloutmq.services.worker.loader import load_environment
from rolloutmq.services.worker.scripted import END

CONFIG = Path(__file__).parents[2] / "examples" / "tools" / "lookup.toml"
LEARNED_WITHIN_S = 900.0


@pytest.fixture
def environment() -> Any:
    config = load(CONFIG, environ={})
    return load_environment("lookup", config.environment["lookup"], config.base_dir)


def test_the_call_and_the_answer_are_worth_half_each(environment: Any) -> None:
    task = environment.task(random.Random(0))  # that of `play` with its seed
    wanted = task.table[task.key]
    other = next(key for key in task.table if key != task.key)

    def asks_and_repeats(prompt: str) -> str:
        return task.key if prompt.endswith("?") else prompt[-2]

    assert list(play(environment, ScriptedPolicy(asks_and_repeats)).scores) == [1.0] * 4
    for said, score in (([task.key, "="], 0.5), ([other, wanted], 0.5), ([other, "="], 0.0), (["", ""], 0.0)):
        assert list(play(environment, ScriptedPolicy(said), size=1).scores) == [score]


def test_a_turn_continues_the_tokens_of_the_call(environment: Any) -> None:
    policy = ScriptedPolicy(lambda prompt: "7" if prompt.endswith("?") else "ab")
    group = play(environment, policy, size=1)
    key, result = policy.prompts[0][0], policy.prompts[1].removeprefix(policy.prompts[0] + "7\n")
    expected = [*map(ord, f"{key}?7"), END, *map(ord, f"\n{result}ab")]
    assert group["tokens"][0].tolist() == expected
    assert group["mask"][0].tolist() == [False] * 2 + [True] * 2 + [False] * 3 + [True] * 2
    assert [one["role"] for one in group["messages"][0]] == ["user", "assistant", "tool", "assistant"]


def test_what_is_no_key_has_no_value(environment: Any) -> None:
    policy = ScriptedPolicy("??")
    play(environment, policy, size=1)
    assert policy.prompts[1] == f"{policy.prompts[0]}??\n="


@pytest.mark.extended
def test_it_learns_to_call_the_tool_and_to_repeat_its_result(tmp_path: Path) -> None:
    code, summary = scenario.run(tmp_path / "run", config=CONFIG, deadline_s=LEARNED_WITHIN_S)
    assert code == 0
    assert summary["reward_first"] < 0.2
    assert summary["reward_last"] > 0.85
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
