"""The start of a program that dies with its parent: it is the same process, with the signals of a fresh one."""

import signal
import subprocess
import sys

from rolloutmq.schemas.process import python_command
from rolloutmq.services.programs.tied import NO_PROGRAM

TIED = "rolloutmq.services.programs.tied"


def started(*argv: str) -> "subprocess.Popen[str]":
    """Start it where a signal is ignored and another one blocked, as in the processes of a cluster."""
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    ignored = signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    try:
        return subprocess.Popen(
            python_command(sys.executable, TIED, *argv),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
    finally:
        signal.signal(signal.SIGUSR2, ignored)
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def test_the_program_takes_the_process_and_has_all_its_signals() -> None:
    with started("sh", "-c", "echo $$; exec cat /proc/self/status") as process:
        out, _ = process.communicate(timeout=60)
    assert int(out.split()[0]) == process.pid
    states = dict(line.split(":", 1) for line in out.splitlines()[1:])
    for kind in ("SigIgn", "SigBlk"):
        found = {number for number in signal.valid_signals() if int(states[kind], 16) >> (number - 1) & 1}
        assert not found, kind  # further ones belong to the C library


def test_a_program_that_does_not_exist_is_named() -> None:
    with started("no-such-program") as process:
        _, said = process.communicate(timeout=60)
    assert process.returncode == NO_PROGRAM
    assert "there is no program to run on" in said
    assert "install it there" in said
