"""The files of probes: `live` while a command works at all, `ready` while it does what it is for.

A command touches each file once a second while it holds, and removes it once it does not. A probe passes if the file
is young: one `find` tells it, and opens no port. So both fail for a process that hangs or was stopped.
"""

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import PRIVATE_DIRECTORY
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import UnusablePathError

logger = logging.getLogger(__name__)

TOUCH_S: Final = 1.0
LIVE: Final = "live"
READY: Final = "ready"


class ProbeFiles:
    """The files of one command, in a directory of its own. What an earlier process left there goes.

    Raises:
        UnusablePathError: The directory cannot be created or written.
    """

    def __init__(self, directory: Path) -> None:
        self._live, self._ready = directory / LIVE, directory / READY
        self._throttle = LogThrottle()
        self._was_ready: bool | None = None
        try:
            directory.mkdir(mode=PRIVATE_DIRECTORY, parents=True, exist_ok=True)
            self.clear()
        except OSError as error:
            raise UnusablePathError(f"--probe-dir {directory}", error.strerror or str(error)) from error

    def show(self, *, live: bool, ready: bool) -> None:
        """Show what holds now. Never raises: what cannot be written is logged, and the probe fails."""
        if ready != self._was_ready:
            self._was_ready = ready
            logger.info("readiness ready=%s", "yes" if ready else "no")
        try:
            _show(self._live, live)
            _show(self._ready, live and ready)
        except OSError as error:
            if self._throttle.is_due(str(error), time.monotonic()):
                logger.warning("probe files not written error=%s", error)

    def clear(self) -> None:
        """Remove both files. OSError: it is not possible."""
        _show(self._live, False)
        _show(self._ready, False)


async def keep_probes(
    files: ProbeFiles, is_ready: Callable[[], bool], is_live: Callable[[], bool] = lambda: True
) -> None:
    """Show each second whether the command lives and is ready, until cancelled; then remove the files."""
    try:
        while True:
            files.show(live=is_live(), ready=is_ready())
            await asyncio.sleep(TOUCH_S)
    finally:
        with contextlib.suppress(OSError):
            files.clear()


def _show(path: Path, holds: bool) -> None:
    if holds:
        path.touch(mode=0o600)
    else:
        path.unlink(missing_ok=True)
