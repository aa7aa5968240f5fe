"""A model takes tensors from elsewhere as its own: parameters, buffers, ties; and computes what is not shared.

Every module is reached, those in lists too, and every name of a tied tensor gets the same object, since an optimizer
counts objects. What is not in the state dict (RoPE tables) is computed from the configuration of its module: a model
built on meta has none, and `to_empty` would leave garbage there.
"""

import zlib
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from rolloutmq.schemas.sharing import WeightsMismatchError
from rolloutmq.trainer.weights.manifest import WeightManifest, named_tensors


def bind(model: nn.Module, manifest: WeightManifest, views: Mapping[str, Tensor], *, copy: bool) -> None:
    """Replace every parameter and persistent buffer by its view, ties included; with `copy`, keep the values."""
    old = dict(named_tensors(model))
    new: dict[str, Tensor] = {}
    for spec in manifest.tensors:
        before, view = old[spec.name], views[spec.name]
        if copy:
            view.copy_(before)
        if isinstance(before, nn.Parameter):
            view = nn.Parameter(view, requires_grad=before.requires_grad and copy)
        for name in (spec.name, *spec.ties):
            new[name] = view
    for name, tensor in new.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            module._parameters[leaf] = tensor
        else:
            module._buffers[leaf] = tensor


Derived = dict[str, tuple[nn.Module, str, Tensor]]
"""Buffers that are computed and not shared, by their full name: module, name in it, value."""


def derived(model: nn.Module) -> Derived:
    """Return the buffers that are not shared; what is on meta is computed from the configuration of its module.

    Raises:
        WeightsMismatchError: A module does not say from what it was built.
    """
    found: Derived = {}
    for prefix, module in model.named_modules():
        names = [
            name
            for name in sorted(module._non_persistent_buffers_set)
            if module._buffers.get(name) is not None
        ]
        lacking = any(module._buffers[name].is_meta for name in names)
        source = (_build_again(module) if lacking else module) or module
        for name in names:
            buffer = source._buffers.get(name)
            if buffer is None or buffer.is_meta:
                raise WeightsMismatchError(f"{prefix}.{name}", "is on meta and cannot be computed anew")
            found[f"{prefix}.{name}"] = (module, name, buffer)
    return found


def digests(buffers: Derived) -> dict[str, str]:
    """Tell for each buffer what it is, short enough for an error message."""
    return {
        name: f"{buffer.dtype} crc32 {zlib.crc32(_bytes(buffer)):08x}"
        for name, (_, _, buffer) in buffers.items()
    }


def _build_again(module: nn.Module) -> nn.Module | None:
    if not hasattr(module, "config"):
        return None
    kind: Callable[..., nn.Module] = type(module)
    with torch.device("cpu"):
        return kind(config=module.config)


def _bytes(buffer: Tensor) -> bytes:
    return buffer.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
