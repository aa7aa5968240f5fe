"""One process of a kind for each run: a lock that the kernel gives back however its holder ends.

The file says who holds it. What it says is read only by those that are refused, so that it does not matter that it
stays behind.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rolloutmq.schemas.errors import RunDirInUseError
from rolloutmq.schemas.records import RunHolder


@contextmanager
def only_one(lock: Path, name: str) -> Iterator[None]:
    """Hold the lock as long as the block lasts.

    Raises:
        RunDirInUseError: Somebody has it; the error says who, and since when.
    """
    with lock.open("ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refusal(lock, name, file.read()) from None
        file.truncate(0)
        file.write(msgspec.json.encode(RunHolder(name=name, pid=os.getpid(), since=time.time())))
        file.flush()
        yield


def _refusal(lock: Path, name: str, told: bytes) -> RunDirInUseError:
    try:
        holder = msgspec.json.decode(told, type=RunHolder)
    except msgspec.DecodeError:  # it has only just taken it
        return RunDirInUseError(str(lock.parent), f"another {name}")
    return RunDirInUseError(str(lock.parent), f"another {holder.name}", holder.pid, holder.since)
