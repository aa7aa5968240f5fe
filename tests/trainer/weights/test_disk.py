"""Weights that are published as files: whole or not at all, under exactly their version."""

import errno
import fcntl
import os
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

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import DiskAddress
from rolloutmq.schemas.sharing import (
    SegmentGoneError,
    SegmentInUseError,
    WeightsDamagedError,
    WeightsMismatchError,
    WeightsNotWrittenError,
    WeightsTornError,
)
from rolloutmq.trainer.weights import versions
from rolloutmq.trainer.weights.address import DIRECTORY, owner_lives, read_disk, sweep
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
    return sorted(path.name for path in (address.parent / DIRECTORY).iterdir() if path.is_dir())


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
    (address.parent / DIRECTORY / ".1.3.dead-1.partial").mkdir()
    with versions.held(address.parent / DIRECTORY / first):
        for step in range(5, 9):
            with owner.writing(V(1, step)):
                pass
        assert len(published(address)) == versions.KEPT + 1
        assert first in published(address)
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
        patched.setattr(versions, "is_locked", stale)
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
    return address.parent / DIRECTORY / found.directory


def test_damaged_files_are_refused_and_the_old_weights_stay(
    address: Path, owned: tuple[Any, DiskShare]
) -> None:
    model, owner = owned
    reading = on_meta(model.config)
    reader = DiskShare.attach(reading, address)
    before = logits(reading)
    with owner.writing(V(1, 5)):
        model.lm_head.weight.data.fill_(2.0)
    tensors = files(address) / versions.TENSORS
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
    with pytest.raises(WeightsDamagedError, match="is not as it was written"):
        reader.reading().__enter__()
    tensors.write_bytes(whole)
    manifest = files(address) / versions.MANIFEST
    manifest.write_bytes(manifest.read_bytes() + b" ")
    with pytest.raises(WeightsDamagedError, match="its manifest is not"):
        reader.reading().__enter__()
    with pytest.raises(WeightsDamagedError):
        DiskShare.attach(on_meta(model.config), address)
    assert torch.equal(logits(reading), before)
    with owner.writing(V(1, 6)):
        pass
    with reader.reading() as version:
        assert version == V(1, 6)
    assert not reader.is_torn()


def test_a_disk_without_room_keeps_the_version_before(
    address: Path, owned: tuple[Any, DiskShare], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, owner = owned

    def full(_path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(versions, "force", full)
        with pytest.raises(WeightsNotWrittenError, match="No space left"), owner.writing(V(1, 5)):
            pass
    assert owner.is_torn()
    assert not list((address.parent / DIRECTORY).glob(".*"))
    assert DiskShare.attach(on_meta(model.config), address).version == V(1, 4)


def test_a_reader_keeps_no_file_open(address: Path, owned: tuple[Any, DiskShare]) -> None:
    reading = on_meta(owned[0].config)
    DiskShare.attach(reading, address)
    assert versions.TENSORS not in Path("/proc/self/maps").read_text()


def test_what_a_dead_owner_left_goes_and_what_a_living_one_has_stays(
    address: Path, owned: tuple[Any, DiskShare]
) -> None:
    _, owner = owned
    assert owner_lives(address)
    assert sweep(address) == []
    owner.close()
    assert not owner_lives(address)
    assert sweep(address) == [address.parent / DIRECTORY, address]
    assert not address.exists()
    (address.parent / DIRECTORY).mkdir()  # somebody else's
    assert sweep(address) == []
    assert (address.parent / DIRECTORY).exists()


def test_a_file_that_differs_from_the_model_is_told(owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    owner.verify(Level.ALIASING)
    model.model.norm.weight.data[0] += 1
    with pytest.raises(WeightsMismatchError, match=r"model.norm.weight: differs from the file"):
        owner.verify(Level.ALIASING)


def test_no_version_and_no_address(address: Path) -> None:
    with pytest.raises(SegmentGoneError, match="no version was published yet"):
        DiskShare.attach(on_meta(config("qwen2")), address)
    gone = DiskAddress(directory="gone", version=V(), manifest="", tensors=0, run="r")
    address.write_bytes(msgspec.json.encode(gone))
    with pytest.raises(SegmentGoneError, match="removed before"):
        DiskShare.attach(on_meta(config("qwen2")), address)


def test_two_living_owners_are_one_too_many(address: Path, owned: tuple[Any, DiskShare]) -> None:
    model, owner = owned
    with pytest.raises(SegmentInUseError, match=f"process {os.getpid()}"):
        DiskShare.create(model, address)
    owner.close()
    heir = DiskShare.create(model, address, version=V(2, 0))
    assert owner.is_replaced()
    heir.close(unlink=True)
    assert not address.exists()
    assert not (address.parent / DIRECTORY).exists()


WRITER = """
import sys
from pathlib import Path
import torch
from torch import nn
from rolloutmq.schemas.envelope import PolicyVersion
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
    assert len(published(address)) <= versions.KEPT + 1
