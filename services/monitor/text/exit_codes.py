"""Exit codes, the error line of a command, and a guard for readers that leave early."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


def complain(problem: str, code: int) -> int:
    """Write an error line to standard error, and return the exit code."""
    sys.stderr.write(f"error: {problem}\n")
    return code


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block quietly when the reader of standard output is gone, as after `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more on exit; that flush must not hit the broken pipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
