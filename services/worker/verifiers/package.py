"""Installed environment packages of the `verifiers` hub: from `environment.NAME.verifiers` to an environment of theirs.

A package is a module with `load_environment(**arguments)`. Every failure is a `ConfigError`, and most are found without
running the package's code.

What their environments do to a process is undone: each takes over SIGINT and SIGTERM, by which a worker drains, and
their log prints the arguments, among which are secrets, past the log of this process. Some draw their rows while they
load, by the shared generators. These are seeded meanwhile, so that row i is the same in every worker and life.
"""

import importlib
import inspect
import logging
import random
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import util
from importlib.machinery import PathFinder
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Final

import numpy as np

from rolloutmq.bus.lifecycle import without_secrets
from rolloutmq.schemas.errors import ConfigError, install_remedy
from rolloutmq.schemas.printable import error_line

logger = logging.getLogger(__name__)

FIRST: Final = (0, 1, 14)
"""Oldest version whose clients and rollouts the adapter knows."""
TASKSETS: Final = (0, 4)
"""First version with tasksets in place of `load_environment`."""
BEYOND: Final = (0, 5)
"""First version that no adapter knows."""
INSTALL: Final = install_remedy("verifiers")
SEED: Final = 0
"""Seed of the shared generators while a package loads."""
LOADER: Final = "load_environment"
ENVIRONMENTS: Final = "verifiers.envs.environment"
"""Module of their base class; its import also sets up their log."""
_CHATTY: Final = ("httpx", "httpx2", "openai", "aiohttp.access", "renderers")
"""Loggers with a line for each request."""
_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM)


def check_package(key: str, package: str, base_dir: Path) -> None:
    """Check that `verifiers` and the package are installed, without running code of either. Raises ConfigError."""
    found = _version()
    if found is None:
        raise ConfigError(key, f"needs the package verifiers, which is not installed; {INSTALL}")
    numbers = _numbers(found)
    if numbers < FIRST or numbers >= BEYOND:
        first, beyond = (".".join(map(str, one)) for one in (FIRST, BEYOND))
        raise ConfigError(
            key,
            f"needs verifiers from {first} and below {beyond} (got {found}); {INSTALL}",
        )
    module = module_name(package)
    if numbers >= TASKSETS and _is_bundled(module):
        return
    if util.find_spec(module) is None and PathFinder.find_spec(module, [str(base_dir)]) is None:
        raise ConfigError(
            key,
            f"there is no module {module} (got {package!r}); install the package of the environment with pip, or "
            "with `prime env install` of the package `prime`",
        )


def _is_bundled(module: str) -> bool:
    """Return whether verifiers brings a taskset of this name."""
    theirs = util.find_spec("verifiers")
    where = theirs.submodule_search_locations if theirs is not None else None
    return any((Path(one) / "v1" / "tasksets" / module).is_dir() for one in where or ())


def has_tasksets() -> bool:
    """Return whether the installed version has tasksets in place of `load_environment`."""
    found = _version()
    return found is not None and _numbers(found) >= TASKSETS


def module_name(package: str) -> str:
    """Return the module of a package, whose name may begin with its owner on the hub."""
    return package.rpartition("/")[2].replace("-", "_")


def load_package(section: str, package: str, arguments: Mapping[str, Any], base_dir: Path) -> Any:
    """Import a package and return its environment. Runs the package's code; in the main thread only.

    Args:
        section: Key of the section, such as `environment.wordle`.
        package: Name of the package.
        arguments: Arguments of its `load_environment`.
        base_dir: Directory of the configuration, in which the module may be, too.

    Raises:
        ConfigError: The package cannot be imported, knows no such argument, or makes no environment; the cause is
            chained.
    """
    key = f"{section}.verifiers"
    check_package(key, package, base_dir)
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))
    name = module_name(package)
    with own_signals(), same_draws():
        theirs = imported(key, ENVIRONMENTS)
        adopt_log()
        imported(key, "datasets").disable_progress_bars()
        load = getattr(imported(key, name), LOADER, None)
        if not callable(load):
            raise ConfigError(
                key,
                f"{name} has no function `{LOADER}`: it is no environment of verifiers, or one of a later version",
            )
        _check_arguments(f"{section}.options", load, arguments)
        try:
            environment = imported(key, "verifiers").load_environment(package, **arguments)
        except (Exception, SystemExit) as error:
            logger.exception("environment package failed package=%s", package)
            cause = error.__cause__ or error
            raise ConfigError(key, f"{LOADER}() of {name} raised {described(cause)}") from cause
    adopt_log(logging.CRITICAL)  # the worker tells of failed rollouts itself, and not of each
    if not isinstance(environment, theirs.Environment):
        raise ConfigError(
            key,
            f"{LOADER}() of {name} returned no environment of verifiers (got {type(environment).__name__})",
        )
    return environment


def _version() -> str | None:
    try:
        return version("verifiers")
    except PackageNotFoundError:
        return None


def _numbers(text: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: those of 0.4.0rc1 are 0, 4, 0."""
    numbers: list[int] = []
    for part in text.split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if digits:
            numbers.append(int(digits))
        if digits != part:
            break
    return tuple(numbers)


def imported(key: str, name: str) -> Any:
    """Import a module. Raises ConfigError."""
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:
        logger.exception("environment import failed source=%s", name)
        raise ConfigError(key, f"importing {name} raised {described(error)}") from error


def _check_arguments(key: str, load: Any, arguments: Mapping[str, Any]) -> None:
    """Check the arguments against the signature, so that a TypeError of the package is not mistaken for one."""
    try:
        signature = inspect.signature(load)
    except ValueError:  # a function of an extension module may have none
        return
    try:
        signature.bind(**arguments)
    except TypeError as error:
        raise ConfigError(key, f"{error}; the signature is {LOADER}{signature}") from None


@contextmanager
def own_signals() -> Iterator[None]:
    """Give the handlers of SIGINT and SIGTERM back after the block."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


@contextmanager
def same_draws() -> Iterator[None]:
    """Seed the shared generators for the block: a package that draws its rows draws the same in every worker."""
    before, theirs = random.getstate(), np.random.get_state()
    random.seed(SEED)
    np.random.seed(SEED)
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(theirs)


def adopt_log(level: int = logging.WARNING) -> None:
    """Send what verifiers logs to the log of this process, which shows no secret. Below a warning it logs arguments."""
    theirs = logging.getLogger("verifiers")
    theirs.handlers.clear()
    theirs.propagate = True
    theirs.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(logging.WARNING)


def described(error: BaseException) -> str:
    """Return type and text of an error in one line, without secrets."""
    return without_secrets(error_line(error))
