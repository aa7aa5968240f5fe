"""Learnability: tasks that the policy solves sometimes, and whose groups have a spread of scores.

The learnability of a task with success rate p is p (1 - p), the variance of a score of 0 or 1: a task that is always or
never solved teaches nothing (Tzannetos et al. 2023; Rutherford et al. 2024, arXiv:2408.15099). With partial credit p
may be 0.5 in every answer, so p (1 - p) is multiplied by the probability that the scores of a group differ at all.

    gain "variance"   weight = (p (1 - p) s)^k     p = a / (a + b), s = c / (c + d)
    gain "headroom"   weight = ((1 - p) s)^k

With partial credit a low success rate is no lack of a signal: the scores of a difficult task differ from the beginning.
There the second gain fits, the room above the policy times the probability of a signal. For scores of 0 and 1 and
groups of n, s is 1 - p^n - (1 - p)^n, so it leaves hopeless tasks, too. `sharpness` k tells the best from the good.

Both are means of Beta posteriors. A group of n sequences with success rate r adds n r to `a` and n (1 - r) to `b`, and
1 to `c` if its scores differ, else to `d`. Before each group the evidence so far is multiplied by a factor, because the
policy changes: `decay` for a level, `task_decay` for a task, whose groups are further apart.

The prior of a level is Beta(1, 1). The prior of a task is that of its level now, with the same strength of two. A draw
chooses the level by its weight times its number of tasks, then the task within it by the task's weight relative to that
of the level when the task was last drawn; a new task has 1. So outcomes of a level guide the choice among tasks that
were never drawn, which are most of a large space. Within it a task with a spread is repeated, and a mastered one passed
over, however far the level has come meanwhile.
"""

from array import array
from collections.abc import Mapping
from functools import partial
from itertools import pairwise
from typing import Annotated, Any, Final, Literal

import msgspec
import numpy as np
from msgspec import Meta

from rolloutmq.services.curriculum.samplers.sampler import (
    Outcome,
    TaskSpace,
    chance,
    options_of,
    pick,
    require_memory,
)
from rolloutmq.services.curriculum.samplers.sum_tree import SumTree

FIELDS: Final = 4
"""Numbers of the evidence: a, b, c and d without the prior."""


class LearnabilityOptions(msgspec.Struct, frozen=True):
    """Options of `learnability`.

    Attributes:
        gain: Measure of a task, see the module.
        sharpness: Exponent of the measure; 0.1 is nearly uniform.
        explore: Part of the draws that comes from all tasks alike, so that a change of any of them is noticed.
        decay: Factor on the evidence of a level at each new outcome of it.
        task_decay: Factor on the evidence of a task at each new outcome of it.
    """

    gain: Literal["variance", "headroom"] = "variance"
    sharpness: Annotated[float, Meta(gt=0.0, le=10.0)] = 1.0
    explore: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.05
    decay: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.95
    task_decay: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.5


class _State(msgspec.Struct, array_like=True):
    """Evidence of the levels, and evidence and weight of the tasks that have any."""

    levels: list[float]
    seen: list[int]
    tasks: list[float]
    weights: list[float]


class Learnability:
    """See the module. Memory: at most 64 bytes a task."""

    def __init__(self, space: TaskSpace, options: LearnabilityOptions) -> None:
        require_memory(space)
        self._space = space
        self._explore = options.explore
        self._weight_of = partial(weight_of, options)
        self._levels = _Evidence(space.levels, options.decay)
        self._tasks = _Evidence(space.count, options.task_decay)
        starts = [space.start_of(level) for level in range(space.levels + 1)]
        self._starts = starts
        self._sizes = [end - start for start, end in pairwise(starts)]
        self._by_level = SumTree([self._weight_of(EVEN) * size for size in self._sizes])
        self._within = [SumTree(np.ones(size)) for size in self._sizes]

    def draw(self, number: int) -> int:
        """See `Sampler.draw`."""
        seed = self._space.seed
        if chance(seed, number, "explore") < self._explore:
            return pick(self._space.count, chance(seed, number))
        level = self._by_level.draw(chance(seed, number, "level"))
        return self._starts[level] + self._within[level].draw(chance(seed, number))

    def update(self, outcome: Outcome) -> None:
        """See `Sampler.update`."""
        level, index = self._space.level_of(outcome.index), outcome.index
        self._levels.add(level, outcome)
        self._tasks.add(index, outcome)
        known = self._levels.posterior(level)
        self._weigh(level)
        self._within[level][index - self._starts[level]] = self.preference(index, known)

    def preference(self, index: int, level: "Posterior") -> float:
        """Return the weight of a task relative to that of its level."""
        return self._weight_of(self._tasks.posterior(index, level)) / self._weight_of(level)

    def _weigh(self, level: int) -> None:
        self._by_level[level] = self._weight_of(self._levels.posterior(level)) * self._sizes[level]

    def state(self) -> bytes:
        """See `Sampler.state`. Its size is that of the tasks with an outcome."""
        seen = self._tasks.known()
        tasks = [value for index in seen for value in self._tasks.of(index)]
        places = [(self._space.level_of(index), index) for index in seen]
        weights = [self._within[level][index - self._starts[level]] for level, index in places]
        return msgspec.msgpack.encode(_State(self._levels.values.tolist(), seen, tasks, weights))

    def restore(self, state: bytes) -> None:
        """See `Sampler.restore`."""
        found = msgspec.msgpack.decode(state, type=_State)
        if len(found.levels) != len(self._levels.values) or len(found.tasks) != FIELDS * len(found.seen):
            raise ValueError("the state is of another task space")
        self._levels.values = array("d", found.levels)
        for at, (index, weight) in enumerate(zip(found.seen, found.weights, strict=True)):
            self._tasks.put(index, found.tasks[FIELDS * at : FIELDS * (at + 1)])
            level = self._space.level_of(index)
            self._within[level][index - self._starts[level]] = weight
        for level in range(self._space.levels):
            self._weigh(level)


Posterior = tuple[float, float]
"""Mean success rate p, and mean probability s of a group with a spread."""
EVEN: Final[Posterior] = (0.5, 0.5)
"""Means of Beta(1, 1)."""
SMALLEST: Final = 1e-100
"""Least weight: without one a power may round to 0."""
STRENGTH: Final = 2.0
"""Strength of every prior, in sequences for p and in groups for s: that of Beta(1, 1)."""


def weight_of(options: LearnabilityOptions, posterior: Posterior) -> float:
    """Return the weight of a posterior, see the module; never 0, because p and s lie between 0 and 1."""
    p, s = posterior
    gain = p * (1.0 - p) * s if options.gain == "variance" else (1.0 - p) * s
    return max(SMALLEST, float(gain**options.sharpness))


class _Evidence:
    """Decayed evidence of several posteriors."""

    def __init__(self, count: int, decay: float) -> None:
        self._decay = decay
        self.values = array("d", bytes(8 * FIELDS * count))

    def of(self, one: int) -> "array[float]":
        return self.values[FIELDS * one : FIELDS * (one + 1)]

    def put(self, one: int, values: list[float]) -> None:
        if not 0 <= one < len(self.values) // FIELDS:
            raise ValueError(f"the state has evidence of an unknown task {one}")
        self.values[FIELDS * one : FIELDS * (one + 1)] = array("d", values)

    def add(self, one: int, outcome: Outcome) -> None:
        """Let the evidence decay, and add a group to it."""
        solved = outcome.sequences * outcome.success
        added = (solved, outcome.sequences - solved, not outcome.flat, outcome.flat)
        for at, more in enumerate(added, FIELDS * one):
            self.values[at] = self.values[at] * self._decay + more

    def posterior(self, one: int, prior: Posterior = EVEN) -> Posterior:
        """Return the means of the posteriors from a prior with these means."""
        a, b, c, d = self.of(one)
        return (
            (STRENGTH * prior[0] + a) / (STRENGTH + a + b),
            (STRENGTH * prior[1] + c) / (STRENGTH + c + d),
        )

    def known(self) -> list[int]:
        """Return those with evidence."""
        counts = np.frombuffer(self.values).reshape(-1, FIELDS)[:, 2:].sum(axis=1)
        return [int(one) for one in np.flatnonzero(counts)]


def learnability(space: TaskSpace, given: Mapping[str, Any]) -> Learnability:
    """Make a sampler by learnability. See `Factory`."""
    return Learnability(space, options_of(LearnabilityOptions, given))
