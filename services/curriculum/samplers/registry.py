"""The samplers by name: those of this package, and those that other packages register.

A package registers a sampler by an entry point of the group `rolloutmq.samplers`:

    [project.entry-points."rolloutmq.samplers"]
    mine = "package.module:factory"

The entry point is a `Factory`. Names of this package cannot be replaced.
"""

import difflib
import operator
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Final, cast

import msgspec

from rolloutmq.schemas.config.environment import LEVELS
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.curriculum.samplers.learnability import learnability
from rolloutmq.services.curriculum.samplers.ordered import competence, easy_first, uniform
from rolloutmq.services.curriculum.samplers.replay import replay
from rolloutmq.services.curriculum.samplers.sampler import (
    Factory,
    OptionError,
    Outcome,
    Sampler,
    TaskSpace,
)

GROUP: Final = "rolloutmq.samplers"
OURS: Final[Mapping[str, Factory]] = {
    "uniform": uniform,
    "easy_first": easy_first,
    "competence": competence,
    "learnability": learnability,
    "replay": replay,
}


def space_of(config: RunConfig, env: str) -> TaskSpace:
    """Return the task space of an environment with a curriculum."""
    section, environment = config.curriculum[env], config.environment[env]
    seed = config.run.seed if section.seed is None else section.seed
    steps = config.trainer.steps
    return TaskSpace(
        count=environment.task_count,
        levels=section.levels or min(LEVELS, environment.task_count),
        expected=steps * config.part(env) // environment.group_size,
        seed=f"{seed}/{env}",
    )


def make_sampler(config: RunConfig, env: str) -> Sampler:
    """Make the sampler of an environment with a curriculum; one of another package as a `ForeignSampler`.

    Raises:
        ConfigError: There is no sampler of that name, it cannot be imported, or an option of it is wrong.
    """
    section, key = config.curriculum[env], f"curriculum.{env}"
    factory, space = _factory(f"{key}.sampler", section.sampler), space_of(config, env)
    try:
        made = factory(space, section.options)
    except OptionError as error:
        raise ConfigError(_path(env, error.option), error.problem) from None
    except Exception as error:  # the code of another package may raise anything
        if section.sampler in OURS:
            raise
        raise ConfigError(
            f"{key}.options", f"{section.sampler} raised {type(error).__name__}: {error}"
        ) from error
    return made if section.sampler in OURS else ForeignSampler(made, f"{key}.sampler", section.sampler, space)


def _path(env: str, option: str) -> str:
    if option == "task_count":
        return f"environment.{env}.task_count"
    return f"curriculum.{env}.options.{option}" if option else f"curriculum.{env}.options"


def _factory(key: str, name: str) -> Factory:
    if name in OURS:
        return OURS[name]
    others = {point.name: point for point in entry_points(group=GROUP)}
    if name not in others:
        allowed = [*OURS, *sorted(others)]
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        raise ConfigError(key, f"unknown sampler (got {name!r}); {hint}allowed: {', '.join(allowed)}")
    try:
        found: Any = others[name].load()
    except Exception as error:
        raise ConfigError(
            key, f"importing {others[name].value} raised {type(error).__name__}: {error}"
        ) from error
    if not callable(found):
        raise ConfigError(key, f"{others[name].value} is not a function that makes a sampler")
    return cast(Factory, found)


class ForeignSampler:
    """A sampler of another package: whatever it does wrong is an error that names it.

    Args:
        sampler: The sampler.
        key: Dotted path of the key that selects it.
        name: Its name.
        space: The tasks to choose from.
    """

    def __init__(self, sampler: Sampler, key: str, name: str, space: TaskSpace) -> None:
        self._sampler = sampler
        self._key = key
        self._name = name
        self._count = space.count

    def draw(self, number: int) -> int:
        """See `Sampler.draw`. ConfigError: It raised, or drew no task of the task space."""
        with self._named("draw"):
            index = operator.index(self._sampler.draw(number))
        if not 0 <= index < self._count:
            raise self._error("draw", f"must return a task from 0 to {self._count - 1} (got {index})")
        return index

    def update(self, outcome: Outcome) -> None:
        """See `Sampler.update`. ConfigError: It raised."""
        with self._named("update"):
            self._sampler.update(outcome)

    def state(self) -> bytes:
        """See `Sampler.state`. ConfigError: It raised, or returned no bytes."""
        with self._named("state"):
            return bytes(memoryview(self._sampler.state()))

    def restore(self, state: bytes) -> None:
        """See `Sampler.restore`. ConfigError: It raised another error than those of a damaged state."""
        with self._named("restore", msgspec.DecodeError, ValueError):
            self._sampler.restore(state)

    @contextmanager
    def _named(self, method: str, *passed: type[Exception]) -> Iterator[None]:
        try:
            yield
        except passed:
            raise
        except Exception as error:  # the code of another package may raise anything
            raise self._error(method, f"raised {type(error).__name__}: {error}") from error

    def _error(self, method: str, problem: str) -> ConfigError:
        return ConfigError(
            self._key, f"{self._name}.{method} {problem}; repair the sampler, then start or resume the run"
        )


def check_samplers(config: RunConfig) -> None:
    """Make each configured sampler, draw a task and ask for its state.

    Raises ConfigError as `make_sampler`, or if the sampler of another package cannot do that.
    """
    for env in config.curriculum:
        sampler = make_sampler(config, env)
        sampler.draw(0)
        sampler.state()
