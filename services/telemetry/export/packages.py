"""The packages that an export needs, and the extras that install them. Imports none of them."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from rolloutmq.schemas.config.run import TelemetryConfig
from rolloutmq.schemas.errors import MissingError, install_remedy


@dataclass(frozen=True, slots=True)
class Need:
    """A package of an extra.

    Attributes:
        key: Key of the configuration that needs it, with its value.
        module: Module of the package.
        extra: Extra of ours with the package.
    """

    key: str
    module: str
    extra: str

    @property
    def is_met(self) -> bool:
        """Whether the package is installed."""
        try:
            return importlib.util.find_spec(self.module) is not None
        except ModuleNotFoundError:  # its parent package is missing
            return False


SINKS: Final = {
    "wandb": Need('telemetry.sinks = ["wandb"]', "wandb", "wandb"),
    "tensorboard": Need('telemetry.sinks = ["tensorboard"]', "tensorboard", "tensorboard"),
    "mlflow": Need('telemetry.sinks = ["mlflow"]', "mlflow", "mlflow"),
}
TRACES: Final = Need("telemetry.trace_ratio", "opentelemetry.exporter.otlp.proto.http", "otel")


def needs_of(config: TelemetryConfig) -> Iterator[Need]:
    """Yield what a configuration needs."""
    for sink in config.sinks:
        yield SINKS[sink]
    if config.trace_ratio:
        yield TRACES


def missing_in(config: TelemetryConfig) -> Iterator[MissingError]:
    """Yield an error for each package that a configuration needs and this environment lacks."""
    for need in needs_of(config):
        if not need.is_met:
            yield MissingError(
                f"the package {need.module.split('.')[0]}",
                f"`{need.key}` needs it; {install_remedy(need.extra)}",
            )
