"""Each life of a run is recorded, and one that was killed ends with its last word."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.bus.rundir import read_lives, write_json
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.process import Role
from rolloutmq.services.process import run_lives
from rolloutmq.services.process.identity import identify
from rolloutmq.services.process.run_lives import ended_lives, has_launcher, last_written, living


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


def write_at(path: Path, at: float, text: str = "{}\n") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    os.utime(path, (0.0, at))


def test_each_life_of_a_run_is_recorded_and_a_killed_one_lasts_until_its_last_word(layout: RunLayout) -> None:
    with living(layout):
        (present,) = read_lives(layout)
        assert present.ended is None
    (first,) = read_lives(layout)
    assert first.began == present.began
    assert first.ended is not None
    assert first.ended >= first.began
    write_json(layout.lives, [first, Life(first.ended + 10.0)])  # its launcher was killed
    write_at(layout.metrics, first.ended + 25.0)
    with living(layout):
        assert read_lives(layout)[1] == Life(first.ended + 10.0, first.ended + 25.0)
    assert len(read_lives(layout)) == 3
    layout.lives.write_text("{torn")
    assert read_lives(layout) == ()
    assert ended_lives(layout) == []


def test_the_last_word_of_a_run_is_in_its_logs(layout: RunLayout) -> None:
    assert last_written(layout) == 0.0
    write_at(layout.settled, 20.0)
    write_at(layout.acks / "w-0.jsonl", 30.0)
    write_at(layout.acks / "w-1.jsonl", 40.0, "")  # a producer that nobody answered
    assert last_written(layout) == 30.0
    write_json(layout.lives, [Life(50.0)])
    assert ended_lives(layout) == [Life(50.0, 50.0)], "nothing was written since"


def test_an_end_that_cannot_be_written_is_logged(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with living(layout):
        monkeypatch.setattr(run_lives, "write_json", full)
    assert "end of the run not recorded" in caplog.text
    assert read_lives(layout)[0].ended is None


def test_only_a_running_launcher_owns_a_run(layout: RunLayout) -> None:
    assert not has_launcher(layout)
    layout.owner.write_text("{torn")
    assert not has_launcher(layout)
    with subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE) as child:
        write_json(layout.owner, identify("up", Role.LAUNCHER, child.pid, "t"))
        assert has_launcher(layout)
        child.kill()
        child.wait()
    assert not has_launcher(layout)
