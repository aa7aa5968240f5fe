"""Calls of traced rollouts are published, those of others are not even timed."""

import asyncio
from pathlib import Path

import pytest
from tests.services.telemetry.bus import forwarding

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.transport.event_feed import EventFeed
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.tracing import CALLS_LIMIT, RolloutTrace, is_sampled
from rolloutmq.services.worker.openai.call_trace import RolloutTracer, traced_call

DEADLINE_S = 60.0


def one_call(status: int = 200) -> None:
    with traced_call("http://engine", "/v1/completions") as call:
        call.status = status


async def heard(run_dir: Path, tracer: RolloutTracer, calls: int = 1) -> RolloutTrace:
    """Trace rollouts until one is heard: the first ones may be published before anybody listens."""
    async with EventFeed(RunLayout(run_dir), [b"telemetry.trace."]) as feed, asyncio.timeout(DEADLINE_S):
        while True:
            with tracer.rollout("math-0/1-1"):
                await asyncio.gather(*(asyncio.to_thread(one_call) for _ in range(calls)))
            if (known := await feed.next(0.1)) is not None:
                event = codec.decode_event(known[1])
                assert isinstance(event, RolloutTrace)
                assert known[0] == b"telemetry.trace.math-0"
                return event


@pytest.mark.parametrize(("calls", "told", "dropped"), [(3, 3, 0), (CALLS_LIMIT + 5, CALLS_LIMIT, 5)])
async def test_calls_of_a_traced_rollout_are_published(
    run_dir: Path, calls: int, told: int, dropped: int
) -> None:
    with forwarding(RunLayout(run_dir)):
        tracer = RolloutTracer(RunLayout(run_dir), "math-0", "math", 1.0)
        try:
            event = await heard(run_dir, tracer, calls)
        finally:
            tracer.close()
    assert (event.group_id, event.env, event.worker) == ("math-0/1-1", "math", "math-0")
    assert (len(event.calls), event.dropped_calls) == (told, dropped)
    call = event.calls[0]
    assert (call.engine, call.path, call.status) == ("http://engine", "/v1/completions", 200)
    assert 0 < call.began_at <= event.at
    assert 0 <= call.seconds < DEADLINE_S


def test_calls_outside_of_a_traced_rollout_leave_nothing(run_dir: Path) -> None:
    tracer = RolloutTracer(RunLayout(run_dir), "math-0", "math", 0.5)
    told: list[str] = []
    tracer._tell = lambda group_id, calls: told.append(f"{group_id} {len(calls)}")  # type: ignore[method-assign]
    names = [f"math-0/1-{number}" for number in range(50)]
    for name in names:
        with tracer.rollout(name):
            one_call()
        one_call()
    assert told == [f"{name} 1" for name in names if is_sampled(name, 0.5)]


def test_a_call_that_raises_has_no_status_and_raises(run_dir: Path) -> None:
    tracer = RolloutTracer(RunLayout(run_dir), "math-0", "math", 1.0)
    seen: list[int] = []
    tracer._tell = lambda group_id, calls: seen.extend(call.status for call in calls)  # type: ignore[method-assign] # noqa: ARG005
    with pytest.raises(ConnectionError), tracer.rollout("g"), traced_call("e", "/"):
        raise ConnectionError
    assert seen == [0]


def test_without_a_broker_nothing_is_told_and_nothing_fails(run_dir: Path) -> None:
    tracer = RolloutTracer(RunLayout(run_dir), "math-0", "math", 1.0)
    with tracer.rollout("g"):
        one_call()
    tracer.close()
