"""Versions of the weights as directories: how they are written, found, kept from going, and removed.

    weights/                        beside the address file
      0.7.3f2a...-8/                a version: model.safetensors, manifest.json; there whole or not at all
      owner                         locked by the owner for its life; holds its pid
    weights.json                    where the newest version is, and the sha256 of its manifest

A writer forces a hidden directory to disk and renames it, then replaces the address file; if that fails, what it wrote
goes again, and if it was killed, with the next version.

The version that is named and the one that was before it are kept, and any that a reader holds (a shared lock on its
manifest, for as long as it reads and copies). A reader that comes too late all the same finds the version gone, and
looks at the address again. Files that cannot be read while the address still names them are damaged, whatever the
reason. What a dead owner published stays good: it is whole.
"""

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from rolloutmq.bus.durability import force, sum_of
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import DiskAddress
from rolloutmq.schemas.sharing import SegmentGoneError, WeightsDamagedError, WeightsNotWrittenError
from rolloutmq.trainer.weights.address import directory_of, is_locked, read_disk
from rolloutmq.trainer.weights.manifest import WeightManifest

logger = logging.getLogger(__name__)

TENSORS: Final = "model.safetensors"
MANIFEST: Final = "manifest.json"
ATTEMPTS: Final = 5
"""Versions that may be pruned under a reader before it gives up: the writer is faster than the disk is read."""


class Found(msgspec.Struct, frozen=True):
    """A version, read whole."""

    address: DiskAddress
    manifest: WeightManifest
    tensors: dict[str, Tensor]


def named(address_file: Path) -> DiskAddress | None:
    """Return which version is the newest, or None where there is none (yet), or the weights go by another way.

    Raises:
        WeightsDamagedError: The address file cannot be read.
    """
    try:
        return read_disk(address_file)
    except OSError as error:
        raise WeightsDamagedError(str(address_file), str(error)) from error


@contextmanager
def newest(address_file: Path) -> Iterator[Found]:
    """Read the newest version whole, and hold it as long as the block lasts: its tensors are the file itself, mapped.

    Raises:
        SegmentGoneError: There is none, or versions are removed faster than they can be read.
        WeightsDamagedError: Its files are not what was published, are missing, or cannot be read.
    """
    with ExitStack() as stack:
        yield _found(address_file, stack)


def _found(address_file: Path, stack: ExitStack) -> Found:
    address = named(address_file)
    for _ in range(ATTEMPTS):
        if address is None:
            raise SegmentGoneError(str(address_file), "no version was published yet")
        directory = directory_of(address_file) / address.directory
        try:
            stack.enter_context(held(directory))
            return _read(address, directory)
        except OSError as error:
            stack.close()
            before, address = address, named(address_file)
            if address == before:  # nobody removed it for a newer one
                raise WeightsDamagedError(str(directory), str(error)) from error
    raise SegmentGoneError(str(address_file), "versions were removed before they could be read")


def _read(address: DiskAddress, directory: Path) -> Found:
    encoded = (directory / MANIFEST).read_bytes()
    if hashlib.sha256(encoded).hexdigest() != address.manifest:
        raise WeightsDamagedError(str(directory), "its manifest is not the one that was published")
    if sum_of(directory / TENSORS) != address.tensors:
        raise WeightsDamagedError(str(directory), f"{TENSORS} is not as it was written")
    try:
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
        tensors = load_file(directory / TENSORS)
    except (msgspec.DecodeError, SafetensorError) as error:
        raise WeightsDamagedError(str(directory), str(error)) from None
    if problem := _difference(manifest, tensors):
        raise WeightsDamagedError(str(directory), problem)
    return Found(address, manifest, tensors)


def _difference(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> str:
    """Name the first tensor of a file that is not as its manifest says, or nothing."""
    for spec in manifest.tensors:
        tensor = tensors.get(spec.name)
        if tensor is None:
            return f"{spec.name} is not in {TENSORS}"
        found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if found != (spec.dtype, spec.shape):
            return f"{spec.name} is {found} in the file, {(spec.dtype, spec.shape)} in its manifest"
    extra = sorted(tensors.keys() - {spec.name for spec in manifest.tensors})
    return f"{extra[0]} is in the file and not in its manifest" if extra else ""


@contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep a version from being pruned."""
    fd = os.open(directory / MANIFEST, os.O_RDONLY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_SH)
        if os.fstat(fd).st_nlink == 0:
            raise FileNotFoundError(directory)
        yield
    finally:
        os.close(fd)


def publish(
    address_file: Path,
    name: str,
    version: PolicyVersion,
    run: str,
    manifest: WeightManifest,
    tensors: Mapping[str, Tensor],
) -> None:
    """Write a version whole, name it in the address file, and remove old ones. Blocks for as long as the disk takes.

    What cannot be removed stays until the next version: this one is published all the same.

    Raises:
        WeightsNotWrittenError: There is no room, or the disk failed; the address names the version before.
    """
    root = directory_of(address_file)
    encoded = msgspec.json.encode(manifest)
    digest = hashlib.sha256(encoded).hexdigest()
    partial = root / f".{name}.partial"
    try:
        before = read_disk(address_file)
        _write(partial, encoded, tensors)
        written = sum_of(partial / TENSORS)
        partial.rename(root / name)
        force(root)
        address = DiskAddress(directory=name, version=version, manifest=digest, tensors=written, run=run)
        _replace(address_file, msgspec.json.encode(address) + b"\n")
    except (OSError, SafetensorError) as error:
        for path in (partial, root / name):
            shutil.rmtree(path, ignore_errors=True)
        raise WeightsNotWrittenError(str(root), str(error)) from error
    try:
        # Until the new address is on disk, a loss of power may bring back the one before, and it needs its version.
        force(address_file.parent)
        prune(root, {name, before.directory if before else ""})
    except OSError as error:
        logger.warning("old versions not removed directory=%s error=%s", root, error)


def _write(partial: Path, manifest: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write the files of a version, and force them to disk."""
    partial.mkdir(mode=0o700)
    save_file(dict(tensors), partial / TENSORS, metadata={"format": "pt"})
    (partial / MANIFEST).write_bytes(manifest)
    for path in (partial / TENSORS, partial / MANIFEST, partial):
        force(path)


def prune(root: Path, kept: Container[str]) -> None:
    """Remove all versions but those with these names, and what a killed writer left; not under a reader."""
    for path in [path for path in root.iterdir() if path.is_dir() and path.name not in kept]:
        if not is_locked(path / MANIFEST):
            shutil.rmtree(path, ignore_errors=True)


def seen(path: Path) -> tuple[int, int] | None:
    """Return what is another whenever the address file was replaced, or None where there is none.

    Raises:
        WeightsDamagedError: It cannot be looked at.
    """
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise WeightsDamagedError(str(path), str(error)) from error
    return info.st_ino, info.st_mtime_ns


def _replace(path: Path, data: bytes) -> None:
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        written.write_bytes(data)
        force(written)
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise
