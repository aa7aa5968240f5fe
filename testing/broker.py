"""A broker for tests: in a thread of this process, with real sockets, shared memory and journal.

    with LocalBroker() as broker:
        with Producer.blocking(broker.run_dir, env="add") as producer:
            producer.send(group)

It is the broker of a run, so clients, `rolloutmq status` and the ledger meet what they meet there. It starts in
milliseconds. At durability `os`, its default, it survives a killed process, and no ack waits for a disk.
"""

import asyncio
import ctypes
import os
import shutil
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self
from weakref import WeakSet

from rolloutmq.bus.rundir import read_run
from rolloutmq.launch.settings import prepare_service
from rolloutmq.schemas.errors import UsageError
from rolloutmq.services.broker.server import running_broker

DEFAULTS: Final = ("broker.durability=os", f"broker.segment_bytes={1 << 24}")
"""A test wants neither waits for a disk nor 256 MiB reserved on it."""


class LocalBroker:
    """A broker in a thread of this process, for `with`, `async with`, or `start` and `stop`."""

    def __init__(
        self, *settings: str, config: Path | str | None = None, run_dir: Path | str | None = None
    ) -> None:
        """Configure a broker, without starting it.

        Args:
            settings: Texts `key=value` as for `--set`, such as "broker.lease_s=2". Without them the durability is `os`,
                and a segment of the journal has 16 MiB.
            config: TOML file of a run; only the broker of it starts. None: defaults, or what `run_dir` has.
            run_dir: Run directory to use and to keep; created if missing. A configured one keeps its configuration,
                except the keys in `settings`, unless `config` replaces it. None: a temporary one, removed by `stop`.
        """
        self._settings = settings
        self._config = None if config is None else Path(config)
        self._kept = None if run_dir is None else Path(run_dir)
        self._temporary: Path | None = None
        self._has_run = False
        self._running: ExitStack | None = None
        _brokers.add(self)

    @property
    def run_dir(self) -> Path:
        """Its run directory, the `where` of every client. UsageError if it is temporary and the broker does not run."""
        if self._kept is not None:
            return self._kept
        if self._temporary is None and self._has_run:
            raise UsageError(
                "broker: its temporary run directory has gone with it; read it before `stop`, inside the `with` "
                "statement, or keep it with LocalBroker(run_dir=...)"
            )
        if self._temporary is None:
            raise UsageError("broker: has no run directory before its start; use it in a `with` statement")
        return self._temporary

    def start(self) -> Self:
        """Start the broker, and return it once it serves. Blocks for milliseconds.

        Raises:
            UsageError: It runs.
            ConfigError: The configuration is invalid.
            AddressInUseError: Another broker runs in the directory; nothing of it was changed.
        """
        if self._running is not None:
            raise UsageError(f"broker: runs already (in {self.run_dir}); stop it first")
        if self._kept is None:
            self._temporary = Path(tempfile.mkdtemp(prefix="rolloutmq-"))
        try:
            prepare_service(self.run_dir, self._config, self._settings, defaults=DEFAULTS)
            self._serve()
        except BaseException:
            self.stop()
            raise
        return self

    def _serve(self) -> None:
        with ExitStack() as stack:
            stack.enter_context(running_broker(*read_run(self.run_dir)))
            self._running, self._has_run = stack.pop_all(), True

    def restart(self) -> None:
        """Stop the broker in order and start it again, as an operator would. Blocks for milliseconds.

        Clients reconnect by themselves, and a trainer keeps its lease.

        Raises:
            UsageError: It does not run.
        """
        if self._running is None:
            raise UsageError("broker: does not run; start it first")
        self._end()
        self._serve()

    def stop(self) -> None:
        """Stop the broker in order, and remove its temporary directory. Blocks; may be called twice.

        In a forked child it does nothing: broker and directory are those of the process that started it.
        """
        try:
            self._end()
        finally:
            temporary, self._temporary = self._temporary, None
            if temporary is not None:
                shutil.rmtree(temporary)

    def _end(self) -> None:
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _leave_to_parent(self) -> None:
        """Forget what a fork copied. The copies never end: their ends would be those of the broker."""
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self._running))
        self._running = self._temporary = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        starting = asyncio.ensure_future(asyncio.to_thread(self.start))
        try:
            await _ended(starting)
        except asyncio.CancelledError:
            if starting.exception() is None:  # nobody else would stop it
                await self.__aexit__(None, None, None)
            raise
        return starting.result()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        stopping = asyncio.ensure_future(asyncio.to_thread(self.stop))
        await _ended(stopping)
        stopping.result()


_brokers: Final = WeakSet[LocalBroker]()


def _after_fork() -> None:
    for broker in _brokers:
        broker._leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


async def _ended(thread: asyncio.Future[Any]) -> None:
    """Wait until the call of a thread has ended, which no cancellation ends; then raise the cancellation, if any."""
    cancelled: asyncio.CancelledError | None = None
    while not thread.done():
        try:
            await asyncio.wait([thread])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled
