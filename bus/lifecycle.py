"""How every process of a run lives, whatever it does: its log, the signals that end it, how it says why it failed.

    SIGTERM, SIGINT   the first asks for an orderly end, the second ends at once with 130
    SIGUSR1           asks to drain; where there is nothing to drain, for an orderly end

A process is spawned with SIGUSR1 blocked, because one that is still importing would die of it. It is unblocked here,
once the handler stands, and a drain that came earlier arrives then. The last line that a failed process writes is
`error: ` and the reason: the end of its log tells why.
"""

import logging
import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

from rolloutmq.schemas.errors import (
    ConfigError,
    DamagedJournalError,
    EnvironmentFailedError,
    JournalFailedError,
    NothingToLearnError,
    RolloutMQError,
    RunDirInUseError,
    WorkersFailedError,
)
from rolloutmq.schemas.process import PERMANENT_FAILURE

logger = logging.getLogger(__name__)

FAILED: Final = 1
"""Exit code after an error that another start may be spared."""
IN_USE: Final = 4
"""Exit code where another process has what this one is for: the run directory."""
FORCED: Final = 130
"""Exit code after a second signal."""
_HOPELESS: Final = (
    ConfigError,
    DamagedJournalError,
    EnvironmentFailedError,
    JournalFailedError,
    NothingToLearnError,
    WorkersFailedError,
)
"""Errors that the next start would meet again."""
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


@contextmanager
def signals(
    on_stop: Callable[[str], None],
    on_drain: Callable[[], None] | None = None,
    on_force: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle the signals of a service as long as the block lasts, then put the old handlers back.

    For the main thread only. The callbacks run in it between two bytecodes, wherever it is: they
    may set a flag, write to a pipe or use `call_soon_threadsafe`, and nothing else. SIGUSR1 is
    unblocked inside the block.

    Args:
        on_stop: Called with the name of the first SIGTERM or SIGINT; a second one ends the process.
        on_drain: Called at each SIGUSR1. Without it SIGUSR1 is a request to stop, but never the
            second one that forces.
        on_force: Called at the second, before the process ends: the last chance to kill children.
    """
    asked = False

    def stop(number: int, _frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            try:
                if on_force is not None:
                    on_force()
            finally:
                os._exit(FORCED)
        asked = True
        on_stop(signal.Signals(number).name)

    def drain(_number: int, _frame: FrameType | None) -> None:
        if on_drain is None:
            on_stop("SIGUSR1")
        else:
            on_drain()

    before = {number: signal.getsignal(number) for number in _HANDLED}
    for number in _HANDLED:
        signal.signal(number, drain if number is signal.SIGUSR1 else stop)
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        for number, handler in before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)


def set_up_logging() -> None:
    """Log to standard error: time, level, logger, event. Does nothing where handlers stand already."""
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.INFO,
        format="%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s",
        datefmt="%Y-%m-%d %H:%M:%S",
    )


def log_failure(name: str, error: BaseException) -> int:
    """Log why a process failed, and return the exit code that says whether starting it again can help.

    A defect is logged with its traceback, our own errors without; the last line is the reason.
    What the next start would meet again is PERMANENT_FAILURE.
    """
    leaves = list(_leaves(error))
    ours = all(isinstance(leaf, RolloutMQError) for leaf in leaves)
    logger.error("failed process=%s", name, exc_info=None if ours else error)
    reason = "; ".join(dict.fromkeys(map(_one_line, leaves)))
    sys.stderr.write(f"error: {reason}\n")
    sys.stderr.flush()
    if any(isinstance(leaf, _HOPELESS) for leaf in leaves):
        return PERMANENT_FAILURE
    return IN_USE if any(isinstance(leaf, RunDirInUseError) for leaf in leaves) else FAILED


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield what a TaskGroup wrapped, however deep."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split())
    if isinstance(error, RolloutMQError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
