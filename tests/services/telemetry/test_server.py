"""The service publishes its samples, and what comes back as an event goes into its record."""

import asyncio
import errno
import os
import threading
from pathlib import Path

import pytest
from tests.services.rewards.test_health_monitor import of, skipped, step
from tests.services.telemetry.bus import OneGpu, forwarding, recorded

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.bus.transport.way import route
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.config.rewards import HealthConfig
from rolloutmq.schemas.config.run import RunConfig, TelemetryConfig
from rolloutmq.schemas.files import Endpoints, InferenceAddress, RunLayout
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.telemetry import EngineSample, GpuAbsence, HostSample, ProcessSample
from rolloutmq.services.process.identity import identify
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.server import Sampler, Telemetry, processes_of, topic_of

DEADLINE_S = 60.0


async def test_samples_are_published_and_recorded(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    config = RunConfig(telemetry=TelemetryConfig(interval_s=0.05))
    write_json(layout.processes, [identify("me", Role.WORKER, os.getpid(), "token/me")])
    stop = Stop()
    wanted = {"host_sample", "process_sample", "gpu_sample"}
    service = asyncio.create_task(Telemetry(config, layout, OneGpu()).run(stop))
    with forwarding(layout):
        async with asyncio.timeout(DEADLINE_S):
            while not wanted <= recorded(layout).keys():
                assert not service.done()
                await asyncio.sleep(0.05)
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)

    lines = recorded(layout)
    assert lines["process_sample"][0]["topic"] == "telemetry.process.me"
    assert lines["gpu_sample"][0]["topic"] == "telemetry.gpu.GPU-7"
    numbers = [line["number"] for line in lines["host_sample"]]
    assert numbers == sorted(set(numbers))


@pytest.mark.parametrize(
    ("signal", "score", "finding"),
    [(True, 0.5, "collapse"), (False, 0.5, "collapse"), (True, 1.0, "solved")],
)
async def test_findings_about_scores_are_published_and_recorded(
    run_dir: Path, signal: bool, score: float, finding: str
) -> None:
    layout = RunLayout(run_dir)
    config = RunConfig(health=HealthConfig(window_steps=2))
    stop, number = Stop(), 0
    service = asyncio.create_task(Telemetry(config, layout, OneGpu()).run(stop))
    with forwarding(layout), Publisher(f"ipc://{layout.root}/publish") as trainer:
        async with asyncio.timeout(DEADLINE_S):
            while not any(one["env"] == "math" for one in recorded(layout)["health_finding"]):
                assert not service.done()
                number += 1  # the first ones may be published before anybody listens
                flat = of("math", [score, score])
                if signal:
                    trainer.publish(topics.STEP, step(number, flat))
                else:
                    trainer.publish(topics.telemetry("skipped", "r"), skipped(0, flat))
                await asyncio.sleep(0.05)
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)
    told = next(one for one in recorded(layout)["health_finding"] if one["env"] == "math")
    assert (told["topic"], told["finding"]) == ("telemetry.health.math", finding)
    assert told["source"] == "telemetry"
    assert told["numbers"]["flat" if finding == "collapse" else "share"] == 1.0


async def test_a_driver_that_hangs_stops_no_other_sample(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    gpu = OneGpu()
    gpu.free.clear()
    stop = Stop()
    config = RunConfig(telemetry=TelemetryConfig(interval_s=0.02))
    service = asyncio.create_task(Telemetry(config, layout, gpu).run(stop))
    try:
        with forwarding(layout):
            async with asyncio.timeout(DEADLINE_S):
                # It hangs for the whole of it, and longer than all these samples take.
                while len(recorded(layout)["host_sample"]) < 10:
                    assert not service.done()
                    await asyncio.sleep(0.05)
            assert all(line["state"] == "silent" for line in recorded(layout)["gpu_sample"])
            stop.request("test")
            await asyncio.wait_for(service, DEADLINE_S)
    finally:
        gpu.free.set()


async def test_a_disk_that_hangs_stops_no_other_sample(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    released = threading.Event()
    monkeypatch.setattr("psutil.disk_usage", lambda _: released.wait())
    write_json(RunLayout(run_dir).processes, [identify("me", Role.WORKER, os.getpid(), "token/me")])
    sampler = Sampler(RunLayout(run_dir), OneGpu(), timeout_s=0.2)
    try:
        for _ in range(2):
            found = await sampler.machine(1.0)
            host, process = found
            assert isinstance(host, HostSample)
            assert isinstance(process, ProcessSample)
            assert (host.disk_free_bytes, host.memory_total_bytes > 0) == (0, True)
            assert len(await sampler.gpus(1.0)) == 1
    finally:
        released.set()


async def test_service_without_a_broker_waits_and_ends_when_told(run_dir: Path) -> None:
    stop = Stop()
    service = asyncio.create_task(Telemetry(RunConfig(), RunLayout(run_dir), OneGpu()).run(stop))
    await asyncio.sleep(0)
    stop.request("test")

    await asyncio.wait_for(service, DEADLINE_S)

    assert not RunLayout(run_dir).metrics.exists()


def test_processes_of_launcher_and_orchestrator_are_joined(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RunLayout(run_dir)
    myself = identify("me", Role.WORKER, os.getpid(), "token/me")
    write_json(layout.processes, [myself])
    assert processes_of(layout) == [myself]

    layout.workers.write_text("{}")

    assert processes_of(layout) == [myself]
    assert "process list unreadable" in caplog.text


async def test_what_engines_say_is_passed_on_once(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    sampler = Sampler(layout, OneGpu())

    async def engines() -> list[EngineSample]:
        return [one for one in await sampler.machine(0.0) if isinstance(one, EngineSample)]

    for name, number in (("inference", 1), ("inference-1", 0)):  # the second counts no beats
        address = InferenceAddress(url="http://x", pid=3, name=name, number=number, in_hand=5, busy=0.5)
        write_json(layout.engine(name), address)
    (one,) = await engines()
    assert (one.name, one.pid, one.in_hand, one.busy) == ("inference", 3, 5, 0.5)
    assert topic_of(one) == b"telemetry.engine.inference"
    assert await engines() == []
    write_json(layout.inference, InferenceAddress(url="http://x", pid=3, number=2))
    assert [one.number for one in await engines()] == [2]


def test_absence_of_gpus_is_told_under_the_name_of_the_host() -> None:
    assert topic_of(GpuAbsence(host="h", number=1, at=0.0, why="none")) == b"telemetry.gpu.h"


async def test_want_of_descriptors_costs_rounds_of_samples_and_not_the_service(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    layout, looks = RunLayout(run_dir), 0
    real = endpoints_of

    def short(asked: RunLayout) -> Endpoints | None:
        nonlocal looks
        looks += 1
        if looks <= 8:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(asked)

    monkeypatch.setattr(route, "endpoints_of", short)
    stop = Stop()
    config = RunConfig(telemetry=TelemetryConfig(interval_s=0.05))
    service = asyncio.create_task(Telemetry(config, layout, OneGpu()).run(stop))
    with forwarding(layout):
        async with asyncio.timeout(DEADLINE_S):
            while "host_sample" not in recorded(layout):
                assert not service.done()
                await asyncio.sleep(0.05)
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)
    told = caplog.text.count("broker not looked for")
    assert 1 <= told <= 4, "each connection tells it once"
