"""Versions of the weights as directories: how they are written, found, kept from going, and removed.

    weights/                        beside the address file
      0.7.3f2a...-8/                a version: model.safetensors, manifest.json; there whole or not at all
      owner                         locked by the owner for its life; holds its pid
    weights.json                    where the newest version is, and the sha256 of its manifest

A writer forces a hidden directory to disk and renames it, then replaces the address file.

The two newest versions are kept, and any that a reader holds (a shared lock on its manifest, for as long as it reads).
A reader that comes too late all the same finds the version gone, and looks at the address again. What a dead owner
published stays good: it is whole.
"""

import fcntl
import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
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
from rolloutmq.trainer.weights.address import DIRECTORY, is_locked, read_disk
from rolloutmq.trainer.weights.manifest import WeightManifest

logger = logging.getLogger(__name__)

TENSORS: Final = "model.safetensors"
MANIFEST: Final = "manifest.json"
KEPT: Final = 2
"""A reader that has read the address of one version finds it for as long as no two newer ones are published."""
ATTEMPTS: Final = 5
"""Versions that may be pruned under a reader before it gives up: the writer is faster than the disk is read."""


class Found(msgspec.Struct, frozen=True):
    """A version, read whole."""

    address: DiskAddress
    manifest: WeightManifest
    tensors: dict[str, Tensor]


def newest(address_file: Path) -> Found:
    """Read the newest version whole.

    Raises:
        SegmentGoneError: There is none, or versions are removed faster than they can be read.
        WeightsDamagedError: Its files are not what was published.
    """
    for _ in range(ATTEMPTS):
        address = read_disk(address_file)
        if address is None:
            raise SegmentGoneError(str(address_file), "no version was published yet")
        directory = address_file.parent / DIRECTORY / address.directory
        with suppress(FileNotFoundError), held(directory):
            return _read(address, directory)
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
    root = address_file.parent / DIRECTORY
    encoded = msgspec.json.encode(manifest)
    digest = hashlib.sha256(encoded).hexdigest()
    partial = root / f".{name}.partial"
    try:
        _write(partial, encoded, tensors)
        written = sum_of(partial / TENSORS)
        partial.rename(root / name)
        force(root)
        address = DiskAddress(directory=name, version=version, manifest=digest, tensors=written, run=run)
        _replace(address_file, msgspec.json.encode(address) + b"\n")
    except (OSError, SafetensorError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise WeightsNotWrittenError(str(root), str(error)) from error
    try:
        prune(root, keep=name)
    except OSError as error:
        logger.warning("old versions not removed directory=%s error=%s", root, error)


def _write(partial: Path, manifest: bytes, tensors: Mapping[str, Tensor]) -> None:
    """Write the files of a version, and force them to disk."""
    partial.mkdir(mode=0o700)
    save_file(dict(tensors), partial / TENSORS, metadata={"format": "pt"})
    (partial / MANIFEST).write_bytes(manifest)
    for path in (partial / TENSORS, partial / MANIFEST, partial):
        force(path)


def prune(root: Path, *, keep: str) -> None:
    """Remove old versions, and what a killed writer left; the newest stay, and those that somebody reads."""
    others = [path for path in root.iterdir() if path.is_dir() and path.name != keep]
    whole = sorted((path for path in others if not path.name.startswith(".")), key=_written)
    for path in [*whole[: max(0, len(whole) - (KEPT - 1))], *(set(others) - set(whole))]:
        if not is_locked(path / MANIFEST):
            shutil.rmtree(path, ignore_errors=True)


def _written(path: Path) -> int:
    return path.stat().st_mtime_ns


def seen(path: Path) -> tuple[int, int] | None:
    try:
        info = path.stat()
    except FileNotFoundError:
        return None
    return info.st_ino, info.st_mtime_ns


def _replace(path: Path, data: bytes) -> None:
    written = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    written.write_bytes(data)
    force(written)
    written.replace(path)
    force(path.parent)
