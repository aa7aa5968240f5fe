"""Hops of groups through a core: each counts once, whatever leases, rewinds, windows and restarts do."""

from typing import Any

import pytest
from tests.services.broker import bench as benches
from tests.services.broker.bench import Bench, config, ids
from tests.services.broker.requests.test_windows import Trainer

from rolloutmq.schemas.config.run import TelemetryConfig
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerBeatReply, WorkerState
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.latency import Hop, LatencyRow, LatencySample
from rolloutmq.schemas.wire.replies import Ok, Rejected
from rolloutmq.schemas.wire.requests import Commit, Release
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.state import group_hops
from rolloutmq.services.broker.state.group_hops import GATHERED, STRIDE, Thinning


class Wall:
    """The wall clock of the bench, which a test can set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.start = benches.WALL
        self._monkeypatch = monkeypatch

    def after(self, seconds: float) -> None:
        """Set it to so many seconds after the start."""
        self._monkeypatch.setattr(benches, "WALL", self.start + seconds)


@pytest.fixture
def wall(monkeypatch: pytest.MonkeyPatch) -> Wall:
    return Wall(monkeypatch)


def rows(bench: Bench) -> dict[tuple[Hop, str, Split], LatencyRow]:
    """Return what the next sample tells."""
    bench.published.clear()
    bench.tick(2.0)
    found: dict[tuple[Hop, str, Split], LatencyRow] = {}
    for event in bench.published:
        if isinstance(event.message, LatencySample):
            assert event.topic == b"telemetry.latency.broker"
            found |= {(row.hop, row.env, row.split): row for row in event.message.rows}
    return found


def begun(**environments: Any) -> Bench:
    bench = Bench(config(**environments) if environments else None)
    bench.tick()
    return bench


def test_a_group_counts_in_each_hop_on_its_way(wall: Wall) -> None:
    bench = begun()
    peer, start = bench.producer(), wall.start
    bench.consumer()
    peer.send(2, started_at=start - 5.0, finished_at=start - 2.0)
    wall.after(4.0)
    batch = bench.batch(0)
    wall.after(10.0)
    bench.settle(batch)
    wall.after(30.0)
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    found = {hop: row for (hop, env, _), row in rows(bench).items() if env == "e"}
    assert {hop: round(row.durations.mean_s, 6) for hop, row in found.items()} == {
        Hop.ROLLOUT: 3.0,
        Hop.SEND: 2.0,
        Hop.QUEUE: 4.0,
        Hop.TRAIN: 6.0,
        Hop.COMMIT: 20.0,
    }
    assert {row.durations.count for row in found.values()} == {2}
    tokens = sum(delivery.header.tokens for delivery in batch.groups)
    assert {row.tokens for row in found.values()} == {tokens}
    assert all(row.slowest_id in ids(batch) for row in found.values())
    assert rows(bench) == {}


def test_environments_and_splits_are_apart(wall: Wall) -> None:
    bench = begun(e={}, f={})
    bench.consumer()
    for env, groups in (("e", 1), ("f", 3)):
        bench.producer(f"p-{env}", env).send(groups, started_at=wall.start - 1.0, finished_at=wall.start)
    bench.producer("q", "e", Split.EVAL).send(2, started_at=wall.start - 1.0, finished_at=wall.start)
    bench.settle(bench.batch(0, 16))
    found = rows(bench)
    for hop in (Hop.ROLLOUT, Hop.SEND):
        assert found[hop, "e", Split.TRAIN].durations.count == 1
        assert found[hop, "f", Split.TRAIN].durations.count == 3
        assert found[hop, "e", Split.EVAL].durations.count == 2
    for hop in (Hop.QUEUE, Hop.TRAIN):
        assert {key: row.durations.count for key, row in found.items() if key[0] is hop} == {
            (hop, "e", Split.TRAIN): 1,
            (hop, "f", Split.TRAIN): 3,
        }


def test_a_group_without_times_has_no_rollout() -> None:
    bench = begun()
    bench.producer().send(2, started_at=0.0, finished_at=0.0)
    assert rows(bench) == {}


def test_a_redelivered_group_waits_once_and_trains_from_its_last_delivery(wall: Wall) -> None:
    bench = begun()
    peer = bench.producer()
    bench.consumer()
    peer.send(2, started_at=0.0, finished_at=0.0)
    wall.after(1.0)
    bench.batch(0)
    bench.ask(Release(consumer="c", reason="test"), Ok)
    wall.after(7.0)
    again = bench.batch(0)
    wall.after(9.0)
    bench.settle(again)
    found = {hop: row for (hop, _, _), row in rows(bench).items()}
    assert (found[Hop.QUEUE].durations.count, found[Hop.QUEUE].durations.mean_s) == (2, 1.0)
    assert (found[Hop.TRAIN].durations.count, found[Hop.TRAIN].durations.mean_s) == (2, 2.0)


def test_groups_of_a_window_count_from_their_own_delivery(wall: Wall) -> None:
    bench = begun()
    peer = bench.producer()
    trainer = Trainer(bench, groups=1)
    names: list[str] = []
    for at in range(2):
        peer.send(1, started_at=0.0, finished_at=0.0)
        wall.after(at)
        names += trainer.take()
    wall.after(5.0)
    bench.ask(trainer.request(trained=names), object)
    row = rows(bench)[Hop.TRAIN, "e", Split.TRAIN]
    assert (row.durations.count, row.durations.total_s, row.slowest_id) == (2, 9.0, names[0])


def test_hops_that_began_before_a_restart_are_left_out(wall: Wall) -> None:
    bench = begun()
    bench.consumer()
    bench.producer().send(4, started_at=0.0, finished_at=0.0)
    batch = bench.batch(0)
    rows(bench)
    bench.restart()
    bench.tick()
    wall.after(50.0)
    bench.settle(batch)
    found = rows(bench)
    assert Hop.TRAIN not in {hop for hop, _, _ in found}
    bench.batch(1)  # the other two were never handed out, and waited through the restart
    row = rows(bench)[Hop.QUEUE, "e", Split.TRAIN]
    assert row.durations.count == 2
    assert row.durations.mean_s == pytest.approx(50.0)


def beat(**given: object) -> WorkerBeat:
    fields = {"worker": "p", "env": "e", "state": WorkerState.READY, "host": "there", **given}
    return WorkerBeat(**fields)  # type: ignore[arg-type]


def test_the_way_from_another_host_is_corrected_by_its_clock(wall: Wall) -> None:
    bench = Bench()
    bench.core = BrokerCore(bench.settings, epoch=1, host="here")
    bench.tick()
    peer, start = bench.producer(), wall.start
    reply = bench.ask(beat(), WorkerBeatReply)
    assert reply.at == start
    times = {"started_at": start - 101.0, "finished_at": start - 100.0}
    peer.send(1, **times)
    found = rows(bench)
    assert found.keys() == {(Hop.ROLLOUT, "e", Split.TRAIN)}  # its clock is not known yet
    bench.ask(beat(clock_offset_s=99.5, clock_error_s=0.002), WorkerBeatReply)
    peer.send(3, **times)
    row = rows(bench)[Hop.SEND, "e", Split.TRAIN]
    assert (row.durations.count, row.clock_error_s) == (3, 0.002)
    assert row.durations.mean_s == pytest.approx(0.5)
    bench.ask(beat(host="here"), WorkerBeatReply)  # another process of this name, on this host
    peer.send(1, **times)
    row = rows(bench)[Hop.SEND, "e", Split.TRAIN]
    assert row.durations.mean_s == pytest.approx(100.0)
    assert row.clock_error_s == 0.0


@pytest.mark.parametrize("bad", [{"clock_offset_s": float("nan")}, {"clock_error_s": -1.0}])
def test_a_clock_that_is_none_is_refused(bad: dict[str, float]) -> None:
    assert Bench().refused(beat(**bad)) is ErrorCode.INVALID


def test_the_last_latencies_are_told_at_the_end(wall: Wall) -> None:
    bench = begun()
    bench.producer().send(1, started_at=wall.start - 1.0, finished_at=wall.start)
    (told,) = bench.core.final_samples(wall.start)
    assert isinstance(told.message, LatencySample)  # type: ignore[union-attr]


def test_a_run_without_latencies_tells_none(wall: Wall) -> None:
    settings = config(e={}).model_copy(update={"telemetry": TelemetryConfig(latencies=False)})
    bench = Bench(settings)
    bench.tick()
    bench.consumer()
    bench.producer().send(2, started_at=wall.start - 1.0, finished_at=wall.start)
    bench.settle(bench.batch(0))
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    assert rows(bench) == {}
    assert not bench.core._state.hops


def test_new_groups_are_counted_while_they_are_in_the_cache(wall: Wall) -> None:
    bench = begun()
    bench.shadowed = False
    bench.producer().send(3 * GATHERED, started_at=wall.start - 1.0, finished_at=wall.start)
    assert bench.core._state.hops.ungathered < GATHERED  # in a burst, before a tick
    assert rows(bench)[Hop.SEND, "e", Split.TRAIN].durations.count == 3 * GATHERED


def test_batches_without_a_tick_in_between_leave_few_groups_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_hops, "DELIVERED", 4)
    bench = begun()
    peer = bench.producer()
    bench.consumer()
    for step in range(5):
        peer.send(2, started_at=0.0, finished_at=0.0)
        bench.settle(bench.batch(step))
        hops = bench.core._state.hops
        assert hops.ungathered - hops.uncounted <= 4
    assert rows(bench)[Hop.QUEUE, "e", Split.TRAIN].durations.count == 10


def test_each_environment_of_a_batch_has_its_groups_and_tokens_in_every_hop(wall: Wall) -> None:
    bench = begun(e={}, f={})
    bench.consumer()
    for env, groups, tokens in (("e", 1, 7), ("f", 3, 11)):
        peer = bench.producer(f"p-{env}", env)
        peer.send(groups, tokens=tokens, started_at=wall.start - 1.0, finished_at=wall.start)
    bench.settle(bench.batch(0, 16))
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    found = rows(bench)
    for hop in (Hop.QUEUE, Hop.TRAIN, Hop.COMMIT):
        told = {env: found[hop, env, Split.TRAIN] for env in ("e", "f")}
        assert {env: (row.durations.count, row.tokens) for env, row in told.items()} == {
            "e": (1, 7),
            "f": (3, 33),
        }


def test_a_rejected_group_is_in_no_checkpoint() -> None:
    bench = begun()
    bench.consumer()
    bench.producer().send(2, tokens=5, started_at=0.0, finished_at=0.0)
    batch = bench.batch(0)
    kept, bad = ids(batch)
    bench.settle(batch, trained=(kept,), rejected=(Rejected(group_id=bad, reason="test"),))
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    found = {hop: row for (hop, _, _), row in rows(bench).items()}
    assert (found[Hop.TRAIN].durations.count, found[Hop.TRAIN].tokens) == (2, 10)
    assert (found[Hop.COMMIT].durations.count, found[Hop.COMMIT].tokens) == (1, 5)


def test_beyond_a_number_of_groups_one_of_several_stands_for_all(
    wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_hops, "SINGLY", 8)
    bench = begun(e={"stale": "pass"}, f={"stale": "pass"})
    bench.consumer()
    start = wall.start
    for env, tokens in (("e", 7), ("f", 11)):
        peer = bench.producer(f"p-{env}", env)
        for _ in range(10):
            peer.send(8, tokens=tokens, started_at=start - 3.0, finished_at=start - 1.0)
    wall.after(4.0)
    for step in range(20):
        bench.settle(bench.batch(step, 32))
    found = rows(bench)
    for env, tokens in (("e", 7), ("f", 11)):
        for hop, seconds in ((Hop.ROLLOUT, 2.0), (Hop.SEND, 1.0), (Hop.QUEUE, 4.0)):
            row = found[hop, env, Split.TRAIN]
            assert abs(row.durations.count - 80) <= STRIDE // 2
            assert row.tokens == tokens * row.durations.count
            assert row.durations.mean_s == pytest.approx(seconds)
            assert row.slowest_id.startswith(f"p-{env}-")
        assert found[Hop.TRAIN, env, Split.TRAIN].durations.count == 80


def test_every_sample_begins_with_groups_that_count_one_by_one(
    wall: Wall, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(group_hops, "SINGLY", 8)
    bench = begun()
    peer = bench.producer()
    for _ in range(3):
        peer.send(5, started_at=wall.start - 1.0, finished_at=wall.start)
        assert rows(bench)[Hop.SEND, "e", Split.TRAIN].durations.count == 5


@pytest.mark.parametrize("sizes", [(1,) * 160, (16,) * 10, (33, 1, 94, 32), (160,)])
def test_thinned_groups_lie_a_stride_apart_whatever_the_messages(sizes: tuple[int, ...]) -> None:
    thinning = Thinning()
    thinning.places(group_hops.SINGLY)
    counted: list[int] = []
    start = 0
    for size in sizes:
        if (found := thinning.places(size)) is not None:
            places, times = found
            assert times == STRIDE
            counted += range(start, start + size)[places]
        start += size
    assert counted == list(range(STRIDE // 2, 160, STRIDE))
