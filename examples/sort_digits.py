"""The quickstart's environment: sort three digits, learned from a score alone."""

import random

from rolloutmq import Completion, SingleTurn


class SortDigits(SingleTurn[str]):
    max_tokens = 4  # three digits and the end token

    def task(self, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=3))

    def prompt(self, task: str) -> str:
        return f"{task}="

    def score(self, task: str, completion: Completion) -> float:
        answer = [*completion.tokens[:-1], completion.finish_reason]
        wanted = [*sorted(task), "stop"]
        return sum(a == w for a, w in zip(answer, wanted, strict=False)) / len(wanted)
