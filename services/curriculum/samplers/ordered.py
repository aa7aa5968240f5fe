"""Samplers by the order of the tasks: uniform, easy first, and by competence. They learn nothing from scores.

The last two take the number of a task for its difficulty: task 0 is the easiest.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from rolloutmq.schemas.wire.envelope import Count
from rolloutmq.services.curriculum.samplers.sampler import (
    OptionError,
    Outcome,
    TaskSpace,
    chance,
    options_of,
    pick,
)

_Positive = Annotated[int, Meta(ge=1)]
UNTIL_END = 0.5
"""Part of the run after which all tasks are drawn, by default."""


class _Counted:
    """Base: a sampler whose only state is the number of outcomes."""

    def __init__(self, space: TaskSpace) -> None:
        self._space = space
        self._outcomes = 0

    def update(self, outcome: Outcome) -> None:  # noqa: ARG002 - the scores do not matter
        """See `Sampler.update`."""
        self._outcomes += 1

    def state(self) -> bytes:
        """See `Sampler.state`."""
        return msgspec.msgpack.encode(self._outcomes)

    def restore(self, state: bytes) -> None:
        """See `Sampler.restore`."""
        self._outcomes = msgspec.msgpack.decode(state, type=Count)

    def _uniform(self, number: int) -> int:
        return pick(self._space.count, chance(self._space.seed, number))


class _Paced(_Counted):
    """Base: one whose walk has a length. The length is part of the state: a longer run does not change the walk."""

    def __init__(self, space: TaskSpace, length: int) -> None:
        super().__init__(space)
        self._length = length

    def state(self) -> bytes:
        """See `Sampler.state`."""
        return msgspec.msgpack.encode((self._outcomes, self._length))

    def restore(self, state: bytes) -> None:
        """See `Sampler.restore`."""
        self._outcomes, self._length = msgspec.msgpack.decode(state, type=tuple[Count, _Positive])


class UniformOptions(msgspec.Struct, frozen=True):
    """Options of `uniform`: none."""


class Uniform(_Counted):
    """Every task with the same probability: the control of every comparison."""

    def draw(self, number: int) -> int:
        """See `Sampler.draw`."""
        return self._uniform(number)


class EasyFirstOptions(msgspec.Struct, frozen=True):
    """Options of `easy_first`.

    Attributes:
        draws: Draws that lead from the easiest to the most difficult task; 0: half of the groups of the run.
    """

    draws: Annotated[int, Meta(ge=0)] = 0


class EasyFirst(_Paced):
    """One walk from the easiest to the most difficult task (Bengio et al. 2009), then every task alike.

    Draw k comes from the k-th of `draws` equal parts of the tasks.
    """

    def __init__(self, space: TaskSpace, options: EasyFirstOptions) -> None:
        super().__init__(space, options.draws or _half_of(space, "draws"))

    def draw(self, number: int) -> int:
        """See `Sampler.draw`."""
        if number >= self._length:
            return self._uniform(number)
        return pick(self._space.count, (number + chance(self._space.seed, number)) / self._length)


class CompetenceOptions(msgspec.Struct, frozen=True):
    """Options of `competence`.

    Attributes:
        start: Competence c0 at the beginning: the easiest part of the tasks that is drawn from at first.
        outcomes: Outcomes T until all tasks are drawn from; 0: half of the groups of the run.
        power: Exponent p: 1 adds tasks at a constant rate, 2 adds them more slowly the more there are.
    """

    start: Annotated[float, Meta(gt=0.0, le=1.0)] = 0.01
    outcomes: Annotated[int, Meta(ge=0)] = 0
    power: Annotated[float, Meta(gt=0.0, le=100.0)] = 2.0


class Competence(_Paced):
    """Every task alike up to a difficulty that grows with the number of outcomes t: those of the easiest part c(t).

    c(t) = min(1, (t (1 - c0^p) / T + c0^p)^(1/p)): Platanios et al. 2019 (arXiv:1903.09848), equations 6 and 7.
    """

    def __init__(self, space: TaskSpace, options: CompetenceOptions) -> None:
        super().__init__(space, options.outcomes or _half_of(space, "outcomes"))
        self._start, self._power = options.start, options.power

    @property
    def competence(self) -> float:
        """Part of the tasks that is drawn from, from 0 to 1."""
        if self._outcomes >= self._length:
            return 1.0
        least = self._start**self._power
        linear = self._outcomes * (1.0 - least) / self._length + least
        return min(1.0, float(linear ** (1.0 / self._power)))

    def draw(self, number: int) -> int:
        """See `Sampler.draw`."""
        known = max(1, min(self._space.count, round(self.competence * self._space.count)))
        return pick(known, chance(self._space.seed, number))


def _half_of(space: TaskSpace, option: str) -> int:
    """Return half of the groups that the run is expected to train on."""
    if not space.expected:
        raise OptionError(option, "is required without the shipped trainer, whose steps give the default")
    return max(1, round(UNTIL_END * space.expected))


def uniform(space: TaskSpace, given: Mapping[str, Any]) -> Uniform:
    """Make a uniform sampler. See `Factory`."""
    options_of(UniformOptions, given)
    return Uniform(space)


def easy_first(space: TaskSpace, given: Mapping[str, Any]) -> EasyFirst:
    """Make an easy-first sampler. See `Factory`."""
    return EasyFirst(space, options_of(EasyFirstOptions, given))


def competence(space: TaskSpace, given: Mapping[str, Any]) -> Competence:
    """Make a sampler by competence. See `Factory`."""
    return Competence(space, options_of(CompetenceOptions, given))
