"""Spans of a group: a tree with stable ids."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.broker.journal.handmade import Handmade

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.tracing import Call, RolloutTrace
from rolloutmq.services.broker.journal.inspect.group_traces import GroupTrace, Part
from rolloutmq.services.telemetry.export.traces.spans import Span, spans_of

CALLS = (
    Call(
        engine="inference",
        path="/v1/completions",
        began_at=1000.1,
        seconds=0.5,
        status=200,
        tokens=7,
        prompt_tokens=3,
    ),
    Call(engine="inference-1", path="/v1/completions", began_at=1000.7, seconds=0.1, status=503),
    Call(engine="inference-1", path="/v1/completions", began_at=1000.9, seconds=0.2),
)


@pytest.fixture
def trace(run_dir: Path) -> GroupTrace:
    header = Handmade(run_dir).accept(1).header
    parts = [
        Part(Hop.ROLLOUT, 1000.0, 1001.5),
        Part(Hop.SEND, 1001.5, 1003.0),
        Part(Hop.QUEUE, 1003.0, 1007.0),
    ]
    return GroupTrace(header, "math", Split.TRAIN, "math-0", 990.0, parts, "expired: stale")


def by_name(spans: list[Span]) -> dict[str, Span]:
    return {span.name: span for span in spans}


def test_the_tree_of_a_group(trace: GroupTrace) -> None:
    rollout = RolloutTrace(group_id="g1", env="math", worker="math-0", at=1001.5, calls=CALLS)
    spans = spans_of(trace, "run", rollout)
    assert [span.name for span in spans] == [
        "group",
        "task",
        "rollout",
        "call",
        "call",
        "call",
        "send",
        "queue",
    ]
    root, named = spans[0], by_name(spans)
    assert (root.parent_id, root.began_at, root.ended_at) == (0, 990.0, 1007.0)
    assert root.problem == "expired: stale"
    assert root.attributes["rolloutmq.group"] == "g1"
    assert (named["task"].began_at, named["task"].ended_at) == (990.0, 1000.0)
    assert {span.parent_id for span in spans[1:] if span.name != "call"} == {root.span_id}
    calls = [span for span in spans if span.name == "call"]
    assert {call.parent_id for call in calls} == {named["rollout"].span_id}
    assert [call.problem for call in calls] == ["", "status 503", "no answer"]
    assert calls[0].ended_at == pytest.approx(1000.6)
    assert calls[0].attributes == {
        "rolloutmq.engine": "inference",
        "url.path": "/v1/completions",
        "gen_ai.usage.input_tokens": 3,
        "gen_ai.usage.output_tokens": 7,
        "http.response.status_code": 200,
    }
    assert len({span.span_id for span in spans}) == len(spans)
    assert {span.trace_id for span in spans} == {root.trace_id}


def test_ids_are_those_of_the_group(trace: GroupTrace) -> None:
    once, twice = spans_of(trace, "run"), spans_of(trace, "run")
    assert once == twice
    trace.header = replace(trace.header, group_id="another")
    other = spans_of(trace, "run")
    assert not {span.span_id for span in once} & {span.span_id for span in other}
    assert once[0].trace_id != other[0].trace_id
    assert 0 < once[0].trace_id < 1 << 128
    assert 0 < once[0].span_id < 1 << 64


@pytest.mark.parametrize("outcome", ["committed", "filtered"])
def test_a_settled_group_without_a_task_has_no_problem(trace: GroupTrace, outcome: str) -> None:
    trace.submitted_at, trace.outcome = None, outcome
    spans = spans_of(trace, "run")
    assert [span.name for span in spans] == ["group", "rollout", "send", "queue"]
    assert spans[0].problem == ""


def test_a_group_without_parts_has_no_spans(trace: GroupTrace) -> None:
    trace.submitted_at, trace.parts = None, []
    assert spans_of(trace, "run") == []
