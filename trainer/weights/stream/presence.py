"""Presence of a relay: once a second it writes into its directory which version it has, and what it waits for.

The command that joined the run tells the broker of it. The file stays when the relay dies: its number then stops.
"""

import logging
import threading
from collections.abc import Callable
from typing import Final, Self

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RelayState, RunLayout

logger = logging.getLogger(__name__)

BEAT_S: Final = 1.0


class Presence:
    """A thread that writes `relay.json` during a block.

    Args:
        layout: Directory of the relay.
        look: Returns the state with a number; called in the thread.
    """

    def __init__(self, layout: RunLayout, look: Callable[[int], RelayState]) -> None:
        self._layout = layout
        self._look = look
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence of the relay")

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopping.set()
        self._thread.join()
        self._layout.relay.unlink(missing_ok=True)

    def _run(self) -> None:
        number, told = 0, ""
        while not self._stopping.is_set():
            number += 1
            try:
                write_json(self._layout.relay, self._look(number))
                told = ""
            except OSError as error:  # a full disk: the file stays as it is
                if str(error) != told:
                    logger.warning("state of the relay not written error=%s", error)
                told = str(error)
            self._stopping.wait(BEAT_S)
