"""The GPU manager: the fleet in the orchestrator. Samples and orders in; drains, limits, events and `gpus.json` out.

`gpus.json` is replaced as a whole, at changes that must survive a restart and every few seconds for readers. A damaged
file is moved aside and logged. It had the causes of cordons, the required clean times and the counts of memory errors;
repeated samples and orders restore the cordons, but for memory errors: these are not told from older ones any more.

The GPUs of a worker are read from the environment of its process, also for adopted ones, never from the file.
"""

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import GpuBook, GpuRecord, RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec
from rolloutmq.schemas.wire.control import Pressure, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.hardware import GpuStanding
from rolloutmq.schemas.wire.telemetry import GpuAbsence, GpuSample
from rolloutmq.services.orchestrator.gpus.fleet import Fleet, GpuWait, WorkerLife
from rolloutmq.services.orchestrator.gpus.placement import GpuRequest, NoGpu
from rolloutmq.services.orchestrator.gpus.visible import VARIABLE, allowing, uuids_of, value_of
from rolloutmq.services.orchestrator.supervision.core import OVER, Ladder, Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.worker_table import env_of
from rolloutmq.services.process.identity import alive, variable_of
from rolloutmq.services.telemetry.probes import host_name

logger = logging.getLogger(__name__)

GPUS_LIMIT: Final = 256
"""Maximum number of tracked GPUs of one host: published samples are untrusted input."""
REPEAT_S: Final = 2.0
"""Interval at which standings are published and written again: events may be lost, and the file's samples get old."""


@dataclass(frozen=True, slots=True)
class GpuLimit:
    """Current maximum of an environment's workers, and its reason."""

    count: int
    reason: str


class Workers(Protocol):
    """Subset of the supervisor's interface."""

    def views(self) -> Mapping[str, ProcessView]: ...
    def identity(self, name: str) -> ProcessIdentity | None: ...
    def retire(self, name: str, ladder: Ladder, reason: str) -> None: ...
    def forget(self, name: str) -> None: ...
    def hold(self, name: str, held: bool) -> None: ...


class GpuManager:
    """GPUs of a run's workers on this host. Belongs to one event loop; no method waits."""

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        self._host = host_name()
        is_here = config.cluster.engine == "local"  # a cluster finds the GPUs of its own hosts
        self._needs = {
            name: GpuRequest(env.gpus, env.vram_bytes) if is_here else GpuRequest()
            for name, env in config.environment.items()
        }
        self._fleet = Fleet(config.hardware, allowing(config.hardware.use, os.environ.get(VARIABLE)))
        self._path = layout.gpus
        self._identities: dict[str, ProcessIdentity] = {}
        self._absence = ""
        self._known: dict[str, GpuLimit] = {}
        self._limits: dict[str, str] = {}
        self._told: tuple[list[GpuStanding], dict[str, str]] = ([], {})
        self._said_at = -math.inf
        self._ghosts: set[str] = set()
        self._fleet.restore(self._kept(), time.monotonic())

    def hear(self, event: GpuSample | GpuAbsence) -> None:
        """Apply an event of telemetry; ignore the GPUs of other hosts."""
        if event.host != self._host:
            return
        if isinstance(event, GpuAbsence):
            self._absence = event.why
            return
        self._absence = ""
        known = self._fleet.cordons.known()
        if event.uuid not in known and len(known) >= GPUS_LIMIT:
            return
        self._fleet.see(event, time.monotonic(), time.time())

    def adopted(self, identity: ProcessIdentity, spec: ProcessSpec) -> ProcessSpec:
        """Return the spec of a running worker with the GPUs of its process."""
        if self._need(spec.name).gpus and (value := variable_of(identity.pid, VARIABLE)):
            return replace(spec, env={**spec.env, VARIABLE: value})
        return spec

    def keep(self, identity: ProcessIdentity, spec: ProcessSpec) -> None:
        """Reserve the GPUs in the spec of an adopted worker."""
        uuids = uuids_of(spec.env.get(VARIABLE))
        if uuids:
            self._identities[spec.name] = identity
            need = self._need(spec.name)
            self._fleet.adopt(spec.name, uuids, need, identity.pid, time.monotonic())
            logger.info("gpus kept name=%s gpus=%s", spec.name, ",".join(uuids))

    def limit(self, env: str, current: int, most: int) -> GpuLimit | None:
        """Return the maximum number of workers, if the GPUs lower it."""
        need = self._needs[env]
        self._limits.pop(env, None)
        self._known.pop(env, None)
        more = most - current
        if not need.gpus or more <= 0:
            return None
        room = self._fleet.room(need, more, time.monotonic())
        if room.count >= more:
            return None
        absence = f" ({self._absence})" if self._absence else ""
        count = current + room.count
        limit = self._known[env] = GpuLimit(count, f"{count} can be placed: {room.reason}{absence}")
        return limit

    def limited(self, env: str, is_short: bool) -> None:
        """Record whether an environment wants more workers than can be placed: only then is the limit reported."""
        if is_short and env in self._known:
            self._limits[env] = self._known[env].reason

    def equipped(self, spec: ProcessSpec) -> ProcessSpec | None:
        """Assign GPUs to a worker about to start; None if it cannot be placed."""
        need = self._need(spec.name)
        if not need.gpus:
            return spec
        chosen = self._fleet.place(spec.name, need, time.monotonic())
        if isinstance(chosen, NoGpu):
            logger.warning("not placed name=%s reason=%s", spec.name, chosen.reason)
            return None
        logger.info("placed name=%s gpus=%s", spec.name, ",".join(chosen))
        return replace(spec, env={**spec.env, VARIABLE: value_of(chosen)})

    def attend(
        self,
        workers: Workers,
        heard: Mapping[str, WorkerStatus],
        pressure: Pressure | None,
        ladder: Callable[[str], Ladder],
    ) -> list[GpuStanding]:
        """Reconcile workers and GPUs, once a tick; return the standings to publish."""
        now, wall = time.monotonic(), time.time()
        if pressure is not None:
            self._fleet.carry_out(pressure.gpu_orders, now, wall)
        self._follow(workers, heard, now)
        self._drain(workers, ladder)
        self.hold_back(workers)
        return self._tell(now, wall)

    def has(self, worker: str) -> bool:
        """Return whether a worker has GPUs."""
        return self._fleet.promises.of(worker) is not None

    def hold_back(self, workers: Workers) -> None:
        """Hold ended workers until their GPUs are ready, else move them to others."""
        now = time.monotonic()
        views = workers.views()
        waiting = [name for name, view in views.items() if view.phase is Phase.WAITING and self.has(name)]
        if waiting:
            self._fleet.follow(self._lives(workers, {}), now)
        for name in waiting:
            match self._fleet.comeback(name, now):
                case None:
                    workers.hold(name, False)
                case GpuWait():
                    workers.hold(name, True)
                case NoGpu(reason):
                    workers.retire(name, (), reason)

    def _follow(self, workers: Workers, heard: Mapping[str, WorkerStatus], now: float) -> None:
        for name in workers.views():
            if (identity := workers.identity(name)) is not None and self.has(name):
                self._identities[name] = identity
        self._fleet.follow(self._lives(workers, heard), now)
        self._identities = {name: one for name, one in self._identities.items() if self.has(name)}

    def _lives(self, workers: Workers, heard: Mapping[str, WorkerStatus]) -> dict[str, WorkerLife]:
        views = workers.views()
        lives = {}
        for name in self._fleet.promises.workers():
            view, identity = views.get(name), workers.identity(name) or self._identities.get(name)
            status = heard.get(name)
            # A process that survived SIGKILL is over for the supervisor, but still has its memory.
            pid = identity.pid if identity is not None and alive(identity) else None
            ready = status is not None and status.state is not WorkerState.STARTING
            lives[name] = WorkerLife(pid, ready, view is not None and view.phase not in OVER)
        return lives

    def _drain(self, workers: Workers, ladder: Callable[[str], Ladder]) -> None:
        views = workers.views()
        for name, reason in self._fleet.leaving().items():
            view = views.get(name)
            if view is None:
                continue
            if view.phase is Phase.FATAL:
                # Do not keep its place: the GPU failed, and another one may work.
                workers.forget(name)
            elif view.phase in {Phase.RUNNING, Phase.WAITING}:
                logger.warning("worker drained from gpu name=%s reason=%s", name, reason)
                workers.retire(name, ladder(name), reason)

    def _tell(self, now: float, wall: float) -> list[GpuStanding]:
        standings = self._fleet.standings(now, wall)
        self._report_ghosts(standings)
        bare = [replace(one, at=0.0) for one in standings], dict(self._limits)
        if bare == self._told and now - self._said_at < REPEAT_S:
            return []
        self._told, self._said_at = bare, now
        book = GpuBook(gpus=tuple(self._fleet.records(standings)), limits=dict(self._limits))
        if book != GpuBook() or self._path.exists():
            try:
                write_json(self._path, book)
            except OSError as error:
                # The cordons stay in force; only a restart would forget them.
                logger.error("gpus not written path=%s error=%s", self._path, error)
        return standings

    def _report_ghosts(self, standings: list[GpuStanding]) -> None:
        found = {one.uuid: one.ghost_bytes for one in standings if one.ghost_bytes}
        for uuid in found.keys() - self._ghosts:
            logger.warning("gpu memory in use by dead workers gpu=%s mib=%d", uuid, found[uuid] >> 20)
        self._ghosts = set(found)

    def _need(self, worker: str) -> GpuRequest:
        return self._needs.get(env_of(worker), GpuRequest())

    def _kept(self) -> list[GpuRecord]:
        try:
            book = read_json(self._path, GpuBook) or GpuBook()
        except msgspec.MsgspecError as error:
            aside = self._path.with_suffix(".damaged")
            self._path.replace(aside)
            logger.error("gpu state lost path=%s error=%s kept=%s", self._path, error, aside)
            return []
        return [record for record in book.gpus if record.standing.host == self._host]
