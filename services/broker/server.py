"""The broker process: claim the run directory, bind, serve, save.

    start   claim and bind the sockets, restore the previous life, bind `broker.listen`, write the addresses to
            `endpoints.json`
    serve   the data plane in a thread of its own; the journal in another
    end     on a signal, on `Shutdown`, or on leaving the block: accept what has arrived, make the state durable,
            remove `endpoints.json`, close

At durability `memory` there is no journal: a killed broker loses its groups, and one that ends in order writes its
state to `saved.rmq`. The two are never mixed in one run directory.
"""

import asyncio
import contextlib
import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

import zmq
from msgspec.structs import replace

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.lifecycle import gc_paused
from rolloutmq.bus.rundir import load_run, usable, write_json
from rolloutmq.bus.shm.arena import MappedArena
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.bindings import SOCKETS, bindings, claim, listen_addresses
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.run_identity import made_run_id
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError, MalformedError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.envelope import ENVELOPE_LIMIT_BYTES
from rolloutmq.schemas.wire.replies import Durability
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.io.data_plane import (
    EVENT_LIMIT_BYTES,
    REQUEST_LIMIT_BYTES,
    BrokerLogs,
    BrokerSockets,
    DataPlane,
    Waker,
)
from rolloutmq.services.broker.io.door import Door
from rolloutmq.services.broker.io.gatekeeper import Gatekeeper, KnownKeys
from rolloutmq.services.broker.io.line_log import LineLog
from rolloutmq.services.broker.io.memory_guard import MemoryAccounts, MemoryGuard
from rolloutmq.services.broker.io.owner_log import OwnerLog
from rolloutmq.services.broker.io.shared_run import SharedRun
from rolloutmq.services.broker.journal.dead_letters import DeadLetterStore
from rolloutmq.services.broker.journal.format.events import Began
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.read.versions import require_own_records
from rolloutmq.services.broker.journal.stored_group import BodyMemory
from rolloutmq.services.broker.replay.core import ReplayCore
from rolloutmq.services.broker.replay.recording import Recording
from rolloutmq.services.broker.snapshots import memory_snapshot
from rolloutmq.services.process.descriptors import raise_descriptor_limit
from rolloutmq.services.process.latency_publisher import own_host
from rolloutmq.services.process.run_lives import has_launcher, living
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)

GC_THRESHOLD: Final = 10_000, 20, 20
"""Objects, and collections of the younger generation, between two garbage collections. The broker makes few cycles.
With the defaults of Python, a profile showed a twelfth of its CPU in the search for them."""

JOURNAL_DESCRIPTORS: Final = 64
"""Descriptors reserved for the journal, which takes them one by one when clients have used up the others."""


class Broker:
    """A running broker; see `running_broker`."""

    def __init__(
        self, core: BrokerCore, plane: DataPlane, endpoints: Endpoints, on_end: Callable[[], object]
    ) -> None:
        self.core = core
        self.endpoints = endpoints
        self.error: BaseException | None = None
        """The exception that ended the data plane, if it failed."""
        self._plane = plane
        self._on_end = on_end
        self._thread = threading.Thread(target=self._run, name="broker data plane")

    def start(self) -> None:
        """Start serving."""
        self._thread.start()

    def stop(self) -> None:
        """Stop serving, after accepting everything that has arrived. Blocks; may be called twice."""
        if self._thread.is_alive():
            self._plane.stop()
            self._thread.join()

    def join(self, timeout_s: float) -> bool:
        """Wait until the data plane has ended by itself; False on timeout."""
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
        on_end: Called in the broker's thread when it stops serving, for any reason.
        recording: Replay this recording and accept no groups; `config` comes from `replay_config`.
        alone: The process is the broker's alone, so its memory is watched.

    Raises:
        AddressInUseError: Another broker lives in this run directory, or a port is taken.
        UnusablePathError: The run directory cannot be read or written.
        ConfigError: `broker.listen` cannot be bound, or its keys cannot be used.
        MissingError, NotPrivateError: The key directory is missing, or open to others.
        RecordVersionError: Another version wrote files of the run directory; none of them was changed.
        DamagedFileError: The id of the run is damaged.
    """
    with contextlib.ExitStack() as stack:
        with usable(layout.root):
            broker = _started(config, layout, stack, on_end, recording, alone=alone)
        yield broker
        broker.stop()
        if broker.error is not None:
            raise broker.error


def _started(
    config: RunConfig,
    layout: RunLayout,
    stack: contextlib.ExitStack,
    on_end: Callable[[], object],
    recording: Recording | None,
    *,
    alone: bool,
) -> Broker:
    """Start a broker that ends with `stack`. OSError: the file system refuses a file of the run directory."""
    require_own_records(layout)  # before the claim, which writes its lock
    epoch = stack.enter_context(claim(layout))
    if not has_launcher(layout):
        stack.enter_context(living(layout))
    previous = _previous_endpoints(layout)
    run_id = made_run_id(layout)
    addresses = stack.enter_context(bindings(layout))
    context = sockets.make_context(2 if config.broker.listen else 1)
    stack.callback(context.term)
    listener = _listener(config, context, stack)
    bound = _make_sockets(context, config.broker, remote=listener is not None)
    stack.callback(bound.close)
    endpoints = replace(_bind(bound, addresses, epoch), run_id=run_id)
    wake = Waker()
    stack.callback(wake.close)
    ram = None if config.broker.durability is Durability.MEMORY else BodyMemory(config.broker.ram_bytes)
    journal: Journal | None = None
    if recording is not None:
        now, wall = time.monotonic(), time.time()
        core: BrokerCore = ReplayCore(config, recording, epoch=epoch, endpoints=endpoints, now=now, wall=wall)
    else:
        core = BrokerCore(
            config,
            epoch=epoch,
            endpoints=endpoints,
            ram=ram,
            open_arena=MappedArena if config.broker.shared_memory else None,
            host=own_host(),
        )
        stack.callback(core.close)
        journal = stack.enter_context(_persistent(core, config.broker, layout, ram, epoch, wake))
    dropped, settled = (stack.enter_context(LineLog.open(path)) for path in (layout.dropped, layout.settled))
    dead = DeadLetterStore(
        layout.dead, config.broker.dead_bytes, sync=config.broker.durability is Durability.DISK
    )
    _reconcile(core, dead)
    accounts = MemoryAccounts(core, ram, journal)
    logs = BrokerLogs(dropped, settled)
    door = None
    if listener is not None:
        # Not before: while the state is restored nobody could answer who may enter.
        endpoints = listener.bind(bound, endpoints, previous)
        core.bound(endpoints)
        door = listener.door(layout, endpoints.listen)
    memory_guard = MemoryGuard(bound.addresses, config.broker.overhead_bytes, accounts) if alone else None
    plane = DataPlane(
        core,
        bound,
        logs,
        dead,
        config.broker.max_group_bytes,
        wake,
        journal,
        memory_guard,
        door,
        SharedRun(config, layout, epoch, run_id),
    )
    broker = Broker(core, plane, endpoints, on_end)
    stack.callback(layout.endpoints.unlink, missing_ok=True)
    write_json(layout.endpoints, endpoints)
    stack.callback(broker.stop)
    broker.start()
    durability = config.broker.durability.value
    logger.info("broker ready serve=%s epoch=%d durability=%s", endpoints.serve, epoch, durability)
    if endpoints.insecure:
        logger.warning(
            "insecure=true: whoever reaches %s may use the run; set broker.keys", endpoints.listen[0]
        )
    elif endpoints.listen:
        logger.info("listening with keys serve=%s", endpoints.listen[0])
    return broker


def main(run_dir: Path) -> int:
    """Run the broker of a run directory until a signal or `Shutdown` ends it; return the exit code."""
    return run_service("broker", partial(_serve, run_dir))


async def _serve(run_dir: Path, stop: Stop) -> None:
    raise_descriptor_limit(JOURNAL_DESCRIPTORS)
    config, layout = load_run(run_dir)
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.call_soon_threadsafe(stop.request, "data plane ended")

    with running_broker(config, layout, ended, alone=True):
        gc.freeze()  # a full collection would visit all that was imported: 50 ms in which nobody is served
        gc.set_threshold(*GC_THRESHOLD)
        await stop.wait()


def replay(recorded: Path, run_dir: Path) -> int:
    """Replay one run in the directory of another until all its batches are settled; return the exit code."""
    return run_service("replay", partial(_serve_replay, recorded, run_dir))


async def _serve_replay(recorded: Path, run_dir: Path, stop: Stop) -> None:
    raise_descriptor_limit(JOURNAL_DESCRIPTORS)
    config, layout = load_run(run_dir)
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.call_soon_threadsafe(stop.request, "end of replay")

    with contextlib.closing(Recording(recorded, BodyMemory(config.broker.ram_bytes))) as recording:
        logger.info("replay started run=%s batches=%d", recorded, len(recording.batches))
        with running_broker(config, layout, ended, recording=recording):
            await stop.wait()


def _make_sockets(context: sockets.Context, config: BrokerConfig, *, remote: bool) -> BrokerSockets:
    largest = max(config.max_group_bytes, ENVELOPE_LIMIT_BYTES)
    bound = BrokerSockets(
        ingest=sockets.ingest_pull(context, largest),
        serve=sockets.serve_router(context, REQUEST_LIMIT_BYTES),
        events=sockets.events_xpub(context),
        publish=sockets.publish_xsub(context, EVENT_LIMIT_BYTES),
        remote_ingest=sockets.ingest_pull(context, largest) if remote else None,
    )
    if remote:
        bound.events.setsockopt(zmq.XPUB_MANUAL, 1)  # the door decides which topics a peer hears
    for prefix in topics.FORWARDED:
        bound.publish.send(b"\x01" + prefix)
    return bound


def _bind(bound: BrokerSockets, addresses: dict[str, str], epoch: int) -> Endpoints:
    for name in SOCKETS:
        sockets.bind_local(getattr(bound, name), addresses[name])
    bound.addresses.extend(addresses.values())
    ingest, serve, events, publish = (addresses[name] for name in SOCKETS)
    return Endpoints(ingest=ingest, serve=serve, events=events, publish=publish, pid=os.getpid(), epoch=epoch)


@dataclass(frozen=True)
class _Listener:
    """`broker.listen`, before it is bound."""

    config: BrokerConfig
    secret: str
    """Secret key of the broker; empty if nobody needs a key."""
    gatekeeper: Gatekeeper | None

    def bind(self, bound: BrokerSockets, endpoints: Endpoints, previous: Endpoints | None) -> Endpoints:
        """Bind the sockets for clients of other hosts, too; return the addresses with theirs."""
        before = previous.listen if previous is not None else ()
        listen = tuple(
            sockets.bind_remote(bound.remote(name), wanted, self.secret)
            for name, wanted in listen_addresses(self.config.listen, before)
        )
        bound.addresses.extend(listen)
        return replace(endpoints, listen=listen, insecure=not self.secret)

    def door(self, layout: RunLayout, addresses: Sequence[str]) -> Door:
        """Return the rules for what comes by these addresses."""
        if self.gatekeeper is None:
            return Door(None, None, addresses)
        log = OwnerLog(layout.owners, self.gatekeeper.keys.roles)
        return Door(self.gatekeeper, log, addresses)


def _listener(config: RunConfig, context: sockets.Context, stack: contextlib.ExitStack) -> _Listener | None:
    """Return what `broker.listen` asks for, None if there is none; raises what `KeyDirectory.records` raises."""
    broker = config.broker
    if not broker.listen:
        return None
    if not broker.keys:
        return _Listener(broker, "", None)
    directory = KeyDirectory(config.base_dir / broker.keys)
    secret, keys = directory.server().secret, KnownKeys(directory)
    questions = sockets.zap_router(context)
    stack.callback(questions.close)
    return _Listener(broker, secret, Gatekeeper(questions, keys))


def _previous_endpoints(layout: RunLayout) -> Endpoints | None:
    """Return the addresses of a killed broker; None if the last one ended in order."""
    try:
        return read_endpoints(layout.root)
    except MalformedError:
        return None


@contextlib.contextmanager
def _persistent(
    core: BrokerCore,
    config: BrokerConfig,
    layout: RunLayout,
    ram: BodyMemory | None,
    epoch: int,
    wake: Waker,
) -> Iterator[Journal | None]:
    """Restore the previous life of the broker, and make this one as durable as configured."""
    if ram is None:
        if any(layout.journal.glob("events-*.rmq")):
            raise ConfigError(
                "broker.durability",
                f"must be os or disk, since {layout.journal} has a journal (got memory)",
            )
        _restore(core, layout)
        yield None
        _save(core, layout)
        return
    if layout.saved.exists():
        raise ConfigError(
            "broker.durability",
            f"must be memory, since {layout.saved} was written at memory (got {config.durability.value})",
        )
    journal = Journal(layout.journal, config, ram, wake.set)
    try:
        with gc_paused():
            undamaged = _recover(core, journal)
            began = Began(epoch, os.getpid(), config.durability.value)
            journal.start([*core.snapshot(), began], keep_old=not undamaged)
        yield journal
        journal.append(core.events())
        journal.close(snapshot=core.snapshot())
        journal.require_sound()
    finally:
        journal.close()


def _recover(core: BrokerCore, journal: Journal) -> bool:
    """Restore the state from the journal; False if parts of it were damaged."""
    began = time.monotonic()
    found = journal.recover()
    problems = core.restore(found.events, found, began, time.time())
    for line in (*found.damage, *problems):
        logger.error("journal damaged what=%s", line)
    if not found.empty:
        logger.info("journal recovered groups=%d seconds=%.2f", core.held_groups, time.monotonic() - began)
    return not found.damage and not problems


def _reconcile(core: BrokerCore, dead: DeadLetterStore) -> None:
    """Remove the dead letters of live groups: the broker was killed before it removed or recorded them."""
    for entry in list(dead.entries()):
        if core.lives(entry.order):
            dead.remove(entry.order)


def _restore(core: BrokerCore, layout: RunLayout) -> None:
    found = memory_snapshot.load(layout.saved)
    for problem in core.restore(found.events, found, time.monotonic(), time.time()):
        logger.error("saved state damaged file=%s what=%s", layout.saved, problem)
    memory_snapshot.retire(layout.saved, found)
    if found.events:
        logger.info("saved state restored groups=%d file=%s", core.held_groups, layout.saved)


def _save(core: BrokerCore, layout: RunLayout) -> None:
    core.forget_unclaimed()
    count = memory_snapshot.save(layout.saved, core.snapshot())
    logger.info("state saved groups=%d", count)
