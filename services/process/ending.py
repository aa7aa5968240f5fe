"""How a process ended, for a supervisor that is not its parent: the kernel tells the exit code to the parent alone.

A supervisor that was killed leaves its processes to the next one, which adopts them. Each process is told at its start
to note its exit code beside its log, as its last act. The supervisor reads and removes the note; one of another process
counts as none, and one that is missing says that the process was killed.
"""

import ctypes
import os
import signal
from collections.abc import MutableMapping
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.process.identity import start_of

VARIABLE: Final = "ROLLOUTMQ_NOTE"
"""Variable with the file of the note."""
PARENT: Final = "ROLLOUTMQ_PARENT"
"""Variable with the pid of a parent with which the process dies, at once: on a host that loses its cluster, nobody else
would end it."""
_SET_PARENT_DEATH_SIGNAL: Final = 1


class EndNote(msgspec.Struct, frozen=True, kw_only=True):
    """Process, its start in ticks, and its exit code."""

    pid: int
    start_ticks: int
    code: int


def die_with_parent(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let the kernel kill this process once the thread that started it has ended, if its parent asked for it."""
    parent = environ.pop(PARENT, "")
    if not parent:
        return
    ctypes.CDLL(None, use_errno=True).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0)
    if str(os.getppid()) != parent:  # it ended before the call
        os.kill(os.getpid(), signal.SIGKILL)


def note_of(log: Path) -> Path:
    """Return the file of the note of a process with this log."""
    return log.with_suffix(".end")


def note_end(code: int, environ: MutableMapping[str, str] = os.environ) -> None:
    """Note the exit code of this process, if its supervisor asked for it. A full disk leaves no note."""
    path = environ.get(VARIABLE, "")
    if not path:
        return
    note = EndNote(pid=os.getpid(), start_ticks=start_of(os.getpid()), code=code)
    try:
        write_private(Path(path), msgspec.json.encode(note))
    except OSError:
        return


def noted_code(log: Path, identity: ProcessIdentity) -> int | None:
    """Return the exit code that a process has noted, None without its note; the note is removed."""
    path = note_of(log)
    try:
        note = read_json(path, EndNote)
        path.unlink(missing_ok=True)
    except (msgspec.MsgspecError, OSError):
        return None
    is_its_own = note is not None and (note.pid, note.start_ticks) == (identity.pid, identity.start_ticks)
    return note.code if note is not None and is_its_own else None
