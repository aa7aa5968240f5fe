"""The cluster service: holds the connection of a run to its cluster, and tells the orchestrator of its processes.

It is a process of its own, because the software of a cluster ends the processes that are connected to it when it fails.
It may be killed at any time: the lives go on for their lease, its next life finds them, and the orchestrator repeats
its orders. SIGTERM is the end of the run: nothing of it stays on the cluster.

All calls of the cluster's software happen in one thread, one after the other; the loop serves the private socket.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final, TypeVar

from rolloutmq.bus.engine_registry import PLACED
from rolloutmq.bus.files import private_file, read_regular
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import load_run
from rolloutmq.bus.transport.bindings import private_directory
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import MalformedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.cluster.backend import Answer, Backend
from rolloutmq.services.orchestrator.cluster.capacity.watch import CapacityWatch
from rolloutmq.services.orchestrator.cluster.lives import SIGKILL, Life, LifeBook
from rolloutmq.services.orchestrator.cluster.messages import (
    RESERVATION,
    Demand,
    Frames,
    HostOrder,
    HostState,
    Order,
    Release,
    Report,
    Send,
    Start,
    framed,
    own_version,
)
from rolloutmq.services.orchestrator.cluster.opening import namespace_of, reached_at
from rolloutmq.services.orchestrator.cluster.remote_processes import short_path
from rolloutmq.services.orchestrator.cluster.resources import need_of, shortage
from rolloutmq.services.orchestrator.cluster.sent_code import excluded
from rolloutmq.services.orchestrator.supervision.worker_table import env_of
from rolloutmq.services.process.identity import inherited_token
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)

POLL_S: Final = 0.2
"""Longest wait for answers before orders are carried out."""
IDLE_S: Final = 0.05
"""Pause of a service without lives."""
READ_BYTES: Final = 1 << 16

_T = TypeVar("_T")
Connect = Callable[[], Backend]


class ClusterService:
    """The service of one run. For one event loop.

    Args:
        config: Configuration of the run, with a listener of the broker.
        layout: Run directory.
        token: Run token.
        connect: Connects to the cluster; called in the thread of the cluster's software.
    """

    def __init__(self, config: RunConfig, layout: RunLayout, token: str, connect: Connect) -> None:
        self._config = config
        self._layout = layout
        self._token = token
        self._connect = connect
        self._book = LifeBook(config.cluster.placement_timeout_s)
        self._capacity = CapacityWatch(config)
        self._orders: list[Order] = []
        self._clients: set[asyncio.StreamWriter] = set()
        self._reservation = ""
        """Life that holds resources of this host."""
        self._unwritten = LogThrottle()
        self._thread = ThreadPoolExecutor(1, "cluster")
        self._key, self._engine_key = (
            read_regular(file) if file.exists() else b""
            for file in (layout.cluster_key, layout.cluster_engine_key)
        )

    async def run(self, stop: Stop) -> None:
        """Serve until `stop`; then end every life and return.

        Raises:
            RunDirInUseError: Another service serves this run.
            MissingError: There is no cluster, or its software is not installed.
            ClusterLostError: The connection is lost.
        """
        with only_one(self._layout.root / "cluster.lock", "cluster service"):
            try:
                backend = await self._call(self._connect)
                try:
                    for life, name in await self._call(backend.found):
                        if name == RESERVATION:
                            self._reservation = life
                        else:
                            self._book.find(life, name, env_of(name), time.monotonic())
                        await self._call(backend.look, life, -1)
                    if self._config.cluster.reserves and not self._reservation:
                        logger.error("the cluster does not keep the reserved part of this host")
                    logger.info("connected to the cluster lives=%d", len(self._book.living()))
                    await self._serve(backend, stop)
                finally:
                    await self._call(backend.close)
            finally:
                self._thread.shutdown(wait=False)

    async def _serve(self, backend: Backend, stop: Stop) -> None:
        private_directory(self._layout.sockets)
        path = self._layout.cluster_socket
        path.unlink(missing_ok=True)
        with short_path(path) as name:
            server = await asyncio.start_unix_server(self._follow, name)
        try:
            while stop.reason is None:
                await self._turn(backend)
            await self._end_all(backend)
        finally:
            server.close()
            for writer in self._clients:
                writer.close()
            path.unlink(missing_ok=True)

    async def _turn(self, backend: Backend) -> None:
        """Carry out the orders, take what has arrived, and give up what lasts too long."""
        orders, self._orders = self._orders, []
        for order in orders:
            await self._carry_out(backend, order)
        await self._look_at_nodes(backend)
        if not (self._book.living() or self._reservation):
            await asyncio.sleep(IDLE_S)
            return
        for answer in await self._call(backend.poll, POLL_S):
            await self._take(backend, answer)
        await self._give_up(backend)

    async def _look_at_nodes(self, backend: Backend) -> None:
        """Tell the nodes of the cluster and of its lives, and ask the cluster to grow or to shrink."""
        now = time.monotonic()
        if self._capacity.is_due(now):
            found = await self._call(backend.nodes)
            if nodeless := self._book.nodeless():  # told ahead of the nodes on which they take room
                for life, node in (await self._call(backend.placed, nodeless)).items():
                    self._tell(self._book.placed(life, node))
            self._tell(self._capacity.seen(found, now))
        if (needs := self._capacity.request(now)) is not None:
            await self._call(backend.request, needs, self._capacity.avoid)

    async def _carry_out(self, backend: Backend, order: Order) -> None:
        match order:
            case Demand():
                self._capacity.wants(order)
            case Start() if order.life not in self._book:
                await self._start(backend, order)
            case Send() if (life := self._book.get(order.life)) is not None and not life.state.over:
                await self._send(backend, order, life)
            case Release():
                await self._call(backend.kill, order.life)
                self._book.release(order.life)
            case _:
                return

    async def _start(self, backend: Backend, order: Start) -> None:
        logger.info("ordered name=%s life=%s", order.name, order.life)
        self._tell(self._book.begin(order.life, order.name, order.env, time.monotonic()))
        told = HostOrder(
            life=order.life,
            name=order.name,
            words=order.words,
            program=order.program,
            token=self._token,
            run=self._config.run.name,
            version=own_version(),
            addresses=(reached_at(self._config),),
            key=self._engine_key if order.env == PLACED else self._key,
            lease_s=self._config.cluster.lease_s,
            term_grace_s=self._config.orchestrator.term_grace_s,
            autoscale=self._config.cluster.autoscale,
            engine=order.env == PLACED,
        )
        await self._call(backend.start, told, need_of(self._config, order.env), self._capacity.avoid)
        await self._call(backend.look, order.life, 0)

    async def _send(self, backend: Backend, order: Send, life: Life) -> None:
        if life.is_hostless:
            await self._call(backend.kill, order.life)
            self._tell(self._book.end(order.life, "was ended before the cluster had a host for it"))
            return
        if order.number == SIGKILL:
            self._book.killed(order.life, time.monotonic())
        await self._call(backend.send, order.life, order.number, order.group)

    async def _take(self, backend: Backend, answer: Answer) -> None:
        if answer.life == self._reservation:
            await self._renew(backend, answer)
            return
        life = self._book.get(answer.life)
        if life is None:
            return
        if answer.told is None:
            self._tell(self._book.end(answer.life, answer.error))
            await self._call(backend.kill, answer.life)
            return
        self._write(life, answer.told)
        news = self._book.answer(answer.life, answer.told, time.monotonic())
        if news is not None:
            logger.info("told name=%s host=%s pid=%d over=%s", news.name, news.host, news.pid, news.over)
            self._tell(news)
        if not life.state.over:
            await self._call(backend.look, answer.life, life.acked)

    async def _renew(self, backend: Backend, answer: Answer) -> None:
        """Ask again what holds resources of this host; that renews its lease."""
        if answer.told is not None:
            await self._call(backend.look, answer.life, 0)
            return
        logger.error(
            "the cluster does not keep the reserved part of this host any more error=%s", answer.error
        )
        self._reservation = ""

    async def _give_up(self, backend: Backend) -> None:
        now = time.monotonic()
        unplaced = self._book.unplaced(now)
        nodes = await self._call(backend.nodes) if unplaced else ()
        for one in unplaced:
            why = shortage(need_of(self._config, one.env), [node.total for node in nodes])
            waited = f"no node has started it for {self._config.cluster.placement_timeout_s:g} s"
            await self._call(backend.kill, one.state.life)
            self._tell(self._book.end(one.state.life, f"{waited}: {why}"))
        for one in self._book.unkillable(now):
            await self._call(backend.kill, one.state.life)
            self._tell(self._book.end(one.state.life, "killed, and its host did not answer", -SIGKILL))

    def _write(self, life: Life, told: HostState) -> None:
        """Append the output of a process to its log in the run."""
        if not told.output:
            return
        try:
            with private_file(self._layout.log(life.state.name), "ab") as log:
                if life.acked >= 0 and told.offset > life.acked:
                    log.write(b"[%d bytes of output are missing here]\n" % (told.offset - life.acked))
                log.write(told.output)
        except OSError as error:
            if self._unwritten.is_due(str(error), time.monotonic()):
                logger.warning("log not written name=%s error=%s", life.state.name, error)

    async def _end_all(self, backend: Backend) -> None:
        """Remove all lives, those that an earlier service has left included, and withdraw the request for nodes."""
        if self._config.cluster.autoscale:
            await self._call(backend.request, {})
        await self._call(backend.kill_all, self._book.living())
        await self._call(backend.kill_all, [life for life, _ in await self._call(backend.found)])

    async def _follow(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Serve an orchestrator until its connection ends."""
        frames = Frames(orders=True)
        writer.write(framed(self._book.report()))
        writer.write(framed(self._capacity.report()))
        self._clients.add(writer)
        try:
            while data := await reader.read(READ_BYTES):
                for order in frames.take(data):
                    if isinstance(order, Start | Send | Release | Demand):
                        self._orders.append(order)
        except (OSError, MalformedError) as error:
            logger.warning("orchestrator lost error=%s", error)
        finally:
            self._clients.discard(writer)
            writer.close()

    def _tell(self, report: Report | None) -> None:
        if report is not None:
            for writer in self._clients:
                writer.write(framed(report))

    async def _call(self, function: Callable[..., _T], *values: object) -> _T:
        """Call the cluster's software in its thread."""
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *values)


def main(run_dir: Path) -> int:
    """Run the cluster service of a run; return its exit code. Blocks."""

    async def serve(stop: Stop) -> None:
        config, layout = load_run(run_dir)
        token = inherited_token() or "by-hand"

        def connect() -> Backend:
            from rolloutmq.services.orchestrator.cluster.ray_backend import RayBackend

            own, code = config.cluster, config.base_dir.resolve()
            return RayBackend(own.address, namespace_of(layout), token, code, tuple(excluded(config, layout)))

        await ClusterService(config, layout, token, connect).run(stop)

    return run_service("cluster", serve)
