"""Code that holds the event loop of its worker: told from outside, with its place and its task.

A `score` that hangs holds the loop, and with it heartbeats, time-outs and orders: nothing in the loop can tell of it. A
thread looks at the main thread instead, and writes what it finds to the log and to `hangs/WORKER.json`. While code
holds the interpreter lock, no thread of Python runs: then `faulthandler` writes the stacks to `hangs/WORKER.stack`.
Readers of the run directory find both by `services.process.stacks`; both go once the loop runs again.

Only time that was witnessed counts: a worker that was stopped and goes on held nothing.
"""

import asyncio
import faulthandler
import logging
import os
import sys
import threading
import time
from types import FrameType
from typing import BinaryIO, Final, Self

from rolloutmq.bus.files import PRIVATE_DIRECTORY, private_file
from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import Hang, RunLayout
from rolloutmq.services.process.stacks import header_of
from rolloutmq.services.worker.user_code.failures import UserFiles, failure_at, frames_of

logger = logging.getLogger(__name__)

HELD_S: Final = 5.0
"""Time for which the loop is held before it is told, in seconds; told again whenever that time has doubled."""
LOCKED_S: Final = 2 * HELD_S
"""Time after which `faulthandler` writes the stacks."""
LOOK_S: Final = 0.5


class LoopWatch:
    """Watches the event loop of a worker, from the import of its environment to its end.

    Args:
        layout: Where the reports go.
        worker: Name of the worker.
        files: Tell the user's frames.
        limit_s: `rollout_timeout_s`, for the log.

    Attributes:
        ticks: Number of times that the loop has run.
    """

    def __init__(self, layout: RunLayout, worker: str, files: UserFiles, limit_s: float) -> None:
        self._layout = layout
        self._worker = worker
        self._files = files
        self._limit_s = limit_s
        self._header = header_of(os.getpid(), files.base_dir)
        self._stacks: BinaryIO | None = None
        self.ticks = 0
        self._timer: asyncio.TimerHandle | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="loop watch", daemon=True)

    def __enter__(self) -> Self:
        """Begin, in the main thread, inside its event loop."""
        try:
            self._layout.hangs.mkdir(mode=PRIVATE_DIRECTORY, exist_ok=True)
            self._layout.hang(self._worker).unlink(missing_ok=True)
            self._stacks = private_file(self._layout.stack(self._worker), "ab", buffering=0)
        except OSError as error:
            logger.warning("hangs are told in the log alone path=%s error=%s", self._layout.hangs, error)
        self._tick()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        if self._timer is not None:
            self._timer.cancel()
        self._thread.join()
        faulthandler.cancel_dump_traceback_later()
        if self._stacks is not None:
            self._stacks.close()
            self._layout.stack(self._worker).unlink(missing_ok=True)

    def _tick(self) -> None:
        """Show that the loop runs, and will again within `LOOK_S`."""
        self.ticks += 1
        self._timer = asyncio.get_running_loop().call_later(LOOK_S, self._tick)
        if self._stacks is None:
            return
        try:
            if self._stacks.seek(0, os.SEEK_END) != len(self._header):
                self._stacks.truncate(0)
                self._stacks.write(self._header)
        except OSError as error:
            logger.debug("stacks not emptied error=%s", error)
        faulthandler.dump_traceback_later(LOCKED_S, file=self._stacks)

    def _run(self) -> None:
        """Look until the end, in a thread."""
        seen, held_s, due_s, last = 0, 0.0, HELD_S, time.monotonic()
        while not self._over.wait(LOOK_S):
            now = time.monotonic()
            if self.ticks != seen:
                if held_s >= HELD_S:
                    self._released(held_s)
                seen, held_s, due_s = self.ticks, 0.0, HELD_S
            else:
                held_s += min(now - last, 2 * LOOK_S)
            last = now
            if held_s >= due_s:
                self._tell(held_s)
                due_s = 2 * held_s
        if held_s >= HELD_S:
            self._released(held_s)

    def _tell(self, held_s: float) -> None:
        frames = frames_of(sys._current_frames().get(threading.main_thread().ident or 0))
        hang = self._hang(frames)
        logger.warning(
            "environment holds the event loop env=%s held_s=%.0f at=%s task=%s: heartbeats and rollout_timeout_s "
            "(%g s) wait for it; await slow calls, or compute in a thread (asyncio.to_thread)",
            self._worker.rpartition("-")[0],
            held_s,
            hang.where or "(no code of the environment)",
            hang.task or "(not known)",
            self._limit_s,
        )
        try:
            write_json(self._layout.hang(self._worker), hang)
        except OSError as error:
            logger.warning("hang not written error=%s", error)

    def _hang(self, frames: list[FrameType]) -> Hang:
        failure = failure_at(frames, self._files, "")
        return Hang(pid=os.getpid(), where=failure.where, task=failure.task)

    def _released(self, held_s: float) -> None:
        logger.info("event loop released held_s=%.0f", held_s)
        self._layout.hang(self._worker).unlink(missing_ok=True)
