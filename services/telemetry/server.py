"""The telemetry service: samples the machine, publishes the samples, records every event of the run, and checks the
health of the rewards by the `step` events.

Its tasks are independent: a published sample travels through the broker and reaches the recorder like any other event.
Samples may be lost; each source numbers its own, so that a gap shows.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.engine_registry import EngineWatch, engines_of
from rolloutmq.bus.files import open_regular
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run, read_json
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.bus.transport.pubsub import RunPublisher
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.wire.control import StepDone, StepSkipped
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.schemas.wire.latency import LatencySample
from rolloutmq.schemas.wire.telemetry import (
    EngineSample,
    Event,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
    TelemetryEvent,
)
from rolloutmq.schemas.wire.training import BatchSettled, StepFigures
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.services.rewards.health_monitor import HealthMonitor
from rolloutmq.services.rewards.joining import FindingOutlet
from rolloutmq.services.telemetry.bounded_calls import CALL_TIMEOUT_S, BoundedCalls
from rolloutmq.services.telemetry.export.exporters import Exporters
from rolloutmq.services.telemetry.gpus import GpuBackend, GpuProbe
from rolloutmq.services.telemetry.nvml import Nvml
from rolloutmq.services.telemetry.probes import Disks, HostProbe, ProcessProbe, host_name
from rolloutmq.services.telemetry.recorder import RECORDED, Recorder

logger = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
"""Maximum time of events lost with a killed service."""
LISTEN_S: Final = 0.2
"""Maximum delay of the recorder's reaction to a stop request."""


def topic_of(event: TelemetryEvent) -> bytes:
    """Return the topic of a sample, by its subject."""
    match event:
        case HostSample():
            return topics.telemetry("host", event.host)
        case GpuSample():
            return topics.telemetry("gpu", event.uuid)
        case GpuAbsence():
            return topics.telemetry("gpu", event.host)
        case ProcessSample():
            return topics.telemetry("process", event.name)
        case EngineSample():
            return topics.telemetry("engine", event.name)
        case LatencySample():
            return topics.telemetry("latency", event.name)


def processes_of(layout: RunLayout) -> list[ProcessIdentity]:
    """Return the processes listed by launcher and orchestrator."""
    found: list[ProcessIdentity] = []
    for path in (layout.processes, layout.workers, layout.engines):
        try:
            found += read_json(path, list[ProcessIdentity]) or []
        except msgspec.DecodeError as error:
            logger.warning("process list unreadable path=%s error=%s", path, error)
    return found


class Sampler:
    """Takes one round of samples at a time; host and GPUs are independent."""

    def __init__(self, layout: RunLayout, gpus: GpuBackend, timeout_s: float = CALL_TIMEOUT_S) -> None:
        self._layout = layout
        self._host = HostProbe(layout.root)
        self._processes = ProcessProbe()
        self._gpus = GpuProbe(gpus, host_name(), timeout_s)
        self._calls = BoundedCalls(timeout_s)
        self._engines = EngineWatch()
        self._rounds = self._gpu_rounds = 0

    async def machine(self, now: float) -> list[TelemetryEvent]:
        """Sample host, processes and engines; a hanging disk is left out."""
        self._rounds += 1
        number = self._rounds
        disks = (await self._calls.make({"disks": self._host.disks}, now)).get("disks")
        free = disks if isinstance(disks, Disks) else Disks()
        samples: list[TelemetryEvent] = [self._host.sample(number, now, free)]
        samples += self._processes.sample(processes_of(self._layout), number, now)
        return samples + self._engine_samples()

    async def gpus(self, now: float) -> list[TelemetryEvent]:
        """Sample the GPUs; takes as long as their driver, up to its time-out."""
        self._gpu_rounds += 1
        gpus = await self._gpus.sample(self._gpu_rounds, now)
        return [gpus] if isinstance(gpus, GpuAbsence) else list(gpus)

    def _engine_samples(self) -> list[EngineSample]:
        """Return the engines' samples of themselves, each once."""
        samples: list[EngineSample] = []
        for seen in self._engines.look(engines_of(self._layout), time.monotonic()):
            one = seen.address
            if one.number and not seen.silent_s:
                samples.append(
                    EngineSample(
                        name=one.name,
                        number=one.number,
                        at=one.at,
                        url=one.url,
                        pid=one.pid,
                        in_hand=one.in_hand,
                        busy=one.busy,
                        draining=one.draining,
                    )
                )
        return samples


Round = Callable[[float], Awaitable[list[TelemetryEvent]]]
"""Samples of one moment; the argument is the wall clock."""


async def _publish(publisher: RunPublisher, sample: Round) -> None:
    """Publish one round of samples, if there is a broker.

    Raises:
        OSError: The samples cannot be taken.
    """
    publisher.follow()
    if publisher.is_open:
        for event in await sample(time.time()):
            publisher.publish(topic_of(event), event)


class Telemetry:
    """The telemetry service of one run.

    Args:
        config: Source of the interval and of the limits of health.
        layout: Location of the processes, the broker's address and the record.
        gpus: GPU driver; NVML by default.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, gpus: GpuBackend | None = None) -> None:
        self._config = config
        self._interval_s = config.telemetry.interval_s
        self._health = HealthMonitor(config.health, config.passes)
        self._layout = layout
        self._sampler = Sampler(layout, gpus or Nvml(host_name()))

    async def run(self, stop: Stop) -> None:
        """Sample and record until `stop`; events received by then are written."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample(stop, self._sampler.machine), name="sample")
            # A hanging driver costs a round of GPU samples, and nothing else.
            tasks.create_task(self._sample(stop, self._sampler.gpus), name="sample gpus")
            tasks.create_task(self._record(stop), name="record")

    async def _sample(self, stop: Stop, sample: Round) -> None:
        with contextlib.closing(RunPublisher(self._layout)) as publisher:
            throttle = LogThrottle()
            while not stop.event.is_set():
                try:
                    await _publish(publisher, sample)
                except OSError as error:  # such as want of descriptors: it costs this round
                    if throttle.is_due(str(error), time.monotonic()):
                        logger.warning("samples not taken error=%s", error)
                await _pause(stop, self._interval_s)

    async def _record(self, stop: Stop) -> None:
        recorder = Recorder(self._layout.metrics)
        exporters = Exporters(self._config, self._layout, recorder)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(exporters.run(stop), name="export")
            await self._record_events(stop, recorder, exporters)

    async def _record_events(self, stop: Stop, recorder: Recorder, exporters: Exporters) -> None:
        health = self._health
        try:
            with contextlib.suppress(FileNotFoundError), open_regular(self._layout.metrics) as record:
                health.replay(record)
        except OSError as error:
            logger.warning("health begins without the record path=%s error=%s", self._layout.metrics, error)
        flush_at = time.monotonic() + FLUSH_S
        with contextlib.closing(FindingOutlet(self._layout)) as outlet:
            await self._follow(stop, recorder, exporters, outlet, flush_at)
        recorder.close()

    async def _follow(
        self, stop: Stop, recorder: Recorder, exporters: Exporters, outlet: FindingOutlet, flush_at: float
    ) -> None:
        async with EventFeed(self._layout, RECORDED) as feed:
            while not stop.event.is_set():
                heard = await feed.next(LISTEN_S)
                if heard is not None and (event := recorder.record(*heard, time.time())) is not None:
                    exporters.feed(event)
                    for finding in self._findings(event):
                        outlet.tell(finding)
                if time.monotonic() >= flush_at:
                    recorder.flush()
                    flush_at = time.monotonic() + FLUSH_S
            while (heard := feed.try_next()) is not None:
                if (event := recorder.record(*heard, time.time())) is not None:
                    exporters.feed(event)

    def _findings(self, event: Event) -> list[HealthFinding]:
        """Return what an event says of the health of the rewards."""
        if isinstance(event, StepFigures):
            self._health.take_figures(event)
        if isinstance(event, StepDone | StepSkipped | BatchSettled):
            return self._health.feed(event, time.time())
        return []


async def _pause(stop: Stop, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.event.wait(), seconds)


def main(run_dir: Path) -> int:
    """Run the service until asked to stop; return its exit code."""

    async def serve(stop: Stop) -> None:
        await Telemetry(*load_run(run_dir)).run(stop)

    return run_service("telemetry", serve)
