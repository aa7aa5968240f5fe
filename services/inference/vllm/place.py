"""Where a vLLM listens: a directory of its engine that only this user may enter, held for the engine's life.

It lies below the sockets of the run, or, where that path is too long for the kernel, below the system's temporary
directory under a hash of it. The lock on it tells the living from the dead: the kernel frees it with the engine, and
ends vLLM with it.
"""

import fcntl
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rolloutmq.bus.endpoint import IPC_PATH_LIMIT_BYTES, private_directory
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.layout import RunLayout

SOCKET: Final = "http"
"""File name of the socket."""
_SUFFIX: Final = "-vllm"


@contextmanager
def held(layout: RunLayout, name: str) -> Iterator[Path]:
    """Hold the directory of an engine's vLLM as long as the block lasts, and yield it; then it is removed.

    Raises:
        AddressInUseError: Another living engine of that name holds it, or it is another user's.
    """
    first = private_directory(layout.sockets / f"{name}{_SUFFIX}")
    lock = _lock(first)
    if lock is None:
        raise AddressInUseError(str(first), "another engine of that name")
    try:
        yield private_directory(_short(first))
    finally:
        _remove(first)
        os.close(lock)


def left(layout: RunLayout) -> list[Path]:
    """Return the directories that engines made and did not remove, whether these live or not."""
    found = sorted(layout.sockets.resolve().glob(f"*{_SUFFIX}"))
    return [path for first in found for path in (first, _short(first)) if path.is_dir()]


def clear(layout: RunLayout) -> None:
    """Remove those of the dead."""
    for first in sorted(layout.sockets.resolve().glob(f"*{_SUFFIX}")):
        if (lock := _lock(first)) is not None:
            _remove(first)
            os.close(lock)


def _short(first: Path) -> Path:
    """Return the directory itself, or where its path is too long the one that stands in for it."""
    if len(os.fsencode(first / SOCKET)) <= IPC_PATH_LIMIT_BYTES:
        return first
    digest = hashlib.blake2b(os.fsencode(first), digest_size=8).hexdigest()
    return Path(tempfile.gettempdir()) / f"rolloutmq-{digest}"


def _remove(first: Path) -> None:
    for path in {_short(first), first}:
        shutil.rmtree(path, ignore_errors=True)


def _lock(directory: Path) -> int | None:
    """Lock a directory for this process; None if another holds it."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(lock)
        return None
    return lock
