import pytest
from tests.services.broker.bench import Bench

from rolloutmq.schemas.wire.control import Drain, WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import Ack, Ok
from rolloutmq.services.broker.actions import Publish
from rolloutmq.services.broker.state.workers import FAILED_S, GONE_S, SILENT_S


def beat(bench: Bench, state: WorkerState = WorkerState.READY, pid: int = 1, started: int = 0) -> bool:
    message = WorkerBeat(worker="p", env="e", state=state, pid=pid, started=started)
    return bench.ask(message, WorkerBeatReply).draining


def drains_sent(bench: Bench, after: float) -> int:
    """Return how often the worker's drain was published in that time."""
    actions = bench.tick(after)
    return sum(isinstance(a, Publish) and a.topic == b"control.p/" for a in actions)


def test_a_drain_is_repeated_until_it_is_confirmed() -> None:
    bench = Bench()
    assert bench.refused(Drain(worker="p")) is ErrorCode.UNKNOWN
    assert not beat(bench)
    bench.ask(Drain(worker="p"), Ok)
    assert bench.core.next_deadline(bench.now) <= bench.now
    assert drains_sent(bench, 0.0) == 1
    assert drains_sent(bench, 0.1) == 0
    assert [drains_sent(bench, 0.25) for _ in range(5)] == [1] * 5
    assert beat(bench)
    assert drains_sent(bench, 0.25) == 1
    assert beat(bench, WorkerState.DRAINING)
    assert drains_sent(bench, 5.0) == 0
    assert [a.topic for a in bench.core.subscribed(b"control.p/") if isinstance(a, Publish)] == [
        b"control.p/"
    ]
    assert bench.core.subscribed(b"control.q/") == []


def test_a_drain_ends_with_its_process() -> None:
    bench = Bench()
    beat(bench)
    bench.ask(Drain(worker="p"), Ok)
    assert beat(bench)
    assert not beat(bench, WorkerState.STARTING, pid=2)
    peer = bench.producer(pid=2)
    bench.ask(Drain(worker="p"), Ok)
    assert peer.sync().draining
    again = bench.producer(pid=2)
    assert again.sync().draining
    assert not bench.producer(pid=3).sync().draining


def test_a_drain_reaches_the_producer_in_its_acks() -> None:
    bench = Bench()
    bench.producer()
    bench.tick()
    bench.ask(Drain(worker="p"), Ok)
    acks = [a.message for a in bench.tick() if isinstance(a, Publish) and a.topic == b"ack.p/"]
    assert [isinstance(ack, Ack) and ack.draining for ack in acks] == [True]


def test_who_left_is_dropped_from_the_table_and_who_failed_is_kept_for_longer() -> None:
    bench = Bench()
    for name, state in (("gone", "gone"), ("failed", "failed"), ("silent", "ready")):
        bench.ask(WorkerBeat(worker=name, env="e", state=WorkerState(state), error="why"), WorkerBeatReply)
    names = [[w.worker for w in bench.pressure().workers]]
    for seconds in (GONE_S + 2, SILENT_S):
        bench.tick(seconds)
        names.append([w.worker for w in bench.pressure().workers])
    assert names == [["failed", "gone", "silent"], ["failed", "silent"], ["failed"]]
    assert bench.pressure().workers[0].silent_s == GONE_S + 2 + SILENT_S
    bench.tick(FAILED_S)
    assert bench.pressure().workers == (), "its replacement has another name"


def test_blocked_seconds_that_are_no_number_are_refused() -> None:
    bench = Bench()
    message = WorkerBeat(worker="p", env="e", state=WorkerState.READY, blocked_s=float("nan"))
    assert bench.refused(message) is ErrorCode.INVALID


@pytest.mark.parametrize("heard", [True, False])
def test_a_drain_names_its_process_also_to_the_next_life_of_the_broker(heard: bool) -> None:
    """A later process of the name subscribes before the broker hears of it, and gets the order of the earlier one."""
    bench = Bench()
    bench.producer(pid=1)
    if heard:
        beat(bench)
    bench.ask(Drain(worker="p"), Ok)
    for _ in range(2):
        kept = [a.message for a in bench.core.subscribed(b"control.p/") if isinstance(a, Publish)]
        assert kept == [Drain(worker="p", pid=1)]
        bench.restart()
    assert not beat(bench, WorkerState.STARTING, pid=2)
    assert bench.core.subscribed(b"control.p/") == []


@pytest.mark.parametrize("restarts", [False, True])
def test_a_drain_is_not_for_a_later_process_of_the_same_pid(restarts: bool) -> None:
    """The first process of each container has pid 1."""
    bench = Bench()
    assert not beat(bench, started=100)
    bench.ask(Drain(worker="p"), Ok)
    if restarts:
        bench.restart()
    assert beat(bench, started=100)
    kept = [a.message for a in bench.core.subscribed(b"control.p/") if isinstance(a, Publish)]
    assert [(one.pid, one.started) for one in kept if isinstance(one, Drain)] == [(1, 100)]
    assert not beat(bench, WorkerState.STARTING, started=200)
    assert bench.core.subscribed(b"control.p/") == []


def test_a_drain_outlives_the_end_of_a_session_of_its_process() -> None:
    """A worker without an engine has no session; it opens another one once it has an engine."""
    bench = Bench()
    beat(bench)
    bench.ask(Drain(worker="p"), Ok)
    assert bench.producer(pid=1).sync().draining
    assert beat(bench)
