"""Weights in a file that goes to a server: safetensors, written in place into a file that its maker holds.

The library's own writer makes a file beside the one that is named and renames it over that: whoever held the one that
was there would hold nothing any more, and a maker that was killed would leave a name that no sweep knows. Here the
bytes go into the very file that is held, one tensor after the other, so that no second whole copy lies in memory.
"""

import fcntl
import os
import secrets
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import torch
from torch import Tensor

from rolloutmq.bus import segments
from rolloutmq.trainer.weights.address import PARCEL

TYPES: Final = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
"""What the format calls the types that can be shared."""
_ALIGNED: Final = 8


class Parcel(NamedTuple):
    """A file that only this user reads, held as segments are: what a dead trainer left is swept with them."""

    path: Path
    fd: int

    def write(self, tensors: Mapping[str, Tensor], metadata: dict[str, str]) -> None:
        """Fill the file. Blocks for as long as the bytes take.

        Raises:
            OSError: There is no room for them.
        """
        # The format wants no gaps: the widest types come first, so that each tensor lies at a multiple of its type.
        order = sorted(tensors, key=lambda name: (-tensors[name].element_size(), name))
        header: dict[str, object] = {"__metadata__": metadata}
        end = 0
        for name in order:
            tensor = tensors[name]
            start, end = end, end + tensor.numel() * tensor.element_size()
            header[name] = {
                "dtype": TYPES[tensor.dtype],
                "shape": list(tensor.shape),
                "data_offsets": [start, end],
            }
        said = msgspec.json.encode(header)
        said += b" " * (-len(said) % _ALIGNED)
        with os.fdopen(self.fd, "wb", closefd=False) as file:
            file.write(len(said).to_bytes(8, "little") + said)
            for name in order:
                file.write(_bytes(tensors[name]))


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


@contextmanager
def parcel(directory: Path) -> Iterator[Parcel]:
    """Make an empty parcel, there and held as long as the block lasts."""
    path = directory / f"{segments.PREFIX}{secrets.token_hex(8)}-{PARCEL}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        segments.lock_byte(fd, 0, fcntl.F_RDLCK)
        yield Parcel(path, fd)
    finally:
        path.unlink(missing_ok=True)
        os.close(fd)
