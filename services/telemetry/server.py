"""The telemetry service: samples the machine, publishes the samples, and records every event of the run.

Two tasks that know nothing of each other: what is published travels through the broker and comes back to the recorder
like every other event. Samples may be lost; each source numbers its own, so that a gap shows.
"""

import asyncio
import contextlib
import logging
import time
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus import topics
from rolloutmq.bus.engines import Watch, engines_of
from rolloutmq.bus.events import Publisher
from rolloutmq.bus.rundir import load_run, read_json
from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.schemas.telemetry import (
    EngineSample,
    GpuAbsence,
    GpuSample,
    HostSample,
    ProcessSample,
    TelemetryEvent,
)
from rolloutmq.services.runner import Stop, run_service
from rolloutmq.services.telemetry.feed import Feed, endpoints_of
from rolloutmq.services.telemetry.probes import (
    BoundedGpuProbe,
    GpuProbe,
    HostProbe,
    NvmlProbe,
    ProcessProbe,
)
from rolloutmq.services.telemetry.recorder import RECORDED, Recorder

logger = logging.getLogger(__name__)

FLUSH_S: Final = 1.0
"""How much of the record a killed service loses."""
LISTEN_S: Final = 0.2
"""How long the recorder may be deaf to the request to end."""


def topic_of(event: TelemetryEvent) -> bytes:
    """Return the topic of a sample, by what it is about."""
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


def processes_of(layout: RunLayout) -> list[ProcessIdentity]:
    """Return the processes that the launcher and the orchestrator say they started."""
    found: list[ProcessIdentity] = []
    for path in (layout.processes, layout.workers, layout.engines):
        try:
            found += read_json(path, list[ProcessIdentity]) or []
        except msgspec.DecodeError as error:
            logger.warning("process list unreadable path=%s error=%s", path, error)
    return found


class Sampler:
    """Takes one round of samples at a time."""

    def __init__(self, layout: RunLayout, gpus: GpuProbe) -> None:
        self._layout = layout
        self._host = HostProbe(layout.root)
        self._processes = ProcessProbe()
        self._gpus = BoundedGpuProbe(gpus)
        self._engines = Watch()
        self._number = 0

    async def round(self, now: float) -> list[TelemetryEvent]:
        """Sample everything; takes as long as the GPU driver does, up to its deadline."""
        self._number += 1
        number = self._number
        samples: list[TelemetryEvent] = [self._host.sample(number, now)]
        samples += self._processes.sample(processes_of(self._layout), number, now)
        samples += self._engine_samples()
        gpus = await self._gpus.sample(number, now)
        return samples + ([gpus] if isinstance(gpus, GpuAbsence) else list(gpus))

    def _engine_samples(self) -> list[EngineSample]:
        """Pass on what the engines say of themselves, once for each time that they say it."""
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


class Telemetry:
    """The service of one run.

    Args:
        config: Gives the interval.
        layout: Gives the processes, the broker's address and the place of the record.
        gpus: Where GPU samples come from.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, gpus: GpuProbe | None = None) -> None:
        self._interval_s = config.telemetry.interval_s
        self._layout = layout
        self._sampler = Sampler(layout, gpus or NvmlProbe())

    async def run(self, stop: Stop) -> None:
        """Sample and record until the end is asked for; what has arrived by then is written."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._sample(stop), name="sample")
            tasks.create_task(self._record(stop), name="record")

    async def _sample(self, stop: Stop) -> None:
        publisher: Publisher | None = None
        address = ""
        try:
            while not stop.event.is_set():
                endpoints = endpoints_of(self._layout)
                if endpoints is not None and endpoints.publish != address:
                    if publisher is not None:
                        publisher.close()
                    address, publisher = endpoints.publish, Publisher(endpoints.publish)
                if publisher is not None:
                    for event in await self._sampler.round(time.time()):
                        publisher.publish(topic_of(event), event)
                await _pause(stop, self._interval_s)
        finally:
            if publisher is not None:
                publisher.close()

    async def _record(self, stop: Stop) -> None:
        recorder = Recorder(self._layout.metrics)
        flush_at = time.monotonic() + FLUSH_S
        async with Feed(self._layout, RECORDED) as feed:
            while not stop.event.is_set():
                event = await feed.next(LISTEN_S)
                if event is not None:
                    recorder.record(*event, time.time())
                if time.monotonic() >= flush_at:
                    recorder.flush()
                    flush_at = time.monotonic() + FLUSH_S
            while (event := feed.try_next()) is not None:
                recorder.record(*event, time.time())
        recorder.flush()


async def _pause(stop: Stop, seconds: float) -> None:
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.event.wait(), seconds)


def main(run_dir: Path) -> int:
    """Run the service until it is told to end; returns its exit code."""

    async def serve(stop: Stop) -> None:
        await Telemetry(*load_run(run_dir)).run(stop)

    return run_service("telemetry", serve)
