"""Sort two to four digits: three raters score, their agreement is watched, and a curriculum chooses the tasks."""

import random
from collections import Counter

from rolloutmq import Completion, Ensemble, SingleTurn


def said(answer: Completion) -> list[str]:
    return answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens


def order(task: str, answer: Completion) -> float:
    return sum(a == b for a, b in zip(said(answer), sorted(task), strict=False)) / len(task)


def digits(task: str, answer: Completion) -> float:
    return (Counter(said(answer)) & Counter(task)).total() / max(len(task), len(said(answer)))


def end(task: str, answer: Completion) -> float:
    return float(answer.finish_reason == "stop" and len(said(answer)) == len(task))


class Rubric(SingleTurn[str]):
    max_tokens = 5  # four digits and the end token
    rewards = Ensemble({"order": order, "digits": digits, "end": end}, weights={"order": 2.0})

    def task(self, rng: random.Random) -> str:
        return self.task_at(rng.randrange(600), rng)

    def task_at(self, index: int, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=2 + index // 200))

    def prompt(self, task: str) -> str:
        return f"{task}="
