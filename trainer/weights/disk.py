"""Weights on disk: versions of the weights as directories, for servers that share a file system only.

    weights/                        beside the address file
      0.7.3f2a...-8/                a version: model.safetensors, manifest.json; complete or absent
      owner                         locked by the owner for its life; holds its pid
    weights.json                    the newest version, and the sha256 of its manifest

A writer syncs a hidden directory, renames it, and replaces the address file. If that fails it removes what it wrote; if
it was killed, the next version removes it.

The newest version, the one before, and every version held by a reader (a shared lock on its manifest while it reads)
are kept. A reader that comes too late finds its version removed and reads the address again. Unreadable files of the
version in the address are damaged. The versions of a dead owner stay valid, because they are complete.

A reader has its own copy. When it enters `reading` and the address names another version, it reads that version whole,
checks it, and only then copies it in, so it has the old weights or the new ones, never a mixture. `reading` yields the
version it copied. A failed write publishes nothing, and the owner refuses the next one until it restores.
"""

import fcntl
import hashlib
import logging
import os
import secrets
import shutil
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Final, Self

import msgspec
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from rolloutmq.bus.files import force, private_file, sum_of, write_private
from rolloutmq.schemas.errors import (
    SegmentGoneError,
    WeightsDamagedError,
    WeightsMismatchError,
    WeightsNotWrittenError,
    WeightsTornError,
)
from rolloutmq.schemas.files import DiskAddress
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.files import safetensors as safetensors_file
from rolloutmq.trainer.weights import disk
from rolloutmq.trainer.weights.address import directory_of, is_locked, own, read_disk
from rolloutmq.trainer.weights.layout import TensorSpec
from rolloutmq.trainer.weights.lock import READ_PATIENCE_S, WRITE_PATIENCE_S
from rolloutmq.trainer.weights.manifest import WeightManifest, arriving, named_tensors
from rolloutmq.trainer.weights.model.binding import adopt, manifest_of, prove
from rolloutmq.trainer.weights.share import Level, Proof, Source, require_own_tensors
from rolloutmq.trainer.weights.verify import logits_digest, tensor_digests

logger = logging.getLogger(__name__)


TENSORS: Final = "model.safetensors"

MANIFEST: Final = "manifest.json"

ATTEMPTS: Final = 5
"""Versions that may be pruned under a reader before it gives up."""


class DiskVersion(msgspec.Struct, frozen=True):
    """A version in memory."""

    address: DiskAddress
    manifest: WeightManifest
    tensors: dict[str, Tensor]


def named(address_file: Path) -> DiskAddress | None:
    """Return the newest version; None if there is none (yet), or if another backend is in use.

    Raises:
        WeightsDamagedError: The address file cannot be read.
    """
    try:
        return read_disk(address_file)
    except OSError as error:
        raise WeightsDamagedError(str(address_file), str(error)) from error


@contextmanager
def newest(address_file: Path) -> Iterator[DiskVersion]:
    """Read the newest version, and hold it for the duration of the block: its tensors map the file.

    Raises:
        SegmentGoneError: There is none, or versions are removed faster than they can be read.
        WeightsDamagedError: Its files differ from the published ones, are missing, or cannot be read.
    """
    with ExitStack() as stack:
        yield _found(address_file, stack)


def _found(address_file: Path, stack: ExitStack) -> DiskVersion:
    address = named(address_file)
    for _ in range(ATTEMPTS):
        if address is None:
            raise SegmentGoneError(str(address_file), "no version has been published yet")
        directory = directory_of(address_file) / address.directory
        try:
            stack.enter_context(held(directory))
            return _read(address, directory)
        except OSError as error:
            stack.close()
            before, address = address, named(address_file)
            if address == before:  # not removed in favour of a newer one
                raise WeightsDamagedError(str(directory), str(error)) from error
    raise SegmentGoneError(str(address_file), "versions were removed before they could be read")


def _read(address: DiskAddress, directory: Path) -> DiskVersion:
    encoded = (directory / MANIFEST).read_bytes()
    if hashlib.sha256(encoded).hexdigest() != address.manifest:
        raise WeightsDamagedError(str(directory), "its manifest differs from the published one")
    if sum_of(directory / TENSORS) != address.tensors:
        raise WeightsDamagedError(str(directory), f"{TENSORS} does not match its checksum")
    try:
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
        tensors = load_file(directory / TENSORS)
    except (msgspec.DecodeError, SafetensorError) as error:
        raise WeightsDamagedError(str(directory), str(error)) from None
    if problem := _difference(manifest, tensors):
        raise WeightsDamagedError(str(directory), problem)
    return DiskVersion(address, manifest, tensors)


def _difference(manifest: WeightManifest, tensors: Mapping[str, Tensor]) -> str:
    """Return the first difference between a file and its manifest, or an empty string."""
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
    """Protect a version from pruning."""
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
    tensors: Iterable[tuple[str, Tensor]],
) -> None:
    """Write a version, name it in the address file, and remove old ones. Blocks while the disk writes.

    Old versions that cannot be removed stay until the next version. If the tensors fail, nothing is published.

    Raises:
        WeightsNotWrittenError: The disk is full or failed; the address still names the previous version.
        WeightsMismatchError: The tensors are not those of the manifest.
    """
    root = directory_of(address_file)
    encoded = msgspec.json.encode(manifest)
    digest = hashlib.sha256(encoded).hexdigest()
    partial = root / f".{name}.partial"
    try:
        before = read_disk(address_file)
        _write(partial, encoded, manifest.tensors, arriving(manifest, tensors))
        written = sum_of(partial / TENSORS)
        partial.rename(root / name)
        force(root)
        address = DiskAddress(directory=name, version=version, manifest=digest, tensors=written, run=run)
        _replace(address_file, msgspec.json.encode(address) + b"\n")
    except BaseException as error:
        for path in (partial, root / name):
            shutil.rmtree(path, ignore_errors=True)
        if isinstance(error, OSError):
            raise WeightsNotWrittenError(str(root), str(error)) from error
        raise
    try:
        # Until the new address is on disk, a power cut may restore the previous one, which needs its version.
        force(address_file.parent)
        prune(root, {name, before.directory if before else ""})
    except OSError as error:
        logger.warning("old versions not removed directory=%s error=%s", root, error)


def _write(
    partial: Path,
    manifest: bytes,
    specs: Iterable[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, Tensor]],
) -> None:
    """Write the files of a version, and sync them."""
    partial.mkdir(mode=0o700)
    with private_file(partial / TENSORS, "wb") as file:
        safetensors_file.write(file, specs, tensors, {"format": "pt"})
    write_private(partial / MANIFEST, manifest)
    for path in (partial / TENSORS, partial / MANIFEST, partial):
        force(path)


def prune(root: Path, kept: Container[str]) -> None:
    """Remove all versions except these and those held by a reader, and leftovers of killed writers."""
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
        write_private(written, data)
        force(written)
        written.replace(path)
    except OSError:
        written.unlink(missing_ok=True)
        raise


class DiskShare:
    """One side of weights on disk. Make it by `create` or `attach`."""

    def __init__(self, model: nn.Module, address_file: Path, manifest: WeightManifest, *, run: str) -> None:
        self._model = model
        self._address_file = address_file
        self._manifest = manifest
        self._run = run
        """Id of the owner's life; for a reader, that of its version."""
        self._tokenizer = ""
        self._source: Source | None = None
        self._version = PolicyVersion()
        self._torn = False
        self._directory = ""
        """Directory of the current version."""
        self._writes = 0
        self._lock: int | None = None
        self._seen: tuple[int, int] | None = None
        """Inode and time of the address file at the last read."""
        self._refused = False

    @classmethod
    def create(
        cls,
        model: nn.Module,
        address_file: Path,
        *,
        version: PolicyVersion = PolicyVersion(),
        tokenizer: str = "",
        source: Source | None = None,
    ) -> Self:
        """Publish the weights of a model as `version`; versions of earlier owners are kept like any old version.

        Args:
            source: Tensors to publish instead of the model's, see `Source`.

        Raises:
            SegmentInUseError: A live process publishes there.
            WeightsMismatchError: The model has tensors that cannot be shared.
        """
        manifest = manifest_of(model, tokenizer=tokenizer)
        share = cls(model, address_file, manifest, run=secrets.token_hex(8))
        share._tokenizer, share._source = tokenizer, source
        share._lock = own(directory_of(address_file))
        try:
            with share.writing(version, restoring=True):
                pass
        except BaseException:
            share.close()
            raise
        return share

    @classmethod
    def attach(cls, model: nn.Module, address_file: Path, *, tokenizer: str = "") -> Self:
        """Fill a model, on meta or built, with the newest version.

        Raises:
            SegmentGoneError: Nothing has been published yet.
            WeightsDamagedError: Its files differ from the published ones, or cannot be read.
            WeightsMismatchError: The model has other tensors; names the first that differs. It is unchanged.
        """
        seen = disk.seen(address_file)
        with disk.newest(address_file) as found:
            # A mapped file would keep its disk space for as long as the reader lives.
            tensors = {name: tensor.clone() for name, tensor in found.tensors.items()}
        computed = prove(model, found.manifest, tokenizer)
        adopt(model, found.manifest, tensors, computed)
        share = cls(model, address_file, found.manifest, run=found.address.run)
        share._tokenizer, share._version, share._seen = tokenizer, found.address.version, seen
        share._directory = found.address.directory
        return share

    @property
    def version(self) -> PolicyVersion:
        """Version of this side."""
        return self._version

    def manifest(self) -> WeightManifest:
        """Return the manifest of the weights."""
        return self._manifest

    def is_torn(self) -> bool:
        """Return whether a write of this owner failed midway, or this reader refused the newest version.

        A reader's copy is always whole.
        """
        return self._torn or self._refused

    def is_replaced(self) -> bool:
        """Return whether the newest version belongs to another owner than the version of this side. Reads the file.

        An unreadable file counts as unchanged; `reading` raises the error.
        """
        try:
            address = disk.named(self._address_file)
        except WeightsDamagedError:
            return False
        return address is not None and address.run != self._run

    @contextmanager
    def reading(self, patience_s: float = READ_PATIENCE_S) -> Iterator[PolicyVersion]:  # noqa: ARG002 - never waits
        """Load a newer version if there is one, and yield the version of this side.

        Raises:
            SegmentGoneError: Versions were removed faster than they could be read.
            WeightsDamagedError: The files of the newest version are damaged; the old one stays.
            WeightsMismatchError: The newer version belongs to another model; the old one stays.
            WeightsTornError: This owner's own write failed midway.
        """
        if self._torn:
            raise WeightsTornError(self._version)
        self._refresh()
        yield self._version

    def keeping(self) -> AbstractContextManager[None]:
        """Do nothing: readings hold no lock."""
        return nullcontext()

    def _refresh(self) -> None:
        try:
            seen = disk.seen(self._address_file)
            if seen is not None and seen != self._seen:
                self._look()
                self._seen = seen
        except WeightsDamagedError:
            self._refused = True
            raise
        self._refused = False

    def _look(self) -> None:
        address = disk.named(self._address_file)
        if address is not None and address.directory != self._directory:
            with disk.newest(self._address_file) as found:
                self._take(found)

    def _take(self, found: disk.DiskVersion) -> None:
        if found.manifest != self._manifest:
            prove(self._model, found.manifest, self._tokenizer)
        mine = dict(named_tensors(self._model))
        with torch.no_grad():
            for name, tensor in found.tensors.items():
                mine[name].copy_(tensor)
        self._manifest, self._version = found.manifest, found.address.version
        self._directory, self._run = found.address.directory, found.address.run

    @contextmanager
    def writing(
        self,
        version: PolicyVersion,
        *,
        restoring: bool = False,
        patience_s: float = WRITE_PATIENCE_S,  # noqa: ARG002 - waits for no reader
    ) -> Iterator[None]:
        """Let the block change the weights, then publish them as `version`. Blocks while the disk writes.

        Raises:
            WeightsTornError: An earlier block failed and this one does not restore.
            WeightsNotWrittenError: The disk is full or failed; the owner must restore.
        """
        if self._torn and not restoring:
            raise WeightsTornError(self._version)
        self._torn = True
        yield
        self._publish(version)
        self._torn, self._version = False, version

    def _publish(self, version: PolicyVersion) -> None:
        self._writes += 1
        name = f"{version.incarnation}.{version.step}.{self._run}-{self._writes}"
        tensors = self._source() if self._source else named_tensors(self._model)
        disk.publish(self._address_file, name, version, self._run, self._manifest, tensors)
        self._directory = name

    def verify(
        self,
        level: Level,
        *,
        inputs: Tensor | None = None,
        patience_s: float = 0.0,  # noqa: ARG002 - asks no other side
        exact: bool = False,
    ) -> Proof:
        """Verify the share up to `level`; see `SharedWeights.verify`.

        Without shared memory there is no aliasing and no other side to ask. Instead the files of this side's version
        must hold the bytes of the model.
        """
        require_own_tensors(self._source, level)
        prove(self._model, self._manifest, self._tokenizer)
        digests, logits = dict[str, str](), ""
        with self.reading() as version:
            if level >= Level.ALIASING:
                self._require_published()
            if level >= Level.DIGESTS:
                digests = tensor_digests(self._model, self._manifest, exact=exact)
            if level >= Level.LOGITS:
                if inputs is None:
                    raise ValueError("inputs: required for LOGITS")
                logits = logits_digest(self._model, inputs)
        manifest = self._manifest
        return Proof(level, version, len(manifest.tensors), manifest.end, None, digests, logits)

    def _require_published(self) -> None:
        mine = dict(named_tensors(self._model))
        with disk.newest(self._address_file) as found:
            if found.address.directory != self._directory:
                return  # just replaced by a newer one; its files may be gone
            for name, tensor in found.tensors.items():
                if not torch.equal(mine[name].detach().cpu(), tensor):
                    raise WeightsMismatchError(name, "differs from the file of this version")

    def close(self, *, unlink: bool = False) -> None:
        """Release the weights; with `unlink`, remove the address file and all versions. May be called twice."""
        if unlink and not self.is_replaced():
            self._address_file.unlink(missing_ok=True)
            shutil.rmtree(directory_of(self._address_file), ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
