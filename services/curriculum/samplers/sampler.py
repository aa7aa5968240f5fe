"""A sampler: draws task numbers from a task space, and learns from the outcome of their groups.

A sampler is deterministic: a draw depends on the seed, on its number, and on the outcomes in the order in which the
sampler heard them. A draw changes nothing. So a restarted service with the same outcomes makes the same choices.
"""

import hashlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol, TypeVar

import msgspec

TASKS_LIMIT: Final = 1 << 24
"""Most tasks of a sampler that remembers each task."""
_T = TypeVar("_T")


class OptionError(ValueError):
    """An option of a sampler is unknown or out of range.

    Attributes:
        option: Its name, or `task_count` for the size of the task space; empty if the options as a whole are wrong.
        problem: What is wrong, what was given, and what to do.
    """

    def __init__(self, option: str, problem: str) -> None:
        super().__init__(f"{option}: {problem}" if option else problem)
        self.option = option
        self.problem = problem


@dataclass(frozen=True, slots=True)
class TaskSpace:
    """The tasks to choose from: the numbers 0 to `count` - 1, in equal levels of neighbours, easy to difficult.

    Attributes:
        count: Number of tasks.
        levels: Number of levels, at most `count`.
        expected: Groups that the run is expected to train on; 0 if unknown.
        seed: Seed of the draws.
    """

    count: int
    levels: int = 1
    expected: int = 0
    seed: str = "0"

    def __post_init__(self) -> None:
        if not 1 <= self.levels <= self.count:
            raise ValueError(f"levels must be from 1 to the number of tasks {self.count} (got {self.levels})")

    def level_of(self, index: int) -> int:
        """Return the level of a task."""
        return index * self.levels // self.count

    def start_of(self, level: int) -> int:
        """Return the first task of a level; that of level `levels` is `count`."""
        return -(-level * self.count // self.levels)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The scores of the group that answered a task.

    Attributes:
        index: Number of the task.
        sequences: Sequences of the group.
        success: Success rate: the mean score within the range of scores, 0 to 1.
        deviation: Standard deviation of the scores, in the same unit: 0 to 0.5. For scores 0 and 1 it is
            sqrt(p (1 - p)) with the success rate p.
        flat: All scores are equal, so the group teaches nothing.
    """

    index: int
    sequences: int
    success: float
    deviation: float
    flat: bool


class Sampler(Protocol):
    """Chooses task numbers. Time of a draw and of an update: O(log n) for n tasks."""

    def draw(self, number: int) -> int:
        """Return a task for the draw of that number; the same for the same number and the same outcomes."""
        ...

    def update(self, outcome: Outcome) -> None:
        """Learn from the outcome of a task."""
        ...

    def state(self) -> bytes:
        """Return all it has learned."""
        ...

    def restore(self, state: bytes) -> None:
        """Continue from a state of a sampler of the same kind, options and task space, exactly.

        Raises:
            msgspec.DecodeError, ValueError: The state is damaged.
        """
        ...


Factory = Callable[[TaskSpace, Mapping[str, Any]], Sampler]
"""Makes a sampler from a task space and its options; OptionError if an option is unknown or out of range."""


def options_of(kind: type[_T], given: Mapping[str, Any]) -> _T:
    """Return options as a struct.

    Raises:
        OptionError: An option is unknown, or has a wrong type or value.
    """
    names = getattr(kind, "__struct_fields__", ())
    if unknown := [name for name in given if name not in names]:
        raise OptionError(unknown[0], f"unknown option; allowed: {', '.join(names) or 'none'}")
    for name in given:
        try:
            msgspec.convert({name: given[name]}, kind)
        except msgspec.ValidationError as error:
            problem = str(error).partition(" - at ")[0].replace("Expected", "must be", 1)
            raise OptionError(name, f"{problem} (got {given[name]!r})") from None
    return msgspec.convert(dict(given), kind)


def require_memory(space: TaskSpace) -> None:
    """Require a task space whose tasks can each be remembered.

    Raises:
        OptionError: It has too many tasks.
    """
    if space.count > TASKS_LIMIT:
        raise OptionError(
            "task_count",
            f"must be at most {TASKS_LIMIT} for a sampler that remembers each task (got {space.count}); use "
            "`uniform`, `easy_first` or `competence`",
        )


def chance(seed: str, number: int, use: str = "") -> float:
    """Return the uniform random number of a draw, from 0 to below 1.

    It is a hash of the seed, the number of the draw and its use, so it needs no state besides the number.
    """
    digest = hashlib.blake2b(f"{seed}/{use}/{number}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) * 2.0**-53


def pick(count: int, u: float, start: int = 0) -> int:
    """Return one of `count` numbers from `start` on, by a uniform random number."""
    # A double has 53 bits: larger spaces get every number that it can tell apart.
    return start + min(count - 1, math.floor(u * count))
