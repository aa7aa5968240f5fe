"""Stage: the chunks of the next version, in a segment of their own, until it is whole.

    header page | digests of the chunks that are here | tensors' memory

A digest is written after its chunk, and erased before the chunk is overwritten. So what a killed receiver leaves is
valid, and the next life asks for the rest only. Once all chunks of a version are here the header says so, with the
version: a receiver killed while it copies them into the weights finds a stage that is whole, and copies again.

Memory is allocated chunk by chunk when it is first used, and kept: a run that sends few chunks needs little.
"""

import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Self

import numpy as np

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.shm import segment_file
from rolloutmq.bus.shm.segment_file import SegmentFile
from rolloutmq.schemas.errors import MissingError, SegmentGoneError
from rolloutmq.schemas.files import StagedWeights
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.weights.stream.chunks import (
    CHUNK_BYTES,
    DIGEST,
    HERE,
    Bytes,
    chunk,
    count_of,
    digest,
)
from rolloutmq.trainer.weights.stream.messages import NAME_BYTES

KIND: Final = "stage"
_PAGE: Final = 4096
_STATE: Final = struct.Struct("<QQqq64s128s")
"""Whether it is whole, bytes of the tensors, version, layout, write; behind the segment's header."""
_STATE_AT: Final = 64


class Stage:
    """Chunks of one layout. Make it by `adopt` or `create`. Belongs to one thread."""

    def __init__(self, segment: SegmentFile, layout: str, nbytes: int) -> None:
        self.layout = layout
        self._segment = segment
        self._nbytes = nbytes
        self._memory = mmap.mmap(segment.fd, _size(nbytes))
        count = count_of(nbytes)
        self.table = np.frombuffer(self._memory, DIGEST, count, _PAGE)
        """Digests of the chunks that are here; changes with them."""
        self._known = self.table["known"]
        self._data: Bytes = np.frombuffer(self._memory, np.uint8, nbytes, _data_at(nbytes))
        self._allocated = np.zeros(count, bool)

    @classmethod
    def create(cls, layout: str, nbytes: int, file: Path) -> Self:
        """Create an empty stage and name it in a file.

        Raises:
            MissingError: There is not enough shared memory.
        """
        segment = segment_file.create(KIND, _data_at(nbytes))
        try:
            os.ftruncate(segment.fd, _size(nbytes))
            made = cls(segment, layout, nbytes)
            made._mark(0, PolicyVersion(), "")
            write_json(file, StagedWeights(path=str(segment.path), nonce=segment.nonce))
        except BaseException:
            segment.discard()
            raise
        return made

    @classmethod
    def adopt(cls, file: Path) -> Self | None:
        """Take over the stage that a dead receiver left; None if there is none."""
        named = read_json(file, StagedWeights)
        if named is None:
            return None
        try:
            segment = segment_file.open_existing(Path(named.path), named.nonce, writable=True)
        except SegmentGoneError:
            return None
        try:
            state = os.pread(segment.fd, _STATE.size, _STATE_AT)
            _, nbytes, _, _, layout, _ = _STATE.unpack(state)
            if os.fstat(segment.fd).st_size != _size(nbytes) or not nbytes:
                raise ValueError
            segment.claim()
            return cls(segment, layout.rstrip(b"\0").decode(), nbytes)
        except (ValueError, struct.error):
            os.close(segment.fd)
            return None

    def _mark(self, whole: int, version: PolicyVersion, write: str) -> None:
        encoded = write.encode()
        assert len(encoded) <= NAME_BYTES
        state = _STATE.pack(
            whole, self._nbytes, version.incarnation, version.step, self.layout.encode(), encoded
        )
        # The first word last: a stage is whole only once the rest of the header is there.
        self._memory[_STATE_AT + 8 : _STATE_AT + _STATE.size] = state[8:]
        self._memory[_STATE_AT : _STATE_AT + 8] = state[:8]

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors' memory."""
        return self._nbytes

    @property
    def whole(self) -> tuple[PolicyVersion, str] | None:
        """Version and name of the write that is whole here, or None."""
        state = _STATE.unpack(self._memory[_STATE_AT : _STATE_AT + _STATE.size])
        if not state[0]:
            return None
        return PolicyVersion(state[2], state[3]), state[5].rstrip(b"\0").decode()

    def place(self, index: int) -> Bytes:
        """Return the memory of a chunk to write in; it does not count until `keep`.

        Raises:
            MissingError: There is not enough shared memory.
        """
        self._known[index] = 0
        if not self._allocated[index]:
            self._allocate(index)
        return chunk(self._data, index)

    def _allocate(self, index: int) -> None:
        start = index * CHUNK_BYTES
        try:
            os.posix_fallocate(
                self._segment.fd, _data_at(self._nbytes) + start, min(CHUNK_BYTES, self._nbytes - start)
            )
        except OSError as error:
            raise MissingError(
                f"shared memory for a chunk of weights ({error.strerror})",
                "give the container more shared memory, for example --shm-size=8g",
            ) from None
        self._allocated[index] = True

    def digest(self, index: int) -> tuple[int, int, int]:
        """Return the digest of the bytes of a chunk, as they are now."""
        return digest(chunk(self._data, index))

    def keep(self, index: int, found: tuple[int, int, int]) -> None:
        """Count a chunk as received."""
        self.table[index] = (*found[:2], 0)
        self._known[index] = 1

    def keep_whole(self, index: int) -> None:
        """Count a chunk as received that came without a digest."""
        self._known[index] = HERE

    def complete(self) -> None:
        """Make the digests of chunks that came without one: a transfer broke off, and the next one needs them."""
        for index in np.flatnonzero(self.table["known"] == HERE).tolist():
            self.keep(index, self.digest(index))

    def seal(self, version: PolicyVersion, write: str) -> None:
        """Declare the version whole: its chunks are here, or already in the weights."""
        self._mark(1, version, write)

    def reopen(self) -> None:
        """Let chunks change again; what is here counts for the next version."""
        self._mark(0, PolicyVersion(), "")

    def clear(self) -> None:
        """Forget all chunks; their memory is kept."""
        self.table["known"] = 0
        self._mark(0, PolicyVersion(), "")

    def kept(self) -> Iterator[tuple[int, Bytes]]:
        """Yield the chunks that are here, those behind one another together: the number of the first, and their bytes.

        Many bytes at once are copied for half the CPU, see `segment.COPY_BYTES`.
        """
        found = np.flatnonzero(self._known)
        for run in np.split(found, np.flatnonzero(np.diff(found) > 1) + 1):
            if run.size:
                yield int(run[0]), self._data[run[0] * CHUNK_BYTES : (run[-1] + 1) * CHUNK_BYTES]

    def close(self, file: Path, *, remove: bool = False) -> None:
        """Release the stage, for the next life of the receiver; with `remove`, remove it and the file that names it."""
        if remove:
            file.unlink(missing_ok=True)
            self._segment.path.unlink(missing_ok=True)
        else:
            self._segment.release()
        del self.table, self._known, self._data
        os.close(self._segment.fd)


def _data_at(nbytes: int) -> int:
    table = count_of(nbytes) * DIGEST.itemsize
    return _PAGE + -(-table // _PAGE) * _PAGE


def _size(nbytes: int) -> int:
    return _data_at(nbytes) + nbytes
