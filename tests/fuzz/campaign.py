"""Campaigns: a fuzzer tries one input after another, until one of them is too much for the code, or the time is over.

A seed and a number make an input, whatever was tried before it, so each can be tried alone. An input that takes longer
than `PATIENCE_S`, or more memory than `MEMORY_BYTES`, is a defect like an undocumented error.
"""

import random
import signal
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import ClassVar, Final, Self

PATIENCE_S: Final = 30.0
"""Longest time of one input; the usual one takes milliseconds."""
MEMORY_BYTES: Final = 256 << 20
"""Most memory that one input may add to the process."""
_STATUS: Final = Path("/proc/self/status")
_CLEAR: Final = Path("/proc/self/clear_refs")
_CLEAR_PEAK: Final = b"5"


class Fuzzer(ABC):
    """One kind of hostile input. Use it as a context manager."""

    name: ClassVar[str]

    @abstractmethod
    def attempt(self, rng: random.Random) -> str:
        """Make one input and try it; return a word for the outcome, for the statistics.

        Raises:
            Exception: The code under test broke a promise.
        """

    @abstractmethod
    def keep(self, directory: Path) -> str:
        """Keep the last input in an empty directory, and return a text for people about it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:  # noqa: B027 - most have nothing to close
        """Close what was opened."""


class TooSlowError(BaseException):
    """An input took too long. No code under test catches it."""


class TooLargeError(Exception):
    """An input took too much memory."""


class BrokenError(Exception):
    """An input broke a promise; the cause has the details."""

    def __init__(self, fuzzer: str, seed: int, number: int) -> None:
        super().__init__(f"{fuzzer}: seed {seed}: input {number} breaks a promise")
        self.fuzzer = fuzzer
        self.seed = seed
        self.number = number


def source(seed: int, number: int) -> random.Random:
    """Return the source of one input."""
    return random.Random(f"{seed}/{number}")


def run(
    fuzzer: Fuzzer, seed: int, *, seconds: float = float("inf"), inputs: int | None = None, first: int = 1
) -> tuple[int, Counter[str]]:
    """Try inputs until one of the limits; return their number and outcomes.

    Raises:
        BrokenError: An input broke a promise.
    """
    until, outcomes, count = time.monotonic() + seconds, Counter[str](), 0
    while time.monotonic() < until and (inputs is None or count < inputs):
        number = first + count
        count += 1
        try:
            with within(PATIENCE_S), light(MEMORY_BYTES):
                outcomes[fuzzer.attempt(source(seed, number))] += 1
        except (Exception, TooSlowError) as error:
            raise BrokenError(fuzzer.name, seed, number) from error
    return count, outcomes


@contextmanager
def within(seconds: float) -> Iterator[None]:
    """Raise TooSlowError in the main thread once the block takes too long, also inside of a system call.

    A timer of the caller goes on afterwards.
    """

    def ring(_number: int, _frame: FrameType | None) -> None:
        raise TooSlowError(f"longer than {seconds:g} s")

    began = time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    left_s, interval_s = signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(0.001, left_s - (time.monotonic() - began)), interval_s)


@contextmanager
def light(nbytes: int) -> Iterator[None]:
    """Raise TooLargeError if the memory of the process grew by more than that within the block."""
    _CLEAR.write_bytes(_CLEAR_PEAK)
    before = _peak_bytes()
    yield
    if (grown := _peak_bytes() - before) > nbytes:
        raise TooLargeError(f"{grown >> 20} MiB, at most {nbytes >> 20} are allowed")


def _peak_bytes() -> int:
    line = next(line for line in _STATUS.read_text().splitlines() if line.startswith("VmHWM:"))
    return int(line.split()[1]) << 10
