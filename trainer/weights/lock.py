"""Lock of the shared weights: the control page with version, sequence and writer.

64-bit fields behind the header of the segment (see `bus.shm.segment_file`), written by the owner only:

    64  manifest offset   72  manifest bytes       80  sequence
    88  version of even writes: incarnation, step  104  version of odd writes
   120  writer pid       128  writer start ticks  136  writer pid namespace  144  writer pending

`flock` excludes. The sequence is odd from the first byte of a write to the last. If the writer dies in between, it
stays odd and the kernel releases the lock; readers then refuse the weights until they are written whole. `flock` alone
starves the writer (measured: 400 ms behind a busy reader), so a waiting writer sets `writer pending`, and readers stand
back until it is cleared or the writer is dead.

The version of write number n is in slot n & 1, so that the last complete one can be read at any time without the lock.
Readers never write and may map the page read-only. One share belongs to one thread at a time.
"""

import fcntl
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fcntl import flock
from mmap import mmap
from pathlib import Path
from typing import Final

from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas.errors import WeightsBusyError, WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion

PAGE_BYTES: Final = 4096
TENSORS_AT: Final = 2 * PAGE_BYTES
"""Offset of the first tensor: behind the control page and the scratch page of `verify`."""
LOCKS: Final = Path("/proc/locks")
READ_PATIENCE_S: Final = 5.0
"""Seconds a reader waits: a write takes milliseconds, so a longer one is stopped or hung."""
WRITE_PATIENCE_S: Final = 60.0
"""Seconds a writer waits; a reader holds the lock for one forward pass."""
_SHARED, _FREE = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_UN
_FIRST_PAUSE_S: Final = 20e-6
_LAST_PAUSE_S: Final = 1e-3
_LIVENESS_S: Final = 0.02
"""Seconds after which a pending writer is looked up in /proc."""

_MANIFEST_OFFSET, _MANIFEST_BYTES, _SEQUENCE, _VERSIONS = 8, 9, 10, 11
_WRITER, _PENDING = 15, 18


class WeightLock:
    """The control page of a mapped segment, in one process."""

    def __init__(self, memory: mmap, fd: int) -> None:
        self._fields = memoryview(memory)[:PAGE_BYTES].cast("q")
        self._fd = fd
        self._me = SegmentOwner.current()
        self._known = -1, PolicyVersion()
        """Last sequence read, and its version."""
        self._keeps = self._has = False

    def close(self) -> None:
        """Release the page. The lock is free then, as it always is outside of the blocks."""
        self._fields.release()

    @property
    def manifest_range(self) -> tuple[int, int]:
        """Offset and length of the manifest in bytes."""
        return self._fields[_MANIFEST_OFFSET], self._fields[_MANIFEST_BYTES]

    def place_manifest(self, offset: int, nbytes: int) -> None:
        """Record the location of the manifest; for the owner, before others map the segment."""
        self._fields[_MANIFEST_OFFSET], self._fields[_MANIFEST_BYTES] = offset, nbytes

    @property
    def writes(self) -> int:
        """Number of complete writes; another after each, also if the version is the same."""
        return self._fields[_SEQUENCE] >> 1

    @property
    def version(self) -> PolicyVersion:
        """Version of the last complete write. Outside `reading` it may be outdated on return."""
        fields = self._fields
        while True:
            sequence = fields[_SEQUENCE]
            slot = _slot(sequence)
            version = PolicyVersion(fields[slot], fields[slot + 1])
            if fields[_SEQUENCE] - sequence <= 1:  # no write of this slot has begun
                return version

    def is_torn(self) -> bool:
        """Return whether a write was begun and not finished by a writer that is dead or failed."""
        sequence = self._fields[_SEQUENCE]
        if not sequence & 1 or self._held_by_living_writer():
            return False
        return self._fields[_SEQUENCE] == sequence  # otherwise the writer has just finished

    def write_at_hand(self) -> tuple[int, int] | None:
        """Return the pid of the current or waiting writer, and a number unique to the write; None without one."""
        fields = self._fields
        if not (fields[_SEQUENCE] & 1 or fields[_PENDING]):
            return None
        return fields[_WRITER], fields[_SEQUENCE]

    def _held_by_living_writer(self) -> bool:
        return bool(self._fields[_WRITER]) and self._writer().alive()

    def _writer(self) -> SegmentOwner:
        return SegmentOwner(*self._fields[_WRITER : _WRITER + 3])

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the lock between readings in the block, until a writer waits; saves two system calls per reading.

        For readings in quick succession: a writer waits for the next one, or for the end of the block.
        """
        self._keeps = True
        try:
            yield
        finally:
            self._keeps = False
            self._let_go()

    @contextmanager
    def reading(self, patience_s: float = READ_PATIENCE_S) -> Iterator[PolicyVersion]:
        """Hold the weights still and yield their version; see `begin_reading`."""
        version = self.begin_reading(patience_s)
        try:
            yield version
        finally:
            self.end_reading()

    def begin_reading(self, patience_s: float = READ_PATIENCE_S) -> PolicyVersion:
        """Hold the weights still from now on and return their version. Blocks the thread during a write.

        Runs at every decoding step with cold caches, so its path is short.

        Raises:
            WeightsTornError: A write was not finished; the weights are invalid until they are restored.
            WeightsBusyError: A live writer held them longer than `patience_s`.
        """
        fields = self._fields
        if self._has:
            if not fields[_PENDING]:
                return self._known[1]  # no write is possible meanwhile
            self._let_go()
        if fields[_PENDING]:
            self._take(fcntl.LOCK_SH, patience_s, self._writer_waits)
        else:
            try:
                flock(self._fd, _SHARED)
            except BlockingIOError:
                self._take(fcntl.LOCK_SH, patience_s, self._writer_waits)
        sequence = fields[_SEQUENCE]
        if sequence & 1:
            self._let_go()
            raise WeightsTornError(self.version)
        self._has = self._keeps
        if sequence != self._known[0]:
            self._known = sequence, self.version
        return self._known[1]

    def end_reading(self) -> None:
        """Release the weights, unless they are kept and no writer waits."""
        if not self._has or self._fields[_PENDING]:
            self._let_go()

    def _let_go(self) -> None:
        self._has = False
        flock(self._fd, _FREE)

    @contextmanager
    def writing(
        self, version: PolicyVersion, *, restoring: bool = False, patience_s: float = WRITE_PATIENCE_S
    ) -> Iterator[None]:
        """Lock out readers while the block changes the weights; they are `version` when it ends.

        If the block raises, the weights count as half-written and readers refuse them.

        Args:
            restoring: The block writes every tensor, and so may follow an unfinished write.

        Raises:
            WeightsTornError: An earlier write was not finished and this one does not restore.
            WeightsBusyError: A reader held the lock longer than `patience_s`.
        """
        fields = self._fields
        self._enter(patience_s)
        try:
            if fields[_SEQUENCE] & 1 and not restoring:
                raise WeightsTornError(self.version)
            fields[_SEQUENCE] |= 1
            yield
            slot = _slot(fields[_SEQUENCE] + 1)
            fields[slot], fields[slot + 1] = version.incarnation, version.step
            fields[_SEQUENCE] += 1
        finally:
            fields[_WRITER] = 0
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _enter(self, patience_s: float) -> None:
        fields = self._fields
        fields[_WRITER + 1], fields[_WRITER + 2] = self._me.start_ticks, self._me.namespace
        fields[_WRITER] = self._me.pid
        fields[_PENDING] = 1
        try:
            self._take(fcntl.LOCK_EX, patience_s, _nobody)
        except BaseException:
            fields[_WRITER] = 0
            raise
        finally:
            fields[_PENDING] = 0

    def _writer_waits(self, waited_s: float) -> bool:
        if not self._fields[_PENDING]:
            return False
        return waited_s < _LIVENESS_S or self._held_by_living_writer()

    def _take(self, kind: int, patience_s: float, stand_back: Callable[[float], bool]) -> None:
        """Take the lock by polling: a thread blocked in the kernel could not be ended in an orderly way."""
        started, pause = 0.0, _FIRST_PAUSE_S
        while True:
            waited = time.monotonic() - started if started else 0.0
            if not stand_back(waited):
                try:
                    return fcntl.flock(self._fd, kind | fcntl.LOCK_NB)
                except BlockingIOError:
                    pass
            started = started or time.monotonic()
            if waited > patience_s:
                if kind == fcntl.LOCK_SH:
                    raise WeightsBusyError(self._fields[_WRITER], waited)
                raise WeightsBusyError(0, waited, holders(self._fd))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)


def holders(fd: int) -> tuple[int, ...]:
    """Return the pids with a flock on an open file, as far as the kernel shows them."""
    info = os.fstat(fd)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        locks = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return ()
    # number, FLOCK, ADVISORY, READ or WRITE, pid, file; a waiting lock has an arrow in second place
    pids = {int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == file}
    return tuple(sorted(pid for pid in pids if pid > 0))


def _slot(sequence: int) -> int:
    return _VERSIONS + 2 * (sequence >> 1 & 1)


def _nobody(_waited_s: float) -> bool:
    return False
