"""Where the main thread is, as another thread sees it: the user's code that runs or waits."""

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Final, Self

from rolloutmq.services.worker.user_code.failures import UserFiles, failure_at, frames_of, waiting_frames

FIRST_S: Final = 2.0
"""Time after which something takes long, in seconds."""
LOOK_S: Final = 0.2

OURS: Final = "rolloutmq."
"""First part of the names of this package's modules."""
DEBUGGERS: Final = frozenset({"bdb", "pdb", "cmd"})
"""Modules whose frames mean that somebody types."""


def frames_now(files: UserFiles, loop: asyncio.AbstractEventLoop | None) -> list[FrameType]:
    """Return the frames of the main thread, outermost first; if its event loop waits, those of a task of the user.

    What has started this package is left out, such as its script in `bin`.

    Args:
        files: Tell the user's frames.
        loop: Event loop of the main thread; None if it has none.
    """
    ident = threading.main_thread().ident
    running = _from_ours(frames_of(sys._current_frames().get(ident or 0)))
    if loop is None or _is_users(running, files):
        return running
    waiting = [waiting_frames(task) for task in asyncio.all_tasks(loop)]
    return max((one for one in waiting if _is_users(one, files)), key=len, default=running)


def is_debugged(frames: list[FrameType]) -> bool:
    """Return whether a debugger holds the thread."""
    return any(frame.f_globals.get("__name__") in DEBUGGERS for frame in frames)


def _from_ours(frames: list[FrameType]) -> list[FrameType]:
    """Return the frames from the first one of this package on."""
    names = (str(frame.f_globals.get("__name__")) for frame in frames)
    return frames[next((at for at, name in enumerate(names) if name.startswith(OURS)), 0) :]


def _is_users(frames: list[FrameType], files: UserFiles) -> bool:
    return any(files.has(frame.f_code.co_filename) for frame in frames)


class Watch:
    """Tells what takes long, and where in the user's code, in growing intervals; not while a debugger holds it.

    Args:
        files: Tell the user's frames.
        tell: Called from a thread with one line.
    """

    def __init__(self, files: UserFiles, tell: Callable[[str], None]) -> None:
        self._files = files
        self._tell = tell
        self._what = ""
        self._since = self._due = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)
        self.loop: asyncio.AbstractEventLoop | None = None
        """Event loop of the main thread, once it has one."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def begin(self, what: str) -> None:
        """Name what begins now."""
        self._what, self._since = what, time.monotonic()
        self._due = self._since + FIRST_S

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            if not self._what or now < self._due:
                continue
            frames = frames_now(self._files, self.loop)
            if is_debugged(frames):
                self._due = now + FIRST_S
                continue
            place = failure_at(frames, self._files, "").where
            taken_s = now - self._since
            self._tell(f"{self._what}: {taken_s:.0f} s so far{f', at {place}' if place else ''}")
            self._due = now + max(FIRST_S, taken_s)
