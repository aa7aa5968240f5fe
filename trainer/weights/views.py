"""Tensors that lie in shared bytes."""

import torch
from torch import Tensor

from rolloutmq.schemas.sharing import WeightsMismatchError
from rolloutmq.trainer.weights.placement import PhysicalTensor, TensorSpec


def view(flat: Tensor, spec: TensorSpec | PhysicalTensor) -> Tensor:
    """Return the tensor of a manifest as it lies in shared bytes: on their storage, but no view in autograd's sense.

    Tensors that were views of one base would share its version counter, and a change of one void the graph of all.
    """
    dtype: torch.dtype = getattr(torch, spec.dtype)
    stride = spec.stride if isinstance(spec, TensorSpec) else torch.empty(spec.shape, device="meta").stride()
    made = torch.empty(0, dtype=dtype, device=flat.device)
    if not spec.nbytes:
        return made.reshape(spec.shape)
    first = flat.storage_offset() + spec.offset
    # `set_` would enlarge a storage that is too small, and so leave the shared memory.
    if (first % dtype.itemsize) or spec.offset + spec.nbytes > flat.numel():
        raise WeightsMismatchError(spec.name, f"lies at {spec.offset}: outside the shared memory")
    return made.set_(flat.untyped_storage(), first // dtype.itemsize, spec.shape, stride)
