"""The place of the user's code is found in stacks, and what hangs in a worker in its files, whatever they have."""

from pathlib import Path
from typing import Final

import pytest

from rolloutmq.schemas.files import Hang, RunLayout
from rolloutmq.services.process.stacks import fault_in, hang_of, header_of

STACKS: Final = """\
Timeout (0:00:10)!
Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 324 in wait
  File "/home/me/raters.py", line 3 in order

Thread 0x00007f02 (most recent call first):
  File "/usr/lib/python3.11/re/__init__.py", line 166 in match
  File "/home/me/.venv/lib/python3.11/site-packages/grammar/parse.py", line 7 in parse
  File "/home/me/env/sums.py", line 14 in score
  File "/home/me/env/sums.py", line 2 in outer
"""


@pytest.fixture
def layout(tmp_path: Path) -> RunLayout:
    layout = RunLayout(tmp_path)
    layout.hangs.mkdir()
    return layout


def test_the_users_innermost_frame_of_the_main_thread_is_the_place(layout: RunLayout) -> None:
    layout.stack("add-0").write_bytes(header_of(7, Path("/home/me/env")) + STACKS.encode())
    assert hang_of(layout, "add-0", 7) == Hang(pid=7, where="sums.py:14")
    assert hang_of(layout, "add-0", 8) is None, "the files are of an earlier process"
    assert hang_of(layout, "add-1", 7) is None


def test_a_rater_in_another_thread_may_hold_the_lock(layout: RunLayout) -> None:
    first, _, _ = STACKS.partition("\n\n")
    layout.stack("add-0").write_bytes(header_of(7, Path("/home/me/env")) + first.encode())
    assert hang_of(layout, "add-0", 7) == Hang(pid=7, where="/home/me/raters.py:3")


@pytest.mark.parametrize("content", [b"", b"7 /home/me\n", b"\xff\xfe", b"no pid\nFile", b"7\n"])
def test_a_worker_that_runs_and_a_damaged_file_tell_nothing(content: bytes, layout: RunLayout) -> None:
    layout.hang("add-0").write_bytes(content)
    layout.stack("add-0").write_bytes(content)
    assert hang_of(layout, "add-0", 7) is None


FAULT: Final = """\
INFO rater called
Fatal Python error: Segmentation fault
Thread 0x00007f03 (most recent call first):
  File "/home/me/env/sums.py", line 99 in other
Current thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3.11/ctypes/__init__.py", line 3 in string_at
  File "/home/me/env/raters.py", line 3 in order
Thread 0x00007f02 (most recent call first):
  File "/home/me/env/sums.py", line 14 in score
Extension modules: numpy (total: 1)
"""


def test_the_place_of_a_fatal_signal_is_that_of_its_thread() -> None:
    assert fault_in(FAULT) == "/home/me/env/raters.py:3"
    assert fault_in(FAULT, Path("/home/me/env")) == "raters.py:3"
    assert fault_in(FAULT.partition("\n")[0]) == ""
