"""A model takes tensors from elsewhere as its own: parameters, buffers, ties; and computes what is not shared.

Every module is reached, those in lists too, and every name of a tied tensor gets the same object, since an optimizer
counts objects. What is not in the state dict (RoPE tables) is computed from the configuration of its module: a model
built on meta has none, and `to_empty` would leave garbage there.
"""

import copy
import zlib
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.schemas.sharing import WeightsMismatchError
from rolloutmq.trainer.weights.facts import module_facts
from rolloutmq.trainer.weights.manifest import (
    WeightManifest,
    describe,
    named_tensors,
    require_derived,
    require_equal,
)
from rolloutmq.trainer.weights.tokenizer import require_same_tokenizer


def bind(model: nn.Module, manifest: WeightManifest, views: Mapping[str, Tensor], *, keep: bool) -> None:
    """Replace every parameter and persistent buffer by its view, ties included; with `keep`, write the values there."""
    old = dict(named_tensors(model))
    new: dict[str, Tensor] = {}
    for spec in manifest.tensors:
        before, view = old[spec.name], views[spec.name]
        if keep:
            view.copy_(before)
        if isinstance(before, nn.Parameter):
            view = nn.Parameter(view, requires_grad=before.requires_grad and keep)
        for name in (spec.name, *spec.ties):
            new[name] = view
    for name, tensor in new.items():
        path, _, leaf = name.rpartition(".")
        module = model.get_submodule(path)
        if isinstance(tensor, nn.Parameter):
            module._parameters[leaf] = tensor
        else:
            module._buffers[leaf] = tensor


def manifest_of(model: nn.Module, *, fused: bool = False, tokenizer: str = "") -> WeightManifest:
    """Describe an owner's model whole: tensors, facts, what it computed, and the tokenizer's fingerprint.

    Raises:
        WeightsMismatchError: It cannot be shared.
    """
    described = describe(model, fused=fused)
    return msgspec.structs.replace(
        described, derived=digests(derived(model)) | module_facts(model), tokenizer=tokenizer
    )


def prove(model: nn.Module, manifest: WeightManifest, tokenizer: str = "") -> "Derived":
    """Prove that a model means what a manifest says; return what it computes by itself. The model is unchanged.

    Raises:
        WeightsMismatchError: It does not; names the tensor or the key.
    """
    require_equal(manifest, describe(model, fused=bool(manifest.fused)))
    require_same_tokenizer(manifest.tokenizer, tokenizer)
    computed = derived(model)
    require_derived(manifest.derived, digests(computed) | module_facts(model))
    return computed


def adopt(
    model: nn.Module, manifest: WeightManifest, views: Mapping[str, Tensor], computed: "Derived"
) -> None:
    """Bind a model that was proven to the shared tensors, and place what it computes by itself."""
    bind(model, manifest, views, keep=False)
    place_derived(computed)
    require_real(model)


Derived = dict[str, tuple[nn.Module, str, Tensor]]
"""Tensors that are computed and not shared, by their full name: module, name in it, value."""


def derived(model: nn.Module) -> Derived:
    """Return the tensors that are not shared; what is on meta is computed from the configuration.

    They are buffers that are not persistent, and tensors that a module keeps as plain attributes. A module with a
    configuration of its own is built again by itself, the whole model only where that does not do.

    Raises:
        WeightsMismatchError: One is on meta, and nothing says from what it was computed.
    """
    found: Derived = {}
    whole: dict[str, nn.Module] | None = None
    for prefix, module in model.named_modules():
        names = _computed_names(module)
        source: nn.Module | None = module
        if any(getattr(module, name).is_meta for name in names):
            source = _build_again(module)
            if source is None and whole is None:
                whole = dict(_build_without_parameters(model).named_modules())
            source = source or (whole or {}).get(prefix)
        for name in names:
            full = f"{prefix}.{name}" if prefix else name
            found[full] = (
                module,
                name,
                _as_expected(getattr(module, name), getattr(source, name, None), full),
            )
    return found


def place_derived(tensors: Derived) -> None:
    """Make them the model's own."""
    for module, name, tensor in tensors.values():
        if name in module._buffers:
            module._buffers[name] = tensor  # as persistent as it was
        else:
            setattr(module, name, tensor)


def digests(tensors: Derived) -> dict[str, str]:
    """Tell for each tensor what it is, short enough for an error message; not for those that move with the input."""
    return {
        name: f"{tensor.dtype} crc32 {zlib.crc32(_bytes(tensor)):08x}"
        for name, (module, leaf, tensor) in tensors.items()
        if not _moves(module, leaf)
    }


def _moves(module: nn.Module, name: str) -> bool:
    """Tell whether a forward pass changes a table: RoPE that follows the length of the input; the original stays."""
    kinds = getattr(module, "rope_type", "")
    found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(found & {"dynamic", "longrope"}) and "original" not in name


def require_real(model: nn.Module) -> None:
    """Prove that nothing was left on meta, in lists of modules neither.

    Raises:
        WeightsMismatchError: Something was; names the first tensor.
    """
    for prefix, module in model.named_modules(remove_duplicate=False):
        own = {**module._parameters, **module._buffers, **_plain_tensors(module)}
        for name, tensor in own.items():
            if tensor is not None and tensor.is_meta:
                raise WeightsMismatchError(f"{prefix}.{name}" if prefix else name, "is still on meta")


def _computed_names(module: nn.Module) -> list[str]:
    buffers = (name for name in module._non_persistent_buffers_set if module._buffers.get(name) is not None)
    return sorted({*buffers, *_plain_tensors(module)})


def _plain_tensors(module: nn.Module) -> dict[str, Tensor]:
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def _as_expected(before: Tensor, computed: object, name: str) -> Tensor:
    if not isinstance(computed, Tensor) or computed.is_meta:
        raise WeightsMismatchError(name, "is on meta and cannot be computed anew")
    if (before.dtype, before.shape) != (computed.dtype, computed.shape):
        was = f"{before.dtype} {tuple(before.shape)}"
        raise WeightsMismatchError(name, f"was {was}, computed anew {computed.dtype} {tuple(computed.shape)}")
    return computed


def _build_again(module: nn.Module) -> nn.Module | None:
    """Build a module without parameters from its configuration; None if it has none, or is made in another way."""
    if not hasattr(module, "config") or any(True for _ in module.parameters()):
        return None
    kind: Callable[..., nn.Module] = type(module)
    try:
        with torch.device("cpu"):
            return kind(config=module.config)
    except TypeError:
        return None


def _build_without_parameters(model: nn.Module) -> nn.Module:
    """Build a model again of which only the computed tensors are real: each parameter is let go when it is made."""
    kind: Callable[..., nn.Module] = type(model)
    dtype = getattr(model, "dtype", None)
    if not hasattr(model, "config"):
        return nn.Module()
    before, register = torch.get_default_dtype(), nn.Module.register_parameter

    def on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        register(module, name, None if parameter is None else nn.Parameter(parameter.detach().to("meta")))

    nn.Module.register_parameter = on_meta  # type: ignore[method-assign,assignment]
    try:
        # Constants of a module take the type in which the model was made.
        torch.set_default_dtype(dtype if isinstance(dtype, torch.dtype) else before)
        with torch.device("cpu"):
            return kind(copy.deepcopy(model.config))
    finally:
        torch.set_default_dtype(before)
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _bytes(buffer: Tensor) -> bytes:
    return buffer.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
