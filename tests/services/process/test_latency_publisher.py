"""Samples reach the subscribers of a run, follow its broker, and hold nobody up."""

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.schemas.config.run import RunConfig, TelemetryConfig
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.latency import Hop, LatencySample
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.process.latency_publisher import GPUS_VARIABLE, own_gpus, publishing, recorder_of
from rolloutmq.services.process.latency_recorder import LatencyKey, LatencyRecorder

LIMIT_S = 60.0
INTERVAL_S = 0.05
KEY = LatencyKey(Hop.ROLLOUT, "e")


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():  # noqa: ASYNC110 - a task of the code under test changes it
            await asyncio.sleep(0.01)


async def heard(broker: Broker, recorder: LatencyRecorder) -> LatencySample:
    """Measure until a sample arrives: those before the connection stands are lost."""
    async with Subscriber(broker.endpoints.events, [b"telemetry.latency.w-0"]) as events:
        async with asyncio.timeout(LIMIT_S):
            while True:
                recorder.add(KEY, 0.25, tokens=3, source="g")
                event = events.try_next()
                if event is not None:
                    sample = codec.decode_event(event[1])
                    assert isinstance(sample, LatencySample)
                    return sample
                await asyncio.sleep(INTERVAL_S)


async def test_samples_arrive_and_follow_a_broker_that_moved(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), RunConfig()
    write_json(layout.config, config)
    recorder = LatencyRecorder("w-0", time.time())
    async with publishing(recorder, layout, INTERVAL_S):
        with running_broker(config, layout) as broker:
            sample = await heard(broker, recorder)
            assert (sample.name, sample.rows[0].env, sample.rows[0].slowest_id) == ("w-0", "e", "g")
        recorder.add(KEY, 0.25)  # meanwhile the broker is away
        await asyncio.sleep(3 * INTERVAL_S)
        with running_broker(config, layout) as broker:
            assert (await heard(broker, recorder)).number > sample.number


async def test_the_last_sample_is_told_at_the_end(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), RunConfig()
    write_json(layout.config, config)
    recorder = LatencyRecorder("w-0", time.time())
    with running_broker(config, layout) as broker:
        async with Subscriber(broker.endpoints.events, [b"telemetry.latency.w-0"]) as events:
            async with publishing(recorder, layout, INTERVAL_S):
                await heard(broker, recorder)
                while events.try_next() is not None:
                    pass
                recorder.add(LatencyKey(Hop.ROLLOUT, "last"), 1.0)
            async with asyncio.timeout(LIMIT_S):
                async for _, payload in events:
                    sample = codec.decode_event(payload)
                    assert isinstance(sample, LatencySample)
                    if any(row.env == "last" for row in sample.rows):
                        break


async def test_a_run_without_a_broker_or_with_a_bad_address_costs_samples_alone(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    recorder, layout = LatencyRecorder("w-0", time.time()), RunLayout(run_dir)
    async with publishing(recorder, layout, 0.01):
        recorder.add(KEY, 1.0)
        await until(lambda: not recorder)  # it is told to nobody, and not kept
        bad = Endpoints(ingest="x", serve="x", events="x", publish="nowhere", pid=1, epoch=1)
        write_json(layout.endpoints, bad)
        recorder.add(KEY, 1.0)
        await until(lambda: "latencies not published" in caplog.text)


@pytest.mark.parametrize(
    ("value", "gpus"),
    [
        ("GPU-aa, GPU-bb", ("GPU-aa", "GPU-bb")),
        ("GPU-aa", ("GPU-aa",)),
        ("0,1", ()),
        ("", ()),
        ("GPU-aa,1", ()),
    ],
)
def test_gpus_are_those_assigned_by_uuid(
    monkeypatch: pytest.MonkeyPatch, value: str, gpus: tuple[str, ...]
) -> None:
    monkeypatch.setenv(GPUS_VARIABLE, value)
    assert own_gpus() == gpus


async def test_a_run_without_latencies_opens_no_connection(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    recorder = recorder_of("w-0", TelemetryConfig(latencies=False))
    before = asyncio.all_tasks()
    async with publishing(recorder, layout, INTERVAL_S):
        recorder.add(KEY, 1.0)
        assert not recorder
        assert asyncio.all_tasks() == before
