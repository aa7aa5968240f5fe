"""The board: numbers that the processes of an act share, in a mapped file. A killed process leaves its last ones."""

import mmap
import os
from pathlib import Path
from types import TracebackType
from typing import Final, Self

RANKS: Final = 16
"""Most ranks of an act, over all trainers."""
_CELL_BYTES: Final = 8


class Board:
    """One cell tells all ranks to leave; in the others each rank counts the groups it has settled, over its lives."""

    def __init__(self, path: Path) -> None:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            nbytes = (1 + RANKS) * _CELL_BYTES
            os.ftruncate(fd, nbytes)
            self._memory = mmap.mmap(fd, nbytes)
        finally:
            os.close(fd)
        self._cells = memoryview(self._memory).cast("q")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._cells.release()
        self._memory.close()

    @property
    def leave(self) -> bool:
        """Whether all ranks end in order."""
        return bool(self._cells[0])

    @leave.setter
    def leave(self, value: bool) -> None:
        self._cells[0] = value

    def settled(self, rank: int, groups: int) -> None:
        """Count groups a rank has settled."""
        self._cells[1 + rank] += groups

    def settled_by(self, rank: int) -> int:
        """Return the groups a rank has settled so far."""
        return self._cells[1 + rank]

    @property
    def total(self) -> int:
        """Groups settled by all ranks so far; those of a lost batch count again."""
        return sum(self._cells[1:])
