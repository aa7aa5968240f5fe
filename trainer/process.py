"""How the trainer lives as a process: its log, the signals that end it, the run that it belongs to.

    SIGTERM, SIGINT, SIGUSR1   end in order: the step in hand is finished, a checkpoint written, the batch given back
    SIGTERM, SIGINT again      end at once with 130

The trainer blocks: it computes, or it waits for the broker, perhaps for ever. A signal that comes while it computes is
only noted. One that comes within `Stop.interrupting` ends the wait there, by an exception, as Ctrl-C would.
"""

import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Final

from pydantic import ValidationError

from rolloutmq.schemas.config import RunConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, NothingToLearnError, RolloutMQError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.process import PERMANENT_FAILURE

logger = logging.getLogger(__name__)

FAILED: Final = 1
MISCONFIGURED: Final = 2
FORCED: Final = 130
_ENDING: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)


class StoppedError(KeyboardInterrupt):
    """The trainer was asked to end while it waited. A wait that Ctrl-C can end in order, this ends in order too."""


class Stop:
    """The request to end. Belongs to the main thread, where signal handlers run."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def request(self, reason: str) -> None:
        """Ask for the end. Raises StoppedError if called from a handler while the trainer waits."""
        if not self.asked:
            self.asked = True
            logger.info("stopping reason=%s", reason)
        if self._waiting:
            self._waiting = False
            raise StoppedError

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a request end the wait in the block with StoppedError, at once if it was made before."""
        self._waiting = True
        try:
            if self.asked:
                raise StoppedError
            yield
        finally:
            self._waiting = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Handle the signals of the process within the block, then put the old handlers back. For the main thread."""
    stop = Stop()

    def handle(number: int, _frame: FrameType | None) -> None:
        if stop.asked and number != signal.SIGUSR1:
            os._exit(FORCED)
        stop.request(signal.Signals(number).name)

    before = {number: signal.signal(number, handle) for number in _ENDING}
    # The process may have been started with SIGUSR1 blocked, so as not to die of it while it still imported.
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
    try:
        yield stop
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


def report_failure(error: Exception) -> int:
    """Log why the trainer failed, our own errors without a traceback, the reason last; return the exit code."""
    ours = isinstance(error, RolloutMQError)
    logger.error("failed service=trainer", exc_info=None if ours else error)
    text = " ".join(str(error).split())
    sys.stderr.write(f"error: {text if ours else f'{type(error).__name__}: {text}'}\n")
    sys.stderr.flush()
    if isinstance(error, ConfigError):
        return MISCONFIGURED
    return PERMANENT_FAILURE if isinstance(error, NothingToLearnError) else FAILED


def load_run(run_dir: Path) -> tuple[RunConfig, RunLayout]:
    """Read the resolved configuration of a run.

    Raises:
        MissingError: The directory holds no run.
        ConfigError: Its configuration is not valid, for example of another version.
    """
    layout = RunLayout(run_dir)
    try:
        return RunConfig.model_validate_json(layout.config.read_bytes()), layout
    except (FileNotFoundError, NotADirectoryError):
        raise MissingError(str(layout.config), "start the run with `rolloutmq up`") from None
    except ValidationError as error:
        first = error.errors()[0]
        raise ConfigError(".".join(map(str, first["loc"])) or "config", first["msg"]) from None
