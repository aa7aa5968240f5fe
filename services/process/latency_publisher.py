"""Publishes the latency samples of a process through the broker of its run, beside its work.

Loss: samples are lost while the broker is away or telemetry is slow, and with a killed process; nothing waits for them.
A process whose broker is away keeps no more than its rows. A sample costs one message each `telemetry.interval_s`, and
none while nothing was measured.
"""

import asyncio
import logging
import os
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Final

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.config.run import TelemetryConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.process.latency_recorder import LatencyRecorder

logger = logging.getLogger(__name__)

GPUS_VARIABLE: Final = "CUDA_VISIBLE_DEVICES"


def own_host() -> str:
    """Return the name of this host, as in `host_sample`."""
    return socket.gethostname() or "localhost"


def own_gpus() -> tuple[str, ...]:
    """Return the UUIDs of the GPUs assigned to this process; none if it was given none, or indexes."""
    named = tuple(part.strip() for part in os.environ.get(GPUS_VARIABLE, "").split(","))
    return named if all(part.startswith("GPU-") for part in named) else ()


def recorder_of(name: str, config: TelemetryConfig) -> LatencyRecorder:
    """Return the recorder of this process under a name of the run; it records nothing if the configuration says so."""
    return LatencyRecorder(name, time.time(), host=own_host(), gpus=own_gpus(), enabled=config.latencies)


@asynccontextmanager
async def publishing(
    recorder: LatencyRecorder, layout: RunLayout, interval_s: float
) -> AsyncIterator[LatencyRecorder]:
    """Publish the samples of a recorder for the duration of the block, and a last one at its end."""
    if not recorder.enabled:
        yield recorder
        return
    publisher = LatencyPublisher(recorder, layout)
    running = asyncio.create_task(publisher.run(interval_s), name="latencies")
    try:
        yield recorder
    finally:
        running.cancel()
        await asyncio.wait({running})
        publisher.close()


class LatencyPublisher:
    """The connection of one recorder to the broker of its run, wherever that is now."""

    def __init__(self, recorder: LatencyRecorder, layout: RunLayout) -> None:
        self._recorder = recorder
        self._throttle = LogThrottle()
        self._publisher = RunPublisher(layout)

    async def run(self, interval_s: float) -> None:
        """Publish a sample each interval until cancelled."""
        while True:
            # Ahead of the first sample: one that is sent before a connection stands is lost.
            self._try(self._publisher.follow)
            await asyncio.sleep(interval_s)
            self.publish()

    def publish(self) -> None:
        """Publish what was measured since the last sample, or drop it while there is no broker. Does not block."""
        self._try(self._publish)

    def close(self) -> None:
        """Publish the last sample and close the connection; it has half a second to leave."""
        self.publish()
        self._publisher.close()

    def _publish(self) -> None:
        for sample in self._recorder.samples(time.time()):
            self._publisher.publish(topics.telemetry("latency", sample.name), sample)

    def _try(self, action: Callable[[], None]) -> None:
        """Log an error, which costs the sample: the process measures beside its work."""
        try:
            action()
        except Exception as error:  # noqa: BLE001 - whatever it is, the work goes on
            if self._throttle.is_due(str(error), time.monotonic()):
                logger.warning("latencies not published error=%s", error)
