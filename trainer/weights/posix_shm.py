"""One copy of the weights for trainer and server, in a file in /dev/shm that both map.

    control page (4 KiB: header of the segment, see `bus.segments`, and the words of `lock`) | tensors | manifest

The owner (trainer) puts the weights of its model there and binds the model's parameters to them, so that whatever it
writes in place under `writing` is what every reader has. A reader binds a model built on meta to the same bytes,
mapped read-only: a stray write there is a crash of the reader, never a changed policy. Attaching fails closed, see
`manifest`; nothing is copied, converted or left on meta.

The values of the owner's model are the truth: `create_or_adopt` writes them, whole, whether the segment is new or
was left by an owner that was killed, in mid-write perhaps. Make the optimizer after it: the parameters are new objects.
One share belongs to one thread at a time.
"""

import mmap
import os
import warnings
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Final, Self

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.bus import segments
from rolloutmq.bus.segments import Segment
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import SegmentGoneError, SegmentInUseError, WeightsMismatchError
from rolloutmq.trainer.weights.binding import bind, derived, digests
from rolloutmq.trainer.weights.lock import PAGE_BYTES, READ_PATIENCE_S, WRITE_PATIENCE_S, WeightLock
from rolloutmq.trainer.weights.manifest import (
    TensorSpec,
    WeightManifest,
    align,
    describe,
    require_derived,
    require_equal,
)

KIND: Final = "weights"
MANIFEST_LIMIT_BYTES: Final = 64 << 20


class WeightShare:
    """The weights of one segment, bound to one model. Make it by `create_or_adopt` or `attach`."""

    def __init__(
        self, segment: Segment, memory: mmap.mmap, address_file: Path, *, adopted: bool = False
    ) -> None:
        self._segment = segment
        self._memory: mmap.mmap | None = memory
        self._lock = WeightLock(memory, segment.fd)
        self._address_file = address_file
        self.adopted = adopted
        """Whether the segment was there before this owner."""

    @classmethod
    def create_or_adopt(
        cls, model: nn.Module, address_file: Path, *, version: PolicyVersion = PolicyVersion()
    ) -> Self:
        """Share the weights of a model, in the segment that a killed owner left if it fits, and name it in a file.

        Readers that are attached to that segment stay attached and see the new values under the new version.

        Args:
            model: Built on CPU; its values become the shared ones and its parameters views of them.
            version: What the values are.

        Raises:
            SegmentInUseError: A living process owns the segment that the address file names.
            WeightsMismatchError: The model has tensors that cannot be shared.
            MissingError: There is not enough shared memory.
        """
        manifest = msgspec.structs.replace(describe(model), derived=digests(derived(model)))
        left = _open_left(address_file)
        share = cls._adopt(left, manifest, address_file) if left else None
        if share is None:
            share = cls._create(manifest, address_file)
        try:
            with share.writing(version, restoring=True), torch.no_grad():
                bind(model, manifest, share._views(manifest), copy=True)
            segments.write_address(address_file, share._segment)
        except BaseException:
            share.close(unlink=not share.adopted)
            raise
        if left and not share.adopted:
            left.path.unlink(missing_ok=True)
        return share

    @classmethod
    def _create(cls, manifest: WeightManifest, address_file: Path) -> Self:
        encoded = msgspec.json.encode(manifest)
        offset = PAGE_BYTES + align(manifest.end)
        segment = segments.create(KIND, offset + len(encoded))
        memory = mmap.mmap(segment.fd, 0)
        memory[offset:] = encoded
        share = cls(segment, memory, address_file)
        share._lock.place_manifest(offset, len(encoded))
        return share

    @classmethod
    def _adopt(cls, left: Segment, manifest: WeightManifest, address_file: Path) -> Self | None:
        """Take over what a dead owner left, or close it and return None if it is of another model."""
        try:
            memory = mmap.mmap(left.fd, 0)
            share = cls(left, memory, address_file, adopted=True)
            there = share.manifest()
            require_equal(there, manifest)
            require_derived(there.derived, manifest.derived)
        except (WeightsMismatchError, SegmentGoneError, ValueError):
            os.close(left.fd)
            return None
        left.claim()
        return share

    @classmethod
    def attach(cls, model: nn.Module, address_file: Path) -> Self:
        """Bind a model, on meta or built, to the weights that the address file names, read-only.

        Buffers that are not shared and are on meta (RoPE tables) are computed anew from the module's configuration.

        Raises:
            SegmentGoneError: There is no address, or it is out of date: the owner is (re)starting.
            WeightsMismatchError: The model means other tensors; names the first that differs. It is unchanged.
        """
        address = segments.read_address(address_file)
        if address is None:
            raise SegmentGoneError(str(address_file), "no address was published yet")
        segment = segments.open_existing(Path(address.path), address.nonce)
        try:
            memory = mmap.mmap(segment.fd, 0, prot=mmap.PROT_READ)
            share = cls(segment, memory, address_file)
        except ValueError:
            os.close(segment.fd)
            raise SegmentGoneError(address.path, "it is empty") from None
        except BaseException:
            os.close(segment.fd)
            raise
        try:
            manifest = share.manifest()
            require_equal(manifest, describe(model))
            buffers = derived(model)
            require_derived(manifest.derived, digests(buffers))
            bind(model, manifest, share._views(manifest), copy=False)
            for module, name, buffer in buffers.values():
                module._buffers[name] = buffer
        except BaseException:
            share.close()
            raise
        return share

    @property
    def path(self) -> Path:
        """File of the segment."""
        return self._segment.path

    @property
    def nonce(self) -> str:
        """What tells this segment from every other."""
        return self._segment.nonce

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write; inside `reading` use what that yields."""
        return self._lock.version

    def is_torn(self) -> bool:
        """Tell whether the weights are half-written and nobody is at work on them."""
        return self._lock.is_torn()

    def is_replaced(self) -> bool:
        """Tell whether the address file names another segment by now. Reads the file."""
        address = segments.read_address(self._address_file)
        return address is not None and address.nonce != self.nonce

    def reading(self, patience_s: float = READ_PATIENCE_S) -> AbstractContextManager[PolicyVersion]:
        """Hold the weights still and yield their version; see `WeightLock.reading`."""
        return self._lock.reading(patience_s)

    def writing(
        self, version: PolicyVersion, *, restoring: bool = False, patience_s: float = WRITE_PATIENCE_S
    ) -> AbstractContextManager[None]:
        """Keep readers out while the block changes the weights to `version`; see `WeightLock.writing`."""
        return self._lock.writing(version, restoring=restoring, patience_s=patience_s)

    def manifest(self) -> WeightManifest:
        """Decode the manifest of the segment.

        Raises:
            WeightsMismatchError: It is damaged, or of another layout.
        """
        assert self._memory is not None
        offset, nbytes = self._lock.manifest_range
        end = offset + nbytes
        if offset < PAGE_BYTES or not 0 < nbytes <= MANIFEST_LIMIT_BYTES or end > len(self._memory):
            raise WeightsMismatchError("manifest", f"lies at {offset}, {nbytes} bytes: outside the segment")
        try:
            return msgspec.json.decode(self._memory[offset:end], type=WeightManifest)
        except msgspec.DecodeError as error:
            raise WeightsMismatchError("manifest", str(error)) from None

    def _views(self, manifest: WeightManifest) -> dict[str, Tensor]:
        assert self._memory is not None
        return {spec.name: _view(self._memory, spec) for spec in manifest.tensors}

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the segment. May be called twice.

        The memory itself stays mapped for as long as a tensor of the model is alive, so a model can be used, though
        not under the lock any more.

        Args:
            unlink: Remove the segment and the address file that names it; for the owner at its orderly end.
        """
        if self._memory is None:
            return
        self._lock.close()
        if unlink:
            if not self.is_replaced():
                self._address_file.unlink(missing_ok=True)
            self.path.unlink(missing_ok=True)
        os.close(self._segment.fd)
        self._memory = None


def _open_left(address_file: Path) -> Segment | None:
    """Open the segment that the address file names if its owner is dead."""
    address = segments.read_address(address_file)
    if address is None:
        return None
    try:
        left = segments.open_existing(Path(address.path), address.nonce, writable=True)
    except SegmentGoneError:
        return None
    owner = left.owner()
    if owner is not None and owner.alive():
        os.close(left.fd)
        raise SegmentInUseError(address.path, owner.pid)
    return left


def _view(memory: mmap.mmap, spec: TensorSpec) -> Tensor:
    dtype: torch.dtype = getattr(torch, spec.dtype)
    count = spec.nbytes // dtype.itemsize
    if count == 0:
        return torch.empty(spec.shape, dtype=dtype)
    with warnings.catch_warnings():
        # Torch has no read-only tensors and says so; the read-only mapping itself refuses the write.
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        flat = torch.frombuffer(memory, dtype=dtype, count=count, offset=PAGE_BYTES + spec.offset)
    return flat.view(spec.shape)
