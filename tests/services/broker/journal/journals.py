"""Journals for tests: groups with numbered contents, and disks that fail on demand."""

import os
import random
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from rolloutmq.bus.encoding.codec import checksum
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import (
    ColumnSpec,
    ColumnTable,
    Dtype,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.event_buffer import Entry, SnapshotRecord
from rolloutmq.services.broker.journal.format.events import Accepted, Began, GroupSnapshot, Numbers, Table
from rolloutmq.services.broker.journal.format.events_codec import AnyEvent
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.read.recovery import Recovered
from rolloutmq.services.broker.journal.stored_group import BodyMemory, GroupBody, StoredGroup

TABLE = ColumnTable((ColumnSpec("tokens", Dtype.I32, 1),))
RAM = BodyMemory(1 << 40)
DEADLINE_S = 60.0
SMALL = 5 << 14
"""Size of the segments of most tests."""


def config(level: Durability = Durability.DISK, **values: Any) -> BrokerConfig:
    return BrokerConfig(**{"durability": level, "segment_bytes": SMALL, "commit_ms": 0.0, **values})


def contents(number: int, nbytes: int = 0) -> tuple[bytes, ...]:
    """Return the frames of a group, which differ from those of any other."""
    nbytes = nbytes or random.Random(-number).randrange(1, 6000)
    return random.Random(number).randbytes(nbytes), b"group %d" % number


def group(number: int, nbytes: int = 0, ram: BodyMemory = RAM) -> StoredGroup:
    frames = contents(number, nbytes)
    size = sum(map(len, frames))
    header = GroupHeader(
        seq=number,
        position=number,
        group_id=f"g-{number}",
        table=TABLE.id,
        frames=len(frames),
        nbytes=size,
        crc=checksum(frames),
        sequences=4,
        tokens=40,
        oldest=PolicyVersion(1, 2),
        newest=PolicyVersion(1, 3),
        started_at=1.0,
        finished_at=2.0,
        rewards=RewardSummary(0.5, 0.0, 1.0),
    )
    return StoredGroup(
        header=header,
        env="sort3",
        split=Split.TRAIN,
        run="r",
        producer="sort3-0",
        session=9,
        table=TABLE,
        body=GroupBody(frames, size, ram),
        accepted_at=0.0,
        accepted_wall=1000.0 + number,
        order=number,
    )


def snapshot(groups: Iterable[StoredGroup] = (), next_order: int = 1, epoch: int = 1) -> list[SnapshotRecord]:
    """Return a state with those groups."""
    items: list[SnapshotRecord] = [Numbers(next_order, 0, 0), Table(TABLE)]
    items += [(GroupSnapshot(group.accepted(), TABLE.id, 0, 0), group.body) for group in groups]
    return [*items, Began(epoch, 1, "disk")]


class Driven:
    """A journal, driven as the data plane drives it."""

    def __init__(
        self, directory: Path, config: BrokerConfig, disk: Disk | None = None, ram: BodyMemory = RAM
    ) -> None:
        self.woken = threading.Event()
        self.journal = Journal(directory, config, ram, self.woken.set, disk)
        self.found = self.journal.recover()

    def start(self, items: Iterable[SnapshotRecord] | None = None) -> "Driven":
        self.journal.start(snapshot() if items is None else items)
        return self

    def append(self, *entries: Entry) -> int:
        self.journal.append(entries)
        return self.journal.ticket

    def until(self, reached: Callable[[], bool]) -> None:
        """Advance until a condition holds."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            self.journal.advance(time.monotonic(), urgent=True)
            if reached():
                return
            assert time.monotonic() < deadline, "the journal did not get there"
            self.woken.wait(0.01)
            self.woken.clear()

    def settle(self) -> None:
        """Make everything appended durable."""
        self.until(lambda: self.journal.done >= self.journal.ticket)

    def write(self, *entries: Entry) -> None:
        self.append(*entries)
        self.settle()


def orders(found: Recovered) -> list[int]:
    """Return the orders of the groups in the events, in the order of the events."""
    return [event.order for event in acceptances(found.events)]


def acceptances(events: Iterable[AnyEvent]) -> list[Accepted]:
    parts = [event.accepted if isinstance(event, GroupSnapshot) else event for event in events]
    return [event for event in parts if isinstance(event, Accepted)]


def served(found: Recovered) -> set[int]:
    """Read every group back and return the orders of the readable ones; a wrong group fails the test."""
    whole = set()
    for event in acceptances(found.events):
        body = found.body(event)
        if body.load():
            frames = tuple(bytes(frame) for frame in body.frames)
            assert frames == contents(event.order, len(frames[0])), f"group {event.order} is another one"
            assert event.header.group_id == f"g-{event.order}"
            whole.add(event.order)
        body.release()
    return whole


class FailingDisk(Disk):
    """A disk whose calls can be made to fail. `plan` maps a method to a hook called before it."""

    def __init__(self) -> None:
        self.plan: dict[str, Callable[..., None]] = {}
        self.calls: list[str] = []
        self.short = 0
        """If not zero, no write takes more bytes."""

    def fail(self, method: str, number: int, times: float = float("inf"), match: str = "") -> None:
        """Let the next `times` calls of a method fail with that error, on files whose path contains `match`."""
        left = [times]

        def planned(*args: Any) -> None:
            if match and match not in path_of(args[0]):
                return
            left[0] -= 1
            if left[0] >= 0:
                raise OSError(number, os.strerror(number))

        self.plan[method] = planned

    def heal(self) -> None:
        self.plan.clear()

    def _before(self, method: str, *args: Any) -> None:
        self.calls.append(method)
        planned: Callable[..., None] = self.plan.get(method, _nothing)
        planned(*args)

    def create(self, path: Path) -> int:
        self._before("create", path)
        return super().create(path)

    def open(self, path: Path) -> int:
        self._before("open", path)
        return super().open(path)

    def pread(self, fd: int, nbytes: int, offset: int) -> bytes:
        self._before("pread", fd)
        return super().pread(fd, nbytes, offset)

    def pwritev(self, fd: int, buffers: Sequence[Any], offset: int) -> int:
        self._before("pwritev", fd)
        if self.short:
            return os.pwrite(fd, b"".join(map(bytes, buffers))[: self.short], offset)
        return super().pwritev(fd, buffers, offset)

    def allocate(self, fd: int, nbytes: int) -> None:
        self._before("allocate", fd)
        super().allocate(fd, nbytes)

    def fdatasync(self, fd: int) -> None:
        self._before("fdatasync", fd)
        super().fdatasync(fd)

    def truncate(self, fd: int, nbytes: int) -> None:
        self._before("truncate", fd)
        super().truncate(fd, nbytes)

    def rename(self, old: Path, new: Path) -> None:
        self._before("rename", old)
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._before("unlink", path)
        super().unlink(path)

    def sync_directory(self, path: Path) -> None:
        self._before("sync_directory", path)
        super().sync_directory(path)


class CrashingDisk(FailingDisk):
    """A disk that calls `instant` before each change, and can copy its state after a power cut.

    Attributes:
        synced: Contents of each file as of its last sync, by the name it had then.
    """

    def __init__(self, directory: Path, instant: Callable[["CrashingDisk"], None]) -> None:
        super().__init__()
        self.synced: dict[str, bytes] = {}
        self._directory = directory
        self._instant = instant

    def _before(self, method: str, *args: Any) -> None:
        super()._before(method, *args)
        if method in {"pwritev", "fdatasync", "truncate", "rename", "unlink", "sync_directory"}:
            self._instant(self)

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        path = Path(path_of(fd))
        self.synced[path.name] = path.read_bytes()

    def rename(self, old: Path, new: Path) -> None:
        super().rename(old, new)
        self.synced[new.name] = self.synced.pop(old.name)

    def kill(self, target: Path) -> None:
        """Make a directory as a kill of the process would leave it now."""
        shutil.copytree(self._directory, target)

    def power_cut(self, target: Path) -> None:
        """Make a directory as a power cut would leave it now, without unsynced data."""
        target.mkdir()
        for path in self._directory.glob("*.*"):
            if path.name in self.synced:
                (target / path.name).write_bytes(self.synced[path.name])


def path_of(target: Any) -> str:
    return str(Path(f"/proc/self/fd/{target}").readlink() if isinstance(target, int) else target)


def _nothing(*_: Any) -> None:
    return
