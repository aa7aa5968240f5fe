"""Prometheus itself scrapes the endpoint and answers every query of the dashboard: `make test-export`."""

import asyncio
import contextlib
import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from tests.services.telemetry.export.events import every_kind
from tests.services.telemetry.export.prometheus.test_endpoint import config, free_port
from tests.services.telemetry.export.test_deploy import queries

from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.prometheus.endpoint import serve_metrics
from rolloutmq.services.telemetry.export.prometheus.families import Families
from rolloutmq.services.telemetry.export.prometheus.run_metrics import RunMetrics, SelfCounts

pytestmark = [
    pytest.mark.rival,
    pytest.mark.skipif(
        shutil.which("prometheus") is None, reason="prometheus is missing: apt-get install prometheus"
    ),
]
DEADLINE_S = 120.0
CONFIGURATION = """
global: {{scrape_interval: 500ms, scrape_timeout: 500ms}}
scrape_configs:
  - job_name: rolloutmq
    static_configs: [{{targets: ["127.0.0.1:{port}"]}}]
"""


class Fed:
    """Metrics of a run in which everything happens again before each page."""

    def __init__(self) -> None:
        self._metrics = RunMetrics("run", 1.0)

    def __call__(self) -> Families:
        now = asyncio.get_running_loop().time()
        for event in every_kind():
            self._metrics.feed(event, now)
        counts = SelfCounts(1, 2, (("wandb", 3),), (("wandb", 4),))
        return self._metrics.families(now, counts)


@contextlib.asynccontextmanager
async def scraping(port: int, directory: Path) -> AsyncIterator[str]:
    """Run Prometheus for the block; yield the address of its queries."""
    own, file = free_port(), directory / "prometheus.yml"
    file.write_text(CONFIGURATION.format(port=port))
    with (directory / "log").open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            "prometheus",
            f"--config.file={file}",
            f"--storage.tsdb.path={directory / 'data'}",
            f"--web.listen-address=127.0.0.1:{own}",
            stdout=log,
            stderr=log,
        )
    try:
        yield f"http://127.0.0.1:{own}/api/v1/query"
    finally:
        process.terminate()
        await asyncio.wait_for(process.wait(), DEADLINE_S)


def filled(query: str) -> str:
    for variable in ("$job", "$instance", "$env"):
        query = query.replace(f'"{variable}"', '".*"')
    return query.replace("$__rate_interval", "1m")


async def answer(session: aiohttp.ClientSession, url: str, query: str) -> list[Any]:
    """Return the series that answer a query; none while Prometheus does not answer."""
    try:
        async with session.get(url, params={"query": query}) as response:
            told = json.loads(await response.read())
    except (aiohttp.ClientError, json.JSONDecodeError):
        return []
    assert told["status"] == "success", told
    return list(told["data"]["result"])


async def test_every_query_of_the_dashboard_has_an_answer(tmp_path: Path) -> None:
    run, stop = config(), Stop()
    serving = asyncio.create_task(serve_metrics(run, Fed(), stop))
    left = {*map(filled, queries())}
    try:
        async with (
            scraping(run.telemetry.metrics_port, tmp_path) as url,
            aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(DEADLINE_S)) as session,
        ):
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DEADLINE_S):
                    while left:
                        left = {query for query in left if not await answer(session, url, query)}
                        await asyncio.sleep(0.5)
            assert await answer(session, url, "rolloutmq_no_such_metric") == []
            (quantile,) = await answer(
                session,
                url,
                'histogram_quantile(0.5, sum by (le) (rate(rolloutmq_hop_duration_seconds_bucket{hop="queue"}[1m])))',
            )
    finally:
        stop.request("test")
        await asyncio.wait_for(serving, DEADLINE_S)
    assert not left
    assert 0.2 < float(quantile["value"][1]) <= 0.5  # the bucket of half a second
