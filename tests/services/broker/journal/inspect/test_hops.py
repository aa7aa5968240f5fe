"""Hops of groups, from the events of a journal that was made by hand."""

from pathlib import Path

import pytest
from msgspec.structs import replace
from tests.services.broker.journal.handmade import TRAINER, Handmade, item, settles, version

from rolloutmq.schemas.statistics.histogram import LONGEST_S
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.latency import Hop
from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Carved,
    Committed,
    Dropped,
    Forgot,
    Leased,
    LeaseSnapshot,
    Lost,
    Pulled,
    RetainedBatchSnapshot,
    Rewound,
    WasReset,
)
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.inspect.hops import BLOCK, HopFollower, HopKey, merged

NEAR = 0.011


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def pulled(lease: Leased, rank: int = 0) -> Pulled:
    return Pulled(lease.number, rank, f"{TRAINER}-{rank}", "r")


def follow(follower: HopFollower, *events: tuple[float, AnyEvent]) -> HopFollower:
    for at, event in events:
        follower.apply(at, event)
    return follower


def hops(follower: HopFollower) -> dict[str, tuple[int, float]]:
    """Return the number and the mean of each hop, in whole milliseconds."""
    told = follower.histograms()
    assert {key.env for key in told} <= {"sort3"}
    return {key.hop.value: (one.count, round(one.mean_s, 3)) for key, one in told.items()}


def known(follower: HopFollower) -> int:
    return len(follower._groups) + len(follower._handed_at) + len(follower._new) + len(follower._leases)


def test_each_hop_begins_where_the_one_before_ends(made: Handmade) -> None:
    accepted, lease = made.accept(1), made.lease([1])
    follower = follow(
        HopFollower(),
        (1003.0, accepted),  # its rollout: 1000 to 1001.5; accepted at 1003
        (1005.0, lease),
        (1007.0, pulled(lease)),
        (1017.0, settles(lease, "g1")),
        (1047.0, Committed(TRAINER, version(1))),
    )
    assert hops(follower) == {
        "rollout": (1, 1.5),
        "send": (1, 1.5),
        "queue": (1, 4.0),
        "train": (1, 10.0),
        "commit": (1, 30.0),
    }
    assert known(follower) == 0
    assert follower.slowest()[HopKey("sort3", Hop.TRAIN)] == (10.0, "g1")
    assert [*merged(follower.histograms())] == [Hop.ROLLOUT, Hop.SEND, Hop.QUEUE, Hop.TRAIN, Hop.COMMIT]


def test_a_group_that_is_handed_out_again_is_queued_once_and_trained_once(made: Handmade) -> None:
    first, second = made.lease([1]), made.lease([1])
    follower = follow(
        HopFollower(),
        (1003.0, made.accept(1)),
        (1004.0, first),
        (1004.0, pulled(first)),
        (1010.0, Lost(first.number, failed=True, why="gone")),
        (1020.0, second),
        (1021.0, pulled(second)),
        (1024.0, settles(second, "g1")),
    )
    told = hops(follower)
    assert (told["queue"], told["train"]) == ((1, 1.0), (1, 3.0))


def test_ranks_have_hops_of_their_own_and_a_batch_is_whole_with_the_last(made: Handmade) -> None:
    lease = made.lease([1], [2])
    follower = follow(
        HopFollower(),
        *((1003.0, made.accept(order)) for order in (1, 2)),
        (1006.0, lease),
        (1006.0, pulled(lease, 0)),
        (1008.0, pulled(lease, 1)),
        (1010.0, settles(lease, "g1", rank=0)),
        (1011.0, Committed(TRAINER, version(1))),  # the batch is not settled yet
        (1012.0, settles(lease, "g2", rank=1)),
        (1013.0, Committed(TRAINER, version(1))),
    )
    told = hops(follower)
    assert told["train"] == (2, 4.0)
    assert told["queue"] == (2, 3.5)
    assert told["commit"] == (2, 1.0)


def test_groups_of_a_window_are_settled_apart(made: Handmade) -> None:
    lease = made.lease([1, 2])
    carved = Carved(9, 9, TRAINER, "key", (2,))
    made.leases = 8
    own = made.lease([2])
    assert own.number == 9
    follower = follow(
        HopFollower(),
        *((1003.0, made.accept(order)) for order in (1, 2)),
        (1006.0, lease),
        (1006.0, pulled(lease)),
        (1007.0, carved),
        (1007.0, settles(own, "g2")),
        (1010.0, settles(lease, "g1")),
        (1011.0, Committed(TRAINER, version(1))),
    )
    told = hops(follower)
    assert told["train"] == (2, 2.5)
    assert told["commit"] == (2, 2.5)
    assert known(follower) == 0


def test_a_hop_without_a_known_beginning_is_left_out(made: Handmade) -> None:
    """The history begins with a snapshot: a group that was delivered before, and one that was not."""
    lease = made.lease([1, 2])
    follower = follow(
        HopFollower(),
        (1003.0, item(made.accept(1), deliveries=1)),
        (1003.0, item(made.accept(2))),
        (1006.0, lease),
        (1006.0, pulled(lease)),
    )
    assert hops(follower) == {"queue": (1, 2.0)}
    unknown = made.lease([77])
    assert hops(follow(HopFollower(), (1.0, pulled(unknown)), (2.0, settles(unknown, "g77")))) == {}


def test_a_group_without_times_has_no_rollout(made: Handmade) -> None:
    accepted = made.accept(1)
    header = accepted.header
    bare = type(header)(
        **{name: getattr(header, name) for name in header.__struct_fields__ if not name.endswith("_at")},
        started_at=0.0,
        finished_at=0.0,
    )
    fields = {name: getattr(accepted, name) for name in accepted.__struct_fields__}
    assert hops(follow(HopFollower(), (1.0, Accepted(**{**fields, "header": bare})))) == {}


@pytest.mark.parametrize("end", ["dropped", "forgotten", "reset", "resumed"])
def test_nothing_of_an_ended_group_is_remembered(made: Handmade, end: str) -> None:
    lease = made.lease([1])
    follower = follow(HopFollower(), (1003.0, made.accept(1)))
    if end == "dropped":
        follow(follower, (1004.0, Dropped(1, "expired", "stale")))
    elif end == "reset":
        follow(follower, (1004.0, lease), (1004.0, pulled(lease)), (1005.0, WasReset("by hand")))
    else:
        follow(follower, (1004.0, lease), (1004.0, pulled(lease)), (1005.0, settles(lease, "g1")))
        last = Forgot(TRAINER, 1) if end == "forgotten" else Rewound(TRAINER, version(1), "trainer-0")
        follow(follower, (1006.0, last))
    assert known(follower) == 0
    assert "commit" not in hops(follower)


def test_a_batch_after_the_checkpoint_comes_again(made: Handmade) -> None:
    first, again = made.lease([1], step=5), made.lease([1], step=5, again=True)
    follower = follow(
        HopFollower(),
        (1003.0, made.accept(1)),
        (1004.0, first),
        (1004.0, pulled(first)),
        (1005.0, settles(first, "g1")),
        (1100.0, Rewound(TRAINER, version(4), "trainer-0")),
        (1101.0, again),
        (1101.0, pulled(again)),
        (1103.0, settles(again, "g1")),
        (1104.0, Committed(TRAINER, version(5))),
    )
    told = hops(follower)
    assert told["queue"] == (1, 1.0)
    assert told["train"] == (2, 1.5)
    assert told["commit"] == (1, 1.0)


def test_a_dead_group_that_is_queued_again_was_made_and_sent_once(made: Handmade) -> None:
    accepted = made.accept(1)
    again = replace(accepted, order=2, at=90_000.0, requeued=True)
    lease = made.lease([2])
    follower = follow(
        HopFollower(),
        (1003.0, accepted),
        (1004.0, Dropped(1, "dead", "odd")),
        (90_000.0, again),
        (90_001.0, lease),
        (90_002.0, pulled(lease)),
    )
    assert hops(follower) == {"rollout": (1, 1.5), "send": (1, 1.5), "queue": (1, 2.0)}


@pytest.mark.parametrize("finished_at", [1.7e308, float("inf"), float("nan"), -1e308])
def test_the_clock_of_one_producer_spoils_nothing_else(made: Handmade, finished_at: float) -> None:
    odd = made.accept(1)
    odd = replace(odd, header=replace(odd.header, finished_at=finished_at))
    follower = HopFollower()
    for order in range(3):
        follower.apply(1003.0, replace(odd, order=order))
    follower.apply(1003.0, made.accept(10))
    told, slowest = follower.histograms(), follower.slowest()
    for hop in (Hop.ROLLOUT, Hop.SEND):
        key = HopKey("sort3", hop)
        assert 0.0 <= told[key].mean_s <= LONGEST_S
        assert 1.5 <= slowest[key].seconds <= LONGEST_S
    assert merged(told)


def test_rejected_groups_are_let_go_and_a_batch_of_these_alone_is_not_retained(made: Handmade) -> None:
    """`Forgot` counts the batches that the broker retains."""
    useless, mixed, last = made.lease([1], step=1), made.lease([2, 3], step=1), made.lease([4], step=2)
    follower = follow(HopFollower(), *((1003.0, made.accept(order)) for order in (1, 2, 3, 4)))
    for lease, outcome in (
        (useless, settles(useless, rejected=("g1",))),
        (mixed, settles(mixed, "g2", rejected=("g3",))),
        (last, settles(last, "g4")),
    ):
        follow(follower, (1004.0, lease), (1004.0, pulled(lease)), (1005.0, outcome))
    assert {*follower._groups} == {2, 4}
    follow(follower, (1006.0, Forgot(TRAINER, 1)), (1007.0, Committed(TRAINER, version(2))))
    assert hops(follower)["commit"] == (1, 2.0)
    assert known(follower) == 0


def test_of_two_groups_of_one_id_the_rejected_one_is_let_go(made: Handmade) -> None:
    lease = made.lease([1, 2])
    follower = follow(
        HopFollower(),
        *((1003.0, made.accept(order, "same")) for order in (1, 2)),
        (1004.0, lease),
        (1004.0, pulled(lease)),
        (1005.0, settles(lease, "same", rejected=("same",))),
        (1006.0, Committed(TRAINER, version(1))),
    )
    assert hops(follower)["commit"] == (1, 1.0)


def test_a_batch_without_a_step_comes_again_unless_a_step_up_to_the_checkpoint_follows(
    made: Handmade,
) -> None:
    first, idle, again = made.lease([1], step=1), made.lease([2], step=2), made.lease([2], step=2, again=True)
    follower = follow(
        HopFollower(),
        *((1003.0, made.accept(order)) for order in (1, 2)),
        *((1004.0, event) for event in (first, pulled(first), settles(first, "g1"))),
        *((1005.0, event) for event in (idle, pulled(idle), settles(idle, filtered=("g2",)))),
        (1006.0, Rewound(TRAINER, version(1), "trainer-0")),
        *((1010.0, event) for event in (again, pulled(again))),
        (1012.0, settles(again, "g2")),
        (1015.0, Committed(TRAINER, version(2))),
    )
    told = hops(follower)
    assert told["train"] == (3, 0.667)
    assert told["commit"] == (1, 3.0)


def test_leases_and_batches_from_before_the_history_go_on(made: Handmade) -> None:
    """`Forgot` takes the oldest batches, which a snapshot names."""
    lease = made.lease([2])
    follower = follow(
        HopFollower(),
        *((1003.0, item(made.accept(order), deliveries=1)) for order in (1, 2)),
        (
            1003.0,
            RetainedBatchSnapshot(TRAINER, version(0), True, Split.TRAIN, ((1,),), (("trained",),), False),
        ),
        (
            1003.0,
            LeaseSnapshot(
                lease.number,
                lease.generation,
                TRAINER,
                Split.TRAIN,
                lease.step,
                lease.version,
                2,
                lease.shards,
                False,
                False,
                (("trainer-0", "r", None),),
            ),
        ),
        (1005.0, settles(lease, "g2")),
        (1006.0, Forgot(TRAINER, 1)),
        (1007.0, Committed(TRAINER, version(1))),
    )
    assert hops(follower) == {"commit": (1, 2.0)}
    assert known(follower) == 0


def test_groups_for_evaluation_are_told_apart(made: Handmade) -> None:
    accepted = made.accept(1)
    other = replace(accepted, order=2, split=Split.EVAL)
    told = follow(HopFollower(), (1003.0, other), (1003.0, accepted)).histograms()
    assert [(key.split, one.count) for key, one in told.items()] == [(Split.TRAIN, 1)] * 2 + [
        (Split.EVAL, 1)
    ] * 2
    assert merged(told)[Hop.ROLLOUT].count == 1


def test_many_groups_enter_in_blocks(made: Handmade) -> None:
    accepted = made.accept(1)
    fields = {name: getattr(accepted, name) for name in accepted.__struct_fields__}
    follower = HopFollower()
    for order in range(1, 2 * BLOCK + 11):
        follower.apply(1.0, Accepted(**{**fields, "order": order}))
    told = follower.histograms()[HopKey("sort3", Hop.ROLLOUT)]
    assert told.count == 2 * BLOCK + 10
    assert told.percentile_s(99) == pytest.approx(1.5, rel=NEAR)
