"""Single-instance lock of a service in a run; the kernel releases it however its holder ends.

The file names the holder. Only a rejected process reads it, so a stale file does no harm.
"""

import fcntl
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from rolloutmq.bus.files import decode_json, private_file
from rolloutmq.schemas.errors import RunDirInUseError
from rolloutmq.schemas.files import RunHolder


@contextmanager
def only_one(lock: Path, name: str, remedy: str = "") -> Iterator[None]:
    """Hold the lock within the block.

    Args:
        lock: Its file, in the run directory.
        name: What the holder is.
        remedy: What a refused process says to do; empty for `rolloutmq down`.

    Raises:
        RunDirInUseError: Another process holds it; the error names it and its start time.
    """
    with private_file(lock, "ab+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise _refusal(lock, name, file.read(), remedy) from None
        file.truncate(0)
        file.write(msgspec.json.encode(RunHolder(name=name, pid=os.getpid(), since=time.time())))
        file.flush()
        yield


def _refusal(lock: Path, name: str, content: bytes, remedy: str) -> RunDirInUseError:
    try:
        holder = decode_json(content, RunHolder)
    except msgspec.DecodeError:  # the holder has just locked it
        return RunDirInUseError(str(lock.parent), f"another {name}", remedy=remedy)
    return RunDirInUseError(str(lock.parent), f"another {holder.name}", holder.pid, holder.since, remedy)
