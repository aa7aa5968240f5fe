"""Calls of a worker are told by server, path and class of status, retries and vanished answers too."""

import asyncio
import random
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from tests.services.worker.openai.test_client import until

from rolloutmq.schemas.errors import PolicyRefusedError
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.latency import Hop, LatencyRow
from rolloutmq.schemas.wire.tracing import Call
from rolloutmq.services.process.latency_recorder import LatencyRecorder
from rolloutmq.services.worker.openai.call_latencies import CallLatencies
from rolloutmq.services.worker.openai.call_trace import RolloutTracer
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
    ("body", "tokens", "prompt_tokens"),
    [
        (b'{"usage": {"completion_tokens": 7, "prompt_tokens": 3}}', 7, 3),
        (b'{"usage": {"completion_tokens": 7}}', 7, 0),
        (b'{"usage": {"completion_tokens": -7, "prompt_tokens": -3}}', 0, 0),
        (b'{"usage": null}', 0, 0),
        (b"{}", 0, 0),
        (b"no json", 0, 0),
        (b'{"usage": {"completion_tokens": "7"}}', 0, 0),
    ],
)
def test_tokens_are_those_that_the_answer_counts(body: bytes, tokens: int, prompt_tokens: int) -> None:
    recorder = LatencyRecorder("e-0", 0.0)
    with CallLatencies(recorder, "e").attempt("inference-1", "/v1/completions") as attempt:
        attempt.answered(200, body)
    assert rows_of(recorder)["/v1/completions", "2xx"].tokens == tokens
    assert attempt.prompt_tokens == prompt_tokens


async def test_a_traced_call_has_the_name_of_its_engine_and_its_tokens(
    server: "FakeServer", run_dir: Path
) -> None:
    engines = Engines(lambda: [InferenceAddress(url=server.url, pid=1, name="inference-1")], random.Random(0))
    tracer, told = RolloutTracer(RunLayout(run_dir), "e-0", "e", 1.0), list[Call]()
    tracer._tell = lambda group_id, calls: told.extend(calls if group_id == "g" else [])  # type: ignore[method-assign]
    async with OpenAIPolicy.opened(engines) as policy:
        with tracer.rollout("g"):
            await policy.complete("q", n=2)
            server.failures += [503]
            await policy.complete("q")
    tracer.close()
    assert [(one.engine, one.status, one.tokens, one.prompt_tokens) for one in told] == [
        ("inference-1", 200, 2, 3),
        ("inference-1", 503, 0, 0),
        ("inference-1", 200, 2, 3),
    ]
