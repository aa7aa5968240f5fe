"""A run of another host for one command: a temporary directory that a thread keeps fresh until the process ends."""

import asyncio
import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import threading
import time
from pathlib import Path
from typing import Final

from rolloutmq.bus.files import PRIVATE_FILE
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.launch.commands.remote.configured import reading
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.files import Connection

PATIENCE_S: Final = 10.0
"""Longest wait of a command for the first answer of the run."""
END_S: Final = 3.0
"""Longest wait for the thread at the end."""
PREFIX: Final = "rolloutmq-view-"
LOCK: Final = "view.lock"
"""File in the directory that its process holds; the kernel releases it however that ends."""
YOUNG_S: Final = 60.0
"""Age up to which a directory without a lock may be one that is just made."""


def sweep_views() -> None:
    """Remove the directories of views whose processes were killed."""
    for directory in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        with contextlib.suppress(OSError):
            found = directory.lstat()
            if (
                found.st_uid == os.geteuid()
                and stat.S_ISDIR(found.st_mode)
                and _is_left(directory, found.st_mtime)
            ):
                shutil.rmtree(directory, ignore_errors=True)


def _is_left(directory: Path, since: float) -> bool:
    try:
        held = _held(directory / LOCK, os.O_RDWR)
    except FileNotFoundError:
        return time.time() - since > YOUNG_S
    if held >= 0:
        os.close(held)
    return held >= 0


def _held(lock: Path, flags: int = os.O_RDWR | os.O_CREAT) -> int:
    """Return the descriptor of a lock that this process holds by now; -1 if another one holds it."""
    held = os.open(lock, flags | os.O_CLOEXEC | os.O_NOFOLLOW, PRIVATE_FILE)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(held)
        return -1
    return held


class MirroredView:
    """One run, kept fresh by a thread. `close` ends it."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        sweep_views()
        self._directory = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._held = _held(self._directory / LOCK)
        self._ready = threading.Event()
        self._error: BaseException | None = None
        self._loop = asyncio.new_event_loop()
        self._task: asyncio.Task[None] | None = None
        self._mirror = Mirror(connection, reading, self._directory)
        self._thread = threading.Thread(target=self._run, name="mirror of a run", daemon=True)
        self._thread.start()

    def wait(self, timeout_s: float) -> Path:
        """Wait for the first answer, and return the directory.

        Raises:
            KeyRefusedError: Its broker does not let this key in.
            BrokerUnavailableError: The run does not answer in time.
            RolloutMQError: It refuses, or tells what this version cannot read.
        """
        self._ready.wait(timeout_s)
        if self._error is not None:
            raise self._error
        if not self._ready.is_set():
            if self._mirror.refusal is not None:
                raise self._mirror.refusal
            raise BrokerUnavailableError(" or ".join(self._connection.addresses), timeout_s)
        return self._directory

    def close(self) -> None:
        """End the thread, and remove the directory. May be called twice."""
        if self._thread.is_alive() and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self._cancel)
            self._thread.join(END_S)
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._keep())
        except asyncio.CancelledError:
            pass
        except BaseException as error:  # noqa: BLE001 - told to the thread of the command
            self._error = error
        finally:
            self._ready.set()

    async def _keep(self) -> None:
        self._task = asyncio.current_task()
        refreshing = asyncio.create_task(self._mirror.run())
        ready = asyncio.create_task(self._mirror.ready())
        try:
            await asyncio.wait({refreshing, ready}, return_when=asyncio.FIRST_COMPLETED)
            if ready.done():
                ready.result()
                self._ready.set()
            await refreshing
        finally:
            refreshing.cancel()
            ready.cancel()
            await asyncio.wait({refreshing, ready})


def mirrored_view(connection: Connection) -> Path:
    """Return a directory of this run, which is kept fresh until this process ends.

    Raises:
        BrokerUnavailableError, RolloutMQError: As for `MirroredView.wait`.
    """
    view = MirroredView(connection)
    atexit.register(view.close)
    return view.wait(PATIENCE_S)
