"""Weights on one GPU: the owner's memory, opened by its readers through CUDA IPC.

    control page | scratch page | handle page | manifest          in /dev/shm
    tensors                                                       on the GPU, in one allocation, at the same offsets

Everything except the location of the tensors is as in `posix_shm`: lock, versions, manifest, checks. The differences:

- One handle opens all tensors, and it is void without its owner: GPU memory dies with its process. So attaching and
  reading refuse a segment whose owner is dead, where `posix_shm` continues with it. The next owner makes a new
  segment,
  and readers attach again.
- The GPU runs asynchronously: reading and writing blocks wait for it before they release the lock.
- Readers can write: CUDA maps memory for both. They must not.
- Both sides compute RoPE tables on the CPU, where the bits are the same everywhere, and move them.

A CUDA tensor travels as the fifteen arguments of `rebuild_cuda_tensor`. A handle keeps those that vary, in plain types;
nothing is pickled. GPU indices are per process, so a handle names the GPU by UUID, and the reader inserts its own
index. Only memory from cudaMalloc can be opened reliably. Expandable segments travel as file descriptors, which fails
in containers; they are refused at export. Torch counts the readers of a handle for the owner's allocator; here the
owner holds its allocation until it closes, so any number of readers may open the one handle.

Not yet run on a GPU: the tests simulate one on the CPU; the real test is `test_cuda_gpu`.
"""

import os
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Protocol, Self

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile
from rolloutmq.schemas.errors import MissingError, SegmentGoneError, WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.lock import PAGE_BYTES, TENSORS_AT
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors
from rolloutmq.trainer.weights.posix_shm import WeightShare, mapped

ARGUMENTS: Final = 15
"""Arguments of `rebuild_cuda_tensor`: class, size, stride, offset, storage class, type, device, handle, bytes of the
storage, its offset in the allocation, requires_grad, counter, offset of the counter, event, whether to wait for the
event.
"""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """Data with which another process opens a flat byte tensor."""

    gpu: str
    """UUID."""
    allocation: bytes
    nbytes: int
    offset_bytes: int
    """Offset of the tensor's storage in the allocation."""
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


class Cuda(Protocol):
    """GPU operations of a share."""

    def allocate(self, nbytes: int, like: Tensor) -> Tensor:
        """Return zeroed bytes on the GPU of another tensor."""
        ...

    def export(self, flat: Tensor) -> CudaHandle:
        """Return the handle of a flat tensor."""
        ...

    def open(self, handle: CudaHandle) -> Tensor:
        """Open the tensor of another process."""
        ...

    def synchronize(self) -> None:
        """Wait for all work of the GPU."""

    def collect(self) -> None:
        """Release memory of other processes that no tensor uses any more."""


def handle_of(arguments: Sequence[Any], gpus: Sequence[str]) -> CudaHandle:
    """Return the handle for the arguments of `rebuild_cuda_tensor`.

    Args:
        arguments: From `reduce_tensor`, of a flat byte tensor at the start of its storage.
        gpus: UUIDs of this process's GPUs by index.

    Raises:
        WeightsMismatchError: This torch describes tensors in another way.
    """
    if len(arguments) != ARGUMENTS:
        raise WeightsMismatchError(
            "torch", f"describes a CUDA tensor by {len(arguments)} arguments, {ARGUMENTS} expected"
        )
    _, size, stride, offset, _, dtype, device, allocation, nbytes, offset_bytes, *rest = arguments
    _requires_grad, counter, counter_offset, event, waits = rest
    if dtype != torch.uint8 or tuple(stride) != (1,) or offset != 0 or tuple(size) != (nbytes,):
        raise WeightsMismatchError("handle", "must be of a flat byte tensor that fills its storage")
    return CudaHandle(
        gpu=gpus[int(device)],
        allocation=allocation,
        nbytes=nbytes,
        offset_bytes=offset_bytes,
        counter=counter,
        counter_offset=counter_offset,
        event=event,
        waits=waits,
    )


def arguments_of(handle: CudaHandle, gpus: Sequence[str]) -> tuple[Any, ...]:
    """Return the arguments of `rebuild_cuda_tensor` for this process.

    Raises:
        MissingError: This process does not see the GPU that holds the weights.
    """
    if handle.gpu not in gpus:
        raise MissingError(
            f"GPU {handle.gpu}",
            "it holds the weights; make it visible to this process (CUDA_VISIBLE_DEVICES)",
        )
    return (
        *(Tensor, torch.Size([handle.nbytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8),
        *(gpus.index(handle.gpu), handle.allocation, handle.nbytes, handle.offset_bytes, False),
        *(handle.counter, handle.counter_offset, handle.event, handle.waits),
    )


def require_plain_memory(address: int, segments: Sequence[dict[str, Any]]) -> None:
    """Check that memory of the caching allocator came from cudaMalloc.

    Args:
        address: Address of the tensor.
        segments: Result of `torch.cuda.memory_snapshot`.

    Raises:
        WeightsMismatchError: It is in an expandable segment, or in none of the allocator's.
    """
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            if segment.get("is_expandable", False):
                raise WeightsMismatchError(
                    "allocator",
                    "the weights are in an expandable segment, which other processes cannot open reliably; take "
                    "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
                )
            return
    raise WeightsMismatchError("allocator", "the weights are in memory unknown to torch's allocator")


class TorchCuda:
    """The GPUs of this process, through torch."""

    def allocate(self, nbytes: int, like: Tensor) -> Tensor:
        """See `Cuda.allocate`."""
        if not like.is_cuda:
            raise WeightsMismatchError(
                "device", f"the model must be on a GPU (got {like.device}); move it first"
            )
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def export(self, flat: Tensor) -> CudaHandle:
        """See `Cuda.export`."""
        from torch.multiprocessing.reductions import reduce_tensor

        require_plain_memory(flat.data_ptr(), torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        _, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
        return handle_of(arguments, _uuids())

    def open(self, handle: CudaHandle) -> Tensor:
        """See `Cuda.open`."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        opened: Tensor = rebuild_cuda_tensor(*arguments_of(handle, _uuids()))  # type: ignore[no-untyped-call]
        return opened

    def synchronize(self) -> None:
        """See `Cuda.synchronize`."""
        torch.cuda.synchronize()

    def collect(self) -> None:
        """See `Cuda.collect`."""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


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
            raise WeightsMismatchError("handle", f"has {len(handle)} bytes, at most {PAGE_BYTES} fit")
        encoded = msgspec.json.encode(manifest)
        segment = segment_file.create(cls.KIND, MANIFEST_AT + len(encoded))
        memory = mapped(segment)
        memory[MANIFEST_AT:] = encoded
        memory[HANDLE_AT : HANDLE_AT + len(handle)] = handle
        share = cls(segment, memory, address_file, owner=True)
        share._lock.place_manifest(MANIFEST_AT, len(encoded))
        share._flat = flat
        return share

    @classmethod
    def _adopt(cls, left: SegmentFile, _manifest: WeightManifest, _address_file: Path, /) -> Self | None:
        os.close(left.fd)  # its memory died with its owner
        return None

    def _inside(self, _manifest: WeightManifest, /) -> int:
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
        """Open the owner's process, so that its death is noticed at once.

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
                if owner.alive():  # the pid was not reused
                    return
        raise self._gone()

    def _gone(self) -> SegmentGoneError:
        return SegmentGoneError(str(self.path), "its owner is dead and the GPU memory lost")

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
        """Release the weights. The GPU memory goes once no tensor of the model is alive."""
        super().close(unlink=unlink)
        if self._owner_fd is not None:
            os.close(self._owner_fd)
            self._owner_fd = None
        self.cuda.collect()


def _only_device(model: nn.Module) -> Tensor:
    """Return a tensor on the one device of all tensors of a model."""
    tensors = dict(named_tensors(model))
    first = next(iter(tensors.values()))
    for name, tensor in tensors.items():
        if tensor.device != first.device:
            raise WeightsMismatchError(
                name, f"is on {tensor.device}, others are on {first.device}; all must be on one"
            )
    return first


def share_kind(address_file: Path) -> type[WeightShare]:
    """Return the kind of share that an address file names: memory of a GPU, or of the host."""
    found = segment_file.read_address(address_file)
    return CudaShare if found is not None and found.path.endswith(f"-{CudaShare.KIND}") else WeightShare
