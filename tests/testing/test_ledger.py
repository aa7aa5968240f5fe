"""Assertions on the ledger name every group that they miss."""

from pathlib import Path
from typing import Any

import pytest

from rolloutmq import Consumer, Group, Producer, Rejected
from rolloutmq.schemas.errors import MissingError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.testing import LocalBroker, assert_nothing_lost, assert_settled, read_ledger

PATIENCE_S = 60.0
SENT = ("g-1", "g-2", "g-3", "g-4")


def send(run_dir: Path, *names: str, ack_log: Path | None = None) -> None:
    opened = Producer.blocking(run_dir, env="e", producer="e-0", ack_log=ack_log, timeout_s=PATIENCE_S)
    with opened as producer:
        for name in names:
            group = Group.build(name, tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0])
            producer.send(group, timeout_s=PATIENCE_S)


def settle(run_dir: Path, *, filtered: tuple[str, ...] = (), rejected: tuple[str, ...] = ()) -> None:
    """Settle one batch of three groups."""
    with Consumer.blocking(run_dir, sequences=3, timeout_s=PATIENCE_S) as consumer:
        batch = next(iter(consumer))
        bad = [Rejected(group_id=name, reason="not mine") for name in rejected]
        consumer.settle(batch, filtered=filtered, rejected=bad, timeout_s=PATIENCE_S)


def test_settled_groups_are_counted_and_the_others_named() -> None:
    with LocalBroker() as broker:
        send(broker.run_dir, *SENT)
        assert_settled(broker, 0)
        settle(broker.run_dir, filtered=("g-2",))
        assert_settled(broker, 3)
        assert_settled(broker.run_dir, 3)
        states = read_ledger(broker).states
        assert states == {"g-1": "trained", "g-2": "filtered", "g-3": "trained", "g-4": "queued"}
        with pytest.raises(
            AssertionError, match=r"^3 groups settled, 4 expected; not settled: g-4 \(queued\)$"
        ):
            assert_settled(broker, 4)
        with pytest.raises(AssertionError, match="2 expected"):
            assert_settled(broker, 2)


def test_nothing_is_lost_while_a_group_waits() -> None:
    with LocalBroker() as broker:
        send(broker.run_dir, *SENT)
        settle(broker.run_dir)
        assert_nothing_lost(broker, SENT)
        broker.restart()
        assert_nothing_lost(broker, SENT)


def test_a_group_that_was_not_accepted_is_named() -> None:
    with LocalBroker() as broker:
        send(broker.run_dir, "g-1")
        with pytest.raises(AssertionError, match=r"^1 lost: g-2 \(never accepted\)$"):
            assert_nothing_lost(broker, ["g-1", "g-2"])


def test_what_is_no_id_and_no_count_is_refused_with_the_remedy() -> None:
    group: Any = Group.build("g-1", tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0])
    remedy = r"^sent: must be ids of groups \(got .*\); pass \[group\.group_id for group in groups\]$"
    with LocalBroker() as broker:
        send(broker.run_dir, "g-1")
        strange: list[Any] = [[group], iter(["g-1", group]), [1]]
        for sent in strange:
            with pytest.raises(UsageError, match=remedy):
                assert_nothing_lost(broker, sent)
        assert_nothing_lost(broker, (name for name in ["g-1"]))
        for count in ("0", False, -1, 0.0, None):
            with pytest.raises(UsageError, match=r"^count: must be a number of groups, at least 0 \(got "):
                assert_settled(broker, count)  # type: ignore[arg-type]
    for call in (read_ledger, assert_nothing_lost, lambda run: assert_settled(run, 0)):
        with pytest.raises(UsageError, match=r"^run: must be a LocalBroker or a run directory \(got 3\)"):
            call(3)  # type: ignore[arg-type]


def test_a_dropped_group_is_named_with_the_reason_unless_it_is_allowed() -> None:
    with LocalBroker() as broker:
        send(broker.run_dir, *SENT)
        settle(broker.run_dir, rejected=("g-3",))
        with pytest.raises(AssertionError, match=r"^1 lost: g-3 \(dead: .*not mine"):
            assert_nothing_lost(broker, SENT)
        assert_nothing_lost(broker, SENT, dropped={"dead"})


def test_a_group_whose_record_is_gone_is_named(tmp_path: Path) -> None:
    layout = RunLayout(tmp_path / "run")
    with LocalBroker(run_dir=layout.root) as broker:
        layout.acks.mkdir()
        send(broker.run_dir, "g-1", "g-2", ack_log=layout.ack_log("e-0"))
    for segment in layout.journal.glob("groups-*.rmq"):
        segment.unlink()
    with pytest.raises(AssertionError, match=r"^2 lost: group g-1 .* is gone, group g-2 .* is gone$"):
        assert_nothing_lost(layout.root)


def forget(broker: LocalBroker, name: str) -> None:
    """Restart a broker until its history no longer has a group that has ended."""
    for _ in range(50):
        broker.restart()
        if name not in read_ledger(broker).states:
            return
    raise AssertionError(f"the history still has {name}")


def test_groups_that_ended_before_the_kept_history_are_counted() -> None:
    with LocalBroker("broker.history_bytes=1") as broker:
        send(broker.run_dir, *SENT)
        settle(broker.run_dir, rejected=("g-3",))
        forget(broker, "g-3")
        ledger = read_ledger(broker)
        assert (ledger.unnamed, ledger.earlier, ledger.since is None) == ({"dead": 1}, {"g-3"}, False)
        begun = r"; the history begins at .* have no ids \(1 dead\): raise broker.history_bytes"
        with pytest.raises(AssertionError, match=rf"^1 lost: a group without its id \(dead\){begun}"):
            assert_nothing_lost(broker, SENT)
        assert_nothing_lost(broker, SENT, dropped={"dead"})
        with pytest.raises(AssertionError, match=rf"^1 lost: g-9 \(never accepted\){begun}"):
            assert_nothing_lost(broker, [*SENT, "g-9"], dropped={"dead"})
        with pytest.raises(AssertionError, match=rf"4 expected; not settled: g-4 \(queued\){begun}"):
            assert_settled(broker, 4)


def test_a_group_that_no_log_names_may_have_ended_before_the_kept_history() -> None:
    with LocalBroker("broker.history_bytes=1") as broker:
        send(broker.run_dir, *SENT)
        settle(broker.run_dir, rejected=("g-3",))
        forget(broker, "g-3")
        layout = RunLayout(broker.run_dir)
        for log in (layout.settled, layout.dropped):
            log.write_bytes(b"")  # a killed broker may lack the line
        assert_nothing_lost(broker, SENT, dropped={"dead"})
        with pytest.raises(AssertionError, match=r"^2 lost: g-3 \(not in the kept history\), g-9 \(not in"):
            assert_nothing_lost(broker, [*SENT, "g-9"], dropped={"dead"})


def test_without_a_journal_there_is_no_ledger(tmp_path: Path) -> None:
    with (
        LocalBroker("broker.durability=memory") as broker,
        pytest.raises(UsageError, match="keeps no journal"),
    ):
        assert_settled(broker, 0)
    with pytest.raises(MissingError):
        assert_nothing_lost(tmp_path)


def test_a_text_is_no_list_of_ids_and_states_have_names(tmp_path: Path) -> None:
    with pytest.raises(
        UsageError, match=r"^sent: must be ids of groups .got the text 'g0'.; pass a list of ids$"
    ):
        assert_nothing_lost(tmp_path, "g0")
    for states in ({"dead", "typo"}, "dead", ["queued"]):
        with pytest.raises(
            UsageError, match=r"^dropped: must be a set of the states dead, discarded, expired .got"
        ):
            assert_nothing_lost(tmp_path, dropped=states)
