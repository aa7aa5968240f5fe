"""What must survive a loss of power, not only the death of a process."""

import os
from pathlib import Path
from typing import Final

from rolloutmq.bus.codec import checksum

_BLOCK_BYTES: Final = 1 << 20


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


def sum_of(path: Path) -> int:
    """Return the CRC32C of a file; blocks for as long as it takes to read it.

    Raises:
        OSError: It cannot be read.
    """
    with path.open("rb") as file:
        return checksum(iter(lambda: file.read(_BLOCK_BYTES), b""))
