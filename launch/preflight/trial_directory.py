"""The directory of one trial, which is removed with its owner, or by the next trial if the owner was killed.

The owner holds a lock on it, which the kernel releases at any death: it tells a dead owner from a living one, also in
another container. The directory's name is the token of the processes of the trial, so that those of a dead owner are
found by their marker and ended.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from rolloutmq.services.process.child import end_marked

logger = logging.getLogger(__name__)

PREFIX: Final = "rolloutmq-check-"
YOUNG_S: Final = 10.0
"""Age up to which a directory may be that of an owner which has not locked it yet."""


@contextmanager
def trial_directory() -> Iterator[Path]:
    """Yield a new directory, after those of dead owners and their processes are removed."""
    remove_left()
    with tempfile.TemporaryDirectory(prefix=PREFIX) as directory:
        lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            with suppress(OSError):  # without locks nobody takes it for that of a dead owner
                fcntl.flock(lock, fcntl.LOCK_EX)
            yield Path(directory)
        finally:
            os.close(lock)


def remove_left() -> list[Path]:
    """Remove the directories that dead owners left, and end their processes; return the removed ones."""
    removed = []
    for path in sorted(Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        with suppress(OSError):  # not ours, or another process removes it
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                if _is_left(lock):
                    end_marked(f"{path.name}/")
                    shutil.rmtree(path)
                    removed.append(path)
                    logger.info("removed what a killed check left path=%s", path)
            finally:
                os.close(lock)
    return removed


def _is_left(directory: int) -> bool:
    """Return whether the owner of an open directory is dead, and lock it if so."""
    found = os.fstat(directory)
    if found.st_uid != os.getuid() or time.time() - found.st_mtime < YOUNG_S:
        return False
    try:
        fcntl.flock(directory, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
