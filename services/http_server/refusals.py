"""Refusals of the HTTP servers of a run, by key, for its status: one file, to which each server adds its own.

The broker adds them to what it has refused itself. A server writes at most once in `WRITE_S`, with the next request
then, so that a client that asks again and again costs no more. Keys and reasons are bounded; a damaged file is begun
anew.
"""

import fcntl
import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import private_fd
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import read_json, write_json

logger = logging.getLogger(__name__)

WRITE_S: Final = 1.0
KEYS_LIMIT: Final = 256
REASONS_LIMIT: Final = 16
"""Most reasons of one key; further ones count as `OTHER`."""
OTHER: Final = "other HTTP requests"


class KeyRefusals(msgspec.Struct):
    """What one key was refused.

    Attributes:
        at: Monotonic seconds of this host at which that was written last.
        refused: How often, by what was asked for.
    """

    at: float
    refused: dict[str, int]


class HttpRefusals:
    """What one server refuses. For one thread.

    Args:
        path: File of the run.
        clock: Monotonic seconds.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.monotonic) -> None:
        self._path = path
        self._clock = clock
        self._pending: dict[str, Counter[str]] = {}
        self._written_at = float("-inf")
        self._unwritten = LogThrottle()

    def add(self, key: str, what: str) -> None:
        """Count a refusal of a key."""
        if key in self._pending or len(self._pending) < KEYS_LIMIT:
            counts = self._pending.setdefault(key, Counter())
            counts[what if what in counts or len(counts) < REASONS_LIMIT else OTHER] += 1

    def write(self) -> None:
        """Add what was counted to the file, if it is due; call it with each request."""
        now = self._clock()
        if not self._pending or now - self._written_at < WRITE_S:
            return
        self._written_at = now
        try:
            self._merge()
        except OSError as error:
            if self._unwritten.is_due(str(error), now):
                logger.warning("refusals not written path=%s error=%s", self._path, error)
            return
        self._pending.clear()

    def _merge(self) -> None:
        lock = private_fd(self._path.with_suffix(".lock"), os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX)
            found = read_refusals(self._path)
            for key, counts in self._pending.items():
                if key in found or len(found) < KEYS_LIMIT:
                    entry = found.setdefault(key, KeyRefusals(0.0, {}))
                    entry.at, known = self._written_at, entry.refused
                    for what, count in counts.items():
                        name = what if what in known or len(known) < REASONS_LIMIT else OTHER
                        known[name] = known.get(name, 0) + count
            write_json(self._path, found)
        finally:
            os.close(lock)


def read_refusals(path: Path) -> dict[str, KeyRefusals]:
    """Return what the servers of a run have refused each key; nothing if the file is missing or damaged."""
    try:
        return read_json(path, dict[str, KeyRefusals]) or {}
    except (msgspec.DecodeError, OSError):
        return {}
