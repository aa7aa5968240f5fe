"""One copy of the weights on one GPU: the owner's memory, opened by its readers through CUDA IPC.

    control page | scratch page | handle page | manifest          in /dev/shm
    tensors                                                       on the GPU, in one allocation, at the same offsets

Everything but the place of the tensors is as in `posix_shm`: the same lock and versions, the same manifest and proofs.
What differs:

- One handle opens all tensors, and it is worth nothing without its owner: memory of a dead process is gone, whatever
  the handle says. So attaching and reading refuse a segment whose owner is dead, where `posix_shm` goes on with it,
  and an heir makes a new segment, to which readers attach anew.
- The GPU works behind the caller's back: both blocks wait for it before they let go of the lock.
- Readers are not kept from writing: CUDA opens memory for both. They are asked not to.
- Both sides compute RoPE tables on the CPU, where the bits are the same everywhere, and move them.

Torch counts the readers of a handle for the owner's allocator; here the owner holds its allocation until it closes, so
that any number of readers may open the one handle.

Not yet run on a GPU: the logic is tested with a GPU that the CPU plays, the real thing is in `test_cuda_gpu`.
"""

import os
import select
from pathlib import Path
from typing import ClassVar, Final, Self

import msgspec
from torch import Tensor, nn

from rolloutmq.bus import segments
from rolloutmq.bus.segments import Segment
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import SegmentGoneError, WeightsMismatchError
from rolloutmq.trainer.weights.cuda import Cuda, CudaHandle, TorchCuda
from rolloutmq.trainer.weights.lock import PAGE_BYTES
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors
from rolloutmq.trainer.weights.posix_shm import TENSORS_AT, WeightShare
from rolloutmq.trainer.weights.room import mapped

HANDLE_AT: Final = TENSORS_AT
MANIFEST_AT: Final = HANDLE_AT + PAGE_BYTES


class CudaShare(WeightShare):
    """The weights on a GPU, bound to one model on that GPU."""

    KIND: ClassVar = "gpuweights"
    cuda: ClassVar[Cuda] = TorchCuda()

    _owner_fd: int | None = None

    @classmethod
    def _create(cls, manifest: WeightManifest, address_file: Path, model: nn.Module) -> Self:
        flat = cls.cuda.allocate(manifest.end, _only_device(model))
        handle = msgspec.json.encode(cls.cuda.export(flat))
        if len(handle) > PAGE_BYTES:
            raise WeightsMismatchError("handle", f"has {len(handle)} bytes, there is room for {PAGE_BYTES}")
        encoded = msgspec.json.encode(manifest)
        segment = segments.create(cls.KIND, MANIFEST_AT + len(encoded))
        memory = mapped(segment)
        memory[MANIFEST_AT:] = encoded
        memory[HANDLE_AT : HANDLE_AT + len(handle)] = handle
        share = cls(segment, memory, address_file, owner=True)
        share._lock.place_manifest(MANIFEST_AT, len(encoded))
        share._flat = flat
        return share

    @classmethod
    def _adopt(cls, left: Segment, _manifest: WeightManifest, _address_file: Path) -> Self | None:
        os.close(left.fd)  # its memory went with its owner
        return None

    def _inside(self, _manifest: WeightManifest) -> int:
        return 0

    def _open_flat(self, manifest: WeightManifest) -> Tensor:
        assert self._memory is not None
        self._watch_owner()
        page = self._memory[HANDLE_AT:MANIFEST_AT].rstrip(b"\0")
        try:
            handle = msgspec.json.decode(page, type=CudaHandle)
        except msgspec.DecodeError as error:
            raise WeightsMismatchError("handle", str(error)) from None
        if handle.nbytes != manifest.end:
            raise WeightsMismatchError(
                "handle", f"opens {handle.nbytes} bytes, the manifest has {manifest.end}"
            )
        return self.cuda.open(handle)

    def _watch_owner(self) -> None:
        """Hold on to the owner's process, so that its death is seen at once.

        Raises:
            SegmentGoneError: It is dead already.
        """
        owner = self._segment.owner()
        if owner is not None and owner.alive():
            if not owner.is_here():
                return  # it cannot be watched from this pid namespace
            try:
                self._owner_fd = os.pidfd_open(owner.pid)
            except ProcessLookupError:
                pass
            else:
                if owner.alive():  # and is still the one that was meant
                    return
        raise self._gone()

    def _gone(self) -> SegmentGoneError:
        return SegmentGoneError(str(self.path), "its owner is dead, and the GPU memory went with it")

    def _begin_reading(self, patience_s: float) -> PolicyVersion:
        version = super()._begin_reading(patience_s)
        try:
            self._require_owner()
        except SegmentGoneError:
            super()._end_reading()
            raise
        return version

    def _end_reading(self) -> None:
        try:
            self._settle()
        finally:
            super()._end_reading()
        self._require_owner()  # what was computed from the memory of a dead process is void

    def _require_owner(self) -> None:
        if self._owner_fd is not None and select.select([self._owner_fd], [], [], 0)[0]:
            raise self._gone()

    def _settle(self) -> None:
        self.cuda.synchronize()

    def close(self, *, unlink: bool = False) -> None:
        """Let go of the weights; of the memory itself as soon as no tensor of the model is alive."""
        super().close(unlink=unlink)
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None
        self.cuda.collect()


def _only_device(model: nn.Module) -> Tensor:
    """Return a tensor on the device of all tensors of a model."""
    tensors = dict(named_tensors(model))
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise WeightsMismatchError(name, f"is on {tensor.device}, others are on {first.device}")
    return first
