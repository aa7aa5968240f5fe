"""What torch can do with GPU memory between processes, reduced to what a share needs; the only module that names it.

A CUDA tensor travels as the fifteen arguments of `rebuild_cuda_tensor`. Of these a handle keeps what is not the same
for every tensor, in plain types: nothing is pickled. The index of the GPU counts within a process (each may see other
GPUs in another order), so a handle names the GPU by its UUID, and who opens it puts its own index in.

Only memory of cudaMalloc can be opened by others in the old and dependable way. Memory of expandable segments travels
as file descriptors, which fails in containers and has failed in other ways since; it is refused where it is exported.
"""

from collections.abc import Sequence
from typing import Any, Final, Protocol

import msgspec
import torch
from torch import Tensor

from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.sharing import WeightsMismatchError

ARGUMENTS: Final = 15
"""Of `rebuild_cuda_tensor`: class, size, stride, offset, storage class, type, device, handle, bytes of the storage,
its offset in the allocation, requires_grad, counter, offset of the counter, event, whether to wait for the event."""


class CudaHandle(msgspec.Struct, frozen=True, kw_only=True):
    """How another process opens a flat tensor of bytes."""

    gpu: str
    """UUID."""
    allocation: bytes
    nbytes: int
    offset_bytes: int
    """Of the tensor's storage in the allocation."""
    counter: bytes
    counter_offset: int
    event: bytes
    waits: bool


class Cuda(Protocol):
    """The GPU side of a share."""

    def allocate(self, nbytes: int, like: Tensor) -> Tensor:
        """Return zero bytes on the GPU of another tensor."""

    def export(self, flat: Tensor) -> CudaHandle:
        """Return what others open a flat tensor with."""

    def open(self, handle: CudaHandle) -> Tensor:
        """Open the tensor of another process."""

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was told."""

    def collect(self) -> None:
        """Let go of memory of others that no tensor uses any more."""


def handle_of(arguments: Sequence[Any], gpus: Sequence[str]) -> CudaHandle:
    """Keep of the arguments of `rebuild_cuda_tensor` what another process needs.

    Args:
        arguments: From `reduce_tensor`, of a flat tensor of bytes at the start of its storage.
        gpus: UUIDs of the GPUs of this process by their index.

    Raises:
        WeightsMismatchError: This torch describes tensors in another way.
    """
    if len(arguments) != ARGUMENTS:
        raise WeightsMismatchError(
            "torch", f"describes a CUDA tensor by {len(arguments)} facts, not {ARGUMENTS}"
        )
    _, size, stride, offset, _, dtype, device, allocation, nbytes, offset_bytes, *rest = arguments
    _requires_grad, counter, counter_offset, event, waits = rest
    if dtype != torch.uint8 or tuple(stride) != (1,) or offset != 0 or tuple(size) != (nbytes,):
        raise WeightsMismatchError("handle", "is not of a flat tensor of bytes that fills its storage")
    return CudaHandle(
        gpu=gpus[device],
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
        MissingError: This process does not see the GPU on which the weights are.
    """
    if handle.gpu not in gpus:
        raise MissingError(
            f"GPU {handle.gpu}", "the weights are on it: let this process see it (CUDA_VISIBLE_DEVICES)"
        )
    return (
        *(Tensor, torch.Size([handle.nbytes]), (1,), 0, torch.storage.TypedStorage, torch.uint8),
        *(gpus.index(handle.gpu), handle.allocation, handle.nbytes, handle.offset_bytes, False),
        *(handle.counter, handle.counter_offset, handle.event, handle.waits),
    )


def require_plain_memory(address: int, segments: Sequence[dict[str, Any]]) -> None:
    """Prove that memory of the caching allocator came from cudaMalloc.

    Args:
        address: Of the tensor.
        segments: What `torch.cuda.memory_snapshot` says.

    Raises:
        WeightsMismatchError: It is in an expandable segment, or in none that the allocator knows.
    """
    for segment in segments:
        if segment["address"] <= address < segment["address"] + segment["total_size"]:
            if segment.get("is_expandable", False):
                raise WeightsMismatchError(
                    "allocator",
                    "the weights are in an expandable segment, which other processes cannot open dependably: take "
                    "expandable_segments out of PYTORCH_CUDA_ALLOC_CONF",
                )
            return
    raise WeightsMismatchError("allocator", "the weights are in memory that torch's allocator does not know")


class TorchCuda:
    """The GPUs of this process, by torch."""

    def allocate(self, nbytes: int, like: Tensor) -> Tensor:
        """Return zero bytes on the GPU of another tensor."""
        if not like.is_cuda:
            raise WeightsMismatchError("device", f"the model is on {like.device}: move it to the GPU first")
        return torch.zeros(nbytes, dtype=torch.uint8, device=like.device)

    def export(self, flat: Tensor) -> CudaHandle:
        """Return what others open a flat tensor with."""
        from torch.multiprocessing.reductions import reduce_tensor

        require_plain_memory(flat.data_ptr(), torch.cuda.memory_snapshot())  # type: ignore[no-untyped-call]
        _, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
        return handle_of(arguments, _uuids())

    def open(self, handle: CudaHandle) -> Tensor:
        """Open the tensor of another process."""
        from torch.multiprocessing.reductions import rebuild_cuda_tensor

        opened: Tensor = rebuild_cuda_tensor(*arguments_of(handle, _uuids()))  # type: ignore[no-untyped-call]
        return opened

    def synchronize(self) -> None:
        """Wait until the GPU has done all that it was told."""
        torch.cuda.synchronize()

    def collect(self) -> None:
        """Let go of memory of others that no tensor uses any more."""
        if torch.cuda.is_available():
            torch.cuda.ipc_collect()  # type: ignore[no-untyped-call]


def _uuids() -> list[str]:
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
