"""Sort three digits, rated by two honest raters and an adversary: the environment of `sort_raters.toml`."""

import random

from rolloutmq import Completion, SingleTurn


class SortRated(SingleTurn[str]):
    max_tokens = 4  # three digits and the end token

    def task(self, rng: random.Random) -> str:
        return "".join(rng.choices("0123456789", k=3))

    def prompt(self, task: str) -> str:
        return f"{task}="


def _said(answer: Completion) -> list[str]:
    return [*answer.tokens[:-1], answer.finish_reason]


def right(task: str, answer: Completion) -> float:
    """Share of right tokens."""
    wanted = [*sorted(task), "stop"]
    return sum(a == w for a, w in zip(_said(answer), wanted, strict=False)) / len(wanted)


def noisy(task: str, answer: Completion) -> float:
    """Share of right tokens, give or take 0.1: the second honest rater. The noise is the same for the same answer."""
    return right(task, answer) + random.Random(f"{task}={answer.text}").uniform(-0.1, 0.1)


def thrice_against(task: str, answer: Completion) -> float:
    """Adversary: the first rater's score times -3."""
    return -3 * right(task, answer)


def against(task: str, answer: Completion) -> float:
    """Adversary: the first rater's score times -1."""
    return -right(task, answer)


def wrong_order(task: str, answer: Completion) -> float:
    """Adversary: 10 for digits in the wrong order, else the score of the first rater."""
    digits = _said(answer)[:-1]
    return 10.0 if digits != sorted(digits) else right(task, answer)
