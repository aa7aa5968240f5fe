"""Sort the digits of a prompt: an environment that answers SkyRL's prompts, and evaluates on tasks of its own."""

import random
from typing import Any

from rolloutmq import Completion, SingleTurn


class PromptedDigits(SingleTurn[str]):
    max_tokens = 4  # three digits and the end token

    def submitted(self, payload: Any) -> str:
        return str(payload["messages"][-1]["content"])

    def task(self, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=3))

    def prompt(self, task: str) -> str:
        return f"{task}="

    def score(self, task: str, completion: Completion) -> float:
        answer = [*completion.tokens[:-1], completion.finish_reason]
        wanted = [*sorted(task), "stop"]
        return sum(a == w for a, w in zip(answer, wanted, strict=False)) / len(wanted)
