"""An environment of verifiers in which each row says what goes wrong."""

import asyncio
from typing import Any

import verifiers as vf
from datasets import Dataset

ROWS = (
    "fine",
    "raises",
    "fails",
    "hangs",
    "rewards",
    "judges",
    "nan",
    "none",
    "nucleus",
    "exits",
    "judge exits",
)


async def reward(answer: str) -> float | None:
    if answer == "rewards":
        raise ZeroDivisionError("in the reward")
    if answer == "judge exits":
        raise SystemExit(3)
    if answer == "none":
        return None
    return float("nan") if answer == "nan" else 1.0


def judges(completions: list[Any], answers: list[str]) -> list[float]:
    """A reward of a whole group."""
    if answers[0] == "judges":
        raise ConnectionError("the judge is away")
    return [float(number) for number in range(len(completions))]


class Mishaps(vf.MultiTurnEnv):  # type: ignore[misc]
    async def setup_state(self, state: Any) -> Any:
        way = state["answer"]
        if way == "raises":
            raise KeyError("no such thing")
        if way == "exits":
            raise SystemExit(0)
        if way == "fails":
            raise vf.InfraError("no sandbox")
        if way == "nucleus":
            state["sampling_args"] = {**state["sampling_args"], "top_p": 0.5}
        if way == "hangs":
            await asyncio.Event().wait()
        return state

    async def env_response(self, messages: Any, state: Any, **_: Any) -> Any:  # noqa: ARG002 - as theirs
        raise AssertionError("has one turn")


def load_environment(key: str = "", fail: bool = False, train: bool = True) -> vf.Environment:
    if fail:
        raise ValueError(f"refused: {key}")
    rows = [{"prompt": [{"role": "user", "content": "1="}], "answer": way} for way in ROWS]
    rubric = vf.Rubric(funcs=[reward, judges], weights=[1.0, 0.5])
    data = {"dataset" if train else "eval_dataset": Dataset.from_list(rows)}
    return Mishaps(**data, max_turns=1, rubric=rubric)
