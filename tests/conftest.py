"""Fixtures that every test gets: whatever a test leaves behind fails it."""

import gc
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile, SegmentOwner

SHM = Path("/dev/shm")
# Whatever is started in the background by a shell ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LEAK_DEADLINE_S = 5.0
"""How long a process or thread that is already ending may take to be gone."""


def _processes() -> set[int]:
    return {child.pid for child in psutil.Process().children(recursive=True) if _lives(child)}


def _lives(child: psutil.Process) -> bool:
    try:
        return bool(child.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two looks
        return False


def _descriptors() -> set[str]:
    """Open sockets, event descriptors and shared memory of this process, as the kernel names them."""
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith(("socket:", "/dev/shm/")):
            found.add(target)
        elif target in {"anon_inode:[eventfd]", "anon_inode:[eventpoll]"}:
            found.add(f"{target} {entry.name}")
    return found


class Family(threading.Thread):
    """Remembers who was ever a child: what the dead leave in shared memory says no more than who they were."""

    def __init__(self) -> None:
        super().__init__(name="family", daemon=True)
        self.known = {SegmentOwner.current()}

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(FAMILY_S)

    def look(self) -> set[SegmentOwner]:
        for pid in _processes():
            if ticks := segment_file._start_ticks(pid):  # process ids come again within one session
                self.known.add(SegmentOwner(pid, ticks, segment_file._pid_namespace()))
        return self.known


FAMILY_S = 0.25
"""Whoever owns a segment lives for longer: it has loaded torch."""
_family: list[Family] = []


def family() -> Family:
    """The one of this process, which lasts as long."""
    if not _family:
        _family.append(Family())
        _family[0].start()
    return _family[0]


def _segments() -> set[str]:
    """Segments of this process and of those that ever were its children; other runs of this machine have their own."""
    relatives = family()  # begins before the first test
    found = list(SHM.glob("rolloutmq*"))
    ours = relatives.look() if found else set()
    return {path.name for path in found if _is_ours(path, ours)}


def _is_ours(path: Path, ours: set[SegmentOwner]) -> bool:
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return False
    try:
        owner = SegmentFile(path, "", fd).owner()
    finally:
        os.close(fd)
    return owner in ours


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


PROBES: dict[str, Callable[[], set[int] | set[str]]] = {
    "processes": _processes,
    "descriptors": _descriptors,
    "shared memory": _segments,
    "threads": _threads,
}


_frozen: set[str] = set()


def _freeze_what_was_imported() -> None:
    """Keep modules out of the collections that follow: torch alone is 200 000 objects, 0.1 s for every test."""
    if not _frozen.issuperset(sys.modules):
        gc.unfreeze()
        gc.collect()
        gc.freeze()
        _frozen.update(sys.modules)


@pytest.fixture(autouse=True)
def no_leaks() -> Iterator[None]:
    """Fail the test that leaves a process, a socket, a thread or shared memory behind."""
    _freeze_what_was_imported()
    before = {what: probe() for what, probe in PROBES.items()}
    yield
    deadline = time.monotonic() + LEAK_DEADLINE_S
    while True:
        gc.collect()
        leaked = {what: extra for what, probe in PROBES.items() if (extra := probe() - before[what])}
        if not leaked or time.monotonic() > deadline:
            break
        time.sleep(0.02)
    assert not leaked, f"the test left behind: {leaked}"


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """An empty run directory."""
    path = tmp_path / "run"
    path.mkdir(mode=0o700)
    return path
