"""Groups dropped as stale are warned of: for each environment, at once, then at intervals, and at the end."""

import logging
from pathlib import Path

import pytest
from tests.services.broker.io.test_data_plane import Script, running

from rolloutmq.bus.encoding import codec
from rolloutmq.schemas.wire.replies import Ok
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.broker.actions import Expired, Reply
from rolloutmq.services.broker.io.stale_log import LANES, StaleLog


def test_each_environment_is_told_at_once_and_then_at_intervals() -> None:
    log = StaleLog(every_s=30.0)
    assert list(log.warnings(0.0)) == []
    log.note(Expired("mine", 90, 4, newest_step=7))
    log.note(Expired("mine", 6, 4, newest_step=5))
    (first,) = log.warnings(1.0)
    assert first.startswith(
        "groups dropped as stale env=mine count=96 total=96 max_staleness=4 newest_step=7; "
    )
    assert "trainer.batch_sequences" in first
    assert "`rolloutmq set env.mine.stale=pass`" in first
    log.note(Expired("mine", 2, 4))
    log.note(Expired("other", 1, 8))
    (other,) = log.warnings(2.0)
    assert "env=other count=1 total=1 max_staleness=8" in other
    assert list(log.warnings(30.9)) == []
    (again,) = log.warnings(31.0)
    assert "env=mine count=2 total=98 " in again
    assert list(log.warnings(99.0)) == []


def test_groups_that_name_no_policy_have_another_remedy() -> None:
    """The pace of producers does not help: each of their groups expires."""
    log = StaleLog()
    log.note(Expired("mine", 90, 4))
    (told,) = log.warnings(0.0)
    assert "if every group of mine names policy step 0, leave `oldest`" in told
    log.note(Expired("mine", 1, 4, newest_step=9))
    (told,) = log.warnings(99.0)
    assert "leave `oldest`" not in told


def test_environments_that_come_and_go_are_forgotten_and_none_untold_before_the_told() -> None:
    log = StaleLog(every_s=30.0)
    log.note(Expired("untold", 1, 4))
    list(log.warnings(0.0))
    log.note(Expired("untold", 2, 4))
    for number in range(2 * LANES):
        log.note(Expired(f"e{number}", 1, 4))
        list(log.warnings(1.0))
    assert len(log._lanes) == LANES
    assert any("env=untold count=2 " in line for line in log.rest())


def test_the_end_tells_the_rest() -> None:
    log = StaleLog(every_s=30.0)
    log.note(Expired("mine", 1, 4))
    assert len(list(log.warnings(0.0))) == 1
    assert list(log.rest()) == []
    log.note(Expired("mine", 3, 4))
    (rest,) = log.rest()
    assert "count=3 total=4" in rest


def test_the_broker_logs_them(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    script = Script(answer=lambda route, _: [Expired("mine", 5, 4), Reply(route, Ok())])
    with caplog.at_level(logging.WARNING), running(script, tmp_path) as it:
        it.ask(it.dealer(), b"1", b"", codec.encode(GetInfo()))
    (line,) = [record.message for record in caplog.records if "stale" in record.message]
    assert "env=mine count=5" in line
