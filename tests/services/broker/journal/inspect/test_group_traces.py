"""The way of sampled groups, from the events of a journal that was made by hand."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.broker.journal.handmade import TRAINER, Handmade, settles, version
from tests.services.broker.journal.inspect.test_hops import pulled

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.schemas.wire.tracing import is_sampled
from rolloutmq.services.broker.journal.format.events import Committed, Dropped, Lost, TaskSubmitted, WasReset
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect import group_traces
from rolloutmq.services.broker.journal.inspect.group_traces import GroupTrace, Part, TraceFollower

TASK = TaskSubmitted("t-1", "sort3", Split.TRAIN, b"", 2, 0.0, 0, 990.0)


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def over(follower: TraceFollower, *events: tuple[float, AnyEvent]) -> list[GroupTrace]:
    for at, event in events:
        follower.apply(at, event)
    return follower.over()


def test_the_parts_of_a_group_from_its_task_to_its_checkpoint(made: Handmade) -> None:
    lease = made.lease([1])
    follower = TraceFollower(1.0)
    way: list[tuple[float, AnyEvent]] = [
        (991.0, TASK),
        (1003.0, made.accept(1)),
        (1005.0, lease),
        (1007.0, pulled(lease)),
        (1017.0, settles(lease, "g1")),
    ]
    assert over(follower, *way) == []
    (trace,) = over(follower, (1047.0, Committed(TRAINER, version(1))))
    assert trace.header.group_id == "g1"
    assert (trace.env, trace.producer, trace.submitted_at, trace.outcome) == (
        "sort3",
        "sort3-0",
        990.0,
        "committed",
    )
    assert trace.parts == [
        Part(Hop.ROLLOUT, 1000.0, 1001.5),
        Part(Hop.SEND, 1001.5, 1003.0),
        Part(Hop.QUEUE, 1003.0, 1007.0),
        Part(Hop.TRAIN, 1007.0, 1017.0),
        Part(Hop.COMMIT, 1017.0, 1047.0),
    ]
    assert follower.over() == []


def test_a_group_that_is_handed_out_again_shows_the_part_that_counted(made: Handmade) -> None:
    first, second = made.lease([1]), made.lease([1])
    (trace,) = over(
        TraceFollower(1.0),
        (1003.0, made.accept(1)),
        (1004.0, first),
        (1004.0, pulled(first)),
        (1010.0, Lost(first.number, failed=True, why="gone")),
        (1020.0, second),
        (1021.0, pulled(second)),
        (1024.0, settles(second, "g1")),
        (1025.0, Committed(TRAINER, version(1))),
    )
    assert trace.submitted_at is None
    assert trace.parts[2:4] == [Part(Hop.QUEUE, 1003.0, 1004.0), Part(Hop.TRAIN, 1021.0, 1024.0)]


def test_a_dropped_group_ends_with_its_reason(made: Handmade) -> None:
    (trace,) = over(TraceFollower(1.0), (1003.0, made.accept(1)), (1009.0, Dropped(1, "expired", "stale")))
    assert trace.outcome == "expired: stale"
    assert [part.hop for part in trace.parts] == [Hop.ROLLOUT, Hop.SEND]


def test_a_filtered_group_is_told_from_a_trained_one(made: Handmade) -> None:
    lease = made.lease([1, 2])
    traces = over(
        TraceFollower(1.0),
        (1003.0, made.accept(1)),
        (1003.0, made.accept(2)),
        (1004.0, lease),
        (1004.0, pulled(lease)),
        (1008.0, settles(lease, "g1", filtered=("g2",))),
        (1009.0, Committed(TRAINER, version(1))),
    )
    assert {trace.header.group_id: trace.outcome for trace in traces} == {"g1": "committed", "g2": "filtered"}


def test_only_sampled_groups_are_followed(made: Handmade) -> None:
    follower = TraceFollower(0.5)
    events: list[tuple[float, AnyEvent]] = []
    for order in range(1, 101):
        events += [(1003.0, made.accept(order)), (1004.0, Dropped(order, "expired", "stale"))]
    found = {trace.header.group_id for trace in over(follower, *events)}
    assert found == {f"g{order}" for order in range(1, 101) if is_sampled(f"g{order}", 0.5)}
    assert 20 < len(found) < 80


@pytest.mark.parametrize("ratio", [0.0, 0.01, 0.25, 1.0])
def test_the_sample_has_the_ratio(ratio: float) -> None:
    sampled = sum(is_sampled(f"w/{number}", ratio) for number in range(20_000))
    assert sampled == pytest.approx(20_000 * ratio, abs=400)
    assert (ratio in {0.0, 1.0}) == (sampled in {0, 20_000})


def test_memory_is_bounded(made: Handmade, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(group_traces, "OPEN_LIMIT", 10)
    follower = TraceFollower(1.0)
    accepted = made.accept(1)
    for order in range(1, 101):
        follower.apply(1003.0, replace(TASK, id=f"t-{order}"))
        header = replace(accepted.header, group_id=f"g{order}", task="")
        follower.apply(1003.0, replace(accepted, order=order, header=header))
    assert (len(follower._open), len(follower._tasks)) == (10, 10)
    assert len(over(follower, *((1009.0, Dropped(order, "dead", "x")) for order in range(1, 101)))) == 10


def test_a_reset_forgets_all(made: Handmade) -> None:
    follower = TraceFollower(1.0)
    assert over(follower, (1003.0, made.accept(1)), (1004.0, WasReset("asked"))) == []
    assert not follower._open
