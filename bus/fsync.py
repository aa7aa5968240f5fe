"""Syncing files to disk, so they survive a power cut, and their checksums."""

import os
from pathlib import Path
from typing import Final

from rolloutmq.bus.encoding.codec import checksum

_BLOCK_BYTES: Final = 1 << 20


def force(path: Path) -> None:
    """Sync a file, or the entries of a directory, to disk. Blocks.

    Raises:
        OSError: The disk failed or is full, or `path` does not exist.
    """
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def sum_of(path: Path) -> int:
    """Return the CRC32C of a file. Blocks while it reads the file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        return checksum(iter(lambda: file.read(_BLOCK_BYTES), b""))
