"""Without a journal a trace has the rollout and its calls, and each group is sent once."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.services.telemetry.bus import forwarding

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.transport.pubsub import Publisher
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.tracing import Call, RolloutTrace
from rolloutmq.services.telemetry.export.sinks.protocol import Told
from rolloutmq.services.telemetry.export.traces.program import LastWord, Traces, serve
from rolloutmq.services.telemetry.export.traces.spans import Span, rollout_spans_of, span_id_of, trace_id_of

CALLS = (
    Call(engine="inference", path="/v1/completions", began_at=1000.5, seconds=0.5, status=200, tokens=7),
    Call(engine="inference", path="/v1/completions", began_at=1000.1, seconds=0.2, status=503),
)


def rollout(group_id: str = "g1", **fields: Any) -> RolloutTrace:
    known: dict[str, Any] = {"env": "math", "worker": "math-0", "at": 1002.0, "calls": CALLS}
    return RolloutTrace(group_id=group_id, **{**known, **fields})


def test_the_tree_has_the_rollout_and_its_calls() -> None:
    root, span, *calls = rollout_spans_of(rollout(), "run")
    assert (root.name, root.parent_id, root.trace_id) == ("group", 0, trace_id_of("g1"))
    assert root.attributes == {
        "rolloutmq.run": "run",
        "rolloutmq.group": "g1",
        "rolloutmq.environment": "math",
        "rolloutmq.producer": "math-0",
        "rolloutmq.partial": True,
    }
    assert span == replace(
        root, name="rollout", span_id=span_id_of("g1", "rollout", 1), parent_id=root.span_id, attributes={}
    )
    assert (span.began_at, span.ended_at) == (1000.1, 1002.0)
    assert [(one.name, one.parent_id, one.problem) for one in calls] == [
        ("call", span.span_id, ""),
        ("call", span.span_id, "status 503"),
    ]


def test_a_rollout_without_a_call_has_no_spans() -> None:
    assert rollout_spans_of(rollout(calls=()), "run") == []


def test_calls_of_workers_become_traces_without_a_journal(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with forwarding(layout):
        traces = Traces(layout, "run", 1.0, 0.0, has_journal=False)
        endpoints = endpoints_of(layout)
        assert endpoints is not None
        publisher = Publisher(endpoints.publish)
        found: list[list[Span]] = []
        try:
            while not found:  # the subscription begins at its own time
                publisher.publish(topics.telemetry("trace", "math-0"), rollout())
                found += traces.look()
        finally:
            publisher.close()
            traces.close()
        assert {spans[0].attributes["rolloutmq.group"] for spans in found} == {"g1"}
        assert not layout.journal.exists()


def test_a_group_is_sent_once(run_dir: Path) -> None:
    traces = Traces(RunLayout(run_dir), "run", 1.0, 0.0, has_journal=False)
    traces._calls._known = {"g1": rollout(), "g2": rollout("g2")}
    assert [spans[0].attributes["rolloutmq.group"] for spans in traces.look()] == ["g1", "g2"]
    assert traces.look() == []


def test_the_last_error_of_a_library_is_the_reason_and_no_line(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    library = logging.getLogger("tests.otlp")
    word = LastWord.of("tests.otlp")
    traces = Traces(RunLayout(run_dir), "run", 1.0, 0.0, has_journal=False)
    traces._calls._known = {"g1": rollout(), "g2": rollout("g2")}

    def send(_: list[Span]) -> bool:
        for attempt in range(3):
            library.getChild("http").warning("Transient error %s, retrying", attempt)
        library.getChild("http").error("Failed to export, code: %s", 503)
        return False

    told: list[Told] = []
    serve(traces, send, told.append, lambda _: True, word.taken)
    reason = "the receiver of traces does not take them: Failed to export, code: 503"
    assert [one.why for one in told] == [reason, reason]
    assert [record for record in caplog.records if record.name.startswith("tests.otlp")] == []
    assert word.taken() == ""
