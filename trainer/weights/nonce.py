"""The scratch page of a share: a question and an answer in each direction, which proves that both map the same memory.

    0  the owner's question   8  a reader's answer   16  a reader's question   24  the owner's answer

A question is a random number, its answer the complement. Readers map the weights read-only; this page alone they map
writable: no tensor lies in it, and a stray write there spoils one question. Each side answers when it takes its turn
at the weights anyway (the owner when it has written, a reader when it reads), so a question costs nobody a thread, and
the answer comes with the next step. One reader asks at a time: it holds a lock on the word of its question.
"""

import fcntl
import os
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from mmap import mmap
from typing import Final

from rolloutmq.bus.segments import lock_byte
from rolloutmq.schemas.sharing import WeightsSilentError

PAGE_BYTES: Final = 4096
SCRATCH_AT: Final = PAGE_BYTES
"""Right behind the control page."""
_POLL_S: Final = 0.002
_MASK: Final = (1 << 64) - 1


class Scratch:
    """The scratch page of one segment, seen by one side of it."""

    def __init__(self, path: str | os.PathLike[str], inode: int, *, owner: bool) -> None:
        """Map the page.

        Raises:
            OSError: The file is another one by now, or not ours to write.
        """
        self._fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            if os.fstat(self._fd).st_ino != inode:
                raise OSError(f"{os.fspath(path)} was replaced")
            self._memory = mmap(self._fd, PAGE_BYTES, offset=SCRATCH_AT)
        except BaseException:
            os.close(self._fd)
            raise
        self._words = memoryview(self._memory).cast("Q")
        self._owner = owner
        self._answered = -1
        self._ask, self._hear, self._asked, self._say = (0, 1, 2, 3) if owner else (2, 3, 0, 1)

    def close(self) -> None:
        """Let go of the page."""
        self._words.release()
        self._memory.close()
        os.close(self._fd)

    def answer(self) -> None:
        """Answer what the other side asks, if it asks; a fraction of a microsecond otherwise."""
        question = self._words[self._asked]
        if question != self._answered:
            self._words[self._say] = question ^ _MASK
            self._answered = question

    def ask(self, patience_s: float, meanwhile: Callable[[], None] = lambda: None) -> float:
        """Ask the other side and return the seconds that it took to answer. Blocks.

        Args:
            patience_s: How long to wait.
            meanwhile: Called again and again.

        Raises:
            WeightsSilentError: It did not answer: it is gone, or has not had a turn.
        """
        started = time.monotonic()
        with self._turn(started + patience_s):
            question = secrets.randbits(63) | 1
            self._words[self._ask] = question
            while self._words[self._hear] != question ^ _MASK:
                waited = time.monotonic() - started
                if waited > patience_s:
                    raise WeightsSilentError("a reader" if self._owner else "the owner", waited)
                meanwhile()
                time.sleep(_POLL_S)
        return time.monotonic() - started

    @contextmanager
    def _turn(self, until: float) -> Iterator[None]:
        place = SCRATCH_AT + 8 * self._ask
        while not lock_byte(self._fd, place, fcntl.F_WRLCK):
            if time.monotonic() > until:
                raise WeightsSilentError("another reader, which asks as well,", 0.0)
            time.sleep(_POLL_S)
        try:
            yield
        finally:
            lock_byte(self._fd, place, fcntl.F_UNLCK)
