"""Reused segments: which files are reused, and their content after a power cut."""

import os
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from tests.services.broker.journal.journals import (
    SMALL,
    Driven,
    FailingDisk,
    config,
    group,
    served,
    snapshot,
)

from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.journal.format.events import Dropped
from rolloutmq.services.broker.journal.format.records import BLOCK_BYTES
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.journal.write.group_log import SPARES_LIMIT

KEPT = 4
"""Groups that are alive at once."""


def gone(number: int) -> Dropped:
    return Dropped(number, "expired", "stale")


def inodes(directory: Path, pattern: str) -> dict[str, int]:
    found = {}
    for path in sorted(directory.glob(pattern)):
        with suppress(FileNotFoundError):  # The journal goes on meanwhile.
            found[path.name] = path.stat().st_ino
    return found


def flow(run: Driven, count: int, *, first: int = 1, alive: list[StoredGroup] | None = None) -> None:
    """Write groups one after the other, of which the newest `KEPT` stay."""
    alive = alive if alive is not None else []
    for number in range(first, first + count):
        alive.append(group(number, 15_000))
        run.append(alive[-1])
        if len(alive) > KEPT:
            oldest = alive.pop(0)
            oldest.body.release()
            run.append(gone(oldest.order))
        run.settle()


@pytest.mark.parametrize("level", [Durability.DISK, Durability.OS])
def test_a_segment_that_nothing_needs_is_written_over(tmp_path: Path, level: Durability) -> None:
    run = Driven(tmp_path, config(level)).start()
    seen: dict[int, set[str]] = {}
    alive: list[StoredGroup] = []
    for number in range(1, 60):
        flow(run, 1, first=number, alive=alive)
        for name, inode in inodes(tmp_path, "groups-*").items():
            seen.setdefault(inode, set()).add(name)
        assert len(inodes(tmp_path, "spare-*")) <= SPARES_LIMIT
    assert max(map(len, seen.values())) > 3
    assert len(seen) < 9
    for one in alive:
        one.body.shed()
        assert one.body.load()
    run.journal.close()
    assert inodes(tmp_path, "spare-*") == {}
    again = Driven(tmp_path, config(level))
    assert again.found.damage == []
    again.journal.close()


def test_what_somebody_keeps_is_not_written_over(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    alive: list[StoredGroup] = []
    flow(run, 6, alive=alive)
    kept = tmp_path / "kept"
    kept.hardlink_to(tmp_path / "groups-00000001.rmq")
    before = kept.read_bytes()
    flow(run, 40, first=7, alive=alive)
    run.journal.close()
    assert kept.stat().st_nlink == 1
    assert kept.read_bytes() == before


def test_a_segment_that_somebody_removed_is_no_spare_and_ends_nothing(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    alive: list[StoredGroup] = []
    flow(run, 6, alive=alive)
    (tmp_path / "groups-00000001.rmq").unlink()
    flow(run, 20, first=7, alive=alive)
    run.journal.close()
    assert run.journal.done == run.journal.ticket


def test_a_segment_for_one_large_group_is_not_kept(tmp_path: Path) -> None:
    run = Driven(tmp_path, config()).start()
    large = group(1, 3 * SMALL)
    run.write(large, group(2), group(3, 3 * SMALL))
    large.body.release()
    run.write(gone(1))
    run.until(lambda: not (tmp_path / "groups-00000001.rmq").exists())
    assert inodes(tmp_path, "spare-*") == {}
    run.journal.close()


def test_on_a_full_disk_spares_make_room(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(), disk).start()
    alive: list[StoredGroup] = []
    flow(run, 30, alive=alive)
    while not inodes(tmp_path, "spare-*"):
        flow(run, 1, first=alive[-1].order + 1, alive=alive)

    def full_until_they_are_gone(_: int) -> None:
        if inodes(tmp_path, "spare-*"):
            raise OSError(28, "no room")

    disk.plan["pwritev"] = full_until_they_are_gone
    flow(run, 10, first=alive[-1].order + 1, alive=alive)
    assert inodes(tmp_path, "spare-*") == {}
    run.journal.close()


class ForgetfulDisk(FailingDisk):
    """A disk that calls `instant` before each change, and can copy a possible state after a power cut.

    Names are as of the last sync of the directory. The content of a file is as of its last sync, as it is now, or a
    mix of blocks of both.
    """

    def __init__(self, directory: Path, instant: Callable[["ForgetfulDisk"], None]) -> None:
        super().__init__()
        self._directory = directory
        self._instant = instant
        self._names: dict[str, int] = {}
        self._files: dict[int, int] = {}
        """A descriptor of each file, by its number."""
        self._synced: dict[int, bytes] = {}

    def _before(self, method: str, *args: Any) -> None:
        super()._before(method, *args)
        if method in {"pwritev", "fdatasync", "truncate", "rename", "unlink", "sync_directory"}:
            self._instant(self)

    def create(self, path: Path) -> int:
        fd = super().create(path)
        self._files[os.fstat(fd).st_ino] = os.open(path, os.O_RDONLY)
        return fd

    def fdatasync(self, fd: int) -> None:
        super().fdatasync(fd)
        number = os.fstat(fd).st_ino
        self._synced[number] = self._now(number)

    def sync_directory(self, path: Path) -> None:
        super().sync_directory(path)
        self._names = inodes(self._directory, "*.rmq")

    def _now(self, number: int) -> bytes:
        fd = self._files[number]
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def power_cut(self, target: Path, rng: random.Random) -> None:
        """Make a directory as a power cut may leave it."""
        target.mkdir()
        how = rng.choice(["synced", "now", "some"])
        for name, number in self._names.items():
            now, synced = self._now(number), self._synced.get(number, b"")
            data = bytearray(synced if how == "synced" else now)
            if how == "some":
                before = synced.ljust(len(now), b"\0")
                for start in range(0, len(now), BLOCK_BYTES):
                    if rng.random() < 0.5:
                        data[start : start + BLOCK_BYTES] = before[start : start + BLOCK_BYTES]
            (target / name).write_bytes(data[: len(now)])

    def close_all(self) -> None:
        for fd in self._files.values():
            os.close(fd)


def test_a_power_cut_at_any_instant_takes_nothing_that_was_told_and_shows_no_damage(tmp_path: Path) -> None:
    journal, rng = tmp_path / "journal", random.Random(3)
    cuts: list[tuple[Path, set[int]]] = []
    durable: set[int] = set()

    def instant(disk: ForgetfulDisk) -> None:
        if started:
            cuts.append((tmp_path / f"cut-{len(cuts)}", set(durable)))
            disk.power_cut(cuts[-1][0], rng)

    started: list[bool] = []
    disk = ForgetfulDisk(journal, instant)
    run = Driven(journal, config(), disk).start()
    started.append(True)
    alive: list[StoredGroup] = []
    for number in range(1, 45):
        dying = alive[0].order if len(alive) == KEPT else 0
        durable.discard(dying)  # from now on a cut may find it, or not
        flow(run, 1, first=number, alive=alive)
        durable.add(number)
        if number % 15 == 0:
            groups = list(alive)
            run.journal.rotate(snapshot(groups, next_order=number + 1))
            run.settle()
    run.journal.close()
    disk.close_all()
    assert len(cuts) > 200
    names = set()
    for target, told in cuts:
        names |= {path.name for path in target.iterdir() if path.name.startswith("spare-")}
        again = Driven(target, config())
        # Of events that were not synced, a cut may take those in the middle.
        assert not [line for line in again.found.damage if line.startswith("groups")], target
        assert served(again.found) >= told, target
        again.journal.close()
    assert names
