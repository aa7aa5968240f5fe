"""Owners and removal of segments, without torch."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas.errors import SegmentGoneError

CREATOR = """
import sys
from pathlib import Path
from rolloutmq.bus.shm import segment_file as segments
segments.SHM = Path(sys.argv[1]).parent
segment = segments.create("test", 8192)
segments.write_address(Path(sys.argv[1]), segment)
print(segment.path, segment.nonce)
"""


def left_by_the_dead(address: Path) -> tuple[Path, str]:
    """Let a process make a segment and die; return its path and nonce."""
    done = subprocess.run(
        [sys.executable, "-c", CREATOR, str(address)], capture_output=True, text=True, check=True
    )
    path, nonce = done.stdout.split()
    return Path(path), nonce


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sweep of everything, while other tests use the real place, stays in a directory of its own."""
    monkeypatch.setattr(segment_file, "SHM", tmp_path)


@pytest.fixture
def mine() -> Iterator[segment_file.SegmentFile]:
    segment = segment_file.create("test", 8192)
    yield segment
    os.close(segment.fd)
    segment.path.unlink(missing_ok=True)


def test_an_owner_is_more_than_a_pid() -> None:
    me = SegmentOwner.current()
    assert me.pid == os.getpid()
    assert me.alive()
    assert not me._replace(start_ticks=me.start_ticks + 1).alive()
    assert not SegmentOwner(0, 0, me.namespace).alive()
    assert me._replace(start_ticks=0, namespace=1).alive()  # elsewhere: not for this process to judge


def test_a_zombie_is_dead() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    mark = SegmentOwner(
        child.pid, segment_file._start_ticks(child.pid) or 0, SegmentOwner.current().namespace
    )
    assert mark.alive()
    assert child.stdin is not None
    child.stdin.close()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert not mark.alive()
    child.wait()


def test_a_segment_says_whose_it_is(mine: segment_file.SegmentFile) -> None:
    assert mine.path.name == f"rolloutmq-{mine.nonce}-test"
    assert mine.path.stat().st_mode & 0o777 == 0o600
    assert mine.path.stat().st_size == 8192
    assert mine.owner() == SegmentOwner.current()
    again = segment_file.open_existing(mine.path, mine.nonce)
    assert again.owner() == SegmentOwner.current()
    os.close(again.fd)
    assert segment_file.in_use(mine.path)


def test_a_released_segment_has_no_living_owner(mine: segment_file.SegmentFile) -> None:
    mine.release()
    owner = mine.owner()
    assert owner is not None
    assert not owner.alive()
    assert not owner._replace(namespace=owner.namespace + 1).alive()
    assert segment_file.in_use(mine.path)  # this process still maps it
    child = os.fork()
    if not child:
        mine.claim()
        os._exit(0)
    os.waitpid(child, 0)
    claimed = mine.owner()
    mine.release()
    assert mine.owner() == claimed  # that of another process is left alone


def test_another_segment_is_not_opened(mine: segment_file.SegmentFile, tmp_path: Path) -> None:
    with pytest.raises(SegmentGoneError, match="nonce"):
        segment_file.open_existing(mine.path, "0" * 16)
    with pytest.raises(SegmentGoneError, match="No such file"):
        segment_file.open_existing(tmp_path / "nothing", mine.nonce)
    link = tmp_path / "link"
    link.symlink_to(mine.path)
    with pytest.raises(SegmentGoneError):
        segment_file.open_existing(link, mine.nonce)
    foreign = tmp_path / "foreign"
    foreign.write_bytes(b"x" * 100)
    with pytest.raises(SegmentGoneError, match="nonce"):
        segment_file.open_existing(foreign, mine.nonce)


def test_only_what_the_dead_left_is_swept(mine: segment_file.SegmentFile, tmp_path: Path) -> None:
    address = tmp_path / "weights.json"
    path, _ = left_by_the_dead(address)
    swept = segment_file.sweep()
    assert path in swept
    assert mine.path not in swept
    assert mine.path.exists()
    assert not path.exists()
    assert segment_file.sweep(address) == [path]  # the address of what is gone already goes too
    assert not address.exists()


def test_whoever_maps_a_segment_keeps_it(tmp_path: Path) -> None:
    address = tmp_path / "weights.json"
    path, nonce = left_by_the_dead(address)
    held = segment_file.open_existing(path, nonce)
    assert segment_file.sweep(address) == []
    assert path not in segment_file.sweep()
    assert path.exists()
    os.close(held.fd)
    assert segment_file.sweep(address) == [path]
    assert not path.exists()


def test_an_heir_that_comes_while_it_is_swept_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    address = tmp_path / "weights.json"
    path, nonce = left_by_the_dead(address)
    heirs: list[segment_file.SegmentFile] = []
    look = segment_file.in_use

    def look_and_be_late(swept: Path) -> bool:
        found = look(swept)
        heirs.append(segment_file.open_existing(path, nonce, writable=True))
        return found

    monkeypatch.setattr(segment_file, "in_use", look_and_be_late)
    assert segment_file.sweep(address) == []
    (heir,) = heirs
    assert os.fstat(heir.fd).st_nlink == 1
    os.close(heir.fd)


def test_nobody_takes_over_what_is_being_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    address = tmp_path / "weights.json"
    path, nonce = left_by_the_dead(address)
    unlink, refused = Path.unlink, list[Path]()

    def unlink_and_be_late(swept: Path, *, missing_ok: bool = False) -> None:
        if swept == path:
            with pytest.raises(SegmentGoneError, match="is being removed"):
                segment_file.open_existing(path, nonce, writable=True)
            refused.append(path)
        unlink(swept, missing_ok=missing_ok)

    monkeypatch.setattr(Path, "unlink", unlink_and_be_late)
    assert segment_file.sweep(address) == [path]
    assert refused == [path]


def test_an_heir_claims_what_was_left(tmp_path: Path) -> None:
    address = tmp_path / "weights.json"
    path, nonce = left_by_the_dead(address)
    left = segment_file.open_existing(path, nonce, writable=True)
    owner = left.owner()
    assert owner is not None
    assert not owner.alive()
    left.claim()
    assert left.owner() == SegmentOwner.current()
    os.close(left.fd)
    assert segment_file.in_use(path)  # by its owner, who lives
    path.unlink()


def test_a_sweep_touches_nothing_outside(tmp_path: Path) -> None:
    precious, address = tmp_path / "sub" / "precious", tmp_path / "weights.json"
    precious.parent.mkdir()
    precious.write_bytes(b"x" * 100)
    address.write_text(f'{{"path": "{precious}", "nonce": "{"0" * 16}"}}')
    assert segment_file.sweep(address) == []
    assert precious.exists()
    assert address.exists()


def test_a_file_without_a_header_may_be_in_the_making() -> None:
    path = segment_file.SHM / f"{segment_file.PREFIX}{'0' * 16}-test"
    path.write_bytes(b"")
    assert segment_file.sweep() == []
    os.utime(path, (0, 0))
    assert segment_file.sweep() == [path]
    assert not path.exists()


def test_an_unreadable_address_is_none(tmp_path: Path) -> None:
    address = tmp_path / "weights.json"
    assert segment_file.read_address(address) is None
    address.write_text("{")
    assert segment_file.read_address(address) is None
    assert segment_file.sweep(address) == []


def test_memory_that_is_not_there_leaves_nothing() -> None:
    with pytest.raises(Exception, match="shared memory"):
        segment_file.create("test", 1 << 50)
    assert list(segment_file.SHM.iterdir()) == []
