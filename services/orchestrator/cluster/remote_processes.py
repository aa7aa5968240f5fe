"""The orchestrator's side of a cluster: processes of other hosts that a supervisor treats like its own.

A `RemoteProcess` exists from the moment of its order; its host comes later. It asks nobody and waits for nothing:
orders go to the cluster service, and what that reports is kept here. After each connection the orders of all living
processes are repeated, so neither the death of the service nor that of the orchestrator loses one:

    not reported yet     started (again)
    reported before      over, if the service does not know it any more
    unknown here         released: its orchestrator died before it wrote the identity
"""

import asyncio
import contextlib
import logging
import math
import os
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from msgspec.structs import replace

from rolloutmq.bus.log_throttle import WaitLog
from rolloutmq.schemas.errors import MalformedError
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec
from rolloutmq.services.orchestrator.cluster.messages import (
    Demand,
    Frames,
    LifeState,
    Lives,
    Node,
    Nodes,
    Order,
    Program,
    Release,
    Send,
    Start,
    framed,
)
from rolloutmq.services.orchestrator.supervision.worker_table import env_of
from rolloutmq.services.process.child import Exit
from rolloutmq.services.process.identity import marker_of

logger = logging.getLogger(__name__)

AGAIN_S: Final = 0.5
"""Time between two attempts to reach the service."""
READ_BYTES: Final = 1 << 16
GONE: Final = "is not on the cluster any more"

Tell = Callable[[Order], None]


class RemoteProcess:
    """One life of a process on the cluster. Owns an eventfd, readable at its end and once it has a host."""

    def __init__(self, identity: ProcessIdentity, start: Start | None, tell: Tell) -> None:
        self.identity = identity
        self.start = start
        self.sent: list[Send] = []
        """Signals so far, without repetitions."""
        self.is_reported = start is None
        """The service knows it, or knew it once."""
        self.node = self.host = ""
        self.ordered_at = time.monotonic()
        """Time of its order, or of its adoption."""
        self.placed_at = math.inf
        """Time at which it was told that it has a node."""
        self._waits_for = ""
        self.over: Exit | None = None
        self._tell = tell
        self._changed = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)

    def fileno(self) -> int:
        """Return the eventfd."""
        return self._changed

    def poll(self) -> Exit | None:
        """Return how it ended; None while it lives, or may."""
        if self.over is None:
            with contextlib.suppress(BlockingIOError):
                os.eventfd_read(self._changed)
        return self.over

    def send(self, number: signal.Signals) -> None:
        """Signal only this process."""
        self._send(number, group=False)

    def send_group(self, number: signal.Signals) -> None:
        """Signal the whole group."""
        self._send(number, group=True)

    def close(self) -> None:
        """Stop watching. An ended one is released; one that lives continues, for the next orchestrator."""
        if self._changed < 0:
            return
        os.close(self._changed)
        self._changed = -1
        if self.over is not None:
            self._tell(Release(life=self.identity.life))

    @property
    def is_placed(self) -> bool:
        """Whether a node was found for it."""
        return bool(self.node or self.identity.pid)

    @property
    def is_closed(self) -> bool:
        """Whether nobody watches it any more."""
        return self._changed < 0

    def take(self, state: LifeState) -> None:
        """Take what the service reports."""
        self.is_reported = True
        if state.waits_for not in {"", self._waits_for}:
            logger.info("waiting name=%s for=%s", self.identity.name, state.waits_for)
        self._waits_for = state.waits_for
        self.node, self.host = state.node or self.node, state.host or self.host
        if self.node and math.isinf(self.placed_at):
            self.placed_at = time.monotonic()
        if state.pid and state.pid != self.identity.pid:
            self.identity = replace(
                self.identity,
                pid=state.pid,
                start_ticks=state.start_ticks,
                boot_id=state.boot_id,
                host=state.host,
            )
            logger.info("placed name=%s host=%s pid=%d", self.identity.name, state.host, state.pid)
            self._wake()
        if state.over:
            self.end(Exit(state.code, state.why))

    def end(self, how: Exit) -> None:
        """Record its end, once; one that nobody watches any more is released."""
        if self.over is not None:
            return
        self.over = how
        self._wake()
        if self.is_closed:
            self._tell(Release(life=self.identity.life))

    def _wake(self) -> None:
        if not self.is_closed:
            os.eventfd_write(self._changed, 1)

    def _send(self, number: signal.Signals, *, group: bool) -> None:
        order = Send(life=self.identity.life, number=number, group=group)
        if self.over is None and order not in self.sent:
            self.sent.append(order)
            self._tell(order)


class RemoteProcesses:
    """The processes of a run on the cluster: a `Spawner`. For one event loop; `run` keeps the connection.

    Args:
        socket: Path of the service's socket, of any length.

    Attributes:
        nodes: The nodes of the cluster; None before the first report.
    """

    def __init__(self, socket: Path) -> None:
        self.nodes: tuple[Node, ...] | None = None
        self._socket = socket
        self._demand: Demand | None = None
        self._lives: dict[str, RemoteProcess] = {}
        self._writer: asyncio.StreamWriter | None = None
        self._wait = WaitLog()

    def spawn(self, spec: ProcessSpec, token: str) -> RemoteProcess:
        """Order a process; a supervisor holds it at once, and its host is told later."""
        life = secrets.token_hex(8)
        program = Program(argv=spec.argv, variables=spec.env) if spec.foreign else None
        words = () if spec.foreign else spec.argv
        start = Start(
            life=life, name=spec.name, env=spec.kind or env_of(spec.name), words=words, program=program
        )
        marker = marker_of(token, spec.name)
        process = RemoteProcess(
            ProcessIdentity(
                name=spec.name, role=spec.role, pid=0, start_ticks=0, boot_id="", marker=marker, life=life
            ),
            start,
            self._tell,
        )
        self._lives[life] = process
        self._tell(start)
        return process

    def adopt(self, identity: ProcessIdentity) -> RemoteProcess | None:
        """Take over a life that an earlier orchestrator ordered; it ends if the service does not know it.

        Call it before `run`: what is unknown at the first connection is released.
        """
        if not identity.life:
            return None
        process = self._lives[identity.life] = RemoteProcess(identity, None, self._tell)
        return process

    def living(self) -> list[RemoteProcess]:
        """Return the processes that are not over, in the order of their orders."""
        return [one for one in self._lives.values() if one.over is None and not one.is_closed]

    def want(self, demand: Demand) -> None:
        """Say what the control law wants; it is told at changes, and after each connection."""
        if demand != self._demand:
            self._demand = demand
            self._tell(demand)

    def end_marked(self, _marker: str, /) -> int:
        """Do nothing: the host of a process ends what the process has left."""
        return 0

    async def run(self) -> None:
        """Keep a connection to the service until cancelled; a lasting wait for it is logged."""
        while True:
            try:
                with short_path(self._socket) as path:
                    reader, writer = await asyncio.open_unix_connection(path)
            except OSError as error:
                self._misses(str(error))
            else:
                await self._follow(reader, writer)
            await asyncio.sleep(AGAIN_S)

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Take reports until the connection ends."""
        frames = Frames(orders=False)
        try:
            while data := await reader.read(READ_BYTES):
                for report in frames.take(data):
                    if isinstance(report, Lives):
                        self._writer = writer
                        self._wait.over()
                        self._reconcile(report)
                    elif isinstance(report, LifeState):
                        self._take(report)
                    elif isinstance(report, Nodes) and report.nodes:
                        self.nodes = report.nodes
        except (OSError, MalformedError) as error:
            logger.warning("cluster service lost error=%s", error)
        finally:
            self._writer = None
            writer.close()
            self._forget_closed()

    def _reconcile(self, known: Lives) -> None:
        """Bring both sides together after a connection."""
        states = {one.life: one for one in known.lives}
        if self._demand is not None:
            self._tell(self._demand)
        for life in states.keys() - self._lives.keys():
            self._tell(Release(life=life))
        for life, process in list(self._lives.items()):
            if (state := states.get(life)) is not None:
                process.take(state)
            elif process.is_reported or process.start is None:
                process.end(Exit(None, GONE))
            else:
                self._tell(process.start)
            if process.over is None:
                for order in process.sent:
                    self._tell(order)
        logger.info("connected to the cluster service lives=%d", len(self._lives))

    def _take(self, state: LifeState) -> None:
        process = self._lives.get(state.life)
        if process is None:
            self._tell(Release(life=state.life))
        else:
            process.take(state)

    def _tell(self, order: Order) -> None:
        """Send an order, if there is a connection; `_reconcile` repeats it after the next one."""
        if isinstance(order, Release):
            self._lives.pop(order.life, None)
        if self._writer is not None:
            self._writer.write(framed(order))

    def _forget_closed(self) -> None:
        self._lives = {life: one for life, one in self._lives.items() if not one.is_closed}

    def _misses(self, error: str) -> None:
        now = time.monotonic()
        if self._wait.is_due(error, now):
            waited_s = self._wait.waited_s(now)
            logger.warning("waiting for the cluster service waited_s=%.0f error=%s", waited_s, error)


@contextlib.contextmanager
def short_path(path: Path) -> Iterator[str]:
    """Yield a short path of a socket: the kernel takes at most 107 bytes."""
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{directory}/{path.name}"
    finally:
        os.close(directory)
