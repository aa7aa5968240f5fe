import pytest

from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.state.ledger import Ledger


def test_every_move_keeps_the_sum_and_names_its_reason() -> None:
    ledger = Ledger()
    ledger.accept(10)
    ledger.move(GroupState.QUEUED, GroupState.LEASED, 6)
    ledger.move(GroupState.LEASED, GroupState.TRAINED, 3)
    ledger.move(GroupState.LEASED, GroupState.FILTERED)
    ledger.move(GroupState.LEASED, GroupState.DEAD, reason="rejected")
    ledger.move(GroupState.QUEUED, GroupState.EXPIRED, 2, "stale")
    ledger.move(GroupState.TRAINED, GroupState.COMMITTED)
    ledger.rewind(GroupState.TRAINED, 2)
    ledger.validate()
    report = ledger.report(lost_now=5)
    assert (report.queued, report.leased, report.trained, report.committed) == (4, 1, 0, 1)
    assert (report.filtered, report.expired, report.dead) == (1, 2, 1)
    assert (report.accepted, report.rewound, report.lost_before_accept) == (10, 2, 5)
    assert report.reasons == {"dead(rejected)": 1, "expired(stale)": 2}


def test_a_group_that_never_was_cannot_leave() -> None:
    ledger = Ledger()
    ledger.accept()
    ledger.move(GroupState.LEASED, GroupState.TRAINED)
    with pytest.raises(AssertionError):
        ledger.validate()
