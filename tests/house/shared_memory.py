"""Shared memory of the tests: the segments of this session, and the sweep of what ended sessions left.

What the dead leave in /dev/shm says no more than who owned it. So each session keeps a record of its processes, and a
later one removes the segments of a session that was killed before it could. Segments of the living, and of whoever was
never part of a test, stay.
"""

import os
import tempfile
import threading
import time
from collections.abc import Container, Iterator
from pathlib import Path

import psutil

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile, SegmentOwner

SHM = Path("/dev/shm")
RECORDS = Path(tempfile.gettempdir()) / f"rolloutmq-tests-{os.getuid()}"
FAMILY_S = 0.25
"""Whoever owns a segment lives for longer: it has loaded torch."""


def children() -> set[int]:
    """Return the living processes below this one."""
    return {child.pid for child in psutil.Process().children(recursive=True) if _lives(child)}


def _lives(child: psutil.Process) -> bool:
    try:
        return bool(child.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:  # it ended between the two looks
        return False


class Family(threading.Thread):
    """Remembers who was ever a child, and records it for the session after this one."""

    def __init__(self, records: Path = RECORDS) -> None:
        super().__init__(name="family", daemon=True)
        records.mkdir(mode=0o700, exist_ok=True)
        self.known: set[SegmentOwner] = set()
        self.record = records / "-".join(map(str, SegmentOwner.current()))
        self._add(SegmentOwner.current())

    def run(self) -> None:
        while True:
            self.look()
            time.sleep(FAMILY_S)

    def look(self) -> set[SegmentOwner]:
        for pid in children():
            if ticks := segment_file._start_ticks(pid):  # process ids come again within one session
                self._add(SegmentOwner(pid, ticks, segment_file._pid_namespace()))
        return self.known

    def _add(self, owner: SegmentOwner) -> None:
        if owner not in self.known:
            self.known.add(owner)
            with self.record.open("a") as file:
                file.write("{} {} {}\n".format(*owner))


_family: list[Family] = []


def family() -> Family:
    """The one of this process, which lasts as long."""
    if not _family:
        _family.append(Family())
        _family[0].start()
    return _family[0]


def segments() -> set[str]:
    """Segments of this process and of those that ever were its children; other runs of this machine have their own."""
    relatives = family()  # begins before the first test
    if not any(_every()):
        return set()
    ours = relatives.look()
    return {path.name for path in _every() if owner_of(path) in ours}


def _every() -> Iterator[Path]:
    return SHM.glob(f"{segment_file.PREFIX}*")


def owner_of(path: Path) -> SegmentOwner | None:
    """Return the owner of a segment, if it has one."""
    try:
        fd = os.open(path, os.O_RDONLY)
    except OSError:
        return None
    try:
        return SegmentFile(path, "", fd).owner()
    finally:
        os.close(fd)


def sweep(records: Path = RECORDS) -> list[Path]:
    """Remove the segments of ended sessions, and the records of sessions of which nobody lives."""
    removed = []
    for record in sorted(records.iterdir()) if records.is_dir() else []:
        session = SegmentOwner(*map(int, record.name.split("-")))
        if session.alive():
            continue
        try:
            lines = record.read_text().splitlines()
        except FileNotFoundError:  # another session sweeps too
            continue
        owners = {SegmentOwner(*map(int, line.split())) for line in lines}
        removed += remove(owners)
        if not any(owner.alive() for owner in owners):
            record.unlink(missing_ok=True)
    return removed


def end() -> None:
    """Remove what this session's dead left, and its record."""
    remove(family().look())
    if not children():
        family().record.unlink(missing_ok=True)


def remove(owners: Container[SegmentOwner]) -> list[Path]:
    """Remove the segments of these owners that no living process owns or maps."""
    found = [path for path in _every() if (owner := owner_of(path)) is not None and owner in owners]
    return [path for path in found if segment_file._remove_unused(path)]
