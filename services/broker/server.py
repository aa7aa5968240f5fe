"""The broker's life: claim the run directory, bind, serve, save.

    start   claim the sockets, bind them, put back what a former life saved, say in `endpoints.json` where they are
    serve   the data plane, in a thread of its own
    end     by a signal, by `Shutdown`, or by leaving the block: take in what has arrived, save what is not trained,
            remove `endpoints.json`, close

An ack means `memory` so far: what a broker that is killed had accepted is gone with it. An orderly end loses nothing.
"""

import asyncio
import contextlib
import errno
import logging
import os
import resource
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Final

import zmq

from rolloutmq.bus import sockets, topics
from rolloutmq.bus.endpoint import SOCKETS, bindings, claim, connectable, read_endpoints
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.schemas.config import BrokerConfig, RunConfig
from rolloutmq.schemas.envelope import ENVELOPE_LIMIT_BYTES
from rolloutmq.schemas.errors import AddressInUseError, ConfigError, MalformedError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import Endpoints
from rolloutmq.services.broker import saved
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.dataplane import (
    EVENT_LIMIT_BYTES,
    REQUEST_LIMIT_BYTES,
    BrokerSockets,
    DataPlane,
)
from rolloutmq.services.runner import Stop, run_service

logger = logging.getLogger(__name__)

IO_THREADS: Final = 1
"""Threads of the socket library."""


class Broker:
    """A running broker; see `running_broker`."""

    def __init__(
        self, core: BrokerCore, plane: DataPlane, endpoints: Endpoints, on_end: Callable[[], object]
    ) -> None:
        self.core = core
        self.endpoints = endpoints
        self.error: BaseException | None = None
        """What ended the data plane, if it failed."""
        self._plane = plane
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="broker data plane")

    def start(self) -> None:
        """Begin to serve."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, after what has already arrived was taken in. Blocks; may be called twice."""
        if self._thread.is_alive():
            self._plane.stop()
            self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Wait until it stopped serving by itself; False if it still does."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            self._plane.run()
        except BaseException as error:
            logger.exception("data plane failed")
            self.error = error
        finally:
            self._on_end()


@contextlib.contextmanager
def running_broker(
    config: RunConfig, layout: RunLayout, on_end: Callable[[], object] = lambda: None
) -> Iterator[Broker]:
    """Run a broker in a thread of this process for as long as the block lasts.

    Args:
        config: The run's configuration.
        layout: The run directory, which exists.
        on_end: Called in the broker's thread when it stops serving, for whatever reason.

    Raises:
        AddressInUseError: Another broker lives in this run directory, or a port is taken.
        ConfigError: `broker.host` cannot be bound, or must not be.
    """
    with contextlib.ExitStack() as stack:
        epoch = stack.enter_context(claim(layout))
        addresses = stack.enter_context(bindings(config.broker, layout))
        context = sockets.make_context(IO_THREADS)
        stack.callback(context.term)
        bound = _made(context, config.broker)
        stack.callback(bound.close)
        endpoints = _bind(bound, addresses, _former(layout), epoch)
        core = BrokerCore(config, epoch=epoch, endpoints=endpoints)
        _restore(core, layout)
        stack.callback(_save, core, layout)
        dropped = stack.enter_context(layout.dropped.open("ab", buffering=0))
        plane = DataPlane(core, bound, dropped, config.broker.max_group_bytes)
        stack.callback(plane.close)
        broker = Broker(core, plane, endpoints, on_end)
        stack.callback(layout.endpoints.unlink, missing_ok=True)
        write_json(layout.endpoints, endpoints)
        stack.callback(broker.stop)
        broker.start()
        logger.info("ready serve=%s epoch=%d durability=memory", endpoints.serve, epoch)
        yield broker
        broker.stop()
        if broker.error is not None:
            raise broker.error


def main(run_dir: Path) -> int:
    """Run the broker of a run directory until a signal or `Shutdown` ends it; returns the exit code."""
    return run_service("broker", partial(_serve, run_dir))


async def _serve(run_dir: Path, stop: Stop) -> None:
    _raise_file_limit()
    config, layout = load_run(run_dir)
    loop = asyncio.get_running_loop()
    ended = partial(loop.call_soon_threadsafe, stop.request, "data plane ended")
    with running_broker(config, layout, ended):
        await stop.wait()


def _raise_file_limit() -> None:
    """Allow as many descriptors as this user may have: a producer needs three, and 1,024 is the usual limit."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _made(context: sockets.Context, config: BrokerConfig) -> BrokerSockets:
    largest = max(config.max_group_bytes, ENVELOPE_LIMIT_BYTES)
    bound = BrokerSockets(
        ingest=sockets.ingest_pull(context, largest),
        serve=sockets.serve_router(context, REQUEST_LIMIT_BYTES),
        events=sockets.events_xpub(context),
        publish=sockets.publish_xsub(context, EVENT_LIMIT_BYTES),
    )
    for prefix in topics.FORWARDED:
        bound.publish.send(b"\x01" + prefix)
    return bound


def _bind(bound: BrokerSockets, addresses: dict[str, str], former: Endpoints | None, epoch: int) -> Endpoints:
    found = {}
    for name in SOCKETS:
        socket = getattr(bound, name)
        address = addresses[name]
        wanted = [address]
        if former is not None and address.endswith(":*"):
            # Peers of a broker that was killed still try its ports; with new ones they would wait for ever.
            port = getattr(former, name).rpartition(":")[2]
            wanted.insert(0, f"{address.removesuffix('*')}{port}")
        _bind_first(socket, wanted)
        found[name] = connectable(socket.getsockopt(zmq.LAST_ENDPOINT).rstrip(b"\0").decode())
    return Endpoints(**found, pid=os.getpid(), epoch=epoch)


def _bind_first(socket: sockets.Socket, addresses: list[str]) -> None:
    """Bind to the first address that is free."""
    socket.setsockopt(zmq.IPV6, int(addresses[-1].startswith("tcp://[")))
    for address in addresses:
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            if error.errno != errno.EADDRINUSE:
                raise ConfigError("broker.host", f"cannot bind {address}: {error.strerror}") from None
        else:
            return
    raise AddressInUseError(addresses[-1])


def _former(layout: RunLayout) -> Endpoints | None:
    """Return where a broker was bound that ended without removing its file: it was killed."""
    try:
        return read_endpoints(layout.root)
    except MalformedError:
        return None


def _restore(core: BrokerCore, layout: RunLayout) -> None:
    now, wall = time.monotonic(), time.time()
    found = saved.load(layout.saved, now, wall)
    core.restore(found.groups, now, wall, found.kept)
    saved.retire(layout.saved, found)
    if found.groups or found.kept:
        counts = len(found.groups), len(found.kept)
        logger.info("restored groups=%d settled_batches=%d file=%s", *counts, layout.saved)


def _save(core: BrokerCore, layout: RunLayout) -> None:
    count = saved.save(layout.saved, core.saved(), core.kept())
    logger.info("saved groups=%d", count)
