"""Calls of a worker are told by server, path and class of status, retries and vanished answers too."""

import asyncio
import random
from typing import TYPE_CHECKING

import pytest
from tests.services.worker.openai.test_client import until

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.schemas.wire.latency import Hop, LatencyRow
from rolloutmq.services.process.latency_recorder import LatencyRecorder
from rolloutmq.services.worker.openai.call_latencies import CallLatencies
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines

if TYPE_CHECKING:
    from tests.services.worker.conftest import FakeServer


def rows_of(recorder: LatencyRecorder) -> dict[tuple[str, str], LatencyRow]:
    (sample,) = recorder.samples(1.0)
    assert {(row.hop, row.env, row.engine) for row in sample.rows} == {(Hop.CALL, "e", "inference-1")}
    return {(row.route, row.status): row for row in sample.rows}


async def test_calls_count_by_path_and_class(server: "FakeServer") -> None:
    recorder = LatencyRecorder("e-0", 0.0)
    engines = Engines(lambda: [InferenceAddress(url=server.url, pid=1, name="inference-1")], random.Random(0))
    async with OpenAIPolicy.opened(engines, latencies=CallLatencies(recorder, "e")) as policy:
        await policy.complete("q", n=2)
        server.failures += [503, None]
        await policy.complete("q")  # repeated after both failures
        server.failures += [400]
        with pytest.raises(PolicyRefusedError):
            await policy.complete("q")
        await policy.tokenize("text")
        server.gate.clear()
        asking = asyncio.create_task(policy.chat([{"role": "user", "content": "q"}]))
        await until(lambda: server.waiting == 1)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
    rows = rows_of(recorder)
    assert {name: (row.durations.count, row.tokens) for name, row in rows.items()} == {
        ("/v1/completions", "2xx"): (2, 4),
        ("/v1/completions", "5xx"): (1, 0),
        ("/v1/completions", ""): (1, 0),
        ("/v1/completions", "4xx"): (1, 0),
        ("/tokenize", "2xx"): (1, 0),
        ("/v1/chat/completions", ""): (1, 0),
    }


@pytest.mark.parametrize(
    ("body", "tokens"),
    [
        (b'{"usage": {"completion_tokens": 7}}', 7),
        (b'{"usage": {"completion_tokens": -7}}', 0),
        (b'{"usage": null}', 0),
        (b"{}", 0),
        (b"no json", 0),
        (b'{"usage": {"completion_tokens": "7"}}', 0),
    ],
)
def test_tokens_are_those_that_the_answer_counts(body: bytes, tokens: int) -> None:
    recorder = LatencyRecorder("e-0", 0.0)
    with CallLatencies(recorder, "e").attempt("inference-1", "/v1/completions") as attempt:
        attempt.answered(200, body)
    assert rows_of(recorder)["/v1/completions", "2xx"].tokens == tokens
