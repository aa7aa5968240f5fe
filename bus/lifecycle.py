"""The lifecycle of a process of a run: its log, its signals, and the reason of its failure.

    SIGTERM, SIGINT   the first requests an orderly end, the second ends the process at once with 130
    SIGUSR1           requests a drain; a process without a drain treats it as a request to end

A process starts with SIGUSR1 blocked, because the signal would kill it during its imports. It is unblocked here once
the handler is installed; an earlier drain arrives then. A failed process writes `error: ` and the reason as its last
line. Secrets that were hidden before (`hide`) are in neither.
"""

import gc
import io
import logging
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from textwrap import indent
from types import FrameType
from typing import Any, Final, TextIO

from rolloutmq.bus.files import private_file
from rolloutmq.schemas.errors import (
    ConfigError,
    ConsumerFencedError,
    DamagedJournalError,
    EnvironmentFailedError,
    JournalFailedError,
    NothingToLearnError,
    NotPrivateError,
    PackageMissingError,
    RecordVersionError,
    RefusedError,
    RolloutMQError,
    RunDirInUseError,
    WorkersFailedError,
)
from rolloutmq.schemas.printable import error_line, error_text, printable, printable_lines
from rolloutmq.schemas.process import PERMANENT_FAILURE
from rolloutmq.schemas.wire.envelope import ErrorCode

logger = logging.getLogger(__name__)

FAILED: Final = 1
"""Exit code after an error a restart may avoid."""
IN_USE: Final = 4
"""Exit code if another process uses the run directory, or has this one's place."""
FORCED: Final = 130
"""Exit code after a second signal."""
_HOPELESS: Final = (
    ConfigError,
    DamagedJournalError,
    EnvironmentFailedError,
    JournalFailedError,
    NothingToLearnError,
    NotPrivateError,
    PackageMissingError,
    RecordVersionError,
    WorkersFailedError,
)
"""Errors that every restart would meet again."""
_HANDLED: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
_HIDDEN_CHARS: Final = 6
"""Shortest hidden text: a shorter one is no secret, and occurs in harmless words."""
_hidden: Final[dict[str, str]] = {}
"""What the log shows, by the secret it replaces."""


@contextmanager
def gc_paused() -> Iterator[None]:
    """Pause garbage collection while many objects are made that stay: every collection would visit them all.

    It takes a tenth of the time that a process needs to import its code.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


@contextmanager
def signals(
    on_stop: Callable[[str], None],
    on_drain: Callable[[], None] | None = None,
    on_force: Callable[[], None] | None = None,
) -> Iterator[None]:
    """Handle the signals of a service during the block, then restore the old handlers.

    For the main thread only. The callbacks run between two bytecodes of the main thread: they may only set a flag,
    write to a pipe or use `call_soon_threadsafe`. SIGUSR1 is unblocked inside the block.

    Args:
        on_stop: Called with the name of the first SIGTERM or SIGINT; a second one ends the process.
        on_drain: Called at each SIGUSR1. Without it SIGUSR1 requests a stop, but never counts as the second signal.
        on_force: Called at the second signal before the process ends, for example to kill children.
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


def hide(secret: str, shown: str) -> None:
    """Let the log and the reported errors of this process show another text in place of a secret."""
    if len(secret) >= _HIDDEN_CHARS:
        _hidden[secret] = shown


def without_secrets(text: str) -> str:
    """Return a text without the hidden secrets."""
    for secret in sorted(_hidden, key=len, reverse=True):
        text = text.replace(secret, _hidden[secret])
    return text


class LogFormatter(logging.Formatter):
    """Time, level, logger and event in one printable line, without secrets.

    The lines of a traceback follow, each of them indented.
    """

    def __init__(self) -> None:
        super().__init__(
            "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(message)s", datefmt="%Y-%m-%d %H:%M:%S"
        )

    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - a name of the base class
        return printable(super().formatMessage(record))

    def formatException(self, ei: Any) -> str:  # noqa: N802
        try:
            text = super().formatException(ei)
        except BaseException:  # noqa: BLE001 - it reads attributes of the error, which may be a user's code
            text = "".join([*traceback.format_tb(ei[2]), error_line(ei[1])])
        return indent(printable_lines(text), "  ")


class LogHandler(logging.StreamHandler[TextIO]):
    """Writes the log. A record that cannot be written, for example because the disk is full, is dropped.

    The first record after that is followed by the number of the dropped ones.

    Args:
        stream: Where it writes.
        closes: Whether it closes the stream.
    """

    def __init__(self, stream: TextIO, *, closes: bool = False) -> None:
        super().__init__(stream)
        self.setFormatter(LogFormatter())
        self._closes = closes
        self.dropped = 0
        """Records dropped since the last one that was written."""

    def emit(self, record: logging.LogRecord) -> None:
        before = self.dropped
        super().emit(record)
        if before and self.dropped == before:
            text = "records dropped, the log could not be written count=%d"
            super().emit(logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, (before,), None))
            self.dropped = 0 if self.dropped == before else self.dropped

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802 - a name of the base class
        if isinstance(sys.exception(), OSError):
            self.dropped += 1
        else:
            super().handleError(record)

    def close(self) -> None:
        super().close()
        if self._closes:
            self.stream.close()


def set_up_logging(path: Path | None = None) -> None:
    """Log to standard error, or to a file. Does nothing if handlers are installed.

    Raises:
        OSError: The file cannot be opened.
    """
    if logging.root.handlers:
        return
    handler = LogHandler(sys.stderr) if path is None else LogHandler(_unbuffered(path), closes=True)
    logging.basicConfig(level=logging.INFO, handlers=[handler])


def _unbuffered(path: Path) -> TextIO:
    """Open a log without a buffer: one that cannot be written would hold back the records after it."""
    file = private_file(path, "ab", buffering=0)
    return io.TextIOWrapper(file, "utf-8", "backslashreplace", write_through=True)


def log_failure(name: str, error: BaseException) -> int:
    """Log the failure of a process, and return its exit code.

    Unexpected errors are logged with a traceback, errors of this package without; the last line is the reason. The code
    is PERMANENT_FAILURE if every restart would meet the error again, IN_USE if another process has this one's place.
    """
    leaves = list(_leaves(error))
    ours = all(isinstance(leaf, RolloutMQError) for leaf in leaves)
    logger.error("failed process=%s", name, exc_info=None if ours else error)
    reason = without_secrets("; ".join(dict.fromkeys(map(_one_line, leaves))))
    with suppress(OSError):  # the exit code tells the rest
        sys.stderr.write(f"error: {reason}\n")
        sys.stderr.flush()
    if any(isinstance(leaf, _HOPELESS) or _is_final(leaf) for leaf in leaves):
        return PERMANENT_FAILURE
    return (
        IN_USE if any(isinstance(leaf, RunDirInUseError | ConsumerFencedError) for leaf in leaves) else FAILED
    )


def _is_final(error: BaseException) -> bool:
    """Return whether the broker refused what only a person can change: the key, a name, or the installed version."""
    return isinstance(error, RefusedError) and error.code in {ErrorCode.FORBIDDEN, ErrorCode.VERSION}


def _leaves(error: BaseException) -> Iterator[BaseException]:
    """Yield the errors inside nested ExceptionGroups."""
    if isinstance(error, BaseExceptionGroup):
        for inner in error.exceptions:
            yield from _leaves(inner)
    else:
        yield error


def _one_line(error: BaseException) -> str:
    return printable(error_text(error) if isinstance(error, RolloutMQError) else error_line(error))
