"""Manifest of shared weights, and the check that a model has exactly the same tensors.

A manifest lists every parameter and persistent buffer by its state-dict name, once per storage, with the names tied to
it; the model properties that shapes do not show (`fingerprint`); and the tokenizer's fingerprint. Two sides must agree
on all of it: there are no conversions and no defaults. Models are inspected by duck typing, so nothing here imports
torch.
"""

import itertools
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import msgspec

from rolloutmq.schemas.errors import WeightsMismatchError
from rolloutmq.trainer.weights import layout
from rolloutmq.trainer.weights.fingerprint import config_facts, require_reached, require_same_config
from rolloutmq.trainer.weights.layout import PhysicalTensor, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor, nn

FORMAT: Final = 3
MANIFEST_LIMIT_BYTES: Final = 64 << 20
"""Largest encoded manifest."""
DTYPES: Final = ("float32", "bfloat16", "float16", "float64", "int64", "int32", "uint8", "int8", "bool")


class Rotation(msgspec.Struct, frozen=True, kw_only=True):
    """Cos and sin of each position as one rotary module computes them, see `rotation`."""

    name: str
    """The module."""
    layers: str = ""
    """Kind of layers that use it, as in `layer_types` of the configuration; empty for all."""
    positions: int
    digest: str


class WeightManifest(msgspec.Struct, frozen=True, kw_only=True):
    """All tensors in the order of their offsets."""

    format: int = FORMAT
    base: int = 0
    """Position of offset 0: bytes before the tensors in their memory."""
    tensors: tuple[TensorSpec, ...]
    fused: tuple[PhysicalTensor, ...] = ()
    """Tensors of a server with fused projections; empty without such a layout."""
    config: dict[str, Any]
    """Relevant configuration as JSON values."""
    derived: dict[str, str] = {}
    """Digests of computed values (RoPE frequencies, scalings): both sides must compute the same."""
    rotations: tuple[Rotation, ...] = ()
    """RoPE tables, for a server with tables; empty without a layout for it."""
    tokenizer: str = ""
    """Fingerprint of the tokenizer; empty if the owner has none."""

    @property
    def end(self) -> int:
        """Offset behind the last tensor, in bytes."""
        placed: list[TensorSpec | PhysicalTensor] = [*self.tensors, *self.fused]
        return max(one.offset + one.nbytes for one in placed)


def describe(model: "nn.Module", *, fused: bool = False) -> WeightManifest:
    """Return the manifest of a model, built or on meta, with offsets from 0.

    Args:
        fused: Also lay the tensors out for a server with fused projections, see `layout`.

    Raises:
        WeightsMismatchError: A tensor cannot be shared: not dense, of an unknown type, or a hidden view of another.
    """
    require_reached(model)
    names: dict[int, list[str]] = {}
    first: dict[int, Tensor] = {}
    for name, tensor in named_tensors(model):
        names.setdefault(id(tensor), []).append(name)
        first.setdefault(id(tensor), tensor)
    if not first:
        raise WeightsMismatchError("model", "has no tensors")
    specs, ranges = list[TensorSpec](), list[tuple[int, int, str]]()
    for key, tensor in first.items():
        spec = _spec(names[key], tensor)
        if not tensor.is_meta and spec.nbytes:
            ranges.append((tensor.data_ptr(), tensor.data_ptr() + spec.nbytes, spec.name))
        specs.append(spec)
    _require_apart(ranges)
    placed, physical = layout.fused(specs) if fused else (layout.in_a_row(specs), ())
    return WeightManifest(tensors=placed, fused=physical, config=config_facts(model))


def _require_apart(ranges: list[tuple[int, int, str]]) -> None:
    order = {name: number for number, (_, _, name) in enumerate(ranges)}
    for (_, end, left), (start, _, right) in itertools.pairwise(sorted(ranges)):
        if start < end:
            first, second = sorted((left, right), key=order.__getitem__)
            raise WeightsMismatchError(
                second, f"shares the storage of {first} without being tied to it; tie them"
            )


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


def arriving(
    manifest: WeightManifest, tensors: "Iterable[tuple[str, Tensor]]"
) -> "Iterator[tuple[TensorSpec, Tensor]]":
    """Yield each tensor of a manifest once, as it arrives, with its description.

    A tied tensor may arrive under any of its names, also under several: the first one is yielded.

    Raises:
        WeightsMismatchError: A tensor is sharded, unknown, of another type or shape, comes twice, or never comes.
    """
    specs = {name: spec for spec in manifest.tensors for name in (spec.name, *spec.ties)}
    came, given = set[str](), set[str]()
    for name, tensor in tensors:
        spec = specs.get(name)
        if spec is None:
            raise WeightsMismatchError(name, "is not in the shared model")
        if hasattr(tensor, "full_tensor"):
            raise WeightsMismatchError(name, "is sharded; gather it, see `trainer.sharding.gathered`")
        found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape)
        if found != (spec.dtype, spec.shape):
            raise WeightsMismatchError(
                name, f"is {found} here, {(spec.dtype, spec.shape)} in the shared model"
            )
        if name in came:
            raise WeightsMismatchError(name, "came twice")
        came.add(name)
        if spec.name not in given:
            given.add(spec.name)
            yield spec, tensor.detach()
    for spec in manifest.tensors:
        if spec.name not in given:
            raise WeightsMismatchError(spec.name, "was not given; a version has every tensor")


def _spec(names: list[str], tensor: "Tensor") -> TensorSpec:
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
        offset=0,
        nbytes=tensor.numel() * tensor.element_size(),
        ties=tuple(names[1:]),
    )


def require_equal(shared: WeightManifest, mine: WeightManifest) -> None:
    """Check that a model has exactly the tensors of a manifest.

    Raises:
        WeightsMismatchError: It does not; names the first tensor or key that differs.
    """
    if shared.format != mine.format:
        raise WeightsMismatchError("format", f"{shared.format} in the segment, {mine.format} on this side")
    theirs = {spec.name: spec for spec in shared.tensors}
    ours = {spec.name: spec for spec in mine.tensors}
    _require_same_names(theirs, ours)
    for name, spec in theirs.items():
        _require_same(spec, ours[name])
    if shared.fused != mine.fused:
        raise WeightsMismatchError("fused", "the tensors have the layout of another server")
    require_same_config(shared.config, mine.config)


def _require_same_names(theirs: dict[str, TensorSpec], ours: dict[str, TensorSpec]) -> None:
    aliases = {alias: spec.name for spec in theirs.values() for alias in spec.ties}
    own_aliases = {alias: spec.name for spec in ours.values() for alias in spec.ties}
    for name in sorted(ours.keys() - theirs.keys()):
        tied = f"is tied to {aliases.get(name)} in the segment only"
        raise WeightsMismatchError(name, tied if name in aliases else "is not in the segment")
    for name in sorted(theirs.keys() - ours.keys()):
        tied = f"is tied to {own_aliases.get(name)} in the model, but not in the segment"
        raise WeightsMismatchError(
            name, tied if name in own_aliases else "is in the segment, not in the model"
        )


def require_derived(shared: dict[str, str], mine: dict[str, str]) -> None:
    """Check that both sides computed the same values: a RoPE table rounded to bfloat16 changes every position.

    Raises:
        WeightsMismatchError: They differ; names the first.
    """
    for name in sorted(shared.keys() | mine.keys()):
        left, right = shared.get(name, "nothing"), mine.get(name, "nothing")
        if left != right:
            raise WeightsMismatchError(name, f"was computed as {left} by the owner, {right} here")


def _require_same(theirs: TensorSpec, mine: TensorSpec) -> None:
    for fact in ("dtype", "shape", "stride", "ties", "nbytes", "offset"):
        left, right = getattr(theirs, fact), getattr(mine, fact)
        if left != right:
            raise WeightsMismatchError(theirs.name, f"{fact} is {left} in the segment, {right} in the model")
