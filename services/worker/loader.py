"""Loader of an environment: from its section to an instance. Every failure is a `ConfigError`.

`file.py:Class` is a file next to the configuration; `package.module:Class` is any importable module. Packages of
`verifiers` are loaded by `services.worker.verifiers`. The
configuration's directory is last on the import path, so a file may import its neighbours. Importing the module and
calling the class run user code; its exceptions are logged with a traceback, and the `ConfigError` names them in one
line. Both show `env:NAME` where the value of a secret option stood.
"""

import difflib
import importlib
import importlib.util
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from rolloutmq.bus.lifecycle import hide, without_secrets
from rolloutmq.bus.tasks.rows import open_rows
from rolloutmq.schemas.config.command import problem_of_secrets, resolved, secrets_in
from rolloutmq.schemas.config.environment import DatasetConfig, EnvironmentConfig
from rolloutmq.schemas.config.rewards import RewardsConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.printable import error_line, printable
from rolloutmq.services.rewards.ensemble import Ensemble
from rolloutmq.services.rewards.raters import Rater
from rolloutmq.services.rewards.registry import check_rater
from rolloutmq.services.worker.environment import Environment, RowTurn, SingleTurn
from rolloutmq.services.worker.verifiers.environment import VerifiersEnvironment
from rolloutmq.services.worker.verifiers.package import check_package, has_tasksets
from rolloutmq.services.worker.verifiers.tasksets.environment import TasksetEnvironment

logger = logging.getLogger(__name__)


def load_environment(name: str, config: EnvironmentConfig, base_dir: Path) -> Environment:
    """Import the class of `[environment.NAME]`, or load its package of `verifiers`, with its options.

    Args:
        name: Name of the section.
        config: The section.
        base_dir: Directory of the configuration file.

    Raises:
        ConfigError: The class cannot be found, imported or called, or is not an environment; the cause is
            chained.
    """
    check_entry(name, config, base_dir)
    if config.verifiers:
        options = _options(f"environment.{name}.options", config.options)
        adapter = TasksetEnvironment if has_tasksets() else VerifiersEnvironment
        return adapter.loaded(name, config, options, base_dir)
    key = f"environment.{name}.entry"
    source, _, attribute = config.entry.partition(":")
    kind = _class(key, _module(key, source, base_dir), source, attribute)
    options = _options(f"environment.{name}.options", config.options)
    _check_options(f"environment.{name}.options", kind, options)
    try:
        environment = kind(**options)
    except (Exception, SystemExit) as error:
        logger.exception("environment constructor failed entry=%s", config.entry)
        raise ConfigError(key, f"{attribute}() raised {_described(error)}") from error
    _give_rows(f"environment.{name}.dataset", environment, config.dataset, base_dir)
    if config.rewards.raters:
        _give_rewards(f"environment.{name}.rewards", environment, config.rewards, base_dir)
    if isinstance(environment, SingleTurn) and kind.score is SingleTurn.score and environment.rewards is None:
        raise ConfigError(key, f"{attribute} does not implement `score`, and has no `rewards`")
    return cast(Environment, environment)


def check_abilities(
    name: str, config: EnvironmentConfig, environment: Environment, *, numbered: bool = False
) -> None:
    """Check that the environment has the methods its section needs.

    Args:
        name: Name of the section.
        config: The section.
        environment: Its instance.
        numbered: Its tasks are numbers chosen by a curriculum, which every environment can roll out.

    Raises:
        ConfigError: A method is missing.
    """
    kind = type(environment).__name__
    if config.tasks != "own" and not numbered and not callable(getattr(environment, "rollout_task", None)):
        raise ConfigError(
            f"environment.{name}.tasks", f"{kind} has no method `rollout_task`; submitted tasks need it"
        )
    lacks = [method for method in ("task", "member") if not callable(getattr(environment, method, None))]
    if config.group_deadline_s and lacks:
        raise ConfigError(
            f"environment.{name}.group_deadline_s", f"{kind} has no method `{lacks[0]}`; a deadline needs it"
        )


def check_entry(name: str, config: EnvironmentConfig, base_dir: Path) -> None:
    """Check the entry or the package, and the raters, without running the user's code. Raises ConfigError."""
    if config.verifiers:
        check_package(f"environment.{name}.verifiers", config.verifiers, base_dir)
        return
    _check_source(f"environment.{name}.entry", config.entry, base_dir, "class")
    for rater, section in config.rewards.raters.items():
        key = f"environment.{name}.rewards.raters.{rater}"
        if ":" in section.rater:
            _check_source(f"{key}.rater", section.rater, base_dir, "function")
        else:
            check_rater(key, section.rater, None if any(secrets_in(section.options)) else section.options)


def _check_source(key: str, entry: str, base_dir: Path, what: str) -> None:
    source, _, attribute = entry.partition(":")
    if not attribute.isidentifier():
        raise ConfigError(
            key, f"`{attribute}` is not a {what} name; write FILE.py:{what.title()} or MODULE:{what.title()}"
        )
    if source.endswith(".py"):
        if not (base_dir / source).is_file():
            raise ConfigError(key, f"there is no file {base_dir / source}")
        return
    if not all(part.isidentifier() for part in source.split(".")):
        raise ConfigError(key, f"`{source}` is neither a .py file nor a module")
    package = source.partition(".")[0]
    if importlib.util.find_spec(package) is None and PathFinder.find_spec(package, [str(base_dir)]) is None:
        raise ConfigError(key, f"there is no module {package}")


def _give_rows(key: str, environment: Any, config: DatasetConfig, base_dir: Path) -> None:
    """Set `rows` and `eval_rows` of the environment to those of its section."""
    if config.path:
        environment.rows, environment.eval_rows = open_rows(key, config, base_dir)
    elif isinstance(environment, RowTurn) and not environment.rows:
        raise ConfigError(
            f"{key}.path",
            f"required, because {type(environment).__name__} takes its tasks from a data set; name one",
        )


def _give_rewards(key: str, environment: Any, config: RewardsConfig, base_dir: Path) -> None:
    """Set `rewards` of the environment to the ensemble of its section."""
    kind = type(environment)
    if getattr(environment, "rewards", None) is not None:
        raise ConfigError(
            f"{key}.raters", f"{kind.__name__} has its own `rewards`; remove them from the class or from here"
        )
    if isinstance(environment, SingleTurn) and kind.score is not SingleTurn.score:
        raise ConfigError(
            f"{key}.raters",
            f"{kind.__name__} has its own `score`, which they would replace; remove one of them, or make `score` a "
            "function outside the class and name it among the raters",
        )
    functions = {
        name: _function(f"{key}.raters.{name}.rater", section.rater, base_dir)
        for name, section in config.raters.items()
        if ":" in section.rater
    }
    sections = {
        name: section.model_copy(
            update={"options": _options(f"{key}.raters.{name}.options", section.options)}
        )
        for name, section in config.raters.items()
    }
    environment.rewards = Ensemble.of(key, config.model_copy(update={"raters": sections}), functions)


def _function(key: str, entry: str, base_dir: Path) -> Rater:
    source, _, attribute = entry.partition(":")
    found = getattr(_module(key, source, base_dir), attribute, None)
    if not callable(found):
        raise ConfigError(key, f"{source} has no function `{attribute}`")
    return cast(Rater, found)


def _module(key: str, source: str, base_dir: Path) -> ModuleType:
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))
    try:
        if not source.endswith(".py"):
            return importlib.import_module(source)
        return _file_module((base_dir / source).resolve())
    except (Exception, SystemExit) as error:
        logger.exception("environment import failed source=%s", source)
        raise ConfigError(key, f"importing {source} raised {_described(error)}") from error


def _file_module(path: Path) -> ModuleType:
    """Import a file under a name that no installed module can have."""
    name = f"rolloutmq_entry_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is not a Python file")
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
        raise ConfigError(key, f"`{attribute}` of {source} is not a class")
    if not callable(getattr(kind, "rollout", None)):
        raise ConfigError(key, f"{attribute} has no method `rollout`: derive it from rolloutmq.SingleTurn")
    if missing := sorted(getattr(kind, "__abstractmethods__", ())):
        raise ConfigError(key, f"{attribute} does not implement {', '.join(f'`{name}`' for name in missing)}")
    return kind


def _options(key: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options with the values of their secrets, which the log of this process hides from then on."""
    if problem := problem_of_secrets(given, os.environ):
        raise ConfigError(key, problem)
    for name in secrets_in(given):
        hide(os.environ[name], f"env:{name}")
    return cast(dict[str, Any], resolved(given, os.environ))


def _check_options(key: str, kind: type[Any], options: Mapping[str, Any]) -> None:
    """Check the options against the signature, so that a TypeError of user code is not mistaken for one."""
    try:
        signature = inspect.signature(kind)
    except ValueError:  # a class of an extension module may have none
        return
    try:
        signature.bind(**options)
    except TypeError as error:
        raise ConfigError(key, f"{error}; the signature is {kind.__name__}{signature}") from None


def _described(error: BaseException) -> str:
    return printable(without_secrets(error_line(error)))
