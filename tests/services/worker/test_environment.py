"""Environments of users, played with a scripted policy."""

import asyncio
import random
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.environment import Environment, Prompt, SingleTurn
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.scripted import END, ScriptedPolicy, play
from rolloutmq.services.worker.trajectory import Trajectory


class Add(SingleTurn[tuple[int, int]]):
    max_tokens = 4

    def task(self, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(10), rng.randrange(10)

    def prompt(self, task: tuple[int, int]) -> Prompt:
        return f"{task[0]}+{task[1]}="

    def score(self, task: tuple[int, int], completion: Completion) -> float:
        return float(completion.text == str(sum(task)))


def right(prompt: str) -> str:
    return str(sum(map(int, prompt.rstrip("=").split("+"))))


def test_all_answers_of_a_group_are_to_one_task() -> None:
    policy = ScriptedPolicy(right)
    group = play(Add(), policy, size=5)
    assert group.scores.tolist() == [1.0] * 5
    assert len(policy.prompts) == 1
    assert "messages" not in group


def test_each_answer_has_its_own_score() -> None:
    assert play(Add(), ScriptedPolicy(["x", "?"]), size=4).scores.tolist() == [0.0] * 4
    tasks = ScriptedPolicy("")
    play(Add(), tasks, seed=3)
    answers = ["x", right(tasks.prompts[0])]
    assert play(Add(), ScriptedPolicy(answers), size=4, seed=3).scores.tolist() == [0.0, 1.0, 0.0, 1.0]


def test_the_tasks_follow_from_the_seed() -> None:
    asked = []
    for seed in (1, 1, 2):
        policy = ScriptedPolicy("0")
        play(Add(), policy, seed=seed)
        asked += policy.prompts
    assert asked[0] == asked[1] != asked[2]


def test_a_score_may_be_awaited() -> None:
    class Judged(Add):
        async def score(self, task: tuple[int, int], completion: Completion) -> float:  # type: ignore[override]
            await asyncio.sleep(0)
            return float(len(completion.text) * sum(task) >= 0) / 2

    assert play(Judged(), ScriptedPolicy("1"), size=2).scores.tolist() == [0.5, 0.5]


def test_a_prompt_may_be_token_ids() -> None:
    class Tokens(Add):
        def prompt(self, task: tuple[int, int]) -> Prompt:
            return [ord("h"), ord("i") + 0 * task[0]]

    policy = ScriptedPolicy("x")
    group = play(Tokens(), policy, size=1)
    assert policy.prompts == ["hi"]
    assert group["tokens"][0].tolist() == [*b"hix", END]


def test_a_prompt_may_be_a_conversation() -> None:
    class Chat(Add):
        def prompt(self, task: tuple[int, int]) -> Prompt:
            return [
                {"role": "system", "content": "Add."},
                {"role": "user", "content": "+".join("1" for _ in task)},
            ]

    policy = ScriptedPolicy("2")
    group = play(Chat(), policy, size=2)
    assert policy.prompts == ["Add.\n1+1"]
    assert group["messages"][1][-1] == {"role": "assistant", "content": "2"}
    assert len(group["messages"][0]) == 3


def test_settings_of_the_class_reach_the_policy() -> None:
    class Cut(Add):
        max_tokens = 2

    cut = play(Cut(), ScriptedPolicy("12345"), size=1)
    assert cut["stop_reasons"] == ["length"]
    assert sum(cut["mask"][0]) == 2

    class Stopped(Add):
        stop = ("3", "2")

    group = play(Stopped(), ScriptedPolicy("123"), size=1)
    assert group["tokens"][0].tolist()[-2:] == [ord("1"), END]


class Guess:
    """Two turns, by the general protocol, in a context of its own."""

    def __init__(self, limit: int = 2) -> None:
        self.limit = limit
        self.events: list[str] = []

    async def __aenter__(self) -> "Guess":
        self.events.append("entered")
        return self

    async def __aexit__(self, *_: object) -> None:
        self.events.append("left")

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        self.events.append("rollout")
        return [await self._game(policy, rng.randrange(10)) for _ in range(size)]

    async def _game(self, policy: Policy, wanted: int) -> Trajectory:
        (turn,) = await policy.complete("0-9?")
        game = Trajectory.of(turn)
        for _ in range(self.limit - 1):
            if turn.text == str(wanted):
                break
            (turn,) = await policy.complete([*game.token_ids, *b"no"])
            game = game.then(turn)
        return game.scored(float(turn.text == str(wanted)))


def test_several_turns_are_one_sequence() -> None:
    environment: Environment = Guess()
    policy = ScriptedPolicy("7", PolicyVersion(0, 4))
    group = play(environment, policy, size=3, seed=1)
    assert isinstance(environment, Guess)
    assert environment.events == ["entered", "rollout", "left"]
    assert group.newest == PolicyVersion(0, 4)
    tokens, mask = group["tokens"][0].tolist(), group["mask"][0].tolist()
    assert tokens == [*b"0-9?7", END, *b"no7", END]
    assert mask == [False] * 4 + [True] * 2 + [False] * 2 + [True] * 2


def test_a_method_that_is_missing_is_named() -> None:
    class Half(SingleTurn[str]):
        def task(self, rng: random.Random) -> str:
            return str(rng.random())

    with pytest.raises(TypeError, match="prompt"):
        Half()  # type: ignore[abstract]


def test_a_conversation_is_told_from_token_ids() -> None:
    asked: list[Any] = []

    class Spy(ScriptedPolicy):
        async def chat(self, messages: Sequence[Mapping[str, Any]], **sampling: Any) -> list[Completion]:
            asked.append(sampling)
            return await super().chat(messages, **sampling)

    class Warm(Add):
        temperature = 0.5

        def prompt(self, task: tuple[int, int]) -> Prompt:
            return ({"role": "user", "content": str(task)},)

    play(Warm(), Spy("1"), size=3)
    assert asked == [{"n": 3, "max_tokens": 4, "temperature": 0.5, "stop": None}]


async def test_the_environment_of_the_guide_holds_its_rows_out_for_the_evaluation() -> None:
    guide = (Path(__file__).parents[3] / "docs" / "guides" / "evaluation.md").read_text()
    (code,) = (
        block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if "class Rows" in block
    )
    names: dict[str, Any] = {}
    exec(compile(code, "evaluation.md", "exec"), names)
    rows = names["Rows"]()
    right = ScriptedPolicy(lambda prompt: dict(names["ROWS"])[prompt])
    held_out = {rows.prompt(rows.eval_task_at(index, random.Random(0))) for index in range(4)}
    trained = {rows.prompt(rows.task(random.Random(seed))) for seed in range(50)}
    assert held_out == {"2+2=", "3+5="}
    assert trained == {"1+6=", "4+5="}
    (one,) = await rows.rollout_eval(right, 1, 1, random.Random(0))
    assert one.score == 1.0
