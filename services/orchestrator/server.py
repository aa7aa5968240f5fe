"""The orchestrator: runs the workers that the trainer's demand requires, and ends them in order.

It receives `pressure`, asks the autoscaler for target counts, and starts or drains workers to match. A drain goes over
the bus, then by SIGUSR1, then down the stop ladder; see `supervision`. A worker that crashes repeatedly is given up,
and replaced after a pause. If all workers of an environment are given up before one of them has worked, the
orchestrator ends with the reason, and so does the run. A worker is our own program, or that of
`environment.NAME.command`; see `services.programs`.

It depends on no other process: without a broker it runs the minimum, and silence changes nothing. It adopts the workers
of its earlier life, and ends those of another run.
"""

import asyncio
import logging
import secrets
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.engine_registry import FIRST
from rolloutmq.bus.evaluation.plan import answering_producer
from rolloutmq.bus.producer.resend import resend_spools
from rolloutmq.bus.rundir import load_run, read_json
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RolloutMQError, WorkersFailedError
from rolloutmq.schemas.files import EnvironmentRecord, RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role, python_command
from rolloutmq.schemas.wire.control import SILENT_S, WorkerState, WorkerStatus
from rolloutmq.services.orchestrator.autoscaling.autoscaler import Autoscaler, ScaleTarget
from rolloutmq.services.orchestrator.autoscaling.control_law import INFERENCE_BOUND
from rolloutmq.services.orchestrator.autoscaling.decision_log import DecisionLog, resume
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerCounts, WorkerRoom
from rolloutmq.services.orchestrator.bus_client import BusClient
from rolloutmq.services.orchestrator.cluster.capacity.manager import ClusterManager, Fleet
from rolloutmq.services.orchestrator.cluster.capacity.room import NO_ROOM
from rolloutmq.services.orchestrator.cluster.remote_processes import RemoteProcesses
from rolloutmq.services.orchestrator.engines.pool import EnginePool, Placement
from rolloutmq.services.orchestrator.engines.scaling import EngineBound
from rolloutmq.services.orchestrator.gpus.manager import GpuManager
from rolloutmq.services.orchestrator.live_bounds import LiveBounds
from rolloutmq.services.orchestrator.restarts import Restarts
from rolloutmq.services.orchestrator.state_file import StateFile, earlier_lives
from rolloutmq.services.orchestrator.supervision.core import (
    OVER,
    Backoff,
    Ladder,
    Phase,
    ProcessView,
    drain_ladder,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.drain_watch import DrainWatch
from rolloutmq.services.orchestrator.supervision.hang_watch import HangWatch
from rolloutmq.services.orchestrator.supervision.replacement import Replacement
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor, identities_of
from rolloutmq.services.orchestrator.supervision.worker_table import (
    WorkerTable,
    env_of,
    number_of,
    with_joined,
)
from rolloutmq.services.orchestrator.worker_logs import WorkerLogs
from rolloutmq.services.process.child import end_marked, end_strays
from rolloutmq.services.process.identity import find_names, inherited_token, marker_of
from rolloutmq.services.process.lock import only_one
from rolloutmq.services.process.runner import Stop, run_service
from rolloutmq.services.process.stacks import hang_of
from rolloutmq.services.programs.command import ProgramCommands

logger = logging.getLogger(__name__)

CONFIRM_S: Final = 1.0
"""Time for a drain over the bus before SIGUSR1."""
OVERTIME_S: Final = 2.0
"""Time after the drain deadline before SIGTERM: the worker keeps the same deadline, then saves its spool."""
ORPHANS_S: Final = 5.0
"""Interval of the search for spools of ended workers."""
DELIVERED_S: Final = 0.25
"""Interval of the search for drained programs that have delivered everything."""
WAITING_FIRST_S: Final = 2.0
WAITING_SAID_S: Final = 30.0
"""Time after which programs that wait for the gateway are reported first, and the interval from then on."""

VERDICT_S: Final = 3.0
"""Longest wait, once all workers of an environment are given up, for the broker to tell what it accepted of them."""
ENDED_S: Final = 60.0
"""Time an ended worker is remembered: the broker may still report it."""

TOLD_S: Final = 3.0
"""Longest wait for workers that joined by themselves to hear that they drain. They deliver on their own time."""
TOLD_LOOK_S: Final = 0.05

NO_GPU: Final = "no_gpu"
"""Bound of workers without a fitting GPU."""

Command = Callable[[str], tuple[str, ...]]
"""Returns program and arguments of a worker, by name."""
Heard = Mapping[str, WorkerStatus]
"""Last status from the broker of our worker processes, by name."""


def worker_command(run_dir: Path) -> Command:
    """Return the command that starts a worker of a run."""
    module, words = "rolloutmq.launch.service_process", ("worker", "--run-dir", str(run_dir))
    return lambda name: python_command(sys.executable, module, *words, "--worker", name)


def remote_command(name: str) -> tuple[str, ...]:
    """Return the arguments of a worker on another host, which has its own interpreter and run directory."""
    return "worker", "--worker", name


class Orchestrator:
    """The workers of one run. Belongs to one event loop; `run` runs it."""

    def __init__(
        self,
        config: RunConfig,
        layout: RunLayout,
        token: str,
        command: Command | None = None,
        engine_command: Command | None = None,
    ) -> None:
        limits = config.orchestrator
        self._layout = layout
        self._token = token
        here = config.cluster.engine == "local"
        self._command = command or (worker_command(layout.root) if here else remote_command)
        self._programs = ProgramCommands(config, layout)
        self._limits = limits
        self._bounds = LiveBounds(config)
        self._gpus = GpuManager(config, layout)
        self._client = BusClient(layout, self._gpus.hear)
        self._state = StateFile(layout, token)
        self._remote = None if config.cluster.engine == "local" else RemoteProcesses(layout.cluster_socket)
        self._cluster = None if self._remote is None else ClusterManager(config, self._remote)
        self._workers = Supervisor(
            token,
            _backoff(limits),
            identities=layout.workers,
            drain=self._client.drain,
            on_change=self._changed,
            seed=config.run.seed,
            spawner=self._remote,
        )
        self._engines = EnginePool(
            *(config, layout, token, self._client.publish, engine_command, lambda _: self._write_soon()),
            placement=self._placement(config),
        )
        self._drain_ladders = {
            name: _ladder(limits, limits.drain_s(env.rollout_timeout_s))
            for name, env in config.environment.items()
        }
        self._end_ladder = _ladder(limits, limits.end_s)
        self._drains = DrainWatch()
        self._hangs = HangWatch(
            {name: env.liveness_s for name, env in config.environment.items() if env.liveness_s is not None}
        )
        self._restarts = Restarts(
            [(self._workers, self._drain_ladder), (self._engines.processes, self._engines.ladder)],
            self._start_again,
        )
        self._logs = WorkerLogs(layout, config.run, self._workers.views)
        self._pids: dict[str, int] = {}
        self._tables: dict[str, WorkerTable] = {}
        self._replacements = {env: Replacement(limits.stable_s) for env in config.environment}
        self._waiting_said = time.monotonic() - WAITING_SAID_S + WAITING_FIRST_S
        self._has_taken_over = False
        self._scaling: Autoscaler

    def _placement(self, config: RunConfig) -> Placement | None:
        if self._remote is None or self._cluster is None or not config.places_engines:
            return None
        return Placement(self._remote, self._cluster.refusal)

    def kill(self) -> None:
        """Kill all workers and engines now, after a second signal."""
        self._workers.kill()
        self._engines.kill()

    async def run(self, stop: Stop) -> None:
        """Run the workers until `stop`; then drain all of them and return.

        Raises:
            WorkersFailedError: All workers of an environment were given up before one had worked; the others were
                drained.
            RunDirInUseError: Another orchestrator runs this run.
        """
        with only_one(self._layout.root / "orchestrator.lock", "orchestrator"):
            previous, earlier = identities_of(self._layout.workers), self._earlier()
            async with self._engines, self._workers:  # workers end first: they use the engines
                await self._engines.take_over(earlier)
                await self._take_over(previous, earlier)
                self._has_taken_over = True
                async with asyncio.TaskGroup() as tasks:
                    listening = tasks.create_task(self._client.listen(), name="bus client")
                    beside = [
                        tasks.create_task(self._bring_home(), name="left spools"),
                        tasks.create_task(self._logs.run(), name="logs"),
                    ]
                    placing = tasks.create_task(self._reach_cluster(), name="cluster")
                    beating = tasks.create_task(self._state.beat(self._workers), name="heartbeat")
                    ending = tasks.create_task(self._end_delivered(), name="delivered programs")
                    try:
                        await self._govern(stop)
                    finally:
                        for task in beside:
                            task.cancel()
                        reason = f"the orchestrator ends: {stop.reason or 'it failed'}"
                        await self._end_joined(reason)
                        await self._workers.stop(self._workers.views(), self._end_ladder, reason)
                        await self._engines.stop()  # while there is a connection to the cluster
                        ending.cancel()
                        beating.cancel()
                        self._state.write(self._workers, over=True)
                        listening.cancel()
                        placing.cancel()

    async def _reach_cluster(self) -> None:
        """Keep a connection to the cluster service, in a run on a cluster."""
        if self._remote is not None:
            await self._remote.run()

    def _earlier(self) -> Supervision | None:
        """Return what an earlier orchestrator of this run knew of the workers."""
        try:
            found = read_json(self._layout.supervision, Supervision)
        except msgspec.MsgspecError as error:
            logger.warning("earlier state unreadable path=%s error=%s", self._layout.supervision, error)
            return None
        mine = found is not None and found.orchestrator.marker.startswith(f"{self._token}/")
        return found if mine else None

    async def _take_over(self, previous: list[ProcessIdentity], earlier: Supervision | None) -> None:
        """Adopt the workers of an earlier life and its bounds, end those of another run, reserve the used names."""
        mine = f"{self._token}/"
        ours = [
            (identity, self._gpus.adopted(identity, self._spec(identity.name)))
            for identity in previous
            if identity.marker.startswith(mine) and env_of(identity.name) in self._bounds.config.environment
        ]
        known = {one.env: one for one in earlier.environments} if earlier is not None else {}
        for env, record in known.items():
            if record.proven:
                self._workers.prove(env)
        records = earlier.workers if earlier is not None else ()
        lives = earlier_lives(records, {identity.name: identity.pid for identity, _ in ours})
        adopted = self._workers.adopt(ours, lives)
        self._keep_given_up(earlier)
        for identity, spec in ours:
            if spec.name in adopted:
                self._gpus.keep(identity, spec)
        others = [identity for identity in previous if identity.name not in adopted]
        if others:
            await asyncio.to_thread(end_strays, others, self._limits.term_grace_s)
        await asyncio.to_thread(self._end_unknown, set(adopted))
        # Only after an earlier life may the broker still send drains to old names, or a given-up worker have one.
        is_later = bool(ours) or earlier is not None
        taken = [log.stem for log in self._layout.logs.glob("*.log")] if is_later else []
        self._tables = {
            name: WorkerTable(name, taken, known[name].starts if name in known else ())
            for name in self._bounds.config.environment
        }
        alive_now = Counter(map(env_of, adopted))
        if earlier is not None:
            self._bounds.apply(earlier.settings)
        config = self._bounds.config
        path = self._layout.decisions
        # What another run of this directory measured says nothing about this one.
        number, now, at = len(config.environment), time.monotonic(), time.time()
        resumed = await asyncio.to_thread(resume, path, number, now, at) if ours else {}
        self._scaling = Autoscaler(
            config.environment, config.orchestrator, alive_now, DecisionLog(path), resumed
        )

    def _keep_given_up(self, earlier: Supervision | None) -> None:
        """Keep the workers that an earlier life gave up, and the pauses before they are replaced."""
        if earlier is None:
            return
        lives = earlier_lives(earlier.workers)
        for one in earlier.workers:
            if one.phase == Phase.FATAL and one.env in self._replacements:
                log = str(self._layout.log(one.worker))
                spec = ProcessSpec(name=one.worker, role=Role.WORKER, argv=(), log=log, kind=one.env)
                self._workers.keep_fatal(spec, one.since, one.reason, lives[one.worker])
        for record in earlier.environments:
            if record.env in self._replacements:
                self._replacements[record.env].resume(record.failed_at, record.pause_s)

    def _end_unknown(self, known: set[str]) -> None:
        """End workers of this run without an identity on file: their orchestrator was killed before it wrote one."""
        for name in find_names(self._token) - known:
            if env_of(name) in self._bounds.config.environment:
                end_marked(marker_of(self._token, name))

    async def _bring_home(self) -> None:
        """Send the spools of workers that will not restart under their names."""
        told = ""
        while True:
            await asyncio.sleep(ORPHANS_S)
            workers = {name for name, view in self._workers.views().items() if view.phase not in OVER}
            try:
                await resend_spools(
                    self._layout.root,
                    self._layout.spools,
                    ack_logs=self._layout.acks,
                    living=workers | set(map(answering_producer, workers)),
                )
                told = ""
            except RolloutMQError as error:
                if str(error) != told:
                    logger.warning("spools not sent error=%s", error)
                told = str(error)

    async def _end_delivered(self) -> None:
        """End drained programs that have delivered everything; they do not end by themselves."""
        ladder = term_ladder(self._limits.term_grace_s)
        while True:
            await asyncio.sleep(DELIVERED_S)
            for name, status in self._heard().items():
                is_program = bool(self._bounds.config.environment[env_of(name)].command)
                # One that drained for an earlier orchestrator is RUNNING here.
                lives = self._workers.views()[name].phase in {Phase.RUNNING, Phase.STOPPING}
                if is_program and lives and status.state is WorkerState.GONE:
                    self._workers.retire(name, ladder, "it has delivered everything")

    async def _govern(self, stop: Stop) -> None:
        while stop.reason is None:
            heard = self._heard()
            self._believe(heard)
            self._end_hanging(heard)
            orders = self._client.pressure.restarts if self._client.pressure is not None else ()
            self._state.restarted(self._restarts.look(orders, time.monotonic()))
            for standing in self._gpus.attend(
                self._workers, heard, self._client.pressure, self._drain_ladder
            ):
                self._client.publish(standing)
            self._look_at_cluster()
            for line in self._drains.look(self._workers.views(), heard, time.monotonic()):
                logger.warning("unfinished rollouts are abandoned soon %s", line)
            self._decide(heard)
            for table in self._tables.values():
                self._raise_if_failed(table)
            self._look_at_engines(time.monotonic())
            self._forget_ended()
            self._state.write(self._workers)
            try:
                async with asyncio.timeout(self._limits.tick_s):
                    await stop.wait()
            except TimeoutError:
                continue

    def _look_at_cluster(self) -> None:
        """Follow the nodes of a run on a cluster."""
        if self._cluster is not None:
            pressure = self._client.pressure
            orders = None if pressure is None else pressure.gpu_orders
            engines = self._engines
            fleets = Fleet(self._workers, self._drain_ladder), Fleet(engines.processes, engines.ladder)
            self._cluster.attend(fleets, orders)
            further = engines.target.target - 1 if engines.is_placed and engines.target is not None else 0
            self._cluster.wants(
                {scale.env: scale.asked(NO_ROOM) for scale in self._scaling.scales}, engines=further
            )
            limits = {
                scale.env: scale.limit for scale in self._scaling.scales if scale.decision.bound == NO_ROOM
            } | ({FIRST: engines.no_room} if engines.no_room else {})
            self._state.placed(self._cluster.records(), self._cluster.places(), limits)

    def _drain_ladder(self, name: str) -> Ladder:
        return self._drain_ladders[env_of(name)]

    def _heard(self) -> Heard:
        """Return the broker's status of our processes; ignore their earlier lives."""
        views = self._workers.views()
        for name, view in views.items():
            if (identity := self._workers.identity(name)) is not None:
                self._pids[name] = identity.pid
            elif view.phase in {Phase.RUNNING, Phase.STOPPING}:  # it waits for a host of the cluster
                self._pids.pop(name, None)
        workers = () if self._client.pressure is None else self._client.pressure.workers
        return {
            status.worker: status
            for status in workers
            if status.worker in views and self._pids.get(status.worker) == status.pid
        }

    def _believe(self, heard: Heard) -> None:
        """Note who is ready and has done work, end workers that report a failure, and follow drains by others."""
        self._believe_accepted()
        views, age_s = self._workers.views(), time.monotonic() - self._client.heard_at
        for name, status in heard.items():
            if status.produced:
                self._workers.prove(env_of(name))
            if status.state is WorkerState.READY:
                self._workers.ready(name, status.silent_s + age_s)
            if status.state is WorkerState.FAILED and views[name].phase is not Phase.FATAL:
                ladder = term_ladder(self._limits.term_grace_s)
                self._workers.fail(name, ladder, status.error or "the worker reported a failure")
            elif status.draining and views[name].phase is Phase.RUNNING:
                # The drain request suffices: a hanging worker never reports draining, and is ended at the deadline.
                self._workers.retire(name, self._drain_ladder(name), "drained by somebody else")

    def _believe_accepted(self) -> None:
        """Note the environments whose groups the broker has accepted: a worker may die before a heartbeat says so."""
        for lane in () if self._client.pressure is None else self._client.pressure.lanes:
            # Of this life of the broker: a resumed run may have another environment under the same name.
            if lane.accepted_sequences:
                self._workers.prove(lane.env)

    def _end_hanging(self, heard: Heard) -> None:
        """Kill the workers that hang; they are restarted."""
        ladder, views = term_ladder(self._limits.term_grace_s), self._workers.views()
        for name, silence in self._hangs.look(heard, self._client.heard_at).items():
            hang = hang_of(self._layout, name, heard[name].pid)
            reason = silence if hang is None else f"{silence}; {hang.text}"
            if views[name].reason != reason and views[name].phase is Phase.RUNNING:
                logger.warning("worker hangs worker=%s reason=%s", name, reason)
            self._workers.hang(name, ladder, reason)

    def _forget_ended(self) -> None:
        """Forget workers that left in order some time ago, so that the table does not grow for ever."""
        now = time.monotonic()
        for name, view in self._workers.views().items():
            if view.phase is Phase.ENDED and now - view.since > ENDED_S:
                self._workers.forget(name)
        self._pids = {name: pid for name, pid in self._pids.items() if name in self._workers.views()}

    def _replace_failed(self, now: float) -> None:
        """Forget the given-up workers whose places are free again."""
        views = self._workers.views()
        replaced: dict[str, float] = {}
        for env, table in self._tables.items():
            replacement = self._replacements[env]
            for name in replacement.look(table.mine(views), now, proven=self._workers.is_proven(env)):
                logger.info("replacing name=%s reason=%s", name, views[name].reason)
                self._workers.forget(name)
            replaced.update(replacement.due)
        self._state.learned(
            tuple(
                EnvironmentRecord(
                    env=env,
                    proven=self._workers.is_proven(env),
                    starts=table.starts,
                    failed_at=self._replacements[env].failed_at,
                    pause_s=self._replacements[env].pause_s,
                )
                for env, table in self._tables.items()
            ),
            replaced,
        )

    def _start_again(self, worker: str) -> None:
        """End the pause of an environment for which an operator ordered a restart."""
        if (replacement := self._replacements.get(env_of(worker))) is not None:
            replacement.retry(time.monotonic())

    def _raise_if_failed(self, table: WorkerTable) -> None:
        crew = table.mine(self._workers.views())
        if (
            not crew
            or self._workers.is_proven(table.env)
            or any(one.phase is not Phase.FATAL for one in crew)
        ):
            return
        last = max(crew, key=lambda view: view.since)
        # The broker may have accepted a group that its last message did not count yet.
        if self._client.heard_at > last.since or time.monotonic() - last.since > VERDICT_S:
            raise WorkersFailedError(table.env, last.name, last.reason)

    def _take_bounds(self) -> None:
        """Apply the bounds that an operator changed; without a broker they stay."""
        pressure = self._client.pressure
        if pressure is not None and self._bounds.apply(pressure.settings):
            config = self._bounds.config
            self._scaling.rebound(config.environment, config.orchestrator.max_processes)
        self._state.bounded(self._bounds.settings)

    def _decide(self, heard: Heard) -> None:
        self._take_bounds()
        now, engines, pressure = time.monotonic(), self._engines.serving, self._client.pressure
        self._replace_failed(now)
        views = self._workers.views()
        own = {env: table.crew(views, heard, now) for env, table in self._tables.items()}
        rooms, joined = self._rooms(own, now), self._joined()
        crews = {env: with_joined(crew, joined.get(env, ())) for env, crew in own.items()}
        self._scaling.decide(crews, pressure, self._client.heard_at, now, rooms, engines)
        for scale in self._scaling.scales:
            self._send_away(scale, heard, crews[scale.env].joined)
        starts = self._scaling.starts(crews) if self._limits.start_workers else {}
        for env, number in starts.items():
            if self._replacements[env].pauses(now):
                continue
            if number and self._bounds.config.environment[env].command and not self._programs.can_start:
                self._waits_for_gateway(env, now)
                continue
            for _ in range(number):
                if self._cluster is not None and not self._cluster.admits(env):
                    break
                spec = self._gpus.equipped(self._spec(self._tables[env].take()))
                if spec is not None:
                    self._workers.start(spec)
        for scale in self._scaling.scales:
            self._gpus.limited(scale.env, scale.decision.bound == NO_GPU)
            self._state.decided(scale.said, now, self._wanted(scale.env))
            if scale.is_news(now):
                self._client.publish(scale.said)

    def _waits_for_gateway(self, env: str, now: float) -> None:
        """Report that programs cannot start yet, from time to time."""
        if now - self._waiting_said >= WAITING_SAID_S:
            self._waiting_said = now
            logger.warning("not started, waiting for the gateway env=%s file=%s", env, self._layout.gateway)

    def _rooms(self, crews: Mapping[str, WorkerCounts], now: float) -> dict[str, WorkerRoom]:
        """Return the limits from GPUs, failures and the cluster, for environments that have one: the narrower one."""
        rooms = {}
        for env, crew in crews.items():
            most = self._bounds.config.environment[env].max_workers
            own = self._limits.start_workers  # others start theirs elsewhere, on GPUs of their own
            limit = self._gpus.limit(env, crew.current, most) if own else None
            found = [WorkerRoom(limit.count, NO_GPU, limit.reason)] if limit is not None else []
            if (failing := self._replacements[env].room(crew, now)) is not None:
                found.append(failing)
            if self._cluster is not None:
                placeable = self._cluster.limit(env, crew.current, most)
                found += [] if placeable is None else [placeable]
            if found:
                rooms[env] = min(found, key=lambda room: room.workers)
        return rooms

    def _joined(self) -> dict[str, list[WorkerStatus]]:
        """Return the workers that joined by themselves and are heard, by environment."""
        pressure, views = self._client.pressure, self._workers.views()
        age_s = time.monotonic() - self._client.heard_at
        found: defaultdict[str, list[WorkerStatus]] = defaultdict(list)
        for status in pressure.workers if pressure is not None else ():
            lives = status.joined and status.state not in {WorkerState.GONE, WorkerState.FAILED}
            if lives and status.worker not in views and status.silent_s + age_s <= SILENT_S:
                found[status.env].append(status)
        return found

    async def _end_joined(self, reason: str) -> None:
        """Drain the workers that joined by themselves, as the run's own; wait until they have heard it."""
        names = [one.worker for workers in self._joined().values() for one in workers]
        for name in names:
            self._client.drain(name, reason)
        until = time.monotonic() + TOLD_S
        while names and time.monotonic() < until:
            left = (one for workers in self._joined().values() for one in workers)
            names = [one.worker for one in left if not one.draining and one.worker in names]
            await asyncio.sleep(TOLD_LOOK_S)

    def _send_away(self, scale: ScaleTarget, heard: Heard, joined: int) -> None:
        views = self._workers.views()
        target = max(0, scale.decision.target - joined) if self._limits.start_workers else 0
        for name in self._tables[scale.env].surplus(views, heard, target):
            if views[name].phase is Phase.FATAL:
                self._workers.forget(name)
            elif self._client.pressure is not None:
                # Before the first, one of the others may be drained by an order that only the broker knows.
                self._workers.retire(name, self._drain_ladder(name), scale.decision.reason)

    def _look_at_engines(self, now: float) -> None:
        """Pass the saturation of the workers to the engine pool; nothing if the pressure is stale."""
        is_news = now - self._client.heard_at <= self._limits.scaling.stale_s
        said = {scale.env: scale.decision for scale in self._scaling.scales} if is_news else {}
        bounds = {env: EngineBound(one.bound == INFERENCE_BOUND, one.short) for env, one in said.items()}
        self._engines.look(bounds, now, self._wanted(FIRST))
        self._state.engines_decided(self._engines.target, self._engines.processes)

    def _wanted(self, name: str) -> int | None:
        """Return the number that an operator pinned of an environment's workers, or of the engines."""
        return None if self._client.pressure is None else self._client.pressure.wanted.get(name)

    def _changed(self, view: ProcessView) -> None:
        """Write the change to the file, and hold a GPU worker about to restart until its GPUs are free."""
        self._write_soon()
        if view.phase is Phase.WAITING and self._gpus.has(view.name):
            self._workers.hold(view.name, True)
            asyncio.get_running_loop().call_soon(self._gpus.hold_back, self._workers)

    def _write_soon(self) -> None:
        """Write the state, once it holds all that the earlier orchestrator left: a kill must not lose that."""
        if self._has_taken_over:
            self._state.soon(self._workers)

    def _spec(self, name: str) -> ProcessSpec:
        if self._bounds.config.environment[env_of(name)].command:
            return self._programs.spec(name, env_of(name), number_of(name))
        log = str(self._layout.log(name))
        return ProcessSpec(name=name, role=Role.WORKER, argv=self._command(name), log=log, kind=env_of(name))


def _ladder(limits: OrchestratorConfig, deadline_s: float) -> Ladder:
    return drain_ladder(CONFIRM_S, deadline_s + OVERTIME_S, limits.term_grace_s)


def _backoff(limits: OrchestratorConfig) -> Backoff:
    return Backoff(limits.backoff_s, limits.backoff_max_s, limits.crash_limit, limits.stable_s)


def main(run_dir: Path) -> int:
    """Run the orchestrator of a run; return its exit code. Blocks."""
    orchestrator: Orchestrator | None = None

    async def serve(stop: Stop) -> None:
        nonlocal orchestrator
        config, layout = load_run(run_dir)
        orchestrator = Orchestrator(config, layout, inherited_token() or secrets.token_hex(8))
        await orchestrator.run(stop)

    def kill() -> None:
        if orchestrator is not None:
            orchestrator.kill()

    return run_service("orchestrator", serve, on_force=kill)
