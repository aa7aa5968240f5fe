"""Match of a vLLM model with a weight manifest, and the binding of its parameters to shared tensors.

vLLM has its own names and shapes: fused projections, padded vocabularies. The manifest of a segment with a vLLM layout
lists every tensor as vLLM has it (`WeightManifest.fused`), so nothing is guessed: names, types, shapes and ties must be
equal on both sides. Properties that shapes do not show are compared too: the configuration, the constants of modules
(epsilons, scalings), and the RoPE frequencies, which both sides compute and compare bit by bit.
"""

import zlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights.fingerprint import plain, require_same_config
from rolloutmq.trainer.weights.layout import PhysicalTensor
from rolloutmq.trainer.weights.manifest import WeightManifest

_NEUTRAL: Final = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
"""vLLM's scales for quantized KV caches; a value of 1 has no effect."""


def require_match(model: nn.Module, config: Mapping[str, Any], manifest: WeightManifest) -> None:
    """Check that a model of vLLM has the tensors of a manifest.

    Raises:
        WeightsMismatchError: It does not; names the first tensor or key that differs.
    """
    if not manifest.fused:
        raise WeightsMismatchError("manifest", "has no layout for fused projections")
    theirs = {spec.name: spec for spec in manifest.fused}
    mine = dict(_tensors(model))
    for name in [name for name in mine if name.rpartition(".")[2] in _NEUTRAL]:
        if not bool((mine.pop(name)[0] == 1).all()):
            raise WeightsMismatchError(name, "must be 1: the segment has no scale for the KV cache")
    for name in sorted(mine.keys() - theirs.keys()):
        raise WeightsMismatchError(name, "is in vLLM's model, not in the segment")
    for name in sorted(theirs.keys() - mine.keys()):
        raise WeightsMismatchError(name, "is in the segment, not (or only as a tie) in vLLM's model")
    for name, (tensor, ties) in mine.items():
        _require_same(theirs[name], tensor, ties)
    require_same_config(manifest.config, plain(config))
    _require_same_numbers(model, manifest.derived)


def bind(model: nn.Module, manifest: WeightManifest, views: Mapping[str, Tensor]) -> None:
    """Make every parameter and persistent buffer of a model a view of shared memory; ties stay ties."""
    tensors = dict(_tensors(model))
    for spec in manifest.fused:
        tensors[spec.name][0].data = views[spec.name]


def _tensors(model: nn.Module) -> Iterator[tuple[str, tuple[Tensor, tuple[str, ...]]]]:
    """Yield each parameter and persistent buffer once, by its first name, with its other names."""
    names: dict[int, list[str]] = {}
    found: dict[int, Tensor] = {}
    kept = model.state_dict(keep_vars=True)
    for name, tensor in kept.items():
        names.setdefault(id(tensor), []).append(name)
        found[id(tensor)] = tensor
    for key, tensor in found.items():
        first, *others = names[key]
        yield first, (tensor, tuple(others))


def _require_same(spec: PhysicalTensor, tensor: Tensor, ties: tuple[str, ...]) -> None:
    mine = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": tuple(tensor.shape),
        "ties": tuple(sorted(ties)),
        "device": tensor.device.type,
        "dense": tensor.is_contiguous(),
    }
    theirs = {
        "dtype": spec.dtype,
        "shape": spec.shape,
        "ties": tuple(sorted(spec.ties)),
        "device": "cpu",
        "dense": True,
    }
    for key, left in theirs.items():
        if left != mine[key]:
            raise WeightsMismatchError(
                spec.name, f"{key} is {left} in the segment, {mine[key]} in vLLM's model"
            )


def _require_same_numbers(model: nn.Module, derived: Mapping[str, str]) -> None:
    """Compare the values computed from the configuration that both sides have."""
    frequencies = {text for name, text in derived.items() if name.rpartition(".")[2] == "inv_freq"}
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            theirs = derived.get(f"{prefix}.{name}")
            if isinstance(value, float) and theirs not in {None, repr(value)}:
                raise WeightsMismatchError(
                    f"{prefix}.{name}", f"is {theirs} in the segment, {value!r} in vLLM's model"
                )
        if hasattr(module, "cos_sin_cache"):
            mine = _digest(_frequencies(module, prefix))
            if mine not in frequencies:
                expected = " or ".join(sorted(frequencies)) or "nothing"
                raise WeightsMismatchError(
                    f"{prefix}.inv_freq", f"was computed as {expected} by the owner, {mine} in vLLM"
                )


def _frequencies(module: Any, prefix: str) -> Tensor:
    try:
        found: Tensor = module._compute_inv_freq(module.base)
    except (AttributeError, TypeError) as error:
        raise WeightsMismatchError(f"{prefix}.inv_freq", f"cannot be compared: {error}") from None
    return found


def _digest(tensor: Tensor) -> str:
    data = tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{tensor.dtype} crc32 {zlib.crc32(data):08x}"
