"""The control page of shared weights: which version they are, and who may touch them now.

Words of 64 bits behind the header of the segment (see `bus.segments`), written by the owner only:

    64  manifest offset   72  manifest bytes       80  sequence
    88  version of even writes: incarnation, step  104  version of odd writes
   120  writer pid       128  writer start ticks  136  writer pid namespace  144  writer pending

The law: `flock` excludes. The sequence is odd from the first byte of a write to its last; a writer that dies in
between leaves it odd and the kernel frees its lock, so a reader that gets the lock and finds it odd refuses until
somebody has written the weights whole. `flock` alone is unfair to the writer (measured: 400 ms behind a busy reader),
so a waiting writer says so in `writer pending`, and readers stand back until it is cleared or its writer is dead.

The version of write number n lies in slot n & 1, so that the last whole one can be read at any time, without the lock.
Readers never write: they may map the page read-only. One share belongs to one thread at a time.
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

from rolloutmq.bus.segments import Owner
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.sharing import WeightsBusyError, WeightsTornError

PAGE_BYTES: Final = 4096
LOCKS: Final = Path("/proc/locks")
READ_PATIENCE_S: Final = 5.0
"""A write takes milliseconds; a writer that holds the lock for longer is stopped or hung."""
WRITE_PATIENCE_S: Final = 60.0
"""A reader holds the lock for one forward pass."""
_SHARED, _FREE = fcntl.LOCK_SH | fcntl.LOCK_NB, fcntl.LOCK_UN
_FIRST_PAUSE_S: Final = 20e-6
_LAST_PAUSE_S: Final = 1e-3
_LIVENESS_S: Final = 0.02
"""How long a pending writer is believed before it is looked up in /proc."""

_MANIFEST_OFFSET, _MANIFEST_BYTES, _SEQUENCE, _VERSIONS = 8, 9, 10, 11
_WRITER, _PENDING = 15, 18


class WeightLock:
    """The control page of one mapped segment, seen by one process."""

    def __init__(self, memory: mmap, fd: int) -> None:
        self._words = memoryview(memory)[:PAGE_BYTES].cast("q")
        self._fd = fd
        self._me = Owner.current()
        self._known = -1, PolicyVersion()
        """The last sequence that was read, and its version."""
        self._keeps = self._has = False

    def close(self) -> None:
        """Let go of the page. The lock is free afterwards, as it always is outside the two blocks."""
        self._words.release()

    @property
    def manifest_range(self) -> tuple[int, int]:
        """Offset and length of the manifest in bytes."""
        return self._words[_MANIFEST_OFFSET], self._words[_MANIFEST_BYTES]

    def place_manifest(self, offset: int, nbytes: int) -> None:
        """Say where the manifest lies; for the owner, before anybody else maps the segment."""
        self._words[_MANIFEST_OFFSET], self._words[_MANIFEST_BYTES] = offset, nbytes

    @property
    def version(self) -> PolicyVersion:
        """Version of the last whole write. Outside `reading` it may be old by the time it is returned."""
        words = self._words
        while True:
            sequence = words[_SEQUENCE]
            slot = _slot(sequence)
            version = PolicyVersion(words[slot], words[slot + 1])
            if words[_SEQUENCE] - sequence <= 1:  # nobody has begun to write this slot
                return version

    def is_torn(self) -> bool:
        """Tell whether a write was begun and not finished, by a writer that is gone or failed in the middle."""
        sequence = self._words[_SEQUENCE]
        if not sequence & 1 or self._held_by_living_writer():
            return False
        return self._words[_SEQUENCE] == sequence  # or its writer has ended it while it was looked for

    def write_at_hand(self) -> tuple[int, int] | None:
        """Return who writes or waits to, and a number that is another for the next write; None if nobody does."""
        words = self._words
        if not (words[_SEQUENCE] & 1 or words[_PENDING]):
            return None
        return words[_WRITER], words[_SEQUENCE]

    def _held_by_living_writer(self) -> bool:
        return bool(self._words[_WRITER]) and self._writer().alive()

    def _writer(self) -> Owner:
        return Owner(*self._words[_WRITER : _WRITER + 3])

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """Keep the lock from one reading in the block to the next, until a writer waits: two calls less for each.

        For readings that follow each other at once: a writer waits for the next of them, or for the end of the block.
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
        """Hold the weights still from now on and return their version. Blocks the thread while a writer is at work.

        This is taken for every decoding step, whose caches are cold here: the way through it is kept short.

        Raises:
            WeightsTornError: A write was not finished; they are garbage until somebody restores them.
            WeightsBusyError: A living writer kept them for longer than `patience_s`.
        """
        words = self._words
        if self._has:
            if not words[_PENDING]:
                return self._known[1]  # nobody can have written
            self._let_go()
        if words[_PENDING]:
            self._take(fcntl.LOCK_SH, patience_s, self._writer_waits)
        else:
            try:
                flock(self._fd, _SHARED)
            except BlockingIOError:
                self._take(fcntl.LOCK_SH, patience_s, self._writer_waits)
        sequence = words[_SEQUENCE]
        if sequence & 1:
            self._let_go()
            raise WeightsTornError(self.version)
        self._has = self._keeps
        if sequence != self._known[0]:
            self._known = sequence, self.version
        return self._known[1]

    def end_reading(self) -> None:
        """Let the weights go, unless they are kept and nobody waits for them."""
        if not self._has or self._words[_PENDING]:
            self._let_go()

    def _let_go(self) -> None:
        self._has = False
        flock(self._fd, _FREE)

    @contextmanager
    def writing(
        self, version: PolicyVersion, *, restoring: bool = False, patience_s: float = WRITE_PATIENCE_S
    ) -> Iterator[None]:
        """Keep readers out while the block changes the weights; they are `version` when it ends.

        If the block raises, the weights count as half-written and readers refuse them.

        Args:
            restoring: The block writes every tensor anew, and so may follow an unfinished write.

        Raises:
            WeightsTornError: An earlier write was not finished and this one is no restore.
            WeightsBusyError: A reader kept the lock for longer than `patience_s`.
        """
        words = self._words
        self._enter(patience_s)
        try:
            if words[_SEQUENCE] & 1 and not restoring:
                raise WeightsTornError(self.version)
            words[_SEQUENCE] |= 1
            yield
            slot = _slot(words[_SEQUENCE] + 1)
            words[slot], words[slot + 1] = version.incarnation, version.step
            words[_SEQUENCE] += 1
        finally:
            words[_WRITER] = 0
            fcntl.flock(self._fd, fcntl.LOCK_UN)

    def _enter(self, patience_s: float) -> None:
        words = self._words
        words[_WRITER + 1], words[_WRITER + 2] = self._me.start_ticks, self._me.namespace
        words[_WRITER] = self._me.pid
        words[_PENDING] = 1
        try:
            self._take(fcntl.LOCK_EX, patience_s, _nobody)
        except BaseException:
            words[_WRITER] = 0
            raise
        finally:
            words[_PENDING] = 0

    def _writer_waits(self, waited_s: float) -> bool:
        if not self._words[_PENDING]:
            return False
        return waited_s < _LIVENESS_S or self._held_by_living_writer()

    def _take(self, kind: int, patience_s: float, stand_back: Callable[[float], bool]) -> None:
        """Take the lock, polling: a thread that is blocked in the kernel could not be ended in order."""
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
                    raise WeightsBusyError(self._words[_WRITER], waited)
                raise WeightsBusyError(0, waited, holders(self._fd))
            time.sleep(pause)
            pause = min(2 * pause, _LAST_PAUSE_S)


def holders(fd: int) -> tuple[int, ...]:
    """Return the process ids that have a flock on an open file, as far as the kernel tells them here."""
    info = os.fstat(fd)
    file = f"{os.major(info.st_dev):02x}:{os.minor(info.st_dev):02x}:{info.st_ino}"
    try:
        locks = [line.split() for line in LOCKS.read_text().splitlines()]
    except OSError:
        return ()
    # number, FLOCK, ADVISORY, READ or WRITE, pid, file; a lock that is waited for has an arrow in second place
    pids = {int(lock[4]) for lock in locks if lock[1] == "FLOCK" and lock[5] == file}
    return tuple(sorted(pid for pid in pids if pid > 0))


def _slot(sequence: int) -> int:
    return _VERSIONS + 2 * (sequence >> 1 & 1)


def _nobody(_waited_s: float) -> bool:
    return False
