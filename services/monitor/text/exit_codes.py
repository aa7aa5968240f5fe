"""Exit codes, the error line of a command, and guards for a standard output that ends early."""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rolloutmq.schemas.errors import OutputFailedError
from rolloutmq.schemas.printable import printable_lines

FAILED: Final = 1
USAGE: Final = 2
UNCONFIRMED: Final = 6
"""The order is kept; the orchestrator, which alone can carry it out, did not confirm it."""
INTERRUPTED: Final = 130
_OUTPUT_ERRORS: Final = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF})
"""What a write to a full disk, a terminal that is gone, or a closed stream ends with."""


def complain(problem: str, code: int) -> int:
    """Write an error line to standard error, and return the exit code."""
    sys.stderr.write(f"error: {printable_lines(problem)}\n")
    return code


def fill_closed_streams() -> None:
    """Replace closed standard streams, as after `>&-`, by the null device.

    Call it before anything is opened: a socket or file with the number of a standard stream would get its output.
    """
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
    if sys.stdin is None:
        sys.stdin = open(0, closefd=False)  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115


@contextmanager
def reader_may_leave() -> Iterator[None]:
    """End the block quietly when the reader of standard output is gone, as after `| head`.

    Raises:
        OutputFailedError: Standard output takes nothing more for another reason.
    """
    try:
        yield
    except BrokenPipeError:
        silence_output()
    except OSError as error:
        if not is_of_output(error):
            raise
        silence_output()
        raise OutputFailedError(str(error)) from error
    else:
        flush_output()


def is_of_output(error: OSError) -> bool:
    """Return whether an error came from a standard stream: all other files have a name."""
    return error.filename is None and error.errno in _OUTPUT_ERRORS


def flush_output() -> None:
    """Write what is buffered for standard output; quietly drop it if its reader is gone.

    Raises:
        OutputFailedError: Standard output takes nothing more for another reason.
    """
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        silence_output()
    except OSError as error:
        silence_output()
        raise OutputFailedError(str(error)) from error


def silence_output() -> None:
    """Drop everything written to standard output from now on."""
    # The interpreter flushes once more on exit; that flush must not fail again.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
