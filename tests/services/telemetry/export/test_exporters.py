"""Telemetry exports what it hears, and records on whatever an exporter does."""

import asyncio
import json
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.services.telemetry.bus import OneGpu, forwarding
from tests.services.telemetry.export.events import pressure, settled
from tests.services.telemetry.export.prometheus.pages import Sample, key, samples_of
from tests.services.telemetry.export.prometheus.test_endpoint import free_port

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.schemas.config.run import RunConfig, TelemetryConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.exporters import Exporters
from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics
from rolloutmq.services.telemetry.recorder import Recorder
from rolloutmq.services.telemetry.server import Telemetry

DEADLINE_S = 60.0


def config(**fields: Any) -> RunConfig:
    return RunConfig(telemetry=TelemetryConfig(interval_s=0.05, **fields))


async def scraped(port: int) -> dict[Sample, float]:
    """Return the metrics; none while nobody listens."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"http://127.0.0.1:{port}/metrics") as answer,
        ):
            return samples_of(await answer.text())
    except aiohttp.ClientConnectionError:
        return {}


async def test_events_of_the_bus_are_on_the_page(run_dir: Path) -> None:
    layout, port = RunLayout(run_dir), free_port()
    stop, number = Stop(), 0
    service = asyncio.create_task(Telemetry(config(metrics_port=port), layout, OneGpu()).run(stop))
    wanted = {key("gpu_up", gpu="GPU-7"), key("up"), key("batches_total", outcome="step")}
    page: dict[Sample, float] = {}
    with forwarding(layout), Publisher(f"ipc://{layout.root}/publish") as publisher:
        async with asyncio.timeout(DEADLINE_S):
            while not wanted <= {name for name, value in page.items() if value}:
                assert not service.done()
                number += 1  # the first ones may be published before anybody listens
                publisher.publish(topics.PRESSURE, pressure())
                publisher.publish(topics.telemetry("settled", "run"), settled(number))
                await asyncio.sleep(0.05)
                page = await scraped(port)
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)
    assert page[key("batch_reward")] == 0.5
    assert await scraped(port) == {}


async def test_without_a_port_nobody_listens_and_no_library_is_loaded(run_dir: Path) -> None:
    code = (
        "import sys; from rolloutmq.services.telemetry import server;"
        "from rolloutmq.schemas.config.run import RunConfig; from rolloutmq.schemas.files import RunLayout;"
        f"server.Telemetry(RunConfig(), RunLayout(server.Path({str(run_dir)!r})));"
        "print(*{'prometheus_client', 'aiohttp', 'wandb', 'opentelemetry'} & sys.modules.keys())"
    )
    from sys import executable

    process = await asyncio.create_subprocess_exec(executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    output, _ = await asyncio.wait_for(process.communicate(), DEADLINE_S)
    assert (process.returncode, output.decode().split()) == (0, [])


def test_an_exporter_that_raises_is_logged_once_and_costs_the_record_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise ValueError("no")

    monkeypatch.setattr(RunMetrics, "feed", broken)
    exporters = Exporters(config(metrics_port=1), RunLayout(tmp_path), Recorder(tmp_path / "metrics.jsonl"))
    for _ in range(3):
        exporters.feed(settled())
    assert [record.getMessage() for record in caplog.records] == ["event not exported kind=batch_settled"]


async def test_a_port_in_use_does_not_end_telemetry(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    layout = RunLayout(run_dir)
    stop = Stop()
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    service = asyncio.create_task(Telemetry(config(metrics_port=port), layout, OneGpu()).run(stop))
    with forwarding(layout):
        async with asyncio.timeout(DEADLINE_S):
            while not (layout.metrics.exists() and layout.metrics.read_text()):
                assert not service.done()
                await asyncio.sleep(0.05)
        stop.request("test")
        await asyncio.wait_for(service, DEADLINE_S)
    server.close()
    await server.wait_closed()
    assert json.loads(layout.metrics.read_text().splitlines()[0])["kind"]
    assert f"metrics endpoint not listening address=127.0.0.1:{port}" in caplog.text
