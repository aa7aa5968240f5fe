"""Clocks of other hosts: a line for each change that could be measured."""

from math import nan
from pathlib import Path

import pytest

from rolloutmq.schemas.files import NotedClock
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.services.process.clock_log import LEAST_S, ClockLog, Measured, clock_at


def test_only_changes_beyond_the_error_are_noted(tmp_path: Path) -> None:
    log = ClockLog(tmp_path / "clocks.jsonl")
    for wall, offset_s, error_s in (
        (1.0, nan, 0.0),
        (2.0, 3.0, 0.001),
        (3.0, 3.0 + LEAST_S / 2, 0.001),
        (4.0, 3.1, 0.2),
        (5.0, 4.0, 0.001),
    ):
        log.note({"w": Measured(offset_s, error_s)}, wall)
    log.note({}, 6.0)
    found = list(read_lines(tmp_path / "clocks.jsonl", NotedClock))
    assert [(one.at, one.offset_s) for one in found] == [(2.0, 3.0), (5.0, 4.0)]
    assert (tmp_path / "clocks.jsonl").stat().st_mode & 0o777 == 0o600


def test_the_clock_of_a_time_is_the_last_one_before_it() -> None:
    lines = [
        NotedClock(at=at, producer=name, offset_s=offset_s, error_s=0.0)
        for at, name, offset_s in ((1.0, "w", 1.0), (2.0, "x", 9.0), (3.0, "w", 2.0))
    ]
    for wall, offset_s in ((0.5, 1.0), (1.0, 1.0), (2.9, 1.0), (3.5, 2.0)):
        assert clock_at(lines, "w", wall) == Measured(offset_s, 0.0)
    assert clock_at(lines, "nobody", 2.0) is None


def test_a_full_disk_leaves_a_line_to_the_next_look(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "run" / "clocks.jsonl"
    log = ClockLog(path)
    log.note({"w": Measured(3.0, 0.0)}, 1.0)
    assert "clocks not noted" in caplog.text
    path.parent.mkdir()
    log.note({"w": Measured(3.0, 0.0)}, 2.0)
    assert [one.at for one in read_lines(path, NotedClock)] == [2.0]
