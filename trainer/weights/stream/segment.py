"""A segment of shared weights as bytes: the reader of a sender, and the writer of a receiver.

Both know the pages and the lock of `posix_shm`, and no model. The writer is the owner of its segment, as a trainer is
of its own: engines attach to it, check their model against its manifest, and wait for its lock.
"""

import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Self

import msgspec
import numpy as np

from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile
from rolloutmq.schemas.errors import SegmentGoneError, SegmentInUseError, WeightsMismatchError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.layout import align
from rolloutmq.trainer.weights.lock import PAGE_BYTES, TENSORS_AT, WeightLock
from rolloutmq.trainer.weights.manifest import MANIFEST_LIMIT_BYTES, WeightManifest
from rolloutmq.trainer.weights.stream.chunks import Bytes
from rolloutmq.trainer.weights.stream.messages import layout_of

KIND: Final = "weights"
"""As of `posix_shm.WeightShare`."""
COPY_THREADS: Final = 4
COPY_BYTES: Final = 256 << 20
"""Least bytes for each thread of a copy. The C library copies so many at once past the caches, for half the CPU; two
threads with less each were no faster."""


class WeightSegment:
    """An open segment: lock, manifest, and the memory of its tensors. Make it by `read`, `adopt` or `create`."""

    def __init__(self, segment: SegmentFile, memory: mmap.mmap) -> None:
        self.path = segment.path
        self.nonce = segment.nonce
        self.lock = WeightLock(memory, segment.fd)
        self._segment = segment
        try:
            self.encoded = _encoded(memory, self.lock)
            self.manifest = _decoded(self.encoded)
        except BaseException:
            self.lock.close()
            raise
        self.layout = layout_of(self.encoded)
        self.data: Bytes = np.frombuffer(memory, np.uint8, self.manifest.end, TENSORS_AT)
        """The memory of the tensors, from offset 0."""

    @classmethod
    def read(cls, address_file: Path) -> Self:
        """Map the segment in an address file read-only.

        Raises:
            SegmentGoneError: There is no address, or it is outdated.
            WeightsMismatchError: The weights are not in shared memory, or its manifest is damaged.
        """
        segment = _named(address_file)
        return cls._mapped(segment, mmap.PROT_READ)

    @classmethod
    def adopt(cls, address_file: Path) -> Self | None:
        """Take over the segment of a dead owner; None if there is none.

        Raises:
            SegmentInUseError: The owner lives.
        """
        try:
            segment = _named(address_file, writable=True)
        except (SegmentGoneError, WeightsMismatchError):
            return None
        owner = segment.owner()
        if owner is not None and owner.alive():
            os.close(segment.fd)
            raise SegmentInUseError(str(segment.path), owner.pid)
        try:
            adopted = cls._mapped(segment, mmap.PROT_READ | mmap.PROT_WRITE)
        except (SegmentGoneError, WeightsMismatchError):
            return None
        segment.claim()
        return adopted

    @classmethod
    def create(cls, encoded: bytes) -> Self:
        """Create a segment for the tensors of a manifest; publish it with `write_address` once they are there.

        Raises:
            MissingError: There is not enough shared memory.
        """
        offset = TENSORS_AT + align(_decoded(encoded).end)
        segment = segment_file.create(KIND, offset + len(encoded))
        try:
            memory = mmap.mmap(segment.fd, 0)
            memory[offset:] = encoded
            lock = WeightLock(memory, segment.fd)
            lock.place_manifest(offset, len(encoded))
            lock.close()
            return cls(segment, memory)
        except BaseException:
            segment.discard()
            raise

    @classmethod
    def _mapped(cls, segment: SegmentFile, access: int) -> Self:
        try:
            return cls(segment, mmap.mmap(segment.fd, 0, prot=access))
        except ValueError:
            os.close(segment.fd)
            raise SegmentGoneError(str(segment.path), "it is empty") from None
        except BaseException:
            os.close(segment.fd)
            raise

    @property
    def write(self) -> str:
        """Name of the last complete write."""
        return f"{self.nonce}:{self.lock.writes}"

    def owner_lives(self) -> bool:
        """Return whether its owner lives."""
        owner = self._segment.owner()
        return owner is not None and owner.alive()

    @contextmanager
    def writing(self, version: PolicyVersion, patience_s: float) -> Iterator[None]:
        """Lock out readers while the block makes the weights those of `version`, also if they are half-written.

        Raises:
            WeightsBusyError: A reader holds the lock longer than `patience_s`.
        """
        with self.lock.writing(version, restoring=True, patience_s=patience_s):
            yield

    def write_address(self, address_file: Path) -> None:
        """Publish the segment."""
        segment_file.write_address(address_file, self._segment)

    def close(self, *, remove: bool = False) -> None:
        """Release the segment; with `remove`, also remove its file. May be called once.

        Its memory stays mapped while a view of `data` is in use.
        """
        self.lock.close()
        del self.data
        if remove:
            self.path.unlink(missing_ok=True)
        os.close(self._segment.fd)

    def leave(self) -> None:
        """Leave the segment without an owner, for the next life of the receiver. For its owner."""
        self._segment.release()
        self.close()


def copy_parts(target: Bytes, parts: Sequence[tuple[int, Bytes]]) -> None:
    """Copy parts to their offsets, in several threads if they are large: somebody waits for a lock meanwhile."""
    threads = min(COPY_THREADS, os.cpu_count() or 1, sum(part.size for _, part in parts) // COPY_BYTES)
    if threads < 2:
        _copy(target, parts)
        return
    with ThreadPoolExecutor(threads) as pool:
        shares = [[_slice(one, number, threads) for one in parts] for number in range(threads)]
        for _ in pool.map(lambda share: _copy(target, share), shares):
            pass


def _slice(part: tuple[int, Bytes], number: int, count: int) -> tuple[int, Bytes]:
    """Return the share of one thread in a part."""
    offset, data = part
    start, end = data.size * number // count, data.size * (number + 1) // count
    return offset + start, data[start:end]


def _copy(target: Bytes, parts: Iterable[tuple[int, Bytes]]) -> None:
    for offset, part in parts:
        np.copyto(target[offset : offset + part.size], part)


def _named(address_file: Path, *, writable: bool = False) -> SegmentFile:
    address = segment_file.read_address(address_file)
    if address is None:
        raise SegmentGoneError(str(address_file), "no address has been published yet")
    path = Path(address.path)
    if not path.name.endswith(f"-{KIND}"):
        raise WeightsMismatchError("backend", f"{path.name} is not in the memory of a host")
    return segment_file.open_existing(path, address.nonce, writable=writable)


def _encoded(memory: mmap.mmap, lock: WeightLock) -> bytes:
    offset, nbytes = lock.manifest_range
    if offset < PAGE_BYTES or not 0 < nbytes <= MANIFEST_LIMIT_BYTES or offset + nbytes > len(memory):
        raise WeightsMismatchError("manifest", f"lies at {offset}, {nbytes} bytes: outside the segment")
    return memory[offset : offset + nbytes]


def _decoded(encoded: bytes) -> WeightManifest:
    try:
        manifest = msgspec.json.decode(encoded, type=WeightManifest)
    except msgspec.DecodeError as error:
        raise WeightsMismatchError("manifest", str(error)) from None
    if manifest.base != TENSORS_AT:
        raise WeightsMismatchError("manifest", f"its tensors begin at {manifest.base}, not at {TENSORS_AT}")
    return manifest
