"""`os._exit` in the user's code, told before it ends the process.

`os._exit` raises nothing and runs no handler, so nobody could say afterwards whose code has ended the process. Within
`told_exits` it tells its place first. A forked child, and code that is not the user's, ends as ever.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from rolloutmq.services.worker.user_code.failures import UserFailure, UserFiles, failure_at, frames_of

Tell = Callable[[UserFailure, int], int]
"""Called with the place and the exit code, in the thread that ends the process; returns the exit code to end with."""


@contextmanager
def told_exits(files: UserFiles, tell: Tell) -> Iterator[None]:
    """Let `os._exit` of the user's code call `tell` first, within the block, in this process and all its threads."""
    leave, own = os._exit, os.getpid()

    def told(status: int) -> NoReturn:
        if os.getpid() == own:
            with suppress(Exception):
                failure = failure_at(
                    frames_of(sys._getframe(1)), files, f"os._exit({status}) ends the process"
                )
                if failure.where:
                    status = tell(failure, status)
        leave(status)

    setattr(os, "_exit", told)  # noqa: B010 - mypy refuses an assignment to a function
    try:
        yield
    finally:
        setattr(os, "_exit", leave)  # noqa: B010
