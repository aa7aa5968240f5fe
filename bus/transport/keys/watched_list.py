"""A list of keys that others replace: read again once its file has changed.

While it cannot be read, the one of before stays: a damaged file neither opens the door nor locks out the fleet.
"""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Generic, TypeVar

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import RolloutMQError

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Time between two looks at the file: a revocation counts after it."""
_T = TypeVar("_T")


class WatchedList(Generic[_T]):
    """One file. For one thread.

    Args:
        path: The file.
        read: Reads it; raises RolloutMQError if it cannot.

    Attributes:
        value: What it last had.
        due: When to look again, in monotonic seconds.

    Raises:
        RolloutMQError: The file cannot be read now.
    """

    def __init__(self, path: Path, read: Callable[[], _T]) -> None:
        self._path = path
        self._read = read
        self._throttle = LogThrottle()
        self.due = 0.0
        self._seen = self._mark()
        self.value = read()

    def look(self, now: float) -> bool:
        """Read the file again if that is due and it has changed; return whether there is a new value.

        Args:
            now: Monotonic seconds.
        """
        if now < self.due:
            return False
        self.due = now + LOOK_S
        mark = self._mark()
        if mark == self._seen:
            return False
        try:
            self.value = self._read()
        except RolloutMQError as error:
            if self._throttle.is_due(str(error), now):
                logger.error("keys not read, those of before stay error=%s", error)
            return False
        self._seen = mark
        return True

    def _mark(self) -> tuple[int, int, int] | None:
        """Return what changes with each change of the file; None if it cannot be told."""
        try:
            found = self._path.stat()
        except OSError:
            return None
        return found.st_ino, found.st_mtime_ns, found.st_size
