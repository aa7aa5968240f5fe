"""A child of a test that stops or kills itself: ended in any case, and waited for within bounds."""

import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

START_S = 120.0
"""Longest start of a child that imports torch."""
END_S = 30.0
"""Longest time in which the kernel ends a killed process, or a process its last lines."""


class Child:
    """A Python process that reads orders and says when it is ready. Made by `child`."""

    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self.process = process
        self.pid = process.pid

    def line(self, limit_s: float = START_S) -> str:
        """Return the next line that it prints."""
        assert self.process.stdout is not None
        fd, found, deadline = self.process.stdout.fileno(), b"", time.monotonic() + limit_s
        while not found.endswith(b"\n"):
            left_s = deadline - time.monotonic()
            assert left_s > 0, f"it has said only {found!r}"
            if select.select([fd], [], [], left_s)[0]:
                byte = os.read(fd, 1)
                assert byte, f"it ended after {found!r}"
                found += byte
        return found.decode().strip()

    def order(self) -> None:
        """Let it go on."""
        os.write(self.process.stdin.fileno(), b"go\n")  # type: ignore[union-attr]

    def ended(self, limit_s: float = END_S) -> int:
        """Wait for its end; return its exit code."""
        return self.process.wait(limit_s)


@contextmanager
def child(code: str, *arguments: str) -> Iterator[Child]:
    """Run Python code in a process for the duration of the block, and kill it at the end, stopped or not."""
    process = subprocess.Popen(
        [sys.executable, "-c", code, *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
    )
    try:
        yield Child(process)
    finally:
        process.kill()
        process.wait(END_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()
