"""Prioritised replay of tasks: new tasks, and again those whose groups had the most learning potential.

Prioritized Level Replay (Jiang, Grefenstette and Rocktaeschel 2021, arXiv:2010.03934), with tasks for levels. It
replays tasks and never groups: each replay samples a new group from the present policy. While tasks are new, a draw
takes one of them with the probability `new`. Otherwise task i of those with an outcome is drawn with the probability

    (1 - rho) P_S(i) + rho P_C(i)     P_S ~ (1 / rank(S_i))^(1 / beta)     P_C ~ c - C_i

S_i is the standard deviation of the scores of its last group, the mean magnitude of an advantage up to a constant. c is
the number of outcomes so far, C_i that at its last outcome: what has waited longest is due first. With one task, or if
none has waited, P_S alone decides.

Scores are ranked in 65,536 steps, so that a rank costs O(log n). Tasks within one step have no order.
"""

from array import array
from bisect import bisect_right
from collections.abc import Mapping
from typing import Annotated, Any, Final

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

STEPS: Final = 1 << 16
"""Steps of a score."""
HIGHEST: Final = 0.5
"""Largest standard deviation of scores from 0 to 1."""
_NEW: Final = -1


class ReplayOptions(msgspec.Struct, frozen=True):
    """Options of `replay`.

    Attributes:
        new: Probability to draw a new task, while there are any.
        rho: Part of the replays by staleness.
        beta: Temperature of the ranks: a small one replays the best tasks most.
    """

    new: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.5
    rho: Annotated[float, Meta(ge=0.0, le=1.0)] = 0.1
    beta: Annotated[float, Meta(ge=0.01, le=100.0)] = 0.1


class _State(msgspec.Struct, array_like=True):
    """The tasks with an outcome, in the order of their ranking, with their steps and the time of their last outcome."""

    outcomes: int
    tasks: list[int]
    steps: list[int]
    at: list[int]


class Replay:
    """See the module. Memory: at most 80 bytes a task."""

    def __init__(self, space: TaskSpace, options: ReplayOptions) -> None:
        require_memory(space)
        self._space = space
        self._options = options
        self._ranking = _Ranking(space.count)
        self._fresh = SumTree(np.ones(space.count))
        self._seen_at = _Times(space.count)
        self._by_rank = np.cumsum(np.arange(1.0, space.count + 1.0) ** (-1.0 / options.beta))
        self._outcomes = 0

    def draw(self, number: int) -> int:
        """See `Sampler.draw`."""
        seed, options = self._space.seed, self._options
        u = chance(seed, number)
        seen = len(self._ranking)
        is_new = seen < self._space.count and (not seen or chance(seed, number, "new") < options.new)
        if is_new:
            return self._fresh.draw(u)
        if chance(seed, number, "rho") < options.rho and self._seen_at.waited(self._outcomes) > 0:
            return self._seen_at.draw(u, self._outcomes)
        return self._ranking.at(self._rank(u, seen))

    def _rank(self, u: float, seen: int) -> int:
        """Return a rank from 0 by its probability among `seen` ranks."""
        return min(seen - 1, bisect_right(self._by_rank, u * self._by_rank[seen - 1], 0, seen))

    def update(self, outcome: Outcome) -> None:
        """See `Sampler.update`."""
        self._outcomes += 1
        step = pick(STEPS, outcome.deviation / HIGHEST)
        self._note(outcome.index, step, self._outcomes)

    def _note(self, index: int, step: int, at: int) -> None:
        self._ranking.put(index, step)
        self._seen_at.put(index, at)
        self._fresh[index] = 0.0

    def state(self) -> bytes:
        """See `Sampler.state`. Its size is that of the tasks with an outcome."""
        tasks = self._ranking.ordered()
        steps = [self._ranking.step_of(task) for task in tasks]
        return msgspec.msgpack.encode(
            _State(self._outcomes, tasks, steps, [self._seen_at[task] for task in tasks])
        )

    def restore(self, state: bytes) -> None:
        """See `Sampler.restore`."""
        found = msgspec.msgpack.decode(state, type=_State)
        for index, step, at in zip(found.tasks, found.steps, found.at, strict=True):
            if not (0 <= index < self._space.count and 0 <= step < STEPS):
                raise ValueError(f"the state has an unknown task {index} or step {step}")
            self._note(index, step, at)
        self._outcomes = found.outcomes


class _Ranking:
    """Tasks by the step of their score, the highest first."""

    def __init__(self, count: int) -> None:
        self._steps = array("i", [_NEW]) * count
        self._places = array("q", [0]) * count
        self._tasks: dict[int, list[int]] = {}
        self._counts = SumTree(np.zeros(STEPS))

    def __len__(self) -> int:
        return round(self._counts.total)

    def step_of(self, task: int) -> int:
        return self._steps[task]

    def put(self, task: int, step: int) -> None:
        """Set the step of a task; it becomes the last of its step."""
        if self._steps[task] != _NEW:
            self._take_out(task)
        tasks = self._tasks.setdefault(step, [])
        self._steps[task], self._places[task] = step, len(tasks)
        tasks.append(task)
        self._counts[STEPS - 1 - step] = len(tasks)

    def _take_out(self, task: int) -> None:
        """Remove a task; the last of its step takes its place."""
        step, place = self._steps[task], self._places[task]
        tasks = self._tasks[step]
        last = tasks.pop()
        if last != task:
            tasks[place], self._places[last] = last, place
        if not tasks:
            del self._tasks[step]
        self._counts[STEPS - 1 - step] = len(tasks)

    def at(self, rank: int) -> int:
        """Return the task of a rank, from 0 for the highest score."""
        # The middle of the rank's unit of the sum: all sums are integers, so that no rounding can move it.
        column, before = self._counts.find(rank + 0.5)
        return self._tasks[STEPS - 1 - column][int(rank - before)]

    def ordered(self) -> list[int]:
        """Return the tasks, so that `put` in this order makes the same ranking."""
        return [task for step in sorted(self._tasks) for task in self._tasks[step]]


class _Times:
    """The time of the last outcome of each task, and draws in proportion to the time since."""

    def __init__(self, count: int) -> None:
        self._seen = SumTree(np.zeros(count))
        self._at = SumTree(np.zeros(count))

    def __getitem__(self, task: int) -> int:
        return round(self._at[task])

    def put(self, task: int, at: int) -> None:
        self._seen[task], self._at[task] = 1.0, float(at)

    def waited(self, now: int) -> float:
        """Return the sum of all waits: now minus the time, over all tasks with one."""
        return now * self._seen.total - self._at.total

    def draw(self, u: float, now: int) -> int:
        """Return a task with a probability in proportion to its wait, which must not be 0 for all."""
        return self._seen.draw_less(self._at, u, now)


def replay(space: TaskSpace, given: Mapping[str, Any]) -> Replay:
    """Make a sampler by prioritised replay. See `Factory`."""
    return Replay(space, options_of(ReplayOptions, given))
