"""Binding of a model to shared tensors: parameters, buffers and ties; and the tensors computed instead of shared.

All modules are bound, those in lists too. All names of a tied tensor get the same object, because optimizers count
objects. Tensors outside the state dict (RoPE tables) are computed from the configuration of their module: a model built
on meta has none, and `to_empty` would leave garbage there.
"""

import copy
import zlib
from collections.abc import Callable, Mapping

import msgspec
import torch
from torch import Tensor, nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights.fingerprint import module_facts, require_same_tokenizer
from rolloutmq.trainer.weights.manifest import (
    WeightManifest,
    describe,
    named_tensors,
    require_derived,
    require_equal,
)
from rolloutmq.trainer.weights.model.rotation import rotations


def bind(model: nn.Module, manifest: WeightManifest, views: Mapping[str, Tensor], *, keep: bool) -> None:
    """Replace every parameter and persistent buffer by its view, ties included; with `keep`, copy the values there."""
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
    """Return the full manifest of an owner's model: tensors, constants, computed tensors, tokenizer.

    Raises:
        WeightsMismatchError: The model cannot be shared.
    """
    described = describe(model, fused=fused)
    return msgspec.structs.replace(
        described,
        derived=digests(derived(model)) | module_facts(model),
        rotations=rotations(model) if fused else (),
        tokenizer=tokenizer,
    )


def prove(model: nn.Module, manifest: WeightManifest, tokenizer: str = "") -> "Derived":
    """Check that a model fits a manifest; return the tensors it computes itself. The model is unchanged.

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
    """Bind a checked model to the shared tensors, and set its computed tensors."""
    bind(model, manifest, views, keep=False)
    place_derived(computed)
    require_real(model)


Derived = dict[str, tuple[nn.Module, str, Tensor]]
"""Computed tensors by full name: module, name within it, value."""


def derived(model: nn.Module) -> Derived:
    """Return the tensors that are not shared; those on meta are computed from the configuration.

    They are non-persistent buffers, and tensors in plain attributes. A module with its own configuration is rebuilt
    alone; the whole model only if that fails.

    Raises:
        WeightsMismatchError: A tensor on meta cannot be computed.
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
    """Set the computed tensors in the model."""
    for module, name, tensor in tensors.values():
        if name in module._buffers:
            module._buffers[name] = tensor  # as persistent as it was
        else:
            setattr(module, name, tensor)


def digests(tensors: Derived) -> dict[str, str]:
    """Return a short digest of each computed tensor, except those that change with the input."""
    return {
        name: f"{tensor.dtype} crc32 {zlib.crc32(_bytes(tensor)):08x}"
        for name, (module, leaf, tensor) in tensors.items()
        if not _moves(module, leaf)
    }


def _moves(module: nn.Module, name: str) -> bool:
    """Return whether a forward pass changes the table (dynamic RoPE); the original table does not change."""
    kinds = getattr(module, "rope_type", "")
    found = set(kinds.values()) if isinstance(kinds, dict) else {kinds}
    return bool(found & {"dynamic", "longrope"}) and "original" not in name


def require_real(model: nn.Module) -> None:
    """Check that no tensor is left on meta, in lists of modules either.

    Raises:
        WeightsMismatchError: One is; names the first.
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
        raise WeightsMismatchError(name, "is on meta and cannot be computed again")
    if (before.dtype, before.shape) != (computed.dtype, computed.shape):
        was = f"{before.dtype} {tuple(before.shape)}"
        raise WeightsMismatchError(name, f"was {was}, recomputed {computed.dtype} {tuple(computed.shape)}")
    return computed


def _build_again(module: nn.Module) -> nn.Module | None:
    """Build a module without parameters from its configuration; None if that is not possible."""
    if not hasattr(module, "config") or any(True for _ in module.parameters()):
        return None
    kind: Callable[..., nn.Module] = type(module)
    try:
        with torch.device("cpu"):
            return kind(config=module.config)
    except TypeError:
        return None


def _build_without_parameters(model: nn.Module) -> nn.Module:
    """Build a model whose computed tensors are real; each parameter is dropped as soon as it is made."""
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
