"""The cluster in the orchestrator: limits for the control law, what it wants of the cluster, drains of cordoned nodes.

A process for which no node has room is taken back, and counts for nothing: the law starts one again once there is room.
The last worker of an environment stays ordered, so that the cluster tells whether it could ever run. Of engines none
does: the launcher runs the first.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, NamedTuple, Protocol

from msgspec.structs import replace

from rolloutmq.bus.engine_registry import PLACED
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import NodeRecord
from rolloutmq.schemas.wire.hardware import NODE_PREFIX, GpuOrder
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerRoom
from rolloutmq.services.orchestrator.cluster.capacity.room import NO_ROOM, ClusterRoom, cordons
from rolloutmq.services.orchestrator.cluster.messages import Demand
from rolloutmq.services.orchestrator.cluster.remote_processes import RemoteProcess, RemoteProcesses
from rolloutmq.services.orchestrator.cluster.resources import Need, need_of, shortage
from rolloutmq.services.orchestrator.supervision.core import KILL_LADDER, Ladder, Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.worker_table import env_of

logger = logging.getLogger(__name__)

UNPLACED_S: Final = 5.0
"""Time without a node, while none can have room, after which a process is taken back."""
START_PART: Final = 0.8
"""Part of `cluster.placement_timeout_s` after which a process is taken back whose room somebody has: perhaps itself,
for a cluster counts a process as soon as it begins to start it, and names its node once it has started."""

SETTLE_S: Final = 3.0
"""Time after which a cluster surely counts what a process has taken of its node."""


class Processes(Protocol):
    """Subset of the supervisor's interface."""

    def views(self) -> Mapping[str, ProcessView]: ...
    def retire(self, name: str, ladder: Ladder, reason: str) -> None: ...


class Fleet(NamedTuple):
    """The workers of a run, or its engines.

    Attributes:
        processes: Who supervises them.
        ladder: Returns how a process is drained.
    """

    processes: Processes
    ladder: Callable[[str], Ladder]


class _Running(NamedTuple):
    """A process that runs, or waits for its node, and is not being ended."""

    process: RemoteProcess
    fleet: Fleet

    @property
    def name(self) -> str:
        return self.process.identity.name

    @property
    def env(self) -> str:
        """Its environment; `PLACED` for an engine."""
        return env_of(self.name)


class ClusterManager:
    """The nodes of a run. Belongs to one event loop; no method waits.

    Args:
        config: Configuration of the run.
        remote: Its processes on the cluster.
    """

    def __init__(self, config: RunConfig, remote: RemoteProcesses) -> None:
        self._remote = remote
        self._start_s = max(UNPLACED_S, START_PART * config.cluster.placement_timeout_s)
        kinds = (*config.environment, *((PLACED,) if config.places_engines else ()))
        self._needs = {kind: need_of(config, kind) for kind in kinds}
        self._orders: Mapping[str, GpuOrder] = {}
        self._wanted: dict[str, int] = {}

    def attend(self, fleets: Sequence[Fleet], orders: Mapping[str, GpuOrder] | None) -> None:
        """Drain the processes of cordoned nodes, and take back those without room; once a tick.

        Args:
            fleets: All workers and engines.
            orders: The operators' last orders; None while there is no broker.
        """
        self._orders = self._orders if orders is None else orders
        cordoned = self._cordoned()
        for one in self._running(fleets):
            node = one.process.node
            if node in cordoned:
                reason = f"node {short(node)} is cordoned: {cordoned[node]}"
                logger.warning("drained from node name=%s reason=%s", one.name, reason)
                one.fleet.processes.retire(one.name, one.fleet.ladder(one.name), reason)
        self._take_back(self._running(fleets))

    def limit(self, env: str, current: int, most: int) -> WorkerRoom | None:
        """Return the limit on the workers of an environment, if the cluster has one."""
        if self._remote.nodes is None:
            return None
        room = self._room(self._waiting())
        return room.limit(self._needs[env], current, most, self._wanted.get(env, 0))

    def admits(self, env: str) -> bool:
        """Return whether a worker may be ordered now: there is room, or the environment has none on the cluster."""
        if self._remote.nodes is None or all(
            env_of(one.identity.name) != env for one in self._remote.living()
        ):
            return True
        return self._room(self._waiting()).take(self._needs[env])

    def refusal(self) -> str:
        """Return why no engine may be ordered now; empty if one may."""
        if self._remote.nodes is None:
            return f"{NO_ROOM}: the nodes of the cluster are not known yet"
        if self._room(self._waiting()).take(self._needs[PLACED]):
            return ""
        cordoned = self._cordoned()
        nodes = [node.total for node in self._remote.nodes if node.id not in cordoned]
        return f"{NO_ROOM}: the cluster has no room for another engine: it {shortage(self._needs[PLACED], nodes)}"

    def wants(self, wanted: Mapping[str, int], engines: int = 0) -> None:
        """Tell the cluster how many workers of each environment, and engines, are wanted, whatever room there is."""
        self._wanted = {**wanted, PLACED: engines} if engines else dict(wanted)
        self._remote.want(Demand(workers=self._wanted, avoid=tuple(sorted(self._cordoned()))))

    def records(self) -> tuple[NodeRecord, ...]:
        """Return the nodes that can have a process, for readers."""
        cordoned = self._cordoned()
        workers: dict[str, list[str]] = {}
        engines: dict[str, list[str]] = {}
        for one in self._remote.living():
            name = one.identity.name
            (engines if env_of(name) == PLACED else workers).setdefault(one.node, []).append(name)
        return tuple(
            NodeRecord(
                node=node.id,
                host=node.host,
                total=node.total,
                free=node.free,
                workers=tuple(workers.get(node.id, ())),
                engines=tuple(engines.get(node.id, ())),
                cordoned=cordoned.get(node.id, ""),
                order=order.number if (order := self._orders.get(f"{NODE_PREFIX}{node.id}")) else 0,
            )
            for node in self._remote.nodes or ()
            if any(node.total.values())
        )

    def places(self) -> dict[str, tuple[str, str]]:
        """Return host and node of each process that has one; the host is empty until its process has started."""
        return {one.identity.name: (one.host, one.node) for one in self._remote.living() if one.node}

    def _running(self, fleets: Sequence[Fleet]) -> list[_Running]:
        """Return the running processes of these fleets, in the order of their orders."""
        fleet_of = {
            name: fleet
            for fleet in fleets
            for name, view in fleet.processes.views().items()
            if view.phase is Phase.RUNNING
        }
        living = self._remote.living()
        return [_Running(one, fleet_of[one.identity.name]) for one in living if one.identity.name in fleet_of]

    def _take_back(self, running: list[_Running]) -> None:
        """Retire the processes that wait while no node has room for them, but one worker of each environment."""
        now = time.monotonic()
        placed = {PLACED, *(each.env for each in running if each.process.is_placed)}
        free, not_ours = self._room([]), self._not_ours(running)
        for each in running:
            one, env = each.process, each.env
            if one.is_placed or env not in self._needs:
                continue
            has_room, may_start = free.take(self._needs[env]), not_ours.take(self._needs[env])
            if has_room:
                continue
            patience_s = self._start_s if may_start else UNPLACED_S
            if env not in placed:
                placed.add(env)
            elif self._remote.nodes is not None and now - one.ordered_at > patience_s:
                reason = f"{NO_ROOM}: the cluster has no room for it, waiting for {self._needs[env]}"
                each.fleet.processes.retire(each.name, KILL_LADDER, reason)

    def _room(self, waiting: list[Need]) -> ClusterRoom:
        return ClusterRoom(self._remote.nodes or (), self._cordoned(), waiting)

    def _not_ours(self, running: list[_Running]) -> ClusterRoom:
        """Return the room that processes with a node leave: what is free, and what others or starting ones have."""
        left = {node.id: dict(node.total) for node in self._remote.nodes or ()}
        for each in running:
            need, node = self._needs.get(each.env), each.process.node
            if node in left and need is not None:
                for name, amount in need.amounts.items():
                    left[node][name] = left[node].get(name, 0.0) - amount
        nodes = [replace(node, free=left[node.id]) for node in self._remote.nodes or ()]
        return ClusterRoom(nodes, self._cordoned())

    def _waiting(self) -> list[Need]:
        """Return what those need that have no node yet, or have it for so short that it may still count as free."""
        settled = time.monotonic() - SETTLE_S
        living = self._remote.living()
        found = (
            env_of(one.identity.name)
            for one in living
            if not one.is_placed or settled < one.placed_at < math.inf
        )
        return [self._needs[env] for env in found if env in self._needs]

    def _cordoned(self) -> dict[str, str]:
        return cordons(self._remote.nodes or (), self._orders)


def short(node: str) -> str:
    """Return the first characters of a node's id, which tell it from the others."""
    return node[:8]
