"""Requests are counted by declared route and class of status."""

import asyncio

import pytest

from rolloutmq.schemas.wire.latency import LatencyRow
from rolloutmq.services.http_server.request_latencies import (
    OTHER,
    RequestLatencies,
    count_tokens,
    status_class,
)
from rolloutmq.services.process.latency_recorder import LatencyRecorder


@pytest.mark.parametrize(
    ("status", "shown"), [(200, "2xx"), (404, "4xx"), (503, "5xx"), (0, ""), (99, ""), (600, "")]
)
def test_a_status_has_a_class(status: int, shown: str) -> None:
    assert status_class(status) == shown


def rows_of(recorder: LatencyRecorder) -> dict[tuple[str, str], LatencyRow]:
    (sample,) = recorder.samples(1.0)
    return {(row.route, row.status): row for row in sample.rows}


def test_routes_and_classes_are_apart_and_paths_of_clients_are_one() -> None:
    recorder = LatencyRecorder("gateway", 0.0)
    latencies = RequestLatencies(recorder, {"/info"})
    for path, status in [("/info", 200), ("/info", 422), ("/a", 404), ("/b", 404), ("/info", 200)]:
        with latencies.request(path) as exchange:
            exchange.status = status
    counts = {name: row.durations.count for name, row in rows_of(recorder).items()}
    assert counts == {("/info", "2xx"): 2, ("/info", "4xx"): 1, (OTHER, "4xx"): 2}


def test_a_request_whose_client_left_has_no_class() -> None:
    recorder = LatencyRecorder("gateway", 0.0)
    with pytest.raises(asyncio.CancelledError), RequestLatencies(recorder, {"/"}).request("/"):
        raise asyncio.CancelledError
    assert rows_of(recorder).keys() == {("/", "")}


async def test_tokens_count_for_the_request_of_their_task() -> None:
    recorder = LatencyRecorder("inference", 0.0)
    latencies = RequestLatencies(recorder, {"/a", "/b"})

    async def answer(path: str, tokens: int) -> None:
        with latencies.request(path) as exchange:
            await asyncio.sleep(0)
            count_tokens(tokens)
            await asyncio.sleep(0)
            exchange.status = 200

    await asyncio.gather(answer("/a", 3), answer("/b", 5))
    count_tokens(9)  # of no request
    rows = rows_of(recorder)
    assert (rows["/a", "2xx"].tokens, rows["/b", "2xx"].tokens) == (3, 5)
