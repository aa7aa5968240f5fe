"""The shared window: the latest ratings of all processes, whatever byte a process is killed at."""

import fcntl
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.services.rewards.window import SLACK_ROWS, MemoryWindow, SharedWindow, WindowState

NAMES = ("one", "two")
SIZE = 10
ROOT = Path(__file__).parents[3]
Floats = NDArray[np.float64]


def as_before(window: Floats, marks: int) -> int:
    del window
    return marks


def rows_of(first: int, count: int) -> Floats:
    return np.stack([np.arange(first, first + count, dtype=float), np.full(count, np.nan)], axis=1)


def appended(window: Any, rows: Floats, decide: Callable[[Floats, int], int] = as_before) -> WindowState:
    state = window.append(rows, decide)
    assert state is not None
    return state  # type: ignore[no-any-return]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "math.rewards.window"


@pytest.fixture(params=["memory", "file"])
def window(request: pytest.FixtureRequest, file: Path) -> Any:
    return MemoryWindow(2, SIZE) if request.param == "memory" else SharedWindow(file, NAMES, SIZE)


def test_a_window_keeps_the_latest(window: Any) -> None:
    for first in range(0, 40, 4):
        state = appended(window, rows_of(first, 4))
        newest = first + 4
        assert state.seen == newest
        assert state.ratings[:, 0].tolist() == list(range(max(0, newest - SIZE), newest))
        assert np.isnan(state.ratings[:, 1]).all()
        assert state.restarted == ""
    assert appended(window, rows_of(0, 0)).seen == 40


def test_marks_are_kept_from_one_append_to_the_next(window: Any) -> None:
    asked = []

    def decide(ratings: Floats, marks: int) -> int:
        asked.append((len(ratings), marks))
        return (1 << 63) + len(asked)

    assert appended(window, rows_of(0, 1), decide).outliers == (1 << 63) + 1
    assert appended(window, rows_of(1, 1), decide).outliers == (1 << 63) + 2
    assert asked == [(1, 0), (2, (1 << 63) + 1)]


def test_more_rows_than_the_window_are_appended_in_parts(file: Path) -> None:
    state = appended(SharedWindow(file, NAMES, SIZE), rows_of(0, 3 * SLACK_ROWS + 5))
    assert state.seen == 3 * SLACK_ROWS + 5
    assert state.ratings[-1, 0] == 3 * SLACK_ROWS + 4


def test_another_process_and_a_later_one_see_the_same(file: Path) -> None:
    one, other = SharedWindow(file, NAMES, SIZE), SharedWindow(file, NAMES, SIZE)
    for first in range(60):
        state = appended(one if first % 3 else other, rows_of(first, 1))
        assert state.ratings[:, 0].tolist() == list(range(max(0, first + 1 - SIZE), first + 1))
    later = appended(SharedWindow(file, NAMES, SIZE), rows_of(60, 1))
    assert later.ratings[:, 0].tolist() == list(range(51, 61))
    assert later.seen == 61


def test_the_file_is_private_and_bounded(file: Path, tmp_path: Path) -> None:
    window = SharedWindow(file, NAMES, SIZE)
    appended(window, rows_of(0, 1))
    size = file.stat().st_size
    for first in range(2000):
        appended(window, rows_of(first, 3))
    assert file.stat().st_size == size < 10_000
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    link = tmp_path / "link.window"
    link.symlink_to(file)
    with pytest.raises(OSError, match="symbolic link"):
        SharedWindow(link, NAMES, SIZE).append(rows_of(0, 1), as_before)


def test_a_window_in_use_is_told_and_not_waited_for(file: Path) -> None:
    window = SharedWindow(file, NAMES, SIZE)
    appended(window, rows_of(0, 1))
    with file.open("rb+") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        assert window.append(rows_of(1, 1), as_before) is None
    assert appended(window, rows_of(1, 1)).seen == 2


class _KilledError(BaseException):
    pass


@contextmanager
def dying(budget: int) -> Iterator[None]:
    """Let the writes of this block end after so many bytes, like those of a killed process."""
    write, left = os.pwrite, budget

    def torn(fd: int, data: bytes, at: int) -> int:
        nonlocal left
        if len(data) > left:
            write(fd, data[:left], at)
            raise _KilledError
        left -= len(data)
        return write(fd, data, at)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "pwrite", torn)
        yield


def bytes_of_one_append(first: int, count: int, path: Path, monkeypatch: pytest.MonkeyPatch) -> int:
    total, write = 0, os.pwrite

    def counted(fd: int, data: bytes, at: int) -> int:
        nonlocal total
        total += len(data)
        return write(fd, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", counted)
        appended(SharedWindow(path, NAMES, SIZE), rows_of(first, count))
    return total


@pytest.mark.parametrize("before", [0, 7, SIZE + SLACK_ROWS - 2, 3 * (SIZE + SLACK_ROWS) + 1])
def test_a_writer_killed_at_any_byte_changes_nothing(
    before: int, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0 it dies while it makes the file; at the third the rows wrap around the end of the ring."""

    def fresh() -> SharedWindow:
        return SharedWindow(file, NAMES, SIZE)

    if before:
        appended(fresh(), rows_of(0, before))
        clean = file.read_bytes()
    total = bytes_of_one_append(before, 5, file.with_name("other") if not before else file, monkeypatch)
    for budget in range(total):
        file.unlink(missing_ok=True)
        if before:
            file.write_bytes(clean)
        with dying(budget), pytest.raises(_KilledError):
            fresh().append(rows_of(before, 5), as_before)
        state = appended(fresh(), rows_of(1000, 1))
        assert state.restarted == "", budget
        assert state.seen == before + 1
        assert state.ratings[:, 0].tolist() == [*range(max(0, before + 1 - SIZE), before), 1000]


@pytest.mark.parametrize("what", ["a row", "both heads", "the header", "the end", "garbage"])
def test_damage_begins_the_window_anew_and_says_so(what: str, file: Path) -> None:
    window = SharedWindow(file, NAMES, SIZE)
    appended(window, rows_of(0, SIZE))
    data = bytearray(file.read_bytes())
    place = {"a row": 128 + 9, "both heads": 64, "the header": 20, "the end": 0, "garbage": 0}[what]
    if what == "garbage":
        data[:] = os.urandom(len(data))
    elif what == "the end":
        del data[160:]
    else:
        for at in (place, place + 32) if what == "both heads" else (place,):
            data[at] ^= 1
    file.write_bytes(bytes(data))
    state = appended(SharedWindow(file, NAMES, SIZE), rows_of(50, 1))
    assert state.restarted == "its checksums fail"
    assert (state.seen, state.ratings[:, 0].tolist()) == (1, [50.0])
    assert file.with_name(f"{file.name}.damaged").read_bytes() == bytes(data)
    state = appended(window, rows_of(51, 1))  # a process that knew the old rows forgets them
    assert (state.restarted, state.ratings[:, 0].tolist()) == ("", [50.0, 51.0])


def test_a_window_of_other_raters_begins_anew(file: Path) -> None:
    appended(SharedWindow(file, NAMES, SIZE), rows_of(0, 3))
    for names, size in ((("two", "one"), SIZE), (("two", "one"), SIZE + 1)):
        state = appended(SharedWindow(file, names, size), rows_of(9, 1))
        assert "other raters" in state.restarted
        assert state.seen == 1
    three = appended(SharedWindow(file, ("a", "b", "c"), SIZE), np.zeros((2, 3)))
    assert three.ratings.shape == (2, 3)


def test_a_window_of_another_version_is_refused_and_stays(file: Path) -> None:
    appended(SharedWindow(file, NAMES, SIZE), rows_of(0, 3))
    data = bytearray(file.read_bytes())
    data[8] = 9
    file.write_bytes(bytes(data))
    with pytest.raises(RecordVersionError, match="got version 9, this one reads version 1"):
        SharedWindow(file, NAMES, SIZE).append(rows_of(0, 1), as_before)
    assert file.read_bytes() == bytes(data)


WRITER = """
import sys
from pathlib import Path
import numpy as np
from rolloutmq.services.rewards.window import SharedWindow
from tests.services.rewards.test_window import NAMES, as_before
window = SharedWindow(Path(sys.argv[1]), NAMES, 200)
for number in range(int(sys.argv[2]), int(sys.argv[3])):
    while window.append(np.full((4, 2), float(number)), as_before) is None:
        pass
    print(number, flush=True)
"""


@contextmanager
def writing(file: Path, first: int, end: int) -> Iterator["subprocess.Popen[str]"]:
    """Append groups of four equal ratings, in a process that says each number; it is killed at the end of the block."""
    command = [sys.executable, "-c", WRITER, str(file), str(first), str(end)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as writer:
        try:
            yield writer
        finally:
            writer.kill()


def test_two_processes_lose_none_of_each_others_ratings(file: Path) -> None:
    groups = 40
    with writing(file, 0, groups) as one, writing(file, 1000, 1000 + groups) as other:
        for writer in (one, other):
            writer.communicate(timeout=120)
            assert writer.returncode == 0
    state = appended(SharedWindow(file, NAMES, 200), np.empty((0, 2)))
    assert (state.seen, state.restarted) == (2 * groups * 4, "")
    numbers = state.ratings[:, 0].reshape(-1, 4)
    assert (numbers == numbers[:, :1]).all()  # groups are never mixed
    for start in (0, 1000):
        own = numbers[(numbers[:, 0] >= start) & (numbers[:, 0] < start + groups), 0]
        assert (np.diff(own) == 1).all()


def test_a_killed_process_leaves_whole_groups(file: Path) -> None:
    seen = 0
    for life in range(3):
        with writing(file, 0, 10**9) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline()
            writer.send_signal(signal.SIGKILL)
            writer.wait(60)
        state = appended(SharedWindow(file, NAMES, 200), np.empty((0, 2)))
        assert state.restarted == "", life
        assert state.seen % 4 == 0
        assert state.seen > seen
        seen = state.seen
        numbers = state.ratings[:, 0].reshape(-1, 4)
        assert (numbers == numbers[:, :1]).all()
