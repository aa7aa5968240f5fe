"""The broker's life: claim the run directory, bind, serve, save.

    start   claim the sockets, bind them, become what a former life was, say in `endpoints.json` where they are
    serve   the data plane, in a thread of its own; the journal, in another
    end     by a signal, by `Shutdown`, or by leaving the block: take in what has arrived, make the state durable,
            remove `endpoints.json`, close

At durability `memory` there is no journal: a broker that is killed loses what it had accepted, and one that ends in
order leaves its state in `saved.rmq`. The two are never mixed in one run directory.
"""

import asyncio
import contextlib
import errno
import gc
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
from rolloutmq.bus.arena import Mapped
from rolloutmq.bus.endpoint import SOCKETS, bindings, claim, connectable, read_endpoints
from rolloutmq.bus.rundir import load_run, write_json
from rolloutmq.schemas.config import BrokerConfig, RunConfig
from rolloutmq.schemas.delivery import Durability
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
from rolloutmq.services.broker.journal.body import Ram
from rolloutmq.services.broker.journal.dead import DeadStore
from rolloutmq.services.broker.journal.facts import Began
from rolloutmq.services.broker.journal.writer import Journal
from rolloutmq.services.broker.recording import Recording
from rolloutmq.services.broker.relief import Accounts, Relief
from rolloutmq.services.broker.replaying import ReplayCore
from rolloutmq.services.broker.wake import Wake
from rolloutmq.services.runner import Stop, run_service

logger = logging.getLogger(__name__)

JOURNAL_DESCRIPTORS: Final = 64
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
    config: RunConfig,
    layout: RunLayout,
    on_end: Callable[[], object] = lambda: None,
    *,
    recording: Recording | None = None,
    alone: bool = False,
) -> Iterator[Broker]:
    """Run a broker in a thread of this process for as long as the block lasts.

    Args:
        config: The run's configuration.
        layout: The run directory, which exists.
        on_end: Called in the broker's thread when it stops serving, for whatever reason.
        recording: Serve this and nothing else; `config` is that of `replay_config`.
        alone: The process does nothing else, so that its memory is the broker's and is watched.

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
        wake = Wake()
        stack.callback(wake.close)
        ram = None if config.broker.durability is Durability.MEMORY else Ram(config.broker.ram_bytes)
        shares = config.broker.transport == "ipc" and config.broker.shared_memory
        journal: Journal | None = None
        if recording is not None:
            now, wall = time.monotonic(), time.time()
            core: BrokerCore = ReplayCore(
                config, recording, epoch=epoch, endpoints=endpoints, now=now, wall=wall
            )
        else:
            core = BrokerCore(
                config, epoch=epoch, endpoints=endpoints, ram=ram, open_arena=Mapped if shares else None
            )
            stack.callback(core.close)
            journal = stack.enter_context(_lasting(core, config.broker, layout, ram, epoch, wake))
        dropped = stack.enter_context(layout.dropped.open("ab", buffering=0))
        dead = DeadStore(
            layout.dead, config.broker.dead_bytes, sync=config.broker.durability is Durability.DISK
        )
        _reconcile(core, dead)
        accounts = Accounts(core, ram, journal)
        relief = Relief(bound.all, config.broker.overhead_bytes, accounts) if alone else None
        plane = DataPlane(
            core,
            bound,
            dropped,
            dead,
            config.broker.max_group_bytes,
            wake,
            journal,
            relief,
        )
        broker = Broker(core, plane, endpoints, on_end)
        stack.callback(layout.endpoints.unlink, missing_ok=True)
        write_json(layout.endpoints, endpoints)
        stack.callback(broker.stop)
        broker.start()
        durability = config.broker.durability.value
        logger.info("ready serve=%s epoch=%d durability=%s", endpoints.serve, epoch, durability)
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
    with running_broker(config, layout, ended, alone=True):
        await stop.wait()


def replay(recorded: Path, run_dir: Path) -> int:
    """Serve the batches of one run in the directory of another one until all are settled; returns the exit code."""
    return run_service("replay", partial(_serve_again, recorded, run_dir))


async def _serve_again(recorded: Path, run_dir: Path, stop: Stop) -> None:
    _raise_file_limit()
    config, layout = load_run(run_dir)
    loop = asyncio.get_running_loop()
    ended = partial(loop.call_soon_threadsafe, stop.request, "end of replay")
    with contextlib.closing(Recording(recorded, Ram(config.broker.ram_bytes))) as recording:
        logger.info("replaying run=%s batches=%d", recorded, len(recording.batches))
        with running_broker(config, layout, ended, recording=recording):
            await stop.wait()


def _raise_file_limit() -> None:
    """Allow nearly as many descriptors as this user may have: a producer needs three, and 1,024 is the usual limit.

    The rest is the journal's, which takes them one by one where clients have left it none.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most - min(JOURNAL_DESCRIPTORS, most // 8), most))


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


@contextlib.contextmanager
def _lasting(
    core: BrokerCore,
    config: BrokerConfig,
    layout: RunLayout,
    ram: Ram | None,
    epoch: int,
    wake: Wake,
) -> Iterator[Journal | None]:
    """Bring the former life of the broker back, and make this one last as the run demands."""
    if ram is None:
        if any(layout.journal.glob("facts-*.rmq")):
            raise ConfigError("broker.durability", f"{layout.journal} is of a run that is journaled")
        _restore(core, layout)
        yield None
        _save(core, layout)
        return
    if layout.saved.exists():
        raise ConfigError("broker.durability", f"{layout.saved} is of a run at durability memory")
    journal = Journal(layout.journal, config, ram, wake.set)
    try:
        with _uncollected():
            sound = _recover(core, journal)
            began = Began(epoch, os.getpid(), config.durability.value)
            journal.start([*core.snapshot(), began], keep_old=not sound)
        yield journal
        journal.append(core.facts())
        journal.close(snapshot=core.snapshot())
    finally:
        journal.close()


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Let the collector of garbage rest while much is made that stays: it would look at all of it, again and again."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _recover(core: BrokerCore, journal: Journal) -> bool:
    """Become what the journal says; False if something of it was damaged."""
    began = time.monotonic()
    found = journal.recover()
    problems = core.restore(found.facts, found, began, time.time())
    for line in (*found.damage, *problems):
        logger.error("damaged journal: %s", line)
    if not found.empty:
        logger.info("recovered groups=%d seconds=%.2f", core.held_groups, time.monotonic() - began)
    return not found.damage and not problems


def _reconcile(core: BrokerCore, dead: DeadStore) -> None:
    """Remove the letters of groups that live: the broker was killed before it could, or before they were dead."""
    for entry in list(dead.entries()):
        if core.lives(entry.order):
            dead.remove(entry.order)


def _restore(core: BrokerCore, layout: RunLayout) -> None:
    found = saved.load(layout.saved)
    for problem in core.restore(found.facts, found, time.monotonic(), time.time()):
        logger.error("damaged file=%s: %s", layout.saved, problem)
    saved.retire(layout.saved, found)
    if found.facts:
        logger.info("restored groups=%d file=%s", core.held_groups, layout.saved)


def _save(core: BrokerCore, layout: RunLayout) -> None:
    core.forget_unclaimed()
    count = saved.save(layout.saved, core.snapshot())
    logger.info("saved groups=%d", count)
