"""Logs from their end, and what follows, whatever happens to the file."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.monitor.text import logs as command
from rolloutmq.services.monitor.text.logs import Follower, logs


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    found = RunLayout(run_dir)
    found.logs.mkdir()
    found.log("broker").write_text("".join(f"line {index}\n" for index in range(10)))
    found.log("sort3-0").write_text("")
    return found


@pytest.mark.parametrize(("lines", "shown"), [(0, 0), (1, 1), (3, 3), (10, 10), (99, 10)])
def test_last_lines_are_printed(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], lines: int, shown: int
) -> None:
    assert logs(layout.root, "broker", lines=lines) == 0

    assert capsys.readouterr().out == "".join(f"line {index}\n" for index in range(10 - shown, 10))


def test_lines_are_found_across_blocks(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "CHUNK_BYTES", 4)
    with Follower(layout.log("broker"), 2) as follower:
        parts = list(iter(follower.read, b""))

    assert b"".join(parts) == b"line 8\nline 9\n"


def test_unfinished_line_counts_as_one(layout: RunLayout) -> None:
    layout.log("broker").write_text("one\ntwo\nthr")
    with Follower(layout.log("broker"), 2) as follower:
        assert follower.read() == b"two\nthr"


def test_what_is_added_is_read(layout: RunLayout) -> None:
    with Follower(layout.log("broker"), 0) as follower:
        assert follower.read() == b""
        with layout.log("broker").open("a") as file:
            file.write("more\n")
        assert follower.read() == b"more\n"
        assert follower.read() == b""


def test_replaced_file_is_read_from_its_start_after_the_rest_of_the_old_one(layout: RunLayout) -> None:
    path = layout.log("broker")
    with Follower(path, 0) as follower:
        with path.open("a") as file:
            file.write("last of the old\n")
        path.rename(path.with_suffix(".old"))
        path.write_text("first of the new\n")

        assert follower.read() == b"last of the old\n"
        assert follower.read() == b"first of the new\n"
        assert follower.read() == b""


def test_file_that_is_away_for_a_moment_is_waited_for(layout: RunLayout) -> None:
    path = layout.log("broker")
    with Follower(path, 0) as follower:
        path.rename(path.with_suffix(".old"))
        assert follower.read() == b""
        path.write_text("back\n")
        assert follower.read() == b"back\n"


def test_file_that_was_cut_is_read_from_its_start(layout: RunLayout) -> None:
    with Follower(layout.log("broker"), 0) as follower:
        layout.log("broker").write_text("anew\n")

        assert follower.read() == b"anew\n"


def test_following_ends_with_ctrl_c(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def press(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rolloutmq.services.monitor.text.logs.time.sleep", press)

    assert logs(layout.root, "broker", follow=True, lines=1) == 130
    assert capsys.readouterr().out == "line 9\n"


@pytest.mark.parametrize("name", ["nobody", "../config", "", "*"])
def test_unknown_name_lists_what_there_is(
    layout: RunLayout, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    assert logs(layout.root, name) == 1
    assert "it has: broker, sort3-0" in capsys.readouterr().err


def test_missing_directory_is_a_usage_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert logs(tmp_path / "none", "broker") == 2
    assert ": no run directory" in capsys.readouterr().err


def test_reader_that_leaves_early_is_no_failure(layout: RunLayout) -> None:
    layout.log("broker").write_text("x" * (1 << 22) + "\n")
    code = (
        "import sys; from pathlib import Path; from rolloutmq.services.monitor.text.logs import logs;"
        "sys.exit(logs(Path(sys.argv[1]), 'broker'))"
    )
    reading, writing = os.pipe()
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(layout.root)], stdout=writing, stderr=subprocess.PIPE
    )
    os.close(writing)
    os.read(reading, 10)
    os.close(reading)
    _, errors = child.communicate(timeout=30)

    assert (child.returncode, errors) == (0, b"")


def test_control_characters_of_a_log_are_shown_and_not_obeyed(
    layout: RunLayout, capsys: pytest.CaptureFixture[str]
) -> None:
    layout.log("w").write_bytes(b"one\x1b[2J\x07\n\xc2\x9b31mtwo\r\n")
    assert logs(layout.root, "w") == 0
    assert capsys.readouterr().out == "one\\u001b[2J\\u0007\n\\u009b31mtwo\\r\n"
