"""A group's history: every event of the group, and none of the others."""

from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import (
    TRAINER,
    Handmade,
    began,
    item,
    ledger,
    settles,
    version,
)

from rolloutmq.services.broker.journal.format.events import (
    Began,
    Committed,
    Dropped,
    Forgot,
    Lost,
    Numbers,
    Pulled,
    Requeued,
    Rewound,
    Skipped,
    WasReset,
)
from rolloutmq.services.broker.journal.inspect.explain import GroupHistory, group_histories, origin


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def history_of(made: Handmade, name: str = "g1") -> GroupHistory:
    (found,) = group_histories(made.journal, name)
    return found


def events(made: Handmade, name: str = "g1") -> list[str]:
    return [entry.event for entry in history_of(made, name).moments]


def test_a_group_s_way_to_its_checkpoint(made: Handmade) -> None:
    lost, lease = made.lease([2], [1]), made.lease([2, 1], step=1)
    pulled = [Pulled(1, 0, "trainer-0", "r1"), Pulled(1, 1, "trainer-1", "r2")]
    made.log(
        began(),
        [made.accept(1), made.accept(2), Skipped(8, 3, 1, 1, "g1")],
        [lost, *pulled, Lost(1, True, "consumer trainer-1 fell silent")],
        [lease, settles(lease, "g1", "g2"), Committed(TRAINER, version(1))],
    )
    found = history_of(made)
    assert [entry.event for entry in found.moments] == [
        "accepted", "sent again", "leased", "handed out", "lost", "leased", "settled", "committed",
    ]  # fmt: skip
    details = {entry.event: entry.details for entry in reversed(found.moments)}
    assert details["accepted"] == {"segment": 1, "offset": 24}
    assert details["leased"] == {
        "lease": 1, "step": 1, "policy": "0.0", "by": "trainer", "rank": 1, "sequences": 2,
    }  # fmt: skip
    assert details["handed out"] == {"lease": 1, "consumer": "trainer-1", "request": "r2"}
    assert details["lost"] == {"lease": 1, "why": "consumer trainer-1 fell silent", "failed": True}
    assert details["settled"] == {"as": "trained", "lease": 2, "consumer": "trainer-0", "policy": "0.1"}
    assert details["committed"] == {"by": "trainer", "policy": "0.1"}
    assert (found.state, found.order, found.group_id) == ("committed", 1, "g1")
    assert [entry.at for entry in found.moments] == sorted(entry.at for entry in found.moments)


def test_where_it_came_from(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    found = origin(history_of(made).accepted)
    assert (found["producer"], found["env"], found["split"], found["task"]) == (
        "sort3-0",
        "sort3",
        "train",
        "t-1",
    )
    assert (found["session"], found["seq"], found["sequences"], found["tokens"]) == (7, 1, 2, 5)
    assert (found["oldest"], found["newest"]) == ("0.1", "0.2")
    assert (found["started_at"], found["finished_at"]) == (1000.0, 1001.5)
    assert found["rewards"] == {"mean": 0.625, "low": 0.25, "high": 1.0}


def test_a_rewind_is_told_of_the_groups_that_it_moved(made: Handmade) -> None:
    one, two = made.lease([1]), made.lease([2], step=2)
    steps = [one, settles(one, "g1"), two, settles(two, filtered=["g2"])]
    rewound = Rewound(TRAINER, version(1), "trainer-0")
    made.log(
        began(),
        [made.accept(1), made.accept(2), made.accept(3)],
        steps,
        [rewound, made.lease([2], again=True)],
    )
    assert events(made) == ["accepted", "leased", "settled", "committed"]
    found = history_of(made, "g2").moments
    assert [entry.event for entry in found] == ["accepted", "leased", "settled", "rewound", "leased"]
    assert found[3].details == {"was": "filtered", "policy": "0.1", "consumer": "trainer-0"}
    assert found[4].details["again"] is True
    assert events(made, "g3") == ["accepted"]


def test_how_groups_end_untrained(made: Handmade) -> None:
    lease = made.lease([1])
    made.log(
        began(),
        [made.accept(order) for order in (1, 2, 3)],
        [lease, settles(lease, rejected=["g1"]), Dropped(2, "expired", "stale"), WasReset("asked")],
    )
    assert history_of(made).moments[-1].details == {
        "as": "rejected", "reason": "odd", "lease": 1, "consumer": "trainer-0", "policy": "0.0",
    }  # fmt: skip
    assert (history_of(made).state, history_of(made, "g2").state, history_of(made, "g3").state) == (
        "dead",
        "expired",
        "discarded",
    )
    assert history_of(made, "g2").moments[-1].details == {"reason": "stale"}
    assert history_of(made, "g3").moments[-1].details == {"reason": "reset", "why": "asked"}


@pytest.mark.parametrize("event", [Forgot(TRAINER, 9), WasReset("asked")])
def test_a_trained_group_that_is_let_go_says_so(made: Handmade, event: Forgot | WasReset) -> None:
    lease = made.lease([1])
    made.log(began(), [made.accept(1)], [lease, settles(lease, "g1"), event])
    assert history_of(made).moments[-1].event == "let go"
    assert history_of(made).state == "trained"


def test_a_dead_group_that_is_queued_again_has_two_stories(made: Handmade) -> None:
    made.log(
        began(), [made.accept(1), Dropped(1, "dead", "damaged"), Requeued(1), made.accept(2, "g1", seq=1)]
    )
    first, second = group_histories(made.journal, "g1")
    assert [entry.event for entry in first.moments] == ["accepted", "dead", "requeued"]
    assert [entry.event for entry in second.moments] == ["accepted"]
    assert (first.state, second.state) == ("discarded", "queued")


def test_later_lives_of_the_broker_are_told_and_their_snapshots_are_not(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    again = [item(made.accept(1)), item(made.accept(2))]
    made.log([Numbers(3, 0, 0), *again, ledger(2, queued=2), Began(9, 1, "disk")], [made.lease([1, 2])])
    assert events(made) == ["accepted", "broker began", "leased"]
    assert events(made, "g2") == ["accepted", "broker began", "leased"]


def test_what_was_there_when_the_history_begins_is_known(made: Handmade) -> None:
    made.log([Numbers(2, 0, 0), item(made.accept(1), 1), ledger(1, queued=1)])
    found = history_of(made)
    assert [entry.event for entry in found.moments] == ["known"]
    assert found.moments[0].details == {"state": "queued", "deliveries": 1, "failures": 0}


def test_a_group_whose_acceptance_only_its_record_tells(made: Handmade) -> None:
    made.log(began())
    made.accept(1)
    assert events(made) == ["accepted"]


def test_nobody_has_a_story_of_a_group_that_never_was(made: Handmade) -> None:
    made.log(began(), [made.accept(1)])
    assert group_histories(made.journal, "g2") == []
