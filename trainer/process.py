"""Process of the trainer: signals, and the waits they end.

    SIGTERM, SIGINT, SIGUSR1   orderly end: finish and settle the step, write a checkpoint; exit code 130, so that the
                               supervisor knows that steps are left
    SIGTERM, SIGINT again      end at once with 130

The trainer blocks: it computes, or waits for the broker, perhaps forever. A signal during computation sets a flag. A
signal inside `Stop.interrupting` ends the wait by an exception, like Ctrl-C.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from rolloutmq.bus.lifecycle import signals

logger = logging.getLogger(__name__)

INTERRUPTED: Final = 130
"""Exit code of a trainer that was asked to end before its last step."""


class StoppedError(KeyboardInterrupt):
    """The trainer was asked to end while it waited. Handled like KeyboardInterrupt."""


class Stop:
    """The request to end. For the main thread, where signal handlers run."""

    def __init__(self) -> None:
        self.asked = False
        self._waiting = False

    def request(self, reason: str) -> None:
        """Request the end. Raises StoppedError in a handler that interrupts a wait."""
        if not self.asked:
            self.asked = True
            logger.info("stopping reason=%s", reason)
        if self._waiting:
            self._waiting = False
            raise StoppedError

    @contextmanager
    def interrupting(self) -> Iterator[None]:
        """Let a request end the wait in the block with StoppedError; at once if it was made before."""
        self._waiting = True
        try:
            if self.asked:
                raise StoppedError
            yield
        finally:
            self._waiting = False


@contextmanager
def stop_on_signals() -> Iterator[Stop]:
    """Handle the signals of the process within the block, then restore the old handlers. For the main thread."""
    stop = Stop()
    with signals(stop.request):
        yield stop
