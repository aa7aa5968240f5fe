"""The exporters of one run: they get each recorded event, and none of them costs the record anything.

An exporter that raises is logged once for each reason, and goes on with the next event.
"""

import asyncio
import logging
import time
from typing import TYPE_CHECKING

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.process.runner import Stop

if TYPE_CHECKING:
    from rolloutmq.services.telemetry.export.prometheus.families import Families
    from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics
    from rolloutmq.services.telemetry.recorder import Recorder

logger = logging.getLogger(__name__)


class Exporters:
    """What `[telemetry]` asks for: the endpoint of Prometheus. Loads no library of an exporter that is off.

    Args:
        config: The configuration of the run.
        recorder: Counts what telemetry lost.
    """

    def __init__(self, config: RunConfig, recorder: "Recorder") -> None:
        self._config = config
        self._recorder = recorder
        self._metrics = _metrics_of(config) if config.telemetry.metrics_port else None
        self._why = ""

    def feed(self, event: Event) -> None:
        """Pass on an event. Raises nothing, and waits for nobody."""
        try:
            if self._metrics is not None:
                self._metrics.feed(event, time.monotonic())
        except Exception as error:
            if self._why != (why := f"{type(error).__name__}: {error}"):
                logger.exception("event not exported kind=%s", event.__struct_config__.tag)
            self._why = why

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`."""
        if self._metrics is None:
            return
        from rolloutmq.services.telemetry.export.prometheus.endpoint import serve_metrics

        await serve_metrics(self._config, self._families, stop)

    def _families(self) -> "Families":
        from rolloutmq.services.telemetry.export.prometheus.run_metrics import SelfCounts

        assert self._metrics is not None
        counts = SelfCounts(self._recorder.malformed, self._recorder.lost)
        return self._metrics.families(asyncio.get_running_loop().time(), counts)


def _metrics_of(config: RunConfig) -> "RunMetrics":
    from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics

    return RunMetrics(config.run.name, config.telemetry.interval_s)
