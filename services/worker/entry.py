"""From the `entry` of a configuration to a living environment. Whatever is wrong becomes a `ConfigError`.

`file.py:Class` is a file next to the configuration, `package.module:Class` anything that can be imported. The
configuration's directory is on the path either way, behind everything else, so that a file may import its neighbours.
The user's code runs here, when its module is imported and when the class is called;
what it raises is logged with its traceback, since the `ConfigError` is one line.
"""

import difflib
import importlib
import importlib.util
import inspect
import logging
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rolloutmq.schemas.config import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.environment import Environment

logger = logging.getLogger(__name__)


def load_environment(name: str, config: EnvironmentConfig, base_dir: Path) -> Environment:
    """Import the class of `[environment.NAME]` and call it with its options.

    Args:
        name: Name of the section.
        config: The section.
        base_dir: Directory of the configuration file.

    Raises:
        ConfigError: It cannot be found, imported or called, or is no environment; the cause is chained.
    """
    key = f"environment.{name}.entry"
    check_entry(name, config, base_dir)
    source, _, attribute = config.entry.partition(":")
    kind = _class(key, _module(key, source, base_dir), source, attribute)
    _check_options(f"environment.{name}.options", kind, config.options)
    try:
        return cast(Environment, kind(**config.options))
    except (Exception, SystemExit) as error:
        logger.exception("calling failed entry=%s", config.entry)
        raise ConfigError(key, f"{attribute}() raised {_said(error)}") from error


def check_abilities(name: str, config: EnvironmentConfig, environment: Environment) -> None:
    """Check that an environment can do what its section asks of it; raises ConfigError."""
    kind = type(environment).__name__
    if config.tasks != "own" and not callable(getattr(environment, "rollout_task", None)):
        raise ConfigError(
            f"environment.{name}.tasks", f"{kind} has no method `rollout_task` for submitted tasks"
        )
    lacks = [method for method in ("task", "member") if not callable(getattr(environment, method, None))]
    if config.group_deadline_s and lacks:
        raise ConfigError(f"environment.{name}.group_deadline_s", f"{kind} has no method `{lacks[0]}`")


def check_entry(name: str, config: EnvironmentConfig, base_dir: Path) -> None:
    """Check what can be checked without running the user's code; raises ConfigError."""
    key = f"environment.{name}.entry"
    source, _, attribute = config.entry.partition(":")
    if not attribute.isidentifier():
        raise ConfigError(key, f"`{attribute}` is no name of a class")
    if source.endswith(".py"):
        if not (base_dir / source).is_file():
            raise ConfigError(key, f"there is no file {base_dir / source}")
        return
    if not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(key, f"`{source}` is neither a module nor a file that ends in .py")
    package = source.partition(".")[0]
    if importlib.util.find_spec(package) is None and PathFinder.find_spec(package, [str(base_dir)]) is None:
        raise ConfigError(key, f"there is no module {package}")


def _module(key: str, source: str, base_dir: Path) -> ModuleType:
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        return _file_module((base_dir / source).resolve())
    except (Exception, SystemExit) as error:
        logger.exception("importing failed source=%s", source)
        raise ConfigError(key, f"importing {source} raised {_said(error)}") from error


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name of its own, which no installed module can have."""
    name = f"rolloutmq_entry_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and pickle look classes up here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _class(key: str, module: ModuleType, source: str, attribute: str) -> type[Any]:
    kind = getattr(module, attribute, None)
    if kind is None:
        classes = [name for name, value in vars(module).items() if inspect.isclass(value)]
        close = difflib.get_close_matches(attribute, classes, n=1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise ConfigError(key, f"{source} has no class `{attribute}`{hint}")
    if not inspect.isclass(kind):
        raise ConfigError(key, f"`{attribute}` of {source} is no class")
    if not callable(getattr(kind, "rollout", None)):
        raise ConfigError(key, f"{attribute} has no method `rollout`: derive it from rolloutmq.SingleTurn")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(key, f"{attribute} lacks {', '.join(f'`{name}`' for name in missing)}")
    return kind


def _check_options(key: str, kind: type[Any], options: Mapping[str, Any]) -> None:
    """Hold the options against the class, before its own code can raise a TypeError that looks the same."""
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a class of an extension module may have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(key, f"{error}; {kind.__name__}{signature}") from None


def _said(error: BaseException) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
