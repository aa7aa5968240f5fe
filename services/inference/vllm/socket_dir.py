"""Socket directory of a vLLM: private to this user, and locked while its engine lives.

It lies below the sockets of the run, or, if that path is too long for the kernel, below the system's temporary
directory under a hash of it. A held lock shows that the engine lives: the kernel releases it with the engine, and ends
vLLM with it.
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

from rolloutmq.bus.transport.bindings import IPC_PATH_LIMIT_BYTES, private_directory
from rolloutmq.schemas.errors import AddressInUseError
from rolloutmq.schemas.files import RunLayout

SOCKET: Final = "http"
"""File name of the socket."""
_SUFFIX: Final = "-vllm"


@contextmanager
def held(layout: RunLayout, name: str) -> Iterator[Path]:
    """Hold the directory of an engine's vLLM for the duration of the block and yield it; remove it afterwards.

    Raises:
        AddressInUseError: Another live engine of that name holds it, or another user owns it.
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
    """Return the directories of all engines that still exist, whether these engines live or not."""
    found = sorted(layout.sockets.resolve().glob(f"*{_SUFFIX}"))
    return [path for first in found for path in (first, _short(first)) if path.is_dir()]


def clear(layout: RunLayout) -> None:
    """Remove those of the dead."""
    for first in sorted(layout.sockets.resolve().glob(f"*{_SUFFIX}")):
        if (lock := _lock(first)) is not None:
            _remove(first)
            os.close(lock)


def _short(first: Path) -> Path:
    """Return the directory itself, or its substitute if the path is too long."""
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
