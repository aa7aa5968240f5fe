"""Match of a vLLM model with a weight manifest, and the binding of its parameters to shared tensors.

vLLM has its own names and shapes: fused projections, padded vocabularies. The manifest of a segment with a vLLM layout
lists every tensor as vLLM has it (`WeightManifest.fused`), so nothing is guessed: names, types, shapes and ties must be
equal on both sides. Properties that shapes do not show are compared too: the configuration, the constants of modules
(epsilons, scalings), and the RoPE tables. Each layer of vLLM reads cos and sin of a position from a table; its rows
must be those of the owner's forward pass (`trainer.weights.model.rotation`), bit for bit.

A mapped tensor must lie where the owner's memory is, in one piece. A copy may go to any device, and to several workers
that share each tensor: vLLM's loaders move and cut it.
"""

import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

import torch
from torch import Tensor, nn

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.services.inference.vllm import known_differences
from rolloutmq.trainer.weights.fingerprint import plain, require_same_config
from rolloutmq.trainer.weights.layout import PhysicalTensor
from rolloutmq.trainer.weights.manifest import Rotation, WeightManifest
from rolloutmq.trainer.weights.model.rotation import ROWS, digest

_NEUTRAL: Final = frozenset({"_k_scale", "_v_scale", "_q_scale", "_prob_scale"})
"""vLLM's scales for quantized KV caches; a value of 1 has no effect."""
_LAYER: Final = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def require_match(
    model: nn.Module,
    config: Mapping[str, Any],
    manifest: WeightManifest,
    *,
    mapped: torch.device | None = None,
    shards: int = 1,
) -> None:
    """Check that a model of vLLM has the tensors of a manifest.

    Args:
        model: vLLM's model.
        config: Its configuration.
        manifest: What the owner has.
        mapped: Device of the shared memory of which the tensors are to become views; None if they receive copies.
        shards: Workers that share each tensor, for copies.

    Raises:
        WeightsMismatchError: It does not; names the first tensor or key that differs.
    """
    if not manifest.fused:
        raise WeightsMismatchError("manifest", "has no layout for fused projections")
    known_differences.require_none(config)
    theirs = {spec.name: spec for spec in manifest.fused}
    mine = dict(_tensors(model))
    for name in [name for name in mine if name.rpartition(".")[2] in _NEUTRAL]:
        if not bool((mine.pop(name)[0] == 1).all()):
            raise WeightsMismatchError(name, "must be 1: the segment has no scale for the KV cache")
    for name in sorted(mine.keys() - theirs.keys()):
        raise WeightsMismatchError(name, "is in vLLM's model, not in the segment")
    for name in sorted(theirs.keys() - mine.keys()):
        raise WeightsMismatchError(name, "is in the segment, not (or only as a tie) in vLLM's model")
    known = mine.keys() | {tie for _, ties in mine.values() for tie in ties}
    for name, (tensor, ties) in mine.items():
        _require_same(theirs[name], tensor, ties, known, shards)
        if mapped is not None:
            _require_mappable(name, tensor, mapped)
    require_same_config(manifest.config, plain(config))
    _require_same_numbers(model, manifest.derived)
    _require_same_rotations(model, manifest)


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


def _require_same(
    spec: PhysicalTensor, tensor: Tensor, ties: tuple[str, ...], known: Collection[str], shards: int
) -> None:
    """Compare one tensor. A tie that vLLM's model lacks under any name is none of its own: Gemma2 has no head."""
    shape = tuple(tensor.shape)
    if shards > 1 and _may_be_shard(shape, spec.shape, shards):
        shape = spec.shape  # vLLM's loader checks the size of each part
    mine = {
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": shape,
        "ties": tuple(sorted(ties)),
    }
    theirs = {
        "dtype": spec.dtype,
        "shape": spec.shape,
        "ties": tuple(sorted(tie for tie in spec.ties if tie in known)),
    }
    for key, left in theirs.items():
        if left != mine[key]:
            raise WeightsMismatchError(
                spec.name, f"{key} is {left} in the segment, {mine[key]} in vLLM's model"
            )


def _may_be_shard(mine: tuple[int, ...], whole: tuple[int, ...], shards: int) -> bool:
    """Return whether a shape may be that of one of several shards; heads of keys and values may be repeated."""
    return len(mine) == len(whole) and all(
        part <= all_of_it <= part * shards for part, all_of_it in zip(mine, whole, strict=True)
    )


def _require_mappable(name: str, tensor: Tensor, device: torch.device) -> None:
    if tensor.device != device or not tensor.is_contiguous():
        raise WeightsMismatchError(
            name,
            f"must lie on {device} in one piece to be mapped (got {tensor.device}); "
            'for vLLM elsewhere set weights.backend = "vllm_http"',
        )


def _require_same_numbers(model: nn.Module, derived: Mapping[str, str]) -> None:
    """Compare the constants of modules that both sides have."""
    for prefix, module in model.named_modules():
        for name, value in vars(module).items():
            theirs = derived.get(f"{prefix}.{name}")
            if isinstance(value, float) and theirs not in {None, repr(value)}:
                raise WeightsMismatchError(
                    f"{prefix}.{name}", f"is {theirs} in the segment, {value!r} in vLLM's model"
                )


def _require_same_rotations(model: nn.Module, manifest: WeightManifest) -> None:
    """Compare the table of each layer with the owner's for that kind of layer; vLLM shares one among layers."""
    digests: dict[int, str] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        if not (hasattr(module, "cos_sin_cache") or prefix.rpartition(".")[2] == "rotary_emb"):
            continue
        theirs = _rotation_of(prefix, manifest)
        if id(module) not in digests:
            table = _table(prefix, module, theirs.positions)
            digests[id(module)] = digest(table[at : at + ROWS] for at in range(0, len(table), ROWS))
        if (mine := digests[id(module)]) != theirs.digest:
            kind = type(module).__name__
            why = known_differences.remark(manifest.config)
            raise WeightsMismatchError(
                prefix, f"cos and sin are {theirs.digest} in the segment, {mine} in vLLM's {kind}{why}"
            )


def _rotation_of(prefix: str, manifest: WeightManifest) -> Rotation:
    """Return the owner's rotation for the layer of a module of vLLM."""
    kinds = manifest.config.get("layer_types") or ()
    number = int(found[1]) if (found := _LAYER.search(prefix)) else -1
    mine = {"", kinds[number]} if 0 <= number < len(kinds) else {""}
    fitting = [one for one in manifest.rotations if one.layers in mine]
    if len(fitting) != 1:
        raise WeightsMismatchError(prefix, f"must rotate as one module of the owner (got {len(fitting)})")
    return fitting[0]


def _table(prefix: str, module: Any, positions: int) -> Tensor:
    """Return the rows of a module's table that are read: cosines, then sines."""
    table: Tensor | None = getattr(module, "cos_sin_cache", None)
    if table is None:
        raise WeightsMismatchError(prefix, f"{type(module).__name__} has no table to compare")
    if table.device.type != "cpu":  # what the same code gives on a CPU
        with torch.device("cpu"):
            table = module._compute_cos_sin_cache().to(table.dtype)
    assert table is not None
    if table.shape[0] < positions:
        raise WeightsMismatchError(prefix, f"has {table.shape[0]} positions, the model has {positions}")
    return table[:positions]
