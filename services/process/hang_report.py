"""What hangs in a worker, read from its run directory while it hangs.

The worker writes `hangs/WORKER.json`, with the place and the task, from a thread. Code that holds the interpreter lock,
such as a regular expression, stops that thread too: then `faulthandler` has written the stacks to `hangs/WORKER.stack`,
behind a line with the process and the directory of the configuration. The first frame of the user's there is the place.
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


def _of_stacks(path: Path) -> Hang | None:
    try:
        header, _, stacks = read_regular(path).decode(errors="replace").partition("\n")
    except OSError:
        return None
    pid, _, base_dir = header.partition(" ")
    if not stacks or not pid.isdigit():
        return None
    # The main thread, which runs the event loop, is the last one.
    threads = reversed(stacks.split("\n\n"))
    places = [place for thread in threads for place in _FRAME.findall(thread) if _is_users(place[0])]
    where = _place(Path(base_dir), *places[0]) if places else ""
    return Hang(pid=int(pid), where=where)


def _is_users(file: str) -> bool:
    return not LIBRARIES.search(file) and OURS not in Path(file).parents


def _place(base_dir: Path, file: str, line: str) -> str:
    path = Path(file)
    return f"{path.relative_to(base_dir) if base_dir in path.parents else path}:{line}"
