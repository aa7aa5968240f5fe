"""The rungs of the ladder that can be climbed alone: where tensors lie, what they hold, what comes of them."""

import hashlib
from typing import Final

import torch
from torch import Tensor, nn

from rolloutmq.schemas.sharing import WeightsMismatchError
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors

_CHUNK_WORDS: Final = 1 << 20
"""Eight megabytes at a time: what the position-weighted sum needs beside the tensor itself."""


def require_aliases(model: nn.Module, manifest: WeightManifest, start: int) -> None:
    """Prove that every tensor of a model lies in the shared memory, at its offset, under each of its names.

    The model must mean the manifest, which is the rung below.

    Args:
        start: Address of offset 0.

    Raises:
        WeightsMismatchError: One lies elsewhere, for example since somebody replaced the parameter.
    """
    tensors = dict(named_tensors(model))
    for spec in manifest.tensors:
        for name in (spec.name, *spec.ties):
            tensor = tensors[name]
            if spec.nbytes and tensor.data_ptr() != start + spec.offset:
                raise WeightsMismatchError(name, "does not lie in the shared memory any more")
            if tensor is not tensors[spec.name]:
                raise WeightsMismatchError(name, f"is not tied to {spec.name} any more")


def digest(tensor: Tensor, *, exact: bool = False) -> str:
    """Tell what a tensor holds: the sum of its 64-bit words and that of each times its place, or a sha256."""
    data = tensor.detach().reshape(-1).view(torch.uint8)
    if exact:
        return hashlib.sha256(data.cpu().numpy().data).hexdigest()
    tail = -data.numel() % 8
    words = (torch.nn.functional.pad(data, (0, tail)) if tail else data).view(torch.int64)
    plain, placed = 0, 0
    for start in range(0, words.numel(), _CHUNK_WORDS):
        chunk = words[start : start + _CHUNK_WORDS]
        places = torch.arange(start + 1, start + 1 + chunk.numel(), device=chunk.device)
        plain += int(chunk.sum())
        placed += int((chunk * places).sum())
    return f"{plain % 2**64:016x}{placed % 2**64:016x}"


def tensor_digests(model: nn.Module, manifest: WeightManifest, *, exact: bool = False) -> dict[str, str]:
    """Return the digest of every tensor by its name; the weights must not change meanwhile."""
    tensors = dict(named_tensors(model))
    return {spec.name: digest(tensors[spec.name], exact=exact) for spec in manifest.tensors}


@torch.no_grad()
def logits_digest(model: nn.Module, inputs: Tensor) -> str:
    """Return the sha256 of what a causal language model makes of token ids `(B, T)`."""
    return digest(model(input_ids=inputs, use_cache=False).logits.contiguous(), exact=True)
