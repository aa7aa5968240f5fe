"""How a command of the monitor ends: exit codes, the line that says why, and readers that leave early."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

FAILED: Final = 1
USAGE: Final = 2
INTERRUPTED: Final = 130


def complain(problem: str, code: int) -> int:
    """Say on standard error why a command came to nothing, and return its exit code."""
    sys.stderr.write(f"error: {problem}\n")
    return code


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block quietly when nobody reads standard output any more, as after `| head`."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        # The interpreter flushes once more at its end, which must not go into the broken pipe.
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, sys.stdout.fileno())
        os.close(nowhere)
