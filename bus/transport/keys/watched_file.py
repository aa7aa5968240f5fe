"""Files that others replace, such as a list of keys or a certificate: read again once one of them has changed.

While they cannot be read, the value of before stays: a damaged file neither opens the door nor locks out the fleet.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final, Generic, TypeVar

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.schemas.errors import RolloutMQError

logger = logging.getLogger(__name__)

LOOK_S: Final = 0.25
"""Time between two looks at the files: a revocation counts after it."""
_T = TypeVar("_T")


class WatchedFile(Generic[_T]):
    """One value, of one or several files. For one thread.

    Args:
        paths: The file, or files.
        read: Reads them; raises RolloutMQError if it cannot.
        what: Names them in the log.

    Attributes:
        value: What they last had.
        due: When to look again, in monotonic seconds.
        problem: Why they could not be read at the last look; empty if they could.

    Raises:
        RolloutMQError: They cannot be read now.
    """

    def __init__(self, paths: Path | Sequence[Path], read: Callable[[], _T], what: str = "keys") -> None:
        self._paths = [paths] if isinstance(paths, Path) else paths
        self._what = what
        self._read = read
        self._throttle = LogThrottle()
        self.due = 0.0
        self.problem = ""
        self._seen = self._mark()
        self.value = read()

    def look(self, now: float) -> bool:
        """Read the files again if that is due and one has changed; return whether there is a new value.

        Args:
            now: Monotonic seconds.
        """
        if now < self.due:
            return False
        self.due = now + LOOK_S
        mark = self._mark()
        if mark == self._seen:
            self.problem = ""
            return False
        try:
            self.value = self._read()
        except RolloutMQError as error:
            self.problem = str(error)
            if self._throttle.is_due(str(error), now):
                logger.error("%s not read, those of before stay error=%s", self._what, error)
            return False
        self._seen, self.problem = mark, ""
        return True

    def _mark(self) -> list[tuple[int, ...]] | None:
        """Return what changes with each change of a file; None if it cannot be told."""
        try:
            found = [path.stat() for path in self._paths]
        except OSError:
            return None
        return [(one.st_ino, one.st_mtime_ns, one.st_size, one.st_mode, one.st_uid) for one in found]
