"""Stacks that `faulthandler` wrote, and what hangs in a worker while it hangs.

`faulthandler` writes the stacks of all threads to the log of a process that a fatal signal ends, and to
`hangs/WORKER.stack` of a worker whose code holds the interpreter lock, such as a regular expression. There the first
line has the process and the directory of the configuration. The place is the first frame of the user's.

Code that holds only the event loop leaves Python's threads running: then the worker itself has written
`hangs/WORKER.json`, with the place and the task.
"""

import re
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import read_regular
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import Hang, RunLayout

OURS: Final = Path(__file__).parents[2]
"""Directory of this package."""
LIBRARIES: Final = re.compile(r"/lib/python\d|/(site|dist)-packages/")
FATAL: Final = "Fatal Python error: "
CURRENT: Final = "Current thread "
_THREAD: Final = re.compile(r"^(?=Thread 0x|Current thread 0x)", re.MULTILINE)
_FRAME: Final = re.compile(r'^  File "(/[^"\n]*)", line (\d+) in ', re.MULTILINE)


def header_of(pid: int, base_dir: Path) -> bytes:
    """Return the first line of `hangs/WORKER.stack`."""
    return f"{pid} {base_dir}\n".encode(errors="replace")


def hang_of(layout: RunLayout, worker: str, pid: int) -> Hang | None:
    """Return what holds the event loop of a worker now; None if nothing does or the files are of another process."""
    try:
        found = read_json(layout.hang(worker), Hang)
    except (msgspec.DecodeError, OSError):
        found = None
    if found is None:
        found = _of_stacks(layout.stack(worker))
    return found if found is not None and found.pid == pid else None


def fault_in(text: str, base_dir: Path = Path("/")) -> str:
    """Return the place of the user's code at the last fatal signal that a text tells of, `sums.py:14`.

    Empty if there is none.

    Args:
        text: End of a log.
        base_dir: Directory that places are relative to.
    """
    _, fatal, stacks = text.rpartition(FATAL)
    return place_in(stacks, base_dir) if fatal else ""


def place_in(stacks: str, base_dir: Path) -> str:
    """Return the innermost place of the user's code in the stacks of all threads; empty if none of it runs.

    The thread that the signal met comes first, then the main thread, which is the last one.
    """
    threads = _THREAD.split(stacks)[::-1]
    threads.sort(key=lambda one: CURRENT not in one)
    places = [place for thread in threads for place in _FRAME.findall(thread) if _is_users(place[0])]
    return _place(base_dir, *places[0]) if places else ""


def _of_stacks(path: Path) -> Hang | None:
    try:
        header, _, stacks = read_regular(path).decode(errors="replace").partition("\n")
    except OSError:
        return None
    pid, _, base_dir = header.partition(" ")
    if not stacks or not pid.isdigit():
        return None
    return Hang(pid=int(pid), where=place_in(stacks, Path(base_dir)))


def _is_users(file: str) -> bool:
    return not LIBRARIES.search(file) and OURS not in Path(file).parents


def _place(base_dir: Path, file: str, line: str) -> str:
    path = Path(file)
    is_near = base_dir in path.parents and base_dir != Path("/")
    return f"{path.relative_to(base_dir) if is_near else path}:{line}"
