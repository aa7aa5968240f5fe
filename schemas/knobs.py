"""Knobs: what of a configuration may change while the run goes on, and what values it may have.

Each is a field of `BrokerConfig` or `EnvironmentConfig`, named by its dotted key; types and bounds are those of the
models. A change is validated as a whole, together with all that is not changed.
"""

import math
from collections.abc import Collection, Mapping
from typing import Final

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.control import Setting

BROKER_KNOBS: Final = (
    "high_bytes",
    "high_groups",
    "ram_bytes",
    "exact_wait_s",
    "silent_env_s",
    "lease_s",
    "silence_s",
    "retain_bytes",
)
ENVIRONMENT_KNOBS: Final = ("weight", "min_share", "max_staleness", "stale", "pacing", "high_bytes")


class KnobError(Exception):
    """A key that may not change, or a value that it may not have."""

    def __init__(self, key: str, reason: str) -> None:
        self.key = key
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.key}: {self.reason}"


def split(key: str) -> tuple[str, str]:
    """Return the environment, empty for the broker, and the field that a dotted key names.

    `env.` may stand for `environment.`; names of environments may contain dots.

    Raises:
        KnobError: No such knob.
    """
    section, _, rest = key.partition(".")
    if section == "broker":
        if rest not in BROKER_KNOBS:
            raise KnobError(key, f"may not change while the run goes on; may: {', '.join(BROKER_KNOBS)}")
        return "", rest
    env, _, field = rest.rpartition(".")
    if section not in {"env", "environment"} or not env:
        raise KnobError(key, "must be broker.FIELD or env.NAME.FIELD")
    if field not in ENVIRONMENT_KNOBS:
        raise KnobError(key, f"may not change while the run goes on; may: {', '.join(ENVIRONMENT_KNOBS)}")
    return env, field


def full(key: str) -> str:
    """Return a key as the configuration writes it; KnobError if it is none."""
    env, field = split(key)
    return f"environment.{env}.{field}" if env else f"broker.{field}"


def value(config: RunConfig, key: str) -> Setting:
    """Return the present value of a knob; an environment that is not configured has the defaults."""
    env, field = split(key)
    section = config.environment.get(env, config.unconfigured) if env else config.broker
    found: Setting = getattr(section, field)
    return found


def changed(config: RunConfig, values: Mapping[str, Setting], unconfigured: Collection[str]) -> RunConfig:
    """Return the configuration with other values.

    Args:
        config: The configuration before.
        values: Dotted key to new value.
        unconfigured: Environments that exist without being configured.

    Raises:
        KnobError: With the key that is wrong; with all of them if only together they contradict something.
    """
    tree = config.model_dump()
    keys: dict[tuple[str, ...], str] = {}
    for key, new in values.items():
        env, field = split(key)
        if isinstance(new, float) and not math.isfinite(new):
            raise KnobError(key, f"must be a finite number (got {new!r})")
        if env and env not in config.environment and env not in unconfigured:
            raise KnobError(key, f"{env} is no environment of this run")
        if env:
            tree["environment"].setdefault(env, config.unconfigured.model_dump())[field] = new
        else:
            tree["broker"][field] = new
        keys[("environment", env, field) if env else ("broker", field)] = key
    try:
        return RunConfig.model_validate(tree)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0], keys) from None


def _explained(error: ErrorDetails, keys: Mapping[tuple[str, ...], str]) -> KnobError:
    key = keys.get(tuple(str(part) for part in error["loc"]))
    problem = error["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if key is None:
        return KnobError(", ".join(keys.values()), problem)
    return KnobError(key, f"{problem} (got {error['input']!r})")
