"""What shared weights consist of, and the proof that a model means exactly the same.

A manifest lists every parameter and every persistent buffer by its name in the state dict, once for each storage, with
the names that are tied to it, and those facts of the configuration that change the output but no shape (RoPE, norm,
activation). Two sides agree on all of it or not at all: there is no coverage in per cent, no conversion and no
default. Models are inspected by duck typing, so nothing here imports torch.
"""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.schemas.sharing import WeightsMismatchError

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT: Final = 1
ALIGNMENT: Final = 256
"""Bytes; what vector loads and a later copy to a device like."""
DTYPES: Final = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "int8", "bool")
CONFIG_KEYS: Final = (
    "model_type",
    "rope_parameters",
    "rms_norm_eps",
    "layer_norm_eps",
    "hidden_act",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "sliding_window",
    "tie_word_embeddings",
)
"""What no shape proves: equal tensors under another of these give other tokens."""


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor: where it lies in the segment and what its bytes mean. `stride` is in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    ties: tuple[str, ...] = ()
    """Other names of the same storage."""


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors in the order of their offsets."""

    format: int = FORMAT
    tensors: tuple[TensorSpec, ...]
    config: dict[str, Any]
    """Values of `CONFIG_KEYS`, as JSON has them."""
    derived: dict[str, str] = {}
    """Digest of each buffer that is computed and not shared (RoPE tables): both sides must have computed the same."""

    @property
    def end(self) -> int:
        """Offset behind the last tensor, in bytes."""
        last = self.tensors[-1]
        return last.offset + last.nbytes


def describe(model: "nn.Module") -> WeightManifest:
    """Describe the weights of a model, built or on meta, with offsets from 0.

    Raises:
        WeightsMismatchError: A tensor cannot be shared: not dense, of an unknown type, or a hidden view of another.
    """
    names: dict[int, list[str]] = {}
    first: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        first.setdefault(id(tensor), tensor)
    if not first:
        raise WeightsMismatchError("model", "has no tensors")
    specs, offset, storages = [], 0, dict[int, str]()
    for key, tensor in first.items():
        spec = _spec(names[key], tensor, offset)
        if not tensor.is_meta and spec.nbytes:
            storage = tensor.untyped_storage().data_ptr()
            if other := storages.get(storage):
                raise WeightsMismatchError(
                    spec.name, f"is another tensor on the storage of {other}: tie them"
                )
            storages[storage] = spec.name
        specs.append(spec)
        offset = align(offset + spec.nbytes)
    return WeightManifest(tensors=tuple(specs), config=_config_facts(model))


def named_tensors(model: "nn.Module") -> Iterator[tuple[str, "Tensor"]]:
    """Yield every parameter and persistent buffer under each of its names, in a stable order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        dot = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield dot + name, parameter
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield dot + name, buffer


def align(offset: int) -> int:
    """Return the next offset at which a tensor may begin."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def _spec(names: list[str], tensor: "Tensor", offset: int) -> TensorSpec:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype not in DTYPES:
        raise WeightsMismatchError(names[0], f"type {dtype} cannot be shared")
    if not tensor.is_contiguous():
        raise WeightsMismatchError(names[0], f"stride {tuple(tensor.stride())} is not dense")
    return TensorSpec(
        name=names[0],
        dtype=dtype,
        shape=tuple(tensor.shape),
        stride=tuple(tensor.stride()),
        offset=offset,
        nbytes=tensor.numel() * tensor.element_size(),
        ties=tuple(names[1:]),
    )


def _config_facts(model: "nn.Module") -> dict[str, Any]:
    config = getattr(model, "config", None)
    facts = {key: getattr(config, key) for key in CONFIG_KEYS if hasattr(config, key)}
    plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(facts))
    return plain


def require_equal(shared: WeightManifest, mine: WeightManifest) -> None:
    """Prove that a model means exactly the tensors of a segment.

    Raises:
        WeightsMismatchError: It does not; names the first tensor or key that differs.
    """
    if shared.format != mine.format:
        raise WeightsMismatchError("format", f"{shared.format} in the segment, this side knows {mine.format}")
    theirs = {spec.name: spec for spec in shared.tensors}
    ours = {spec.name: spec for spec in mine.tensors}
    aliases = {alias: spec.name for spec in shared.tensors for alias in spec.ties}
    for name in ours.keys() - theirs.keys():
        tied = (
            f"is tied to {aliases[name]} in the segment only" if name in aliases else "is not in the segment"
        )
        raise WeightsMismatchError(name, tied)
    for name in theirs.keys() - ours.keys():
        raise WeightsMismatchError(name, "is in the segment, but not (or only as a tie) in the model")
    for name, spec in theirs.items():
        _require_same(spec, ours[name])
    for key in sorted(shared.config.keys() | mine.config.keys()):
        left, right = shared.config.get(key), mine.config.get(key)
        if left != right:
            raise WeightsMismatchError(f"config.{key}", f"{left!r} in the segment, {right!r} in the model")


def require_derived(shared: dict[str, str], mine: dict[str, str]) -> None:
    """Prove that both sides computed the same buffers: a table rounded to bfloat16 turns every position.

    Raises:
        WeightsMismatchError: They did not; names the first buffer that differs.
    """
    for name in sorted(shared.keys() | mine.keys()):
        left, right = shared.get(name, "nothing"), mine.get(name, "nothing")
        if left != right:
            raise WeightsMismatchError(name, f"was computed as {left} by the owner, {right} here")


def _require_same(theirs: TensorSpec, mine: TensorSpec) -> None:
    for fact in ("dtype", "shape", "stride", "ties", "offset"):
        left, right = getattr(theirs, fact), getattr(mine, fact)
        if left != right:
            raise WeightsMismatchError(theirs.name, f"{fact} is {left} in the segment, {right} in the model")
