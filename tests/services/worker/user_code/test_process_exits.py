"""`os._exit` tells where it is called, in any thread, and ends the process as ever."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

from rolloutmq.services.worker.user_code.failures import UserFiles
from rolloutmq.services.worker.user_code.process_exits import told_exits

SCRIPT: Final = """
import os
import sys
import threading
from pathlib import Path

from rolloutmq.services.worker.user_code.failures import UserFiles
from rolloutmq.services.worker.user_code.process_exits import told_exits


def tell(failure, status):
    print(failure.where, status, flush=True)
    return status + 10


def leave():
    os._exit(3)


with told_exits(UserFiles(Path(__file__).parent), tell):
    if sys.argv[1] == "child" and (child := os.fork()):
        raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    threading.Thread(target=leave).start() if sys.argv[1] == "thread" else leave()
"""


@pytest.mark.parametrize(
    ("how", "code", "told"),
    [("main", 13, "leaving.py:17 3\n"), ("thread", 13, "leaving.py:17 3\n"), ("child", 3, "")],
)
def test_the_place_is_told_and_the_exit_code_is_that_of_the_teller(
    how: str, code: int, told: str, tmp_path: Path
) -> None:
    script = tmp_path / "leaving.py"
    script.write_text(SCRIPT)
    ended = subprocess.run(
        [sys.executable, str(script), how], capture_output=True, text=True, timeout=120, check=False
    )
    assert (ended.returncode, ended.stdout) == (code, told), ended.stderr


def test_it_is_as_before_behind_the_block(tmp_path: Path) -> None:
    before = os._exit
    with told_exits(UserFiles(tmp_path), lambda _failure, status: status):
        assert os._exit is not before
    assert os._exit is before
