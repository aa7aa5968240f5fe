"""The configuration of this host for a run of another one: checked, with paths of this host in place of the other's."""

from collections.abc import Iterable
from pathlib import Path

from rolloutmq.bus.transport.mirror.run_copy import Accept
from rolloutmq.bus.transport.mirror.shared_config import placed, told
from rolloutmq.launch.commands.remote.own_code import OwnCode
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout


def reading(data: bytes, layout: RunLayout) -> RunConfig:
    """Accept a configuration for programs that only look at the run, or give it orders."""
    return placed(told(data), layout, layout.root, None)


def rolling(environments: Iterable[str], own: OwnCode) -> Accept:
    """Return how a configuration is accepted for workers of environments: it names only what this host allows."""

    def accept(data: bytes, layout: RunLayout) -> RunConfig:
        config = told(data)
        for name in environments:
            if name not in config.environment:
                known = ", ".join(config.environment) or "none"
                raise ConfigError(
                    f"environment.{name}",
                    f"the run has no such environment that can be joined (it has: {known})",
                )
            own.require(name, config.environment[name])
        return placed(config, layout, own.directory, None)

    return accept


def training(model: Path | None) -> Accept:
    """Return how a configuration is accepted for ranks of the trainer and for engines.

    Args:
        model: Directory of the model on this host, for a run that has one by path.
    """

    def accept(data: bytes, layout: RunLayout) -> RunConfig:
        config = told(data)
        if config.model.path and model is None:
            raise ConfigError(
                "--model", "is required, because the run has a model by path: name its directory on this host"
            )
        if model is not None and not model.is_dir():
            raise ConfigError("--model", f"there is no directory {model}")
        return placed(config, layout, layout.root, model.resolve() if model is not None else None)

    return accept


def receiving(data: bytes, layout: RunLayout) -> RunConfig:
    """Accept a configuration for a relay: the run streams its weights."""
    config = told(data)
    if config.weights.backend != "stream":
        raise ConfigError(
            "weights.backend",
            f"must be stream, or the run sends no weights to other hosts (got {config.weights.backend}); "
            "set it in the configuration of the run",
        )
    return placed(config, layout, layout.root, None)
