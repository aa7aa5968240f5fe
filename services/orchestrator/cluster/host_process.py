"""A process of a run on a host of a cluster: what the host does for one life of it, whoever runs the cluster.

    directory   private and temporary, with the key of the run; a mirror keeps it like a run directory
    process     in a session of its own; its output goes to this process's output, and to the run in parts
    lease       nobody of the run asks any more: the process gets SIGTERM, then SIGKILL; an ended one leaves the host
    end         what the process left undelivered is sent before its end is told: then its next life may start elsewhere
    engine      has a relay beside it, see `host_engine`

The process dies with the thread that started it (PR_SET_PDEATHSIG), and a guard kills what it has started itself. So a
host that loses its cluster keeps nothing.
"""

import asyncio
import contextlib
import logging
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.files import write_private
from rolloutmq.bus.lifecycle import set_up_logging
from rolloutmq.bus.producer.resend import resend_spools
from rolloutmq.bus.transport.mirror.mirror import Mirror
from rolloutmq.bus.transport.mirror.shared_config import placed, told
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, RolloutMQError
from rolloutmq.schemas.files import Connection, RunLayout
from rolloutmq.schemas.printable import error_line, error_text
from rolloutmq.schemas.process import ProcessSpec, Role, python_command
from rolloutmq.services.orchestrator.cluster.guard import Guard
from rolloutmq.services.orchestrator.cluster.host_engine import EngineSide, remove_directory, served_here
from rolloutmq.services.orchestrator.cluster.messages import (
    LOG_PART_BYTES,
    HostOrder,
    HostState,
    LifeState,
    cut,
    own_version,
)
from rolloutmq.services.process.child import Process, spawn
from rolloutmq.services.process.ending import PARENT
from rolloutmq.services.process.identity import marker_of
from rolloutmq.services.programs.command import RUN_DIR

logger = logging.getLogger(__name__)

OUTPUT_LIMIT_BYTES: Final = 1 << 20
"""Most output that waits for the run; beyond it the oldest is left out."""
LOOK_S: Final = 0.5
"""Interval of the look at the lease."""


class Output:
    """The output of a process that the run has not asked for yet: bounded, and counted from the first byte."""

    def __init__(self, limit_bytes: int = OUTPUT_LIMIT_BYTES) -> None:
        self._limit = limit_bytes
        self._held = bytearray()
        self._start = 0
        """Position of the first held byte."""

    @property
    def end(self) -> int:
        """Position after the last byte."""
        return self._start + len(self._held)

    def add(self, data: bytes) -> None:
        """Hold more output; the oldest beyond the limit is dropped."""
        self._held += data
        self._drop_until(self.end - self._limit)

    def part(self, acked: int) -> tuple[int, bytes]:
        """Return position and bytes of the next part, after what the run has; -1: from the oldest held byte."""
        self._drop_until(acked)
        return self._start, bytes(self._held[:LOG_PART_BYTES])

    def _drop_until(self, position: int) -> None:
        count = min(max(0, position - self._start), len(self._held))
        del self._held[:count]
        self._start += count


class HostProcess:
    """One life. Its own thread does the work; `look`, `send` and `close` may be called from any other.

    Args:
        order: What to run.
        on_silence: Called, in that thread, once the lease is over and the process has ended.
        base_dir: Directory of the code of environments; None for the working directory.
    """

    def __init__(
        self,
        order: HostOrder,
        on_silence: Callable[[], None] = lambda: None,
        base_dir: Path | None = None,
    ) -> None:
        self._order = order
        self._on_silence = on_silence
        self._base_dir = base_dir or Path.cwd()
        self._changed = threading.Condition()
        self._output = Output()
        self._state = LifeState(life=order.life, name=order.name, waits_for="its host sets it up")
        self._asked_at = time.monotonic()
        self._signals: list[tuple[int, bool]] = []
        """Signals so far, without repetitions."""
        self._process: Process | None = None
        self._closing = False
        self._thread = threading.Thread(target=self._main, name=f"life of {order.name}", daemon=True)
        self._thread.start()

    def look(self, acked: int, wait_s: float) -> HostState:
        """Return the state and the next output; wait for news at most so long. It renews the lease.

        Args:
            acked: Position of the output up to which the run has it; -1 for any.
            wait_s: Longest wait.
        """
        with self._changed:
            self._asked_at = time.monotonic()
            before = self._state
            offset, data = self._output.part(acked)
            if not data and not before.over:
                self._changed.wait_for(lambda: self._state != before or self._output.end > offset, wait_s)
                offset, data = self._output.part(acked)
            self._asked_at = time.monotonic()
            more = self._output.end > offset + len(data)
            return HostState(state=self._state, offset=offset, output=data, more=more)

    def send(self, number: int, group: bool) -> None:
        """Signal the process, or its group; one that has not started yet never will.

        A repetition is ignored: after a reconnection all signals are sent again, and a second SIGTERM ends a worker
        that drains at once. SIGKILL may be repeated.
        """
        with self._changed:
            is_repeated = (number, group) in self._signals
            if self._state.over or (is_repeated and number != signal.SIGKILL):
                return
            if not is_repeated:
                self._signals.append((number, group))
            if self._process is not None:
                _signal(self._process, number, group)

    def close(self, timeout_s: float = 5.0) -> None:
        """Kill the process, remove its files but unsent groups, and wait for both, at most so long."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self.send(signal.SIGKILL, True)
        self._thread.join(timeout_s)

    def _main(self) -> None:
        set_up_logging()
        code, why = None, ""
        try:
            code, why = asyncio.run(self._live())
        except Exception as error:  # noqa: BLE001 - the run is told of any failure of its host
            told = error_text(error) if isinstance(error, RolloutMQError) else error_line(error)
            why = f"its host failed: {told}"
        # Only now: once the run knows the end, it removes this process from the host.
        self._change(over=True, code=code, why=cut(why), waits_for="")
        with self._changed:
            while not self._closing and not self._is_silent():
                self._changed.wait(LOOK_S)
        if not self._closing:
            self._on_silence()

    async def _live(self) -> tuple[int | None, str]:
        """Live one life; return the exit code of the process, and why there is none."""
        _require_version(self._order.version)
        directory = Path(tempfile.mkdtemp(prefix="rolloutmq-"))  # for this user alone
        try:
            return await self._live_in(directory)
        finally:
            (directory / "key").unlink(missing_ok=True)
            if self._order.engine:
                remove_directory(directory)
            elif left := _unsent(directory / "run"):
                logger.error("groups of an ended process were not sent files=%s", ", ".join(map(str, left)))
            else:
                shutil.rmtree(directory, ignore_errors=True)

    async def _live_in(self, directory: Path) -> tuple[int | None, str]:
        is_engine = self._order.engine
        mirror = Mirror(
            self._connection(directory),
            self._accept,
            directory / "run",
            asks=not is_engine,
            serves=is_engine,
        )
        refreshing = asyncio.create_task(mirror.run(), name="mirror")
        try:
            self._change(waits_for=f"the run, at {self._order.addresses[0]}")
            if not await self._ready(mirror, refreshing):
                return None, "was ended before it started"
            if is_engine:
                return await self._serve(mirror)
            code = await self._run(mirror.layout, mirror.config.run.tls_ca)
            await self._deliver(mirror.layout)
            left = _unsent(mirror.layout.root)
            return (
                code,
                f"{len(left)} files of its groups stay unsent on its host, in {left[0].parent}"
                if left
                else "",
            )
        finally:
            refreshing.cancel()
            await asyncio.wait({refreshing})

    def _connection(self, directory: Path) -> Connection:
        key = directory / "key"
        if self._order.key:
            write_private(key, self._order.key)
        return Connection(addresses=self._order.addresses, key=str(key) if self._order.key else "")

    def _accept(self, data: bytes, layout: RunLayout) -> RunConfig:
        """Accept the configuration of the run, which has sent its code along: nothing in it is a stranger's."""
        config = placed(told(data), layout, self._base_dir, None)
        return served_here(config, self._order.addresses[0]) if self._order.engine else config

    async def _ready(self, mirror: Mirror, refreshing: "asyncio.Task[None]") -> bool:
        """Wait until the directory has a configuration; False if the process is not wanted any more."""
        ready = asyncio.create_task(mirror.ready())
        try:
            while not ready.done():
                await asyncio.wait({ready, refreshing}, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if refreshing.done():
                    refreshing.result()
                if self._signals or self._is_silent():
                    return False
                if mirror.problem:
                    self._change(waits_for=cut(f"the run: {mirror.problem}"))
            ready.result()
        finally:
            ready.cancel()
        return True

    async def _serve(self, mirror: Mirror) -> tuple[int | None, str]:
        """Run an engine with its relay until one of them ends; return its exit code, and why there is none."""
        side = EngineSide(self._order.name, mirror)
        try:
            code = await self._run(mirror.layout, mirror.config.run.tls_ca, side)
            return (None, f"its relay ended: {side.ended}") if side.ended is not None else (code, "")
        finally:
            await side.close()

    async def _run(self, layout: RunLayout, trust: Path | None, side: EngineSide | None = None) -> int | None:
        """Run the process to its end; return its exit code."""
        home = layout.root.parent
        guard = Guard(marker_of(self._marked, self._order.name), home / "key", None if side is None else home)
        reading, writing = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        os.set_blocking(writing, True)
        try:
            spec = self._spec(layout, trust)
            if side is not None:
                side.start(spec, self._marked, writing)
            with self._changed:
                process = self._process = spawn(spec, self._marked, writing)
                for number, group in self._signals:
                    _signal(process, number, group)
        finally:
            os.close(writing)
        one = process.identity
        self._change(
            host=socket.gethostname(),
            pid=one.pid,
            start_ticks=one.start_ticks,
            boot_id=one.boot_id,
            waits_for="",
        )
        try:
            code = await self._follow(process, reading, side)
            guard.dismiss()
            return code
        finally:
            os.close(reading)
            process.close()

    async def _follow(self, process: Process, reading: int, side: EngineSide | None) -> int | None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        loop.add_reader(process.fileno(), ended.set)
        loop.add_reader(reading, self._read, reading)
        termed_at = None
        try:
            while not ended.is_set():
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(LOOK_S):
                        await ended.wait()
                if self._is_silent():
                    termed_at = self._end_unheard(process, termed_at)
                if side is not None and side.has_ended():
                    process.send_group(signal.SIGKILL)
        finally:
            loop.remove_reader(process.fileno())
            loop.remove_reader(reading)
        if side is not None:
            await side.close()
        found = process.poll()
        while self._read(reading):
            continue
        return None if found is None else found.code

    def _end_unheard(self, process: Process, termed_at: float | None) -> float:
        """End a process whose run is silent: SIGTERM once, SIGKILL after the grace."""
        now = time.monotonic()
        if termed_at is None:
            logger.error(
                "the run is silent, ending name=%s lease_s=%g", self._order.name, self._order.lease_s
            )
            _signal(process, signal.SIGTERM, True)
            return now
        if now - termed_at >= self._order.term_grace_s:
            _signal(process, signal.SIGKILL, True)
        return termed_at

    def _read(self, reading: int) -> bool:
        """Take output that is ready; False if there is none."""
        try:
            data = os.read(reading, LOG_PART_BYTES)
        except BlockingIOError:
            return False
        if not data:  # closed by the process, which may live on
            asyncio.get_running_loop().remove_reader(reading)
            return False
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(data.decode(errors="replace"))
            sys.stdout.flush()
        with self._changed:
            self._output.add(data)
            self._changed.notify_all()
        return True

    async def _deliver(self, layout: RunLayout) -> None:
        """Send what the process has left, while the run asks: its next life may start elsewhere only then."""
        sending = asyncio.create_task(resend_spools(layout.root, layout.spools, ack_logs=layout.acks))
        try:
            while not (sending.done() or self._closing or self._is_silent()):
                await asyncio.wait({sending}, timeout=LOOK_S)
                if not sending.done():
                    self._change(waits_for="the run, to take the groups that it left")
            if sending.done():
                sending.result()
        except RolloutMQError as error:
            logger.warning("groups not sent name=%s error=%s", self._order.name, error)
        finally:
            sending.cancel()
            await asyncio.wait({sending})

    def _spec(self, layout: RunLayout, trust: Path | None) -> ProcessSpec:
        order, own = self._order, {PARENT: str(os.getpid())}
        if order.program is None:
            module, words = "rolloutmq.launch.service_process", order.words
            argv = python_command(sys.executable, module, words[0], "--run-dir", str(layout.root), *words[1:])
            variables = {"PYTHONPATH": _python_path(self._base_dir)}
        else:
            program = [text.replace(RUN_DIR, str(layout.root)) for text in order.program.argv]
            argv = python_command(sys.executable, "rolloutmq.services.programs.tied", *program)
            variables = {
                name: text.replace(RUN_DIR, str(layout.root))
                for name, text in order.program.variables.items()
            }
            own |= {"ROLLOUTMQ_TLS_CA": str(trust)} if trust is not None else {}
        return ProcessSpec(
            name=order.name,
            role=Role.WORKER,
            argv=argv,
            log=str(layout.log(order.name)),
            cwd=str(self._base_dir),
            env={**variables, **own},
            foreign=order.program is not None,
        )

    @property
    def _marked(self) -> str:
        """First part of the marker: another life of the same name may be on this host, and is none of this one's."""
        return f"{self._order.token}/{self._order.life}"

    def _is_silent(self) -> bool:
        return time.monotonic() - self._asked_at > self._order.lease_s

    def _change(self, **values: object) -> None:
        with self._changed:
            self._state = replace(self._state, **values)
            self._changed.notify_all()


def _unsent(root: Path) -> list[Path]:
    """Return the files of groups that the process has left in its directory of the run."""
    return sorted((root / "spools").glob("*"))


def _signal(process: Process, number: int, group: bool) -> None:
    if group:
        process.send_group(signal.Signals(number))
        if number == signal.SIGTERM:
            process.send_group(signal.SIGCONT)
    else:
        process.send(signal.Signals(number))


def _require_version(version: str) -> None:
    """Require the version of the run.

    Raises:
        ConfigError: This host has another one.
    """
    if (own := own_version()) != version:
        raise ConfigError(
            "cluster.engine",
            f"host {socket.gethostname()} has RolloutMQ {own} (the run has {version}); install the "
            "same version on every host of the cluster",
        )


def _python_path(base_dir: Path) -> str:
    """Return the paths of modules without the user's directory: a `json.py` there must not replace a module."""
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    return os.pathsep.join(path for path in paths if path and Path(path).resolve() != base_dir.resolve())
