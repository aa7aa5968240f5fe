"""Layout of the tensors of a manifest: in a row, or so that a server with fused projections can map them.

A server such as vLLM has one tensor where transformers has several: `qkv_proj` contains the rows of q, k and v,
`gate_up_proj` those of gate and up; the rows of its embedding are padded to a multiple of 64. In the fused layout the
parts lie back to back, and behind an embedding there is space for the padding rows, which stay zero. Both sides see the
same bytes under their own names: transformers the logical tensors, the server the physical ones.

Offsets count from the first byte behind the leading pages (`WeightManifest.base`). Pure, no torch.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

import msgspec

from rolloutmq.schemas.errors import WeightsMismatchError

ALIGNMENT: Final = 256
"""Alignment in bytes, for vector loads and copies to a device. Parts of a fused tensor have no gaps."""
ROW_MULTIPLE: Final = 64
"""vLLM pads its vocabulary to a multiple of this (`DEFAULT_VOCAB_PADDING_SIZE`)."""
FUSED: Final = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
"""Physical module, and the modules of transformers whose rows it contains, in order."""
_PART: Final = re.compile(r"(?:^|(?<=\.))(self_attn\.(?:q|k|v)_proj|mlp\.(?:gate|up)_proj)\.(?:weight|bias)$")
_PADDED: Final = re.compile(r"(?:^|\.)(?:embed_tokens|lm_head)\.weight$")


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One logical tensor: location and element layout. `stride` is in elements."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    nbytes: int
    ties: tuple[str, ...] = ()
    """Other names of the same storage."""


class PhysicalTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a server with fused projections; dense, row-major."""

    name: str
    """The server's name."""
    dtype: str
    shape: tuple[int, ...]
    """Shape with padding rows."""
    offset: int
    nbytes: int
    parts: tuple[str, ...]
    """Logical tensors whose rows it contains, in order; one if nothing is fused."""
    ties: tuple[str, ...] = ()
    """The server's other names of the same storage."""


def align(offset: int) -> int:
    """Return the next aligned offset."""
    return -(-offset // ALIGNMENT) * ALIGNMENT


def in_a_row(specs: Iterable[TensorSpec]) -> tuple[TensorSpec, ...]:
    """Place tensors in a row."""
    return tuple(_placed(((spec,) for spec in specs), pad=False))


def fused(specs: Sequence[TensorSpec]) -> tuple[tuple[TensorSpec, ...], tuple[PhysicalTensor, ...]]:
    """Place tensors for a server with fused projections; return them and the server's physical tensors.

    Raises:
        WeightsMismatchError: A part lacks its neighbours, or they cannot be fused.
    """
    groups = list(_groups(specs))
    placed = {spec.name: spec for spec in _placed(groups, pad=True)}
    physical = [_physical([placed[part.name] for part in group]) for group in groups]
    return tuple(placed.values()), tuple(physical)


def _placed(groups: Iterable[Sequence[TensorSpec]], *, pad: bool) -> Iterator[TensorSpec]:
    offset = 0
    for group in groups:
        for spec in group:
            yield msgspec.structs.replace(spec, offset=offset)
            offset += spec.nbytes
        offset = align(offset + (_padding_bytes(group[0]) if pad else 0))


def _groups(specs: Sequence[TensorSpec]) -> Iterator[tuple[TensorSpec, ...]]:
    """Yield the parts of each physical tensor, at the place of the first part."""
    known = {spec.name: spec for spec in specs}
    done: set[str] = set()
    for spec in specs:
        if spec.name in done:
            continue
        group = tuple(_part(known, spec, name) for name in _part_names(spec.name))
        done.update(part.name for part in group)
        yield group


def _part_names(name: str) -> list[str]:
    """Return the names of all parts of the physical tensor that contains a tensor; its own name if not fused."""
    module, leaf = _fused_module(name)
    if not module:
        return [name]
    head = name.removesuffix(leaf)
    _, kind = leaf.split(".")
    return [f"{head}{part}.{kind}" for part in FUSED[module]]


def _fused_module(name: str) -> tuple[str, str]:
    """Return the physical module of a part and the last two components of its name, or empty strings."""
    if not _PART.search(name):
        return "", ""
    leaf = ".".join(name.split(".")[-2:])
    return next((module, leaf) for module, parts in FUSED.items() if leaf.split(".")[0] in parts)


def _part(known: dict[str, TensorSpec], first: TensorSpec, name: str) -> TensorSpec:
    part = known.get(name)
    if part is None:
        raise WeightsMismatchError(name, f"is missing: {first.name} cannot be fused without it")
    if part.dtype != first.dtype or part.shape[1:] != first.shape[1:]:
        raise WeightsMismatchError(
            name, f"{part.dtype} {part.shape} cannot be fused with {first.name}, {first.dtype} {first.shape}"
        )
    if name != first.name and (part.ties or first.ties):
        raise WeightsMismatchError(name, "is tied and cannot be fused")
    return part


def _physical(parts: Sequence[TensorSpec]) -> PhysicalTensor:
    first = parts[0]
    rows = sum(part.shape[0] for part in parts) if first.shape else 0
    shape = (rows + _padding_rows(first), *first.shape[1:]) if first.shape else ()
    return PhysicalTensor(
        name=_physical_name(first.name),
        dtype=first.dtype,
        shape=shape,
        offset=first.offset,
        nbytes=sum(part.nbytes for part in parts) + _padding_bytes(first),
        parts=tuple(part.name for part in parts),
        ties=tuple(map(_physical_name, first.ties)),
    )


def _physical_name(name: str) -> str:
    module, leaf = _fused_module(name)
    return f"{name.removesuffix(leaf)}{module}.{leaf.split('.')[1]}" if module else name


def _padding_rows(spec: TensorSpec) -> int:
    names = (spec.name, *spec.ties)
    return -spec.shape[0] % ROW_MULTIPLE if any(map(_PADDED.search, names)) else 0


def _padding_bytes(spec: TensorSpec) -> int:
    if not spec.shape or not spec.nbytes:
        return 0
    return _padding_rows(spec) * (spec.nbytes // math.prod(spec.shape)) * math.prod(spec.shape[1:])
