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
from rolloutmq.schemas.printable import error_line, error_text
from rolloutmq.services.rewards.builtin import BUILTIN
from rolloutmq.services.rewards.raters import Rater

ENTRY_POINTS: Final = "rolloutmq.raters"
"""Group of the entry points by which other packages name their raters."""

RaterFactory = Callable[..., Rater]
"""Makes a rater from its options."""

_BY_PLACE: Final = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)

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
            raise ConfigError(f"{key}.rater", f"loading {name} raised {error_line(error)}") from error
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as error:
        raise ConfigError(f"{key}.options", f"{error}; {name} takes {inspect.signature(factory)}") from None
    try:
        return factory(**options)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{key}.options", error_text(error)) from None


def check_function(key: str, function: Callable[..., Any], options: Mapping[str, Any]) -> None:
    """Check that a function can be called with a task, an answer and its options.

    Args:
        key: Dotted path of its section, for errors.
        function: The rater.
        options: Keyword arguments of each call.

    Raises:
        ConfigError: It is a class, or takes other arguments.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    if inspect.isclass(function):
        raise ConfigError(
            f"{key}.rater",
            f"must be a function of a task and an answer (got the class {name}); name a function",
        )
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of an extension module
        return
    try:
        signature.bind(None, None, **options)
    except TypeError as error:
        given = "".join(f", {option}=..." for option in options)
        raise ConfigError(
            f"{key}.{'options' if _takes_answer(signature, options) else 'rater'}",
            f"{error}; it is called as {name}(task, answer{given}), and is {name}{signature}",
        ) from None


def _takes_answer(signature: inspect.Signature, options: Mapping[str, Any]) -> bool:
    """Return whether a function takes a task and an answer, and needs no more than its options beside them."""
    try:
        signature.bind_partial(None, None)
    except TypeError:
        return False
    places = (one for one in signature.parameters.values() if one.kind in _BY_PLACE)
    return sum(one.default is one.empty and one.name not in options for one in places) <= 2


def _installed() -> dict[str, EntryPoint]:
    return {point.name: point for point in entry_points(group=ENTRY_POINTS)}
