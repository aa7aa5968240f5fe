"""Chunks of a version: equal parts of the tensors' memory, and a digest of each.

The memory is that of `layout`: all tensors at their offsets, from the first byte to `WeightManifest.end`. It is cut
into chunks of one size without regard to the tensors; the last one is shorter. A digest is the CRC32C of the bytes and
the sum of their 64-bit words: it shows a change by training or by damage, not one made to deceive. Pure.
"""

from collections.abc import Iterable
from typing import Any, Final

import google_crc32c
import numpy as np
import numpy.typing as npt

from rolloutmq.trainer.weights.manifest import WeightManifest

CHUNK_BYTES: Final = 1 << 20
"""Fits the cache of a core, so that copy, digest and cipher read each byte from memory once."""
DIGEST: Final = np.dtype([("crc", "<u4"), ("sum", "<u8"), ("known", "u1")])
"""A digest; `known` is 0 where there is none, and `HERE` where the chunk is there without one."""
HERE: Final = 2

Bytes = npt.NDArray[np.uint8]
Digests = npt.NDArray[Any]


def count_of(nbytes: int) -> int:
    """Return the number of chunks of so many bytes."""
    return -(-nbytes // CHUNK_BYTES)


def chunk(data: Bytes, index: int) -> Bytes:
    """Return a view of one chunk of the tensors' memory."""
    return data[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES]


def unknown(count: int) -> Digests:
    """Return a table in which no digest is known."""
    return np.zeros(count, DIGEST)


def digest(data: Bytes) -> tuple[int, int, int]:
    """Return the digest of a chunk, as a row of a table. Takes 0.2 s for a GB."""
    whole = data.size & ~7
    total = int(np.add.reduce(data[:whole].view(np.uint64), dtype=np.uint64))
    tail = int.from_bytes(data[whole:].tobytes(), "little")
    return int(google_crc32c.value(data)), (total + tail) & (2**64 - 1), 1


def checksum(data: Bytes, before: int = 0) -> int:
    """Return the CRC32C of bytes, which shows damage on their way; `before` is that of the bytes before them."""
    return int(google_crc32c.extend(before, data))


def digests(data: Bytes) -> Digests:
    """Return the table of the tensors' memory."""
    table = unknown(count_of(data.size))
    for index in range(len(table)):
        table[index] = digest(chunk(data, index))
    return table


def decoded(data: bytes, count: int) -> Digests | None:
    """Return a table that came as bytes, or None if it is not one of so many chunks."""
    return np.frombuffer(data, DIGEST) if len(data) == count * DIGEST.itemsize else None


def tensors_at(manifest: WeightManifest, index: int) -> str:
    """Return the names of the tensors in a chunk, at most three, for an error."""
    start, end = index * CHUNK_BYTES, (index + 1) * CHUNK_BYTES
    names = [
        spec.name for spec in manifest.tensors if spec.offset < end and spec.offset + spec.nbytes > start
    ]
    return _listed(names)


def _listed(names: Iterable[str]) -> str:
    first, *rest = [*names] or ["padding"]
    return ", ".join((first, *rest[:2])) + (f" and {len(rest) - 2} more" if len(rest) > 2 else "")
