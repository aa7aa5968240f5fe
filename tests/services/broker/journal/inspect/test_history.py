"""The journal's history: read from beginning to end, also during writes, with every gap reported."""

from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import Handmade, began, flip, item, ledger
from tests.services.broker.journal.other_versions import OTHERS, as_version

from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.services.broker.journal.format.events import Accepted, Began, Dropped, Numbers
from rolloutmq.services.broker.journal.inspect.history import JournalHistory, unlogged


@pytest.fixture
def made(run_dir: Path) -> Handmade:
    return Handmade(run_dir)


def orders(made: Handmade) -> tuple[list[int], list[str]]:
    history = JournalHistory(made.journal)
    events = [event for _, event in history]
    return [event.order for event in events if isinstance(event, Accepted)], history.damage


def test_facts_of_all_logs_come_in_their_order_with_their_times(made: Handmade) -> None:
    made.log(began(), [made.accept(1)], [made.accept(2), Dropped(1, "expired", "stale")])
    made.log([Numbers(3, 0, 0), ledger(2)], [made.accept(3)])
    found = list(JournalHistory(made.journal))
    assert [type(event).__name__ for _, event in found] == [
        "Numbers", "LedgerSnapshot", "Began", "Accepted", "Accepted", "Dropped", "Accepted",
    ]  # fmt: skip
    times = [at for at, _ in found]
    assert times == sorted(times)
    assert times[3] < times[4] == times[5] < times[6]


def test_no_journal_is_no_history(run_dir: Path) -> None:
    assert list(JournalHistory(run_dir / "journal")) == []


def test_chapters_say_which_life_began_with_them(made: Handmade) -> None:
    made.log(began(epoch=4))
    made.log([Numbers(1, 0, 0), ledger()])
    lives = []
    for log in JournalHistory(made.journal).logs():
        lives.append(log.began.epoch if log.began else None)
        assert log.whole
    assert lives == [4, None]


@pytest.mark.parametrize("left", [1, 40, 100])
def test_the_torn_end_of_a_log_that_is_written_is_no_damage(made: Handmade, left: int) -> None:
    made.log(began(), [made.accept(1)])
    whole = made.log_file().read_bytes()
    made.log(began(), [made.accept(1)], [made.accept(2)], number=1)
    made.log_file().write_bytes(made.log_file().read_bytes()[: len(whole) + left])
    assert orders(made) == ([1], [])


def test_a_log_may_end_torn_where_its_life_did_and_nowhere_else(made: Handmade) -> None:
    made.log(began(), [made.accept(1)], [made.accept(2)])
    made.log_file().write_bytes(made.log_file().read_bytes()[:-5])
    made.log([Numbers(3, 0, 0), ledger(2), Began(2, 1, "disk")], [made.accept(3)])
    assert orders(made) == ([1, 3], [])
    made.log([Numbers(3, 0, 0), ledger(2)], [made.accept(3)], number=2)
    found, damage = orders(made)
    assert found == [1, 3]
    assert len(damage) == 1
    assert damage[0].startswith("events-00000001.rmq: ")


def test_a_damaged_record_is_said_and_the_rest_is_read(made: Handmade) -> None:
    made.log(began(), [made.accept(1)], [made.accept(2)], [made.accept(3)])
    whole = made.log_file().read_bytes()
    flip(made.log_file(), whole.index(b"g2"))
    found, damage = orders(made)
    assert found == [1, 3]
    assert "are damaged" in damage[0]
    assert "records 3 to 3 are missing" in damage[1]


def test_a_log_that_is_missing_or_that_is_another_one_is_said(made: Handmade) -> None:
    for order in (1, 2, 3):
        made.log(began(), [made.accept(order)])
    made.log_file(2).unlink()
    assert orders(made) == ([1, 3], ["events-00000002.rmq is missing"])
    made.log_file(2).write_bytes(made.log_file(1).read_bytes())
    assert orders(made) == ([1, 3], ["events-00000002.rmq has the header of another log"])


def test_the_oldest_logs_may_be_gone(made: Handmade) -> None:
    for order in (1, 2):
        made.log(began(), [made.accept(order)])
    made.log_file(1).unlink()
    assert orders(made) == ([2], [])


def test_a_snapshot_that_is_not_whole_is_said(made: Handmade) -> None:
    accepted = made.accept(1)
    made.log([Numbers(2, 0, 0), item(accepted), ledger(1, queued=1)])
    flip(made.log_file(), made.log_file().read_bytes().index(b"g1"))
    history = JournalHistory(made.journal)
    (log,) = history.logs()
    assert not log.whole
    assert len(history.damage) == 2


def test_groups_that_no_fact_names_yet_are_found_in_the_segments(made: Handmade) -> None:
    accepted = [made.accept(1), made.accept(2), made.accept(3, segment=2)]
    assert list(unlogged(made.journal, 1, 1)) == accepted[1:]
    assert list(unlogged(made.journal, 1, 2)) == accepted[2:]
    assert list(unlogged(made.journal, 3, 0)) == []


def test_a_segment_under_another_number_gives_nothing(made: Handmade) -> None:
    made.accept(1)
    made.segment(1).rename(made.segment(2))
    assert list(unlogged(made.journal, 0, 0)) == []


@pytest.mark.parametrize("version", OTHERS)
def test_another_version_is_refused_and_not_told_as_damage(made: Handmade, version: int) -> None:
    made.log(began(), [made.accept(1)])
    as_version(made.segment(), version)
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        list(unlogged(made.journal, 0, 0))
    as_version(made.log_file(), version)
    made.segment().unlink()
    history = JournalHistory(made.journal)
    with pytest.raises(RecordVersionError, match=f"got version {version}"):
        list(history)
    assert history.damage == []


def acceptances(made: Handmade) -> list[tuple[float, int]]:
    found = JournalHistory(made.journal).with_unlogged()
    return [(at, event.order) for at, event in found if isinstance(event, Accepted)]


def test_the_groups_accepted_just_before_a_kill_are_in_the_whole_history(made: Handmade) -> None:
    """The broker answers once the record is durable, and writes the event some milliseconds later."""
    accepted = [made.accept(order) for order in (1, 2, 3)]
    made.log(began(), accepted[:1])
    assert [order for _, order in acceptances(made)] == [1, 2, 3]
    assert [at for at, _ in acceptances(made)][1:] == [accepted[1].at, accepted[2].at]
    made.log([Numbers(4, 0, 0), *map(item, accepted), ledger(3, queued=3), Began(2, 1, "disk")])
    assert [order for _, order in acceptances(made)] == [1, 2, 3]
    made.accept(4)
    assert [order for _, order in acceptances(made)] == [1, 2, 3, 4]


def test_the_state_of_a_log_of_the_same_life_adds_no_group(made: Handmade) -> None:
    accepted = [made.accept(order) for order in (1, 2)]
    made.log([Numbers(3, 0, 0), *map(item, accepted), ledger(2, queued=2), began()[-1]])
    made.log([Numbers(3, 0, 0), *map(item, accepted), ledger(2, queued=2)])
    assert acceptances(made) == []


def test_records_without_any_log_are_no_history(made: Handmade) -> None:
    made.accept(1)
    assert acceptances(made) == []
