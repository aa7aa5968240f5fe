"""The event reserve: disk room kept for events, in a file without content.

Settlements and commits are what frees a full disk, and a restart begins with a snapshot. Neither may lack the room
that groups have taken. The reserve is therefore set aside before any room for groups, and given up as soon as events
lack room. The next life removes the file before it writes anything.
"""

from pathlib import Path
from typing import Final

from rolloutmq.services.broker.journal.disk import Disk

RESERVE_BYTES: Final = 4 << 20
"""Room for the events of some thousand steps. With small segments it is a quarter of a segment."""
RESERVE_NAME: Final = "reserve.tmp"


class EventReserve:
    """Room for events. Belongs to the commit thread.

    Attributes:
        nbytes: Bytes set aside.
    """

    def __init__(self, directory: Path, segment_bytes: int, disk: Disk) -> None:
        self.nbytes = 0
        self._path = directory / RESERVE_NAME
        self._step = min(RESERVE_BYTES, segment_bytes // 4)
        self._disk = disk

    def wanted(self, log_bytes: int) -> int:
        """Return the size beside an event log of `log_bytes`: the next life begins with a log about as large."""
        return self._step * (1 + 2 * log_bytes // self._step)

    def keep(self, nbytes: int) -> None:
        """Set aside that much; OSError, and as much as before stays, if there is no room for all of it."""
        if self.nbytes >= nbytes:
            return
        fd = self._disk.reopen(self._path) if self.nbytes else self._disk.create(self._path)
        try:
            self._disk.allocate(fd, nbytes)
            self.nbytes = nbytes
        except OSError:
            self._disk.truncate(fd, self.nbytes)  # Some file systems have reserved a part of it.
            if not self.nbytes:
                self._disk.unlink(self._path)
            raise
        finally:
            self._disk.close(fd)

    def give_up(self) -> None:
        """Return the room to the disk. May be called twice."""
        self._disk.unlink(self._path)
        self.nbytes = 0
