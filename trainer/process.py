"""How the trainer lives as a process: its log, the signals that end it, the run that it belongs to.

    SIGTERM, SIGINT, SIGUSR1   end in order: the step in hand is finished and settled, a checkpoint written;
                               the exit code is 130, so that whoever keeps it knows that there are steps left
    SIGTERM, SIGINT again      end at once with 130

The trainer blocks: it computes, or it waits for the broker, perhaps for ever. A signal that comes while it computes is
only noted. One that comes within `Stop.interrupting` ends the wait there, by an exception, as Ctrl-C would.
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
    with signals(stop.request):
        yield stop
