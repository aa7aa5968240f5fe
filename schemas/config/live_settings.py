"""Live settings: the configuration keys that can change during a run.

Each is a field of `BrokerConfig`, `OrchestratorConfig` or `EnvironmentConfig`, named by its dotted key, with the type
and bounds of that field. A change is validated together with the rest of the configuration: all of it applies or
nothing does. The broker keeps all of them; those of workers are for the orchestrator, which reads them from `pressure`.
"""

import math
from collections.abc import Collection, Mapping
from typing import Final, NamedTuple

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rolloutmq.schemas.config.base import Text, problem_of
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Setting

BROKER_SETTINGS: Final = (
    "high_bytes",
    "high_groups",
    "ram_bytes",
    "exact_wait_s",
    "silent_env_s",
    "lease_s",
    "silence_s",
    "retain_bytes",
)
ORCHESTRATOR_SETTINGS: Final = ("max_processes",)
WORKER_SETTINGS: Final = ("min_workers", "max_workers")
"""Settings of an environment that the orchestrator applies."""
ENVIRONMENT_SETTINGS: Final = (
    *("weight", "min_share", "max_staleness", "stale", "pacing", "high_bytes"),
    *WORKER_SETTINGS,
)
SECTIONS: Final = {"broker": BROKER_SETTINGS, "orchestrator": ORCHESTRATOR_SETTINGS}
"""Live settings of each section that is no environment."""


class LiveKey(NamedTuple):
    """Parts of a dotted key; `env` is empty outside of `environment`."""

    section: str
    env: str
    field: str

    @property
    def of_orchestrator(self) -> bool:
        """Return whether the orchestrator applies the setting."""
        return self.section == "orchestrator" or self.field in WORKER_SETTINGS

    @property
    def path(self) -> tuple[str, ...]:
        """Return the path of the key in the configuration."""
        return tuple(part for part in self if part)


class LiveSettingError(Exception):
    """A key cannot change during a run, or the value is invalid."""

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def split(key: str) -> LiveKey:
    """Return the parts of a dotted key.

    `env.` is short for `environment.`; names of environments may contain dots.

    Raises:
        LiveSettingError: The key is not a live setting.
    """
    section, _, rest = key.partition(".")
    if (allowed := SECTIONS.get(section)) is not None:
        if rest not in allowed:
            raise LiveSettingError(key, _fixed(allowed))
        return LiveKey(section, "", rest)
    env, _, field = rest.rpartition(".")
    if section not in {"env", "environment"} or not env:
        raise LiveSettingError(key, "must be broker.FIELD, orchestrator.FIELD or env.NAME.FIELD")
    if field not in ENVIRONMENT_SETTINGS:
        raise LiveSettingError(key, _fixed(ENVIRONMENT_SETTINGS))
    return LiveKey("environment", env, field)


def _fixed(allowed: Collection[str]) -> str:
    return f"cannot change during a run; use one of {', '.join(allowed)}"


def full(key: str) -> str:
    """Return a key as the configuration spells it; LiveSettingError if it is not a live setting."""
    return ".".join(split(key).path)


def value(config: RunConfig, key: str) -> Setting:
    """Return the current value of a live setting; an environment without configuration has the defaults."""
    section, env, field = split(key)
    holder = config.environment.get(env, config.unconfigured) if env else getattr(config, section)
    found: Setting = getattr(holder, field)
    return found


def require_workers(config: RunConfig, key: str) -> None:
    """Refuse a bound of workers that this run does not start.

    Raises:
        LiveSettingError: The run has no orchestrator, or no workers of the environment.
    """
    parts = split(key)
    if not parts.of_orchestrator:
        return
    if not config.orchestrator.enabled:
        raise LiveSettingError(key, "this run starts no workers: orchestrator.enabled is false")
    if parts.env and parts.env not in config.environment:
        raise LiveSettingError(key, f"this run starts no workers of {parts.env}")


def changed(config: RunConfig, values: Mapping[str, Setting], unconfigured: Collection[str]) -> RunConfig:
    """Return the configuration with new values.

    Args:
        config: The configuration before the change.
        values: Dotted key to new value.
        unconfigured: Environments that exist without configuration.

    Raises:
        LiveSettingError: It names the wrong key, or all keys if only their combination is wrong.
    """
    tree = config.model_dump()
    keys: dict[tuple[str, ...], str] = {}
    for key, new in values.items():
        section, env, field = split(key)
        if isinstance(new, float) and not math.isfinite(new):
            raise LiveSettingError(key, f"must be a finite number (got {new!r})")
        if env and env not in config.environment and env not in unconfigured:
            raise LiveSettingError(key, f"this run has no environment {env}")
        new = Text(new) if isinstance(new, str) else new  # it comes from a command line
        if env:
            tree["environment"].setdefault(env, config.unconfigured.model_dump())[field] = new
        else:
            tree[section][field] = new
        keys[split(key).path] = key
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0], keys) from None


def _explained(error: ErrorDetails, keys: Mapping[tuple[str, ...], str]) -> LiveSettingError:
    problem = problem_of(error)
    if (key := keys.get(tuple(str(part) for part in error["loc"]))) is not None:
        return LiveSettingError(key, problem)
    # A rule between sections begins its text with a dotted path.
    named, _, rest = problem.partition(": ")
    if (key := keys.get(tuple(named.split(".")))) is not None:
        return LiveSettingError(key, rest)
    return LiveSettingError(", ".join(keys.values()), problem)
