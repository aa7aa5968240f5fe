"""Registry of raters: from a name and options to a rater.

A name stands for a factory, a function of the options that returns a rater. Some are built in. Other packages register
theirs as entry points, and a program its own by `register_rater`:

    [project.entry-points."rolloutmq.raters"]
    polite = "my_package.raters:Polite"
"""

import difflib
import inspect
from collections.abc import Callable, Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.rewards.builtin import BUILTIN
from rolloutmq.services.rewards.raters import Rater

ENTRY_POINTS: Final = "rolloutmq.raters"
"""Group of the entry points by which other packages name their raters."""

RaterFactory = Callable[..., Rater]
"""Makes a rater from its options."""

_registered: dict[str, RaterFactory] = dict(BUILTIN)


def register_rater(name: str, factory: RaterFactory) -> None:
    """Register a factory of raters under a name, for this process. Raises ConfigError if another has the name."""
    if _registered.setdefault(name, factory) is not factory:
        raise ConfigError(
            f"rater {name}", "another factory is registered under this name; choose another name"
        )


def known_raters() -> list[str]:
    """Return all registered names, sorted, without loading the packages of entry points."""
    return sorted({*_registered, *_installed()})


def check_rater(key: str, name: str, options: Mapping[str, Any] | None) -> None:
    """Check a name, and the options of a registered one, without loading another package. Raises ConfigError.

    The options are None where they are not known yet, since secrets are among them.
    """
    if name in _registered:
        if options is not None:
            make_rater(key, name, options)
    elif name not in _installed():
        close = difflib.get_close_matches(name, known_raters(), n=1)
        hint = f"did you mean `{close[0]}`? " if close else ""
        known = ", ".join(known_raters())
        raise ConfigError(f"{key}.rater", f"unknown rater (got {name!r}); {hint}known: {known}")


def make_rater(key: str, name: str, options: Mapping[str, Any]) -> Rater:
    """Make the rater of a name.

    Args:
        key: Dotted path of its section, for errors.
        name: Registered name, or that of an entry point, whose package is then imported.
        options: Keyword arguments of the factory.

    Raises:
        ConfigError: The name is unknown, its package cannot be imported, or the factory refuses the options.
    """
    factory = _registered.get(name)
    if factory is None:
        check_rater(key, name, None)
        try:
            factory = _installed()[name].load()
        except Exception as error:
            raise ConfigError(
                f"{key}.rater", f"loading {name} raised {type(error).__name__}: {error}"
            ) from error
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{key}.options", f"{error}; {name} takes {inspect.signature(factory)}") from None
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.options", str(error)) from None


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
