"""What must survive a loss of power, not only the death of a process."""

import os
from pathlib import Path


def force(path: Path) -> None:
    """Force a file, or the names in a directory, to disk; blocks for as long as that takes.

    Raises:
        OSError: The disk failed or is full, or there is nothing at `path`.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
