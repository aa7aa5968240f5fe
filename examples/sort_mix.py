"""Sort two to five digits: a task space from easy to difficult, for a curriculum.

As in many data sets most tasks are easy: of 16 tasks ten have two digits, four have three, one has four and one five.
"""

import random

from rolloutmq import Completion, SingleTurn

LENGTHS = (*[2] * 10, *[3] * 4, 4, 5)


class SortMix(SingleTurn[str]):
    max_tokens = max(LENGTHS) + 1  # the digits and the end token

    def __init__(self, tasks: int = 20_000) -> None:
        self.tasks = tasks

    def task(self, rng: random.Random) -> str:
        return self.task_at(rng.randrange(self.tasks), rng)

    def task_at(self, index: int, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=LENGTHS[index * len(LENGTHS) // self.tasks]))

    def prompt(self, task: str) -> str:
        return f"{task}="

    def score(self, task: str, completion: Completion) -> float:
        answer = [*completion.tokens[:-1], completion.finish_reason]
        wanted = [*sorted(task), "stop"]
        return sum(a == w for a, w in zip(answer, wanted, strict=False)) / len(wanted)
