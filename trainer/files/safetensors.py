"""Writer of safetensors files in place, tensor by tensor, in whatever order the tensors come.

The header precedes the tensors and is computed from their descriptions, so no tensor has to be there when the file is
begun, and at most one is copied to the memory of the host at a time. The library's own writer needs all tensors at
once, and replaces the file by a rename, which would lose a lock on it.
"""

from collections.abc import Iterable, Mapping
from typing import BinaryIO, Final, Protocol

import msgspec
import torch
from torch import Tensor

TYPES: Final[Mapping[str, str]] = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""Names in the format of those types of torch that can be shared."""

_ALIGNED: Final = 8


class Described(Protocol):
    """Name, type as torch calls it, shape and size of a tensor in the file."""

    @property
    def name(self) -> str: ...
    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def nbytes(self) -> int: ...


def write(
    file: BinaryIO,
    described: Iterable[Described],
    tensors: Iterable[tuple[Described, Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Fill an empty file. Blocks while writing; the caller syncs.

    Args:
        file: Opened for writing, at its beginning.
        described: All tensors of the file.
        tensors: Each of them once, in any order and on any device.
        metadata: Texts by name.

    Raises:
        OSError: There is no space.
    """
    # The format allows no gaps: the widest types come first, so that each tensor is aligned to its type.
    order = sorted(described, key=lambda one: (-getattr(torch, one.dtype).itemsize, one.name))
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    starts: dict[str, int] = {}
    end = 0
    for one in order:
        starts[one.name], end = end, end + one.nbytes
        header[one.name] = {
            "dtype": TYPES[one.dtype],
            "shape": list(one.shape),
            "data_offsets": [starts[one.name], end],
        }
    encoded = msgspec.json.encode(header)
    encoded += b" " * (-len(encoded) % _ALIGNED)
    file.write(len(encoded).to_bytes(8, "little") + encoded)
    begin = at = 8 + len(encoded)
    for one, tensor in tensors:
        start = begin + starts[one.name]
        if start != at:
            file.seek(start)
        file.write(_bytes(tensor))
        at = start + one.nbytes


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
