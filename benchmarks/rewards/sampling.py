"""CPU time of a sampler for one choice and one outcome, at a thousand and at a million tasks.

Each round draws a task and hears its outcome, as the service does. The rival is the direct choice in numpy: it keeps an
array of weights and draws by its running sum, which takes time in proportion to the number of tasks.
"""

import random
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Final

import numpy as np

from benchmarks.harness.row import Row, near
from rolloutmq.services.curriculum.samplers.learnability import learnability
from rolloutmq.services.curriculum.samplers.replay import replay
from rolloutmq.services.curriculum.samplers.sampler import Factory, Outcome, Sampler, TaskSpace

FEW: Final = 1_000
MANY: Final = 1_000_000
LEVELS: Final = 16
CHOICES: Final = 5_000
NAIVE_CHOICES: Final = 100
SAMPLERS: Final[dict[str, Factory]] = {"learnability": learnability, "replay": replay}
GROWTH: Final = 4.0
"""Goal: log2 of a million is twice that of a thousand, and its memory is in no cache."""
SHARE: Final = 0.1


def rows() -> Iterator[Row]:
    """Each sampler against itself with fewer tasks, and against the naive choice."""
    for name, make in SAMPLERS.items():
        many = made(make, MANY)
        yield near(
            f"CPU of a draw and an update by {name}, µs",
            f"{MANY:,} tasks",
            partial(cost, many, MANY),
            partial(cost, made(make, FEW), FEW),
            f"the same with {FEW:,} tasks",
            GROWTH,
        )
        yield near(
            f"CPU of a draw and an update by {name}, µs",
            f"{MANY:,} tasks",
            partial(cost, many, MANY),
            naive(MANY),
            "numpy: the running sum of all weights",
            SHARE,
        )


def made(make: Factory, count: int) -> Sampler:
    """Return a sampler that has heard of many tasks."""
    sampler = make(TaskSpace(count, LEVELS, seed="bench"), {})
    rng = random.Random(0)
    for _ in range(CHOICES):
        sampler.update(outcome(rng.randrange(count), rng))
    return sampler


def outcome(index: int, rng: random.Random) -> Outcome:
    success = rng.random()
    return Outcome(index, 16, success, (success * (1.0 - success)) ** 0.5, flat=False)


def cost(sampler: Sampler, count: int, choices: int = CHOICES) -> float:
    """Return the CPU time of one choice and its outcome, in microseconds."""
    rng = random.Random(count)
    began = time.process_time()
    for number in range(choices):
        sampler.update(outcome(sampler.draw(number), rng))
    return (time.process_time() - began) / choices * 1e6


def naive(count: int, choices: int = NAIVE_CHOICES) -> Callable[[], float]:
    """Return the same measurement of the naive choice."""
    weights, rng = np.full(count, 0.125), random.Random(count)

    def measure() -> float:
        began = time.process_time()
        for _ in range(choices):
            sums = weights.cumsum()
            index = int(sums.searchsorted(rng.random() * sums[-1]))
            success = rng.random()
            weights[min(index, count - 1)] = success * (1.0 - success)
        return (time.process_time() - began) / choices * 1e6

    return measure
