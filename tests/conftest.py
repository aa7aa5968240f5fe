"""Fixtures that every test gets: whatever a test leaves behind fails it."""

import gc
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.house import shared_memory

# Whatever is started in the background by a shell ignores SIGINT, and so would all that the tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LEAK_DEADLINE_S = 5.0
"""How long a process or thread that is already ending may take to be gone."""


def pytest_sessionstart() -> None:
    """Remove what sessions left that were killed."""
    shared_memory.sweep()
    shared_memory.family()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Name binary values by their length: what gzip writes differs by the second, and two workers must agree."""
    if isinstance(val, bytes) and not (len(val) <= 80 and val.isascii() and val.decode().isprintable()):
        return f"{argname}-of-{len(val)}"
    return None


def pytest_sessionfinish() -> None:
    """Remove what the dead of this session left."""
    shared_memory.end()


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


def _threads() -> set[str]:
    return {thread.name for thread in threading.enumerate() if not thread.name.startswith("asyncio_")}


def _logs_off() -> set[str]:
    level = logging.root.manager.disable
    return {f"level {level} and below"} if level else set()


PROBES: dict[str, Callable[[], set[int] | set[str]]] = {
    "logs that are off": _logs_off,
    "processes": shared_memory.children,
    "descriptors": _descriptors,
    "shared memory": shared_memory.segments,
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


@pytest.fixture
def open_umask() -> Iterator[None]:
    """A umask that takes no right from anybody."""
    before = os.umask(0)
    yield
    os.umask(before)
