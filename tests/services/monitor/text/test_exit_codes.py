"""A standard output that is closed, full, or left by its reader ends no command with a traceback."""

import subprocess
import sys

import pytest

PROGRAM = """
import os, sys
from rolloutmq.schemas.errors import OutputFailedError
from rolloutmq.services.monitor.text.exit_codes import fill_closed_streams, reader_may_leave
fill_closed_streams()
assert min(os.open(os.devnull, os.O_RDONLY) for _ in range(3)) > 2
try:
    with reader_may_leave():
        sys.stdout.write("line\\n" * int(sys.argv[1]))
except OutputFailedError as error:
    sys.exit(str(error))
"""


def run(redirection: str, lines: int = 1) -> "subprocess.CompletedProcess[str]":
    command = f'"$0" -c "$1" {lines} {redirection}'
    return subprocess.run(
        ["bash", "-c", command, sys.executable, PROGRAM],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )


@pytest.mark.parametrize("redirection", ["", ">&-", "<&-", "2>&-", "<&- >&- 2>&-", "> >(true)"])
@pytest.mark.parametrize("lines", [1, 100_000])
def test_a_stream_that_is_closed_or_left_is_no_failure(redirection: str, lines: int) -> None:
    told = run(redirection, lines)
    assert (told.returncode, told.stderr) == (0, "")


@pytest.mark.parametrize("lines", [1, 100_000])
def test_an_output_that_is_full_is_said(lines: int) -> None:
    told = run("> /dev/full", lines)
    assert told.returncode == 1
    assert told.stderr.startswith("standard output: cannot be written ([Errno 28] No space left on device)")
    assert "Traceback" not in told.stderr
    assert "Exception ignored" not in told.stderr
