"""What this machine has and lacks for a run, and how to get what it lacks.

Each check is a small function that answers with a `Finding`; none of them changes anything. A finding that is not
`needed` is advice: the run works without it, only with less.
"""

import importlib.util
import json
import os
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from rolloutmq.schemas.errors import RolloutMQError

MIN_PYTHON: Final = (3, 11)
MIN_DESCRIPTORS: Final = 4096
"""About 1,000 producers with three sockets each."""
MIN_SHM_BYTES: Final = 64 << 20
MIN_DISK_BYTES: Final = 1 << 30
IPC_PATH_BYTES: Final = 107
"""Longest path of a unix socket on Linux."""


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at.

    Attributes:
        what: The thing.
        fine: It is as it should be.
        found: What there is.
        remedy: How to get what is missing; empty if it is fine.
        needed: Nothing runs without it.
    """

    what: str
    fine: bool
    found: str
    remedy: str = ""
    needed: bool = True


def python_version(version: tuple[int, ...] = sys.version_info[:3]) -> Finding:
    """Python itself."""
    found = ".".join(map(str, version))
    remedy = "install Python 3.11 or newer and make the virtual environment again"
    return Finding("python", version >= MIN_PYTHON, found, remedy)


def module(name: str, extra: str, what: str, *, needed: bool = False) -> Finding:
    """A package that an extra of ours brings; looked up, not imported."""
    there = importlib.util.find_spec(name) is not None
    remedy = f"pip install 'rolloutmq[{extra}]'" if extra else "pip install rolloutmq"
    return Finding(what, there, "installed" if there else "not installed", remedy, needed)


def descriptors() -> Finding:
    """How many files a process may raise its limit to; the broker raises it by itself."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    unlimited = hard == resource.RLIM_INFINITY
    found = "unlimited" if unlimited else f"{hard} at most"
    remedy = f"raise the hard limit to {MIN_DESCRIPTORS} (ulimit -Hn), or run fewer workers"
    return Finding("open files", unlimited or hard >= MIN_DESCRIPTORS, found, remedy, needed=False)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Where the weights lie that trainer and server share."""
    if not path.is_dir() or not os.access(path, os.W_OK):
        return Finding("shared memory", fine=False, found="none", remedy=f"mount a tmpfs at {path}")
    free = shutil.disk_usage(path).free
    remedy = "give the container more, for example --shm-size=8g"
    return Finding("shared memory", free >= MIN_SHM_BYTES, f"{_size(free)} free", remedy)


def disk(path: Path = Path()) -> Finding:
    """Room for logs, checkpoints and what is saved at the end."""
    free = shutil.disk_usage(path).free
    return Finding("disk", free >= MIN_DISK_BYTES, f"{_size(free)} free", "free at least 1 GiB")


def socket_paths() -> Finding:
    """Sockets need short paths; where the run directory's is too long a temporary one is used."""
    base = tempfile.gettempdir()
    fine = len(base.encode()) < IPC_PATH_BYTES // 2 and os.access(base, os.W_OK)
    return Finding("socket paths", fine, base, "set TMPDIR to a short, writable directory")


def cores() -> Finding:
    """Processors that this process may use."""
    count = len(os.sched_getaffinity(0))
    return Finding("cores", count >= 2, str(count), "two or more are advised", needed=False)


def gpus() -> Finding:
    """GPUs, through NVIDIA's library; a run without any trains on the processors."""
    import pynvml

    remedy = "install NVIDIA's driver if this machine has a GPU; without one all runs on the CPU"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return Finding("gpu", fine=False, found=f"none ({error})", remedy=remedy, needed=False)
    try:
        count = int(pynvml.nvmlDeviceGetCount())
    finally:
        pynvml.nvmlShutdown()
    return Finding("gpu", count > 0, f"{count}", remedy, needed=False)


CHECKS: Final[Iterable[Callable[[], Finding]]] = (
    python_version,
    lambda: module("zmq", "", "pyzmq", needed=True),
    lambda: module("msgspec", "", "msgspec", needed=True),
    lambda: module("torch", "trainer", "torch (trainer and tiny inference)"),
    lambda: module("transformers", "trainer", "transformers (trainer and tiny inference)"),
    lambda: module("matplotlib", "report", "matplotlib (report.png)"),
    cores,
    shared_memory,
    disk,
    socket_paths,
    descriptors,
    gpus,
)


def configuration(file: Path) -> Finding:
    """What `rolloutmq up FILE` would refuse before it starts anything: keys, entries, addresses, a teacher that does
    not fit."""
    from rolloutmq.launch import preflight
    from rolloutmq.launch.settings import load

    try:
        preflight.check(load(file, environ=os.environ))
    except RolloutMQError as error:
        return Finding("configuration", fine=False, found=str(file), remedy=str(error))
    return Finding("configuration", fine=True, found=str(file))


def examine(checks: Iterable[Callable[[], Finding]] = CHECKS) -> list[Finding]:
    """Look at everything."""
    return [check() for check in checks]


def report(*, as_json: bool, file: Path | None = None) -> int:
    """Print what was found, of the machine and of a configuration; return 0 if a run can start here, else 1."""
    more = [] if file is None else [configuration(file)]
    return tell([*examine(), *more], as_json=as_json)


def tell(findings: Sequence[Finding], *, as_json: bool) -> int:
    """Print findings; return 1 if something is missing that is needed, else 0."""
    if as_json:
        text = json.dumps([asdict(finding) for finding in findings], indent=2)
    else:
        text = "\n".join(_line(finding) for finding in findings)
    sys.stdout.write(text + "\n")
    return int(any(finding.needed and not finding.fine for finding in findings))


def _line(finding: Finding) -> str:
    mark = "ok     " if finding.fine else "MISSING" if finding.needed else "advice "
    text = f"{mark} {finding.what}: {finding.found}"
    return text if finding.fine else f"{text}; {finding.remedy}"


def _size(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
