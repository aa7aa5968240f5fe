"""Word problems made offline: one sentence, two numbers, and a verb that says whether to add or to subtract."""

import random
from dataclasses import dataclass

from rolloutmq import Completion, SingleTurn

NAMES = ("ann", "bob", "eva", "tom")
THINGS = ("figs", "nuts")
GAINS = ("gets", "buys")
LOSSES = ("eats", "sells")
HELD_OUT = ("eva", "nuts")
"""Name and thing that the training never has together."""


@dataclass(frozen=True)
class Problem:
    name: str
    thing: str
    verb: str
    first: int
    second: int

    @property
    def text(self) -> str:
        return f"{self.name} has {self.first} {self.thing}, {self.verb} {self.second}="

    @property
    def answer(self) -> str:
        return str(self.first + self.second if self.verb in GAINS else self.first - self.second)


def made(rng: random.Random, *, held_out: bool) -> Problem:
    kinds = [(name, thing) for name in NAMES for thing in THINGS]
    name, thing = rng.choice([kind for kind in kinds if (kind == HELD_OUT) == held_out])
    verb, first, second = rng.choice(GAINS + LOSSES), rng.randrange(4), rng.randrange(4)
    return Problem(name, thing, verb, max(first, second), min(first, second))


class WordProblems(SingleTurn[Problem]):
    max_tokens = 2  # a digit and the end

    def task(self, rng: random.Random) -> Problem:
        return made(rng, held_out=False)

    def eval_task_at(self, index: int, rng: random.Random) -> Problem:  # noqa: ARG002 - drawn, not looked up
        return made(rng, held_out=True)

    def prompt(self, task: Problem) -> str:
        return task.text

    def score(self, task: Problem, completion: Completion) -> float:
        return float(completion.text == task.answer)
