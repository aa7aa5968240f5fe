"""Weights on disk: complete or absent, under exactly their version."""

import builtins
import errno
import fcntl
import io
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from tests.trainer.weights.models import TOKENS, built, config, logits, on_meta
from torch import nn

from rolloutmq.bus.files import force
from rolloutmq.schemas.errors import (
    SegmentGoneError,
    SegmentInUseError,
    WeightsDamagedError,
    WeightsMismatchError,
    WeightsNotWrittenError,
    WeightsTornError,
)
from rolloutmq.schemas.files import DiskAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights import disk
from rolloutmq.trainer.weights.address import OWNER, directory_of, is_locked, owner_lives, read_disk, sweep
from rolloutmq.trainer.weights.disk import DiskShare
from rolloutmq.trainer.weights.share import Level, SharedWeights

V = PolicyVersion


@pytest.fixture
def address(run_dir: Path) -> Path:
    return run_dir / "weights.json"


@pytest.fixture
def owned(address: Path) -> Iterator[tuple[Any, DiskShare]]:
    model = built(config("qwen2"))
    share = DiskShare.create(model, address, version=V(1, 4))
    yield model, share
    share.close()


def published(address: Path) -> list[str]:
    return sorted(path.name for path in (directory_of(address)).iterdir() if path.is_dir())


def test_a_reader_takes_each_version_over_whole(address: Path, owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader: SharedWeights = DiskShare.attach(reading, address)
    assert reader.version == V(1, 4)
    assert reading.lm_head.weight is reading.model.embed_tokens.weight
    parameters = dict(reading.named_parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(5, 8):
        before = logits(model)
        model(input_ids=TOKENS, labels=TOKENS).loss.backward()
        with owner.writing(V(1, step)):
            optimizer.step()
        assert torch.equal(logits(reading), before)  # nothing changes but on entering `reading`
        assert reader.version == V(1, step - 1)
        with reader.reading() as version:
            assert version == V(1, step)
            assert torch.equal(logits(reading), logits(model))
    assert all(parameters[name] is parameter for name, parameter in reading.named_parameters())
    mine, theirs = (one.verify(Level.LOGITS, inputs=TOKENS, exact=True) for one in (owner, reader))
    mine.require_same(theirs)


@pytest.mark.usefixtures("open_umask")
def test_all_files_are_for_their_user_alone(address: Path) -> None:
    DiskShare.create(built(config("qwen2")), address).close()
    modes = {path.name: path.stat().st_mode & 0o777 for path in address.parent.rglob("*") if path.is_file()}
    assert modes == dict.fromkeys((address.name, OWNER, disk.TENSORS, disk.MANIFEST), 0o600)


def fail_in_mid_write(model: Any, owner: DiskShare) -> None:
    with owner.writing(V(1, 5)):
        model.lm_head.weight.data.zero_()
        raise ZeroDivisionError


def test_a_write_that_fails_publishes_nothing(address: Path, owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = DiskShare.attach(reading, address)
    before = logits(reading)
    with pytest.raises(ZeroDivisionError):
        fail_in_mid_write(model, owner)
    assert owner.is_torn()
    with pytest.raises(WeightsTornError), owner.writing(V(1, 5)):
        pass
    with pytest.raises(WeightsTornError), owner.reading():
        pass
    with reader.reading() as version:
        assert version == V(1, 4)
        assert torch.equal(logits(reading), before)
    with owner.writing(V(1, 4), restoring=True):
        model.lm_head.weight.data.fill_(1.0)
    with reader.reading() as version:  # the same version again, and other bytes
        assert version == V(1, 4)
        assert torch.equal(logits(reading), logits(model))


def test_old_versions_go_but_not_under_a_reader(address: Path, owned: tuple[Any, DiskShare]) -> None:
    _, owner = owned
    (first,) = published(address)
    (directory_of(address) / ".1.3.dead-1.partial").mkdir()
    with disk.held(directory_of(address) / first):
        for step in range(5, 9):
            with owner.writing(V(1, step)):
                pass
        assert [name[:4] for name in published(address)] == ["1.4.", "1.7.", "1.8."]
    with owner.writing(V(1, 9)):
        pass
    assert [name[:4] for name in published(address)] == ["1.8.", "1.9."]


def test_old_versions_go_where_a_lock_needs_a_writable_file(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As over NFS, where the kernel makes of a flock a lock of bytes."""
    flock = fcntl.flock

    def strict(fd: int, kind: int) -> None:
        if kind & fcntl.LOCK_EX and fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY:
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", strict)
    for step in range(5, 8):
        with owned[1].writing(V(1, step)):
            pass
    assert [name[:4] for name in published(address)] == ["1.6.", "1.7."]


def test_a_version_is_published_though_old_ones_cannot_go(
    address: Path,
    owned: tuple[Any, DiskShare],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    model, owner = owned

    def stale(_path: Path) -> bool:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "is_locked", stale)
        for step in (5, 6):
            with owner.writing(V(1, step)):
                pass
    assert "old versions not removed" in caplog.text
    assert (owner.version, owner.is_torn()) == (V(1, 6), False)
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 6)
    with owner.writing(V(1, 7)):
        pass
    assert [name[:4] for name in published(address)] == ["1.6.", "1.7."]


def test_what_is_not_the_same_model_is_refused(address: Path, owned: tuple[Any, DiskShare]) -> None:
    model, _ = owned
    other = on_meta(config("qwen2", rms_norm_eps=1e-3))
    with pytest.raises(WeightsMismatchError, match=r"config.rms_norm_eps"):
        DiskShare.attach(other, address)
    assert all(parameter.is_meta for parameter in other.parameters())
    with pytest.raises(WeightsMismatchError, match="dtype is float32"):
        DiskShare.attach(on_meta(model.config, dtype=torch.bfloat16), address)


def files(address: Path) -> Path:
    found = read_disk(address)
    assert found is not None
    return directory_of(address) / found.directory


def test_damaged_files_are_refused_and_the_old_weights_stay(
    address: Path, owned: tuple[Any, DiskShare]
) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = DiskShare.attach(reading, address)
    before = logits(reading)
    with owner.writing(V(1, 5)):
        model.lm_head.weight.data.fill_(2.0)
    tensors = files(address) / disk.TENSORS
    whole = tensors.read_bytes()
    tensors.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(WeightsDamagedError, match="are damaged: "):
        reader.reading().__enter__()
    assert reader.is_torn()
    assert reader.version == V(1, 4)
    assert torch.equal(logits(reading), before)
    turned = bytearray(whole)
    turned[-5] ^= 1
    tensors.write_bytes(turned)
    with pytest.raises(WeightsDamagedError, match="does not match its checksum"):
        reader.reading().__enter__()
    tensors.write_bytes(whole)
    manifest = files(address) / disk.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(WeightsDamagedError, match="its manifest differs"):
        reader.reading().__enter__()
    with pytest.raises(WeightsDamagedError):
        DiskShare.attach(on_meta(model.config), address)
    assert torch.equal(logits(reading), before)
    with owner.writing(V(1, 6)):
        pass
    with reader.reading() as version:
        assert version == V(1, 6)
    assert not reader.is_torn()


@pytest.mark.parametrize("gone", [disk.TENSORS, disk.MANIFEST, "."])
def test_a_version_that_is_named_and_not_there_is_damaged(
    address: Path, owned: tuple[Any, DiskShare], gone: str
) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = DiskShare.attach(reading, address)
    before = logits(reading)
    with owner.writing(V(1, 5)):
        model.lm_head.weight.data.fill_(2.0)
    lost = files(address) / gone
    lost.rename(lost.resolve().with_name("lost"))
    with pytest.raises(WeightsDamagedError, match="No such file"):
        reader.reading().__enter__()
    assert (reader.version, reader.is_torn()) == (V(1, 4), True)
    assert torch.equal(logits(reading), before)
    with pytest.raises(WeightsDamagedError):
        DiskShare.attach(on_meta(model.config), address)
    with owner.writing(V(1, 6)):
        pass
    with reader.reading() as version:
        assert (version, reader.is_torn()) == (V(1, 6), False)


@pytest.mark.parametrize("place", ["address", disk.TENSORS, disk.MANIFEST])
def test_what_cannot_be_read_is_damaged_as_long_as_it_cannot(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = DiskShare.attach(reading, address)
    before = logits(reading)
    with owner.writing(V(1, 5)):
        model.lm_head.weight.data.fill_(2.0)
    bad = address if place == "address" else files(address) / place
    opened = io.open

    def failing(file: Any, *given: Any, **named: Any) -> Any:
        if file == bad:
            raise OSError(errno.EIO, "Input/output error")
        return opened(file, *given, **named)

    with monkeypatch.context() as patched:
        for module in (io, builtins):
            patched.setattr(module, "open", failing)
        with pytest.raises(WeightsDamagedError, match="Input/output error"):
            reader.reading().__enter__()
        assert (reader.version, reader.is_torn(), reader.is_replaced()) == (V(1, 4), True, False)
        assert torch.equal(logits(reading), before)
    with reader.reading() as version:
        assert (version, reader.is_torn()) == (V(1, 5), False)
    assert torch.equal(logits(reading), logits(model))


def test_an_address_that_cannot_be_looked_at_for_a_moment_is_not_refused_for_good(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = DiskShare.attach(on_meta(owned[0].config), address)

    def stale(_path: Path) -> os.stat_result:
        raise OSError(errno.ESTALE, "Stale file handle")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "stat", stale)
        with pytest.raises(WeightsDamagedError, match="Stale file handle"):
            reader.reading().__enter__()
    assert reader.is_torn()
    with reader.reading():
        assert not reader.is_torn()


def test_a_version_is_held_until_it_is_copied(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read is mapped: over a network a file that is removed meanwhile would be the end of the reader."""
    model, owner = owned
    reader = DiskShare.attach(on_meta(model.config), address)
    take, held = DiskShare._take, []

    def looked(share: DiskShare, found: disk.DiskVersion) -> None:
        held.append(is_locked(files(address) / disk.MANIFEST))
        take(share, found)

    monkeypatch.setattr(DiskShare, "_take", looked)
    with owner.writing(V(1, 5)):
        pass
    with reader.reading():
        pass
    assert held == [True]


@pytest.mark.parametrize("call", ["force", "_replace", "replace"])
def test_a_publish_that_fails_behind_its_rename_leaves_nothing(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    model, owner = owned
    (first,) = published(address)
    root = directory_of(address)

    def full(*given: Path) -> None:
        if call == "force" and given[0] != root:
            return force(*given)
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path if call == "replace" else disk, call, full)
        with pytest.raises(WeightsNotWrittenError, match="No space left"), owner.writing(V(1, 5)):
            pass
    assert published(address) == [first]
    assert sorted(path.name for path in address.parent.iterdir()) == ["weights", "weights.json"]
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 4)


def test_what_is_published_stands_though_its_name_is_not_forced(
    address: Path,
    owned: tuple[Any, DiskShare],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Readers have it already; what was before stays, for a loss of power may bring its name back."""
    model, owner = owned

    def failing(path: Path) -> None:
        if path == address.parent:
            raise OSError(errno.EIO, "Input/output error")
        force(path)

    with monkeypatch.context() as patched:
        patched.setattr(disk, "force", failing)
        for step in (5, 6):
            with owner.writing(V(1, step)):
                pass
    assert "old versions not removed" in caplog.text
    assert (owner.version, owner.is_torn()) == (V(1, 6), False)
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 6)
    assert [name[:4] for name in published(address)] == ["1.4.", "1.5.", "1.6."]


def test_what_a_killed_writer_did_not_name_takes_no_place(
    address: Path, owned: tuple[Any, DiskShare]
) -> None:
    (first,) = published(address)
    (directory_of(address) / "1.5.killed-9").mkdir()
    with owned[1].writing(V(1, 5)):
        pass
    assert len(published(address)) == 2
    assert first in published(address)


def test_a_disk_without_room_keeps_the_version_before(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, owner = owned

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(disk, "force", full)
        with pytest.raises(WeightsNotWrittenError, match="No space left"), owner.writing(V(1, 5)):
            pass
    assert owner.is_torn()
    assert not list((directory_of(address)).glob(".*"))
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 4)


def test_a_reader_keeps_no_file_open(address: Path, owned: tuple[Any, DiskShare]) -> None:
    reading = on_meta(owned[0].config)
    DiskShare.attach(reading, address)
    assert disk.TENSORS not in Path("/proc/self/maps").read_text()


def test_what_a_dead_owner_left_goes_and_what_a_living_one_has_stays(
    address: Path, owned: tuple[Any, DiskShare]
) -> None:
    _, owner = owned
    assert owner_lives(address)
    assert sweep(address) == []
    owner.close()
    assert not owner_lives(address)
    assert sweep(address) == [directory_of(address), address]
    assert not address.exists()
    (directory_of(address)).mkdir()  # somebody else's
    assert sweep(address) == []
    assert (directory_of(address)).exists()


def test_a_file_that_differs_from_the_model_is_told(owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    owner.verify(Level.ALIASING)
    model.model.norm.weight.data[0] += 1
    with pytest.raises(WeightsMismatchError, match=r"model.norm.weight: differs from the file"):
        owner.verify(Level.ALIASING)


def test_no_version_and_no_address(address: Path) -> None:
    with pytest.raises(SegmentGoneError, match="no version has been published yet"):
        DiskShare.attach(on_meta(config("qwen2")), address)
    gone = DiskAddress(directory="gone", version=V(), manifest="", tensors=0, run="r")
    address.write_bytes(msgspec.json.encode(gone))
    with pytest.raises(WeightsDamagedError, match="No such file"):
        DiskShare.attach(on_meta(config("qwen2")), address)


def test_versions_that_go_faster_than_they_are_read_are_gone(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, owner = owned
    read = disk._read

    def late(found: DiskAddress, directory: Path) -> disk.DiskVersion:
        with owner.writing(V(1, owner.version.step + 1)):
            pass
        shutil.rmtree(directory)
        return read(found, directory)

    monkeypatch.setattr(disk, "_read", late)
    with pytest.raises(SegmentGoneError, match="removed before"):
        DiskShare.attach(on_meta(model.config), address)
    assert owner.version.step == 4 + disk.ATTEMPTS
    monkeypatch.undo()
    assert DiskShare.attach(on_meta(model.config), address).version == owner.version


def test_two_living_owners_are_one_too_many(address: Path, owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    with pytest.raises(SegmentInUseError, match=f"process {os.getpid()}"):
        DiskShare.create(model, address)
    owner.close()
    heir = DiskShare.create(model, address, version=V(2, 0))
    assert owner.is_replaced()
    heir.close(unlink=True)
    assert not address.exists()
    assert not (directory_of(address)).exists()


def test_an_owner_that_comes_while_it_is_swept_owns_what_is_there_then(
    address: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = built(config("qwen2"))
    DiskShare.create(model, address).close()
    flock, swept = fcntl.flock, list[Path]()

    def late(fd: int, kind: int) -> None:
        if not swept:
            swept.append(address)
            assert sweep(address)
        flock(fd, kind)

    monkeypatch.setattr(fcntl, "flock", late)
    share = DiskShare.create(model, address, version=V(1, 0))
    assert is_locked(directory_of(address) / OWNER)
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 0)
    share.close(unlink=True)


WRITER = """
import sys
from pathlib import Path
import torch
from torch import nn
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.disk import DiskShare
model = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
def fill(value):
    for parameter in model.parameters():
        parameter.data.fill_(value)
fill(0)
share = DiskShare.create(model, Path(sys.argv[1]), version=PolicyVersion(int(sys.argv[2]), 0))
print("ready", flush=True)
step = 0
while True:
    step += 1
    with share.writing(PolicyVersion(int(sys.argv[2]), step)):
        fill(step)
"""


def test_a_writer_that_is_killed_leaves_whole_versions(address: Path) -> None:
    """Whenever it dies, what a reader has is one version, and the one it says."""
    with torch.device("meta"):
        model = nn.ModuleList([nn.Linear(64, 64) for _ in range(8)])
    reader: DiskShare | None = None
    for life in range(2):
        command = [sys.executable, "-c", WRITER, str(address), str(life)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
            assert writer.stdout is not None
            assert writer.stdout.readline() == b"ready\n"
            reader = reader or DiskShare.attach(model, address)
            seen: set[PolicyVersion] = set()
            while len(seen) < 10:
                with reader.reading() as version:
                    found = {value for one in model.parameters() for value in one.flatten().tolist()}
                    assert found == {float(version.step)}
                    seen.add(version)
            writer.kill()
        with reader.reading() as version:
            assert version.incarnation == life
    # The newest, the one before, one that the reader held when the last were removed, and one that was never named.
    assert len(published(address)) <= 4
    share = DiskShare.create(model, address, version=PolicyVersion(2, 0))
    assert len(published(address)) == 2
    share.close()
