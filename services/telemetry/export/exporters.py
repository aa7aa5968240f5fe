"""The exporters of one run: they get each recorded event, and none of them costs the record anything.

An exporter that raises is logged once for each reason, and goes on with the next event.
"""

import asyncio
import logging
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import install_remedy
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import python_command
from rolloutmq.schemas.wire.telemetry import Event
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.packages import SINKS, TRACES
from rolloutmq.services.telemetry.export.sinks.outlet import SinkOutlet
from rolloutmq.services.telemetry.export.sinks.points import Points
from rolloutmq.services.telemetry.recorder import Recorder

if TYPE_CHECKING:
    from rolloutmq.services.telemetry.export.prometheus.families import Families
    from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics

logger = logging.getLogger(__name__)


class Exporters:
    """What `[telemetry]` asks for: `/metrics`, sinks and traces. Loads no library of an exporter that is off.

    Args:
        config: The configuration of the run.
        layout: The run directory.
        recorder: Counts what telemetry lost.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, recorder: Recorder) -> None:
        self._config = config
        self._recorder = recorder
        self._metrics = _metrics_of(config) if config.telemetry.metrics_port else None
        self._points = Points()
        self._outlets = [*_outlets_of(config, layout)]
        self._traces = [*_traces_of(config, layout)]
        self._why = ""

    def feed(self, event: Event) -> None:
        """Pass on an event. Raises nothing, and waits for nobody."""
        try:
            now = time.monotonic()
            if self._metrics is not None:
                self._metrics.feed(event, now)
            if self._outlets:
                for point in self._points.feed(event, now, time.time()):
                    for outlet in self._outlets:
                        outlet.put(point)
        except Exception as error:
            if self._why != (why := f"{type(error).__name__}: {error}"):
                logger.exception("event not exported kind=%s", event.__struct_config__.tag)
            self._why = why

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`, and let the sinks finish."""
        async with asyncio.TaskGroup() as tasks:
            for outlet in (*self._outlets, *self._traces):
                tasks.create_task(outlet.run(stop), name=f"sink {outlet.name}")
            if self._metrics is not None:
                from rolloutmq.services.telemetry.export.prometheus.endpoint import serve_metrics

                tasks.create_task(serve_metrics(self._config, self._families, stop), name="metrics")

    def _families(self) -> "Families":
        from rolloutmq.services.telemetry.export.prometheus.run_metrics import SelfCounts

        assert self._metrics is not None
        all_ = (*self._outlets, *self._traces)
        counts = SelfCounts(
            self._recorder.malformed,
            self._recorder.lost,
            tuple((outlet.name, outlet.taken) for outlet in all_),
            tuple((outlet.name, outlet.dropped) for outlet in all_),
        )
        return self._metrics.families(asyncio.get_running_loop().time(), counts)


def _metrics_of(config: RunConfig) -> "RunMetrics":
    from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics

    return RunMetrics(config.run.name, config.telemetry.interval_s)


def _outlets_of(config: RunConfig, layout: RunLayout) -> Iterator[SinkOutlet]:
    """Yield the sinks whose package is installed."""
    for name in dict.fromkeys(config.telemetry.sinks):
        if not SINKS[name].is_met:
            logger.error("sink not started sink=%s: its package is missing; %s", name, install_remedy(name))
            continue
        module = "rolloutmq.services.telemetry.export.sinks.program"
        yield SinkOutlet(name, python_command(sys.executable, module, name, str(layout.root)))


def _traces_of(config: RunConfig, layout: RunLayout) -> Iterator[SinkOutlet]:
    """Yield the process that sends traces, if there are any. It reads them itself, so it gets no points."""
    if not config.telemetry.trace_ratio:
        return
    if not TRACES.is_met:
        logger.error("traces not started: the package is missing; %s", install_remedy(TRACES.extra))
        return
    module = "rolloutmq.services.telemetry.export.traces.program"
    yield SinkOutlet(TRACES.extra, python_command(sys.executable, module, str(layout.root)))
