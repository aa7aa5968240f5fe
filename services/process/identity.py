"""Process identity, read from /proc: never a pid alone.

Pids are reused, and quickly where the kernel has few of them. A process is identified by boot id, pid and start ticks.
A zombie does not count as alive, although `kill(pid, 0)` and `/proc/<pid>` suggest it. The marker in the environment,
which every descendant inherits, finds processes left behind in other sessions.
"""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

from rolloutmq.schemas.process import ProcessIdentity, Role

MARKER: Final = "ROLLOUTMQ_PROCESS"
"""Variable that marks a process and all of its descendants: `<run token>/<name>`."""
EXEC_S: Final = 0.25
"""Longest time between a process's start and the end of its exec, on a busy machine."""
_PROC: Final = Path("/proc")
_TICKS: Final = os.sysconf("SC_CLK_TCK")
_DEAD: Final = frozenset("ZXx")
_STATE_FIELD: Final = 3
_START_FIELD: Final = 22


@cache
def boot_id() -> str:
    """Return the id of this boot: start ticks of another boot are meaningless."""
    return (_PROC / "sys/kernel/random/boot_id").read_text().strip()


def marker_of(token: str, name: str) -> str:
    """Return the marker of one process of a run."""
    return f"{token}/{name}"


def inherited_token() -> str | None:
    """Return the run token of this process, or None if it was started by hand."""
    marker = os.environ.get(MARKER, "")
    token, slash, _ = marker.partition("/")
    return token if slash else None


def identify(name: str, role: Role, pid: int, marker: str) -> ProcessIdentity:
    """Return the identity of a process that certainly exists, because we have not reaped it.

    Raises:
        ProcessLookupError: It does not exist.
    """
    found = _stat(pid)
    if found is None:
        raise ProcessLookupError(pid)
    return ProcessIdentity(
        name=name, role=role, pid=pid, start_ticks=found[1], boot_id=boot_id(), marker=marker
    )


def exists(identity: ProcessIdentity) -> bool:
    """Return whether the pid still is this process, unreaped zombies included: its group is its own."""
    found = _stat(identity.pid)
    return found is not None and identity.boot_id == boot_id() and found[1] == identity.start_ticks


def alive(identity: ProcessIdentity) -> bool:
    """Return whether this very process runs. A zombie does not."""
    found = _stat(identity.pid)
    return found is not None and found[0] not in _DEAD and exists(identity)


def started_at(identity: ProcessIdentity) -> float:
    """Return the start time of a process of this boot on CLOCK_MONOTONIC; the kernel's start ticks include sleep."""
    slept = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    return round(identity.start_ticks / _TICKS - slept, 2)


def start_of(pid: int) -> int:
    """Return the start ticks of a process, 0 if there is none."""
    found = _stat(pid)
    return 0 if found is None else found[1]


def runs(pid: int, start_ticks: int = 0) -> bool:
    """Return whether a process of this boot runs under this pid.

    Args:
        pid: Process id.
        start_ticks: Its start; without it, 0, the process need not be the one that is meant.
    """
    found = _stat(pid)
    return found is not None and found[0] not in _DEAD and start_ticks in {0, found[1]}


def settled(identity: ProcessIdentity) -> bool:
    """Wait until a just started process shows its environment; False if it is gone. Blocks at most `EXEC_S`.

    It shows none between the return of its parent's spawn and the end of its exec.
    """
    until = time.monotonic() + EXEC_S
    while alive(identity) and time.monotonic() < until:
        with suppress(OSError):
            if (_PROC / str(identity.pid) / "environ").read_bytes():
                return True
        time.sleep(0.001)
    return alive(identity)


def is_marked(pid: int, marker: str) -> bool:
    """Return whether a process carries the marker; a marker that ends in `/` stands for the whole run.

    A process with an unreadable environment is not ours and not marked.
    """
    wanted = f"{MARKER}={marker}".encode()
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return False
    return any(
        entry.startswith(wanted) if marker.endswith("/") else entry == wanted
        for entry in environ.split(b"\0")
    )


def variable_of(pid: int, name: str) -> str | None:
    """Return a variable of a process's initial environment, or None if it is unset or unreadable."""
    try:
        environ = (_PROC / str(pid) / "environ").read_bytes()
    except OSError:
        return None
    start = f"{name}=".encode()
    found = (entry for entry in environ.split(b"\0") if entry.startswith(start))
    return next((os.fsdecode(entry.removeprefix(start)) for entry in found), None)


def find_marked(marker: str) -> list[int]:
    """Return the pids of all running processes with the marker, except the caller and its ancestors.

    Reads the environment of every process of this user: takes milliseconds, for rare use.
    """
    spared = set(_lineage())
    return [pid for pid in _pids() if pid not in spared and is_marked(pid, marker)]


def find_names(token: str) -> set[str]:
    """Return the names of all processes of a run that run or left a descendant, from /proc alone."""
    beginning = f"{MARKER}={token}/".encode()
    names = set()
    for pid in find_marked(f"{token}/"):
        with suppress(OSError):
            variables = (_PROC / str(pid) / "environ").read_bytes().split(b"\0")
            names |= {one.removeprefix(beginning).decode() for one in variables if one.startswith(beginning)}
    return names


def _pids() -> Iterator[int]:
    for entry in os.scandir(_PROC):
        if entry.name.isdigit():
            yield int(entry.name)


def _lineage() -> Iterator[int]:
    pid = os.getpid()
    while pid > 1:
        yield pid
        fields = _fields(pid)
        pid = int(fields[4]) if fields else 0


def _fields(pid: int) -> dict[int, str] | None:
    """Return the fields of /proc/<pid>/stat by their number; the name (2) may hold any character."""
    try:
        text = (_PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    return dict(enumerate(text.rpartition(")")[2].split(), start=_STATE_FIELD))


def _stat(pid: int) -> tuple[str, int] | None:
    """Return state and start ticks, or None if there is no such process."""
    fields = _fields(pid)
    return None if fields is None else (fields[_STATE_FIELD], int(fields[_START_FIELD]))
