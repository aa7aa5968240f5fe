"""Configuration of an environment of `verifiers` 0.4: from the options of a section to an environment of theirs.

The options are the fields of their `[env]` block, without the id of the taskset, which the section names. An agent
without a client of its own is the policy: its sampling is that of the section over the package's. A mistake is refused
by its key, before a rollout meets it.
"""

import itertools
import logging
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.verifiers.package import (
    LOADER,
    adopt_log,
    check_package,
    described,
    imported,
    module_name,
    own_signals,
    same_draws,
)
from rolloutmq.services.worker.verifiers.sampling import sampling_of

logger = logging.getLogger(__name__)

RENDERER: Final = "renderer"
"""Option with the renderer of the policy's chat template, in place of theirs by the model's name."""
EVAL_TASKSET: Final = "eval_taskset"
"""Option with the fields of the taskset in which the evaluation's differs."""
TASKSET: Final = "taskset"


@dataclass(frozen=True, slots=True)
class Loaded:
    """An environment of theirs with its tasks.

    Attributes:
        theirs: The environment.
        tasks: Its tasks, in the order of its taskset.
        held_out: Tasks of the evaluation; None if they are the same.
        policies: Names of the agents that the policy plays.
        renderer: Their configuration of a renderer; None chooses by the model.
    """

    theirs: Any
    tasks: Sequence[Any]
    held_out: Sequence[Any] | None
    policies: tuple[str, ...] = ("agent",)
    renderer: Any = None


def load_taskset(
    section: str, config: EnvironmentConfig, arguments: Mapping[str, Any], base_dir: Path
) -> Loaded:
    """Import a package and return its environment. Runs the package's code; in the main thread only.

    Args:
        section: Key of the section, such as `environment.wordle`.
        config: The section.
        arguments: Its options with the values of their secrets.
        base_dir: Directory of the configuration, in which the module may be, too.

    Raises:
        ConfigError: The package cannot be imported, exports no taskset, knows no such option, or makes no environment;
            the cause is chained.
    """
    key, package = f"{section}.verifiers", config.verifiers
    check_package(key, package, base_dir)
    if str(base_dir) not in sys.path:
        sys.path.append(str(base_dir))
    given = dict(arguments)
    own, renderer = given.pop(EVAL_TASKSET, None), given.pop(RENDERER, None)
    if not isinstance(own, Mapping | None):
        raise ConfigError(
            f"{section}.options.{EVAL_TASKSET}",
            f"must be a table, of the fields in which the taskset of the evaluation differs (got {own!r:.80})",
        )
    with own_signals(), same_draws():
        vf = imported(key, "verifiers.v1")
        adopt_log()
        _check_exports(key, vf, package)
        theirs = _made(section, vf, config, given)
        tasks = _tasks(section, theirs.taskset, config.task_count)
        held_out = None
        if own is not None:
            merged = {**given, TASKSET: {**given.get(TASKSET, {}), **own}}
            differing = _made(section, vf, config, merged, EVAL_TASKSET).taskset
            held_out = _tasks(section, differing, config.task_count)
        loaded = Loaded(
            theirs,
            tasks,
            held_out,
            tuple(policies_of(theirs.config)),
            None if renderer is None else _renderer(f"{section}.options.{RENDERER}", renderer),
        )
    adopt_log(logging.CRITICAL)  # the worker tells of failed rollouts itself, and not of each
    return loaded


def _check_exports(key: str, vf: Any, package: str) -> None:
    try:
        vf.import_taskset(package)
        vf.taskset_config_type(package)
    except (Exception, SystemExit) as error:
        logger.exception("environment import failed source=%s", package)
        module = sys.modules.get(module_name(package))
        if hasattr(module, LOADER) and isinstance(error, AttributeError | TypeError):
            why = f"{module_name(package)} has a `{LOADER}` and exports no Taskset: it is for verifiers below 0.4"
            raise ConfigError(
                key, f"{why}; install verifiers 0.3.1, or a later version of the package"
            ) from error
        raise ConfigError(key, f"importing {module_name(package)} raised {described(error)}") from error


def _made(
    section: str, vf: Any, config: EnvironmentConfig, given: Mapping[str, Any], written: str = TASKSET
) -> Any:
    """Return the environment of these options; `written` is the option with the fields of the taskset."""
    options, package = f"{section}.options", config.verifiers
    taskset = given.get(TASKSET, {})
    if not isinstance(taskset, Mapping) or taskset.get("id", package) != package:
        raise ConfigError(
            f"{options}.{written}",
            f"must be a table, without an `id`: the taskset is {package} (got {taskset!r:.80})",
        )
    try:
        found = vf.resolve_env_config({**given, TASKSET: {**taskset, "id": package}})
    except (Exception, SystemExit) as error:
        raise _refused(options, error, {TASKSET: written}, _hint(package, given)) from error
    found = _with_policy(section, found, given, config)
    _check_runtimes(options, vf, found)
    try:
        return vf.load_environment(found)
    except (Exception, SystemExit) as error:
        logger.exception("environment package failed package=%s", package)
        raise ConfigError(
            f"{section}.verifiers", f"the environment of {package} raised {described(error)}"
        ) from error


def _refused(
    options: str,
    error: BaseException,
    written: Mapping[str, str] | None = None,
    hint: Callable[[Sequence[Any]], str] = lambda _where: "",
) -> ConfigError:
    """Return the error for options that their configuration does not accept; the first of several.

    Args:
        options: Key of the options.
        error: What their configuration raised.
        written: The options that the user has written, by theirs, where they differ.
        hint: What to do about an option at a place.
    """
    errors = getattr(error, "errors", None)
    if not callable(errors):
        return ConfigError(options, described(error))
    first = errors()[0]
    outer, *inner = first["loc"] or ("",)
    where = ".".join(str(one) for one in ((written or {}).get(str(outer), outer), *inner))
    told = f"{first['msg']} (got {first.get('input')!r:.80}){hint(first['loc'])}"
    return ConfigError(f"{options}.{where}" if where else options, told)


def _hint(package: str, given: Mapping[str, Any]) -> Callable[[Sequence[Any]], str]:
    """Return what to do about a field of a harness without an `id`, which is theirs and not the package's."""
    from verifiers.v1.utils.loaders import default_harness_id

    def hint(where: Sequence[Any]) -> str:
        if len(where) < 3 or where[1] != "harness":
            return ""
        agent = given.get(str(where[0]))
        harness = agent.get("harness") if isinstance(agent, Mapping) else None
        if not isinstance(harness, Mapping) or harness.get("id"):
            return ""
        return f"; a harness without an `id` is bash: set {where[0]}.harness.id, for that of the package to {own!r}"

    own = default_harness_id(package)
    return hint


def policies_of(config: Any) -> dict[str, Any]:
    """Return the agents of a configuration of theirs that the policy plays, by name."""
    from verifiers.v1.configs.agent import agent_config_fields

    return {name: spec for name, spec in agent_config_fields(config).items() if spec.client is None}


def _with_policy(section: str, found: Any, given: Mapping[str, Any], config: EnvironmentConfig) -> Any:
    """Return their configuration with our sampling for the agents that the policy plays."""
    changed = {}
    for name, spec in policies_of(found).items():
        theirs = {} if spec.sampling is None else spec.sampling.model_dump(exclude_unset=True)
        keys = _sampling_keys(f"{section}.options.{name}.sampling", given.get(name))
        trains = config.split == "train"
        fields = sampling_of(f"{section}.sampling", theirs, config.sampling, keys, trains=trains)
        extra = fields.pop("extra_body")
        changed[name] = spec.model_copy(update={"sampling": _sampling({**fields, **extra}), "model": None})
    if not changed:
        raise ConfigError(
            f"{section}.options", "every agent has a client of its own; leave out that of the policy"
        )
    return found.model_copy(update=changed)


def _sampling_keys(key: str, agent: Any) -> dict[str, str]:
    """Return the keys of the fields of sampling that the options of an agent set."""
    given = agent.get("sampling") if isinstance(agent, Mapping) else None
    if not isinstance(given, Mapping):
        return {}
    extra = given.get("extra_body")
    inner = {name: f"{key}.extra_body.{name}" for name in extra} if isinstance(extra, Mapping) else {}
    return inner | {name: f"{key}.{name}" for name in given if name != "extra_body"}


def _sampling(fields: Mapping[str, Any]) -> Any:
    from verifiers.v1 import SamplingConfig as Theirs

    return Theirs.model_validate(dict(fields))


def _check_runtimes(options: str, vf: Any, found: Any) -> None:
    """Refuse a sandbox that nobody pays for, and a bundled program that cannot be installed."""
    from verifiers.v1.configs.agent import agent_config_fields
    from verifiers.v1.utils.loaders import builtin_harness_ids
    from verifiers.v1.utils.prime import ensure_prime_auth

    default = vf.default_agent_harness(found.taskset.id)
    for name, spec in agent_config_fields(found).items():
        kind, harness = spec.runtime.type, (spec.harness or default).id
        if kind == "prime":
            try:
                ensure_prime_auth()
            except SystemExit:
                raise ConfigError(
                    f"{options}.{name}.runtime",
                    "its sandbox is one of Prime Intellect, without a key here (got prime); set `type` to "
                    "`subprocess`, which runs programs on this host, or to `docker`, or log in by `prime login`",
                ) from None
        if kind == "subprocess" and harness in builtin_harness_ids() and shutil.which("uv") is None:
            raise ConfigError(
                f"{options}.{name}.harness",
                f"needs uv on PATH, which installs the program of a bundled harness (got {harness}); pip install uv, "
                "and start the run with its directory on PATH",
            )


def _tasks(section: str, taskset: Any, count: int) -> Sequence[Any]:
    """Return the tasks; those of an infinite taskset up to the number of the section."""
    if not taskset.bounded and not count:
        raise ConfigError(
            f"{section}.task_count", "must be the number of tasks to take of a taskset without an end (got 0)"
        )
    try:
        return list(taskset if taskset.bounded else itertools.islice(taskset, count))
    except (Exception, SystemExit) as error:
        logger.exception("tasks of an environment package failed section=%s", section)
        raise ConfigError(
            f"{section}.verifiers", f"its tasks cannot be loaded: {described(error)}"
        ) from error


def _renderer(key: str, given: Any) -> Any:
    from pydantic import TypeAdapter
    from renderers import RendererConfig

    try:
        return TypeAdapter(RendererConfig).validate_python(given)
    except Exception as error:
        raise _refused(key, error) from error
