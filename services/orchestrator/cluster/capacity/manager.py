"""The cluster in the orchestrator: limits for the control law, what it wants of the cluster, drains of cordoned nodes.

A worker for which no node has room is taken back, and counts for nothing: the law starts one again once there is room.
The last worker of an environment stays ordered, so that the cluster tells whether it could ever run.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from typing import Final, Protocol

from msgspec.structs import replace

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import NodeRecord
from rolloutmq.schemas.wire.hardware import NODE_PREFIX, GpuOrder
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerRoom
from rolloutmq.services.orchestrator.cluster.capacity.room import NO_ROOM, ClusterRoom, cordons
from rolloutmq.services.orchestrator.cluster.messages import Demand
from rolloutmq.services.orchestrator.cluster.remote_processes import RemoteProcess, RemoteProcesses
from rolloutmq.services.orchestrator.cluster.resources import Need, need_of
from rolloutmq.services.orchestrator.supervision.core import KILL_LADDER, Ladder, Phase, ProcessView
from rolloutmq.services.orchestrator.supervision.worker_table import env_of

logger = logging.getLogger(__name__)

UNPLACED_S: Final = 5.0
"""Time without a node, while none can have room, after which a worker is taken back."""
START_PART: Final = 0.8
"""Part of `cluster.placement_timeout_s` after which a worker is taken back whose room somebody has: perhaps itself, for
a cluster counts a worker as soon as it begins to start it, and names its node once it has started."""

SETTLE_S: Final = 3.0
"""Time after which a cluster surely counts what a process has taken of its node."""


class Workers(Protocol):
    """Subset of the supervisor's interface."""

    def views(self) -> Mapping[str, ProcessView]: ...
    def retire(self, name: str, ladder: Ladder, reason: str) -> None: ...


class ClusterManager:
    """The nodes of a run's workers. Belongs to one event loop; no method waits.

    Args:
        config: Configuration of the run.
        remote: Its processes on the cluster.
    """

    def __init__(self, config: RunConfig, remote: RemoteProcesses) -> None:
        self._remote = remote
        self._start_s = max(UNPLACED_S, START_PART * config.cluster.placement_timeout_s)
        self._needs = {env: need_of(config, env) for env in config.environment}
        self._orders: Mapping[str, GpuOrder] = {}
        self._wanted: dict[str, int] = {}

    def attend(
        self, workers: Workers, orders: Mapping[str, GpuOrder] | None, ladder: Callable[[str], Ladder]
    ) -> None:
        """Drain the workers of cordoned nodes, and take back those without room; once a tick.

        Args:
            workers: The workers.
            orders: The operators' last orders; None while there is no broker.
            ladder: Returns how a worker is drained.
        """
        self._orders = self._orders if orders is None else orders
        cordoned, views = self._cordoned(), workers.views()
        for one in self._remote.living():
            name = one.identity.name
            if name not in views or views[name].phase is not Phase.RUNNING:
                continue
            if one.node in cordoned:
                reason = f"node {short(one.node)} is cordoned: {cordoned[one.node]}"
                logger.warning("worker drained from node name=%s reason=%s", name, reason)
                workers.retire(name, ladder(name), reason)
        self._take_back(workers)

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

    def wants(self, wanted: Mapping[str, int]) -> None:
        """Tell the cluster how many workers of each environment are wanted, whatever room there is."""
        self._wanted = dict(wanted)
        self._remote.want(Demand(workers=self._wanted, avoid=tuple(sorted(self._cordoned()))))

    def records(self) -> tuple[NodeRecord, ...]:
        """Return the nodes that can have a worker, for readers."""
        cordoned = self._cordoned()
        holders: dict[str, list[str]] = {}
        for one in self._remote.living():
            holders.setdefault(one.node, []).append(one.identity.name)
        return tuple(
            NodeRecord(
                node=node.id,
                host=node.host,
                total=node.total,
                free=node.free,
                workers=tuple(holders.get(node.id, ())),
                cordoned=cordoned.get(node.id, ""),
                order=order.number if (order := self._orders.get(f"{NODE_PREFIX}{node.id}")) else 0,
            )
            for node in self._remote.nodes or ()
            if any(node.total.values())
        )

    def places(self) -> dict[str, tuple[str, str]]:
        """Return host and node of each worker that has one; the host is empty until its process has started."""
        return {one.identity.name: (one.host, one.node) for one in self._remote.living() if one.node}

    def _take_back(self, workers: Workers) -> None:
        """Retire the workers that wait while no node has room for them, but one of each environment."""
        now, views = time.monotonic(), workers.views()
        running = [one for one in self._remote.living() if _runs(views, one)]
        placed = {env_of(one.identity.name) for one in running if one.is_placed}
        free, not_ours = self._room([]), self._not_ours(running)
        for one in running:
            env = env_of(one.identity.name)
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
                workers.retire(one.identity.name, KILL_LADDER, reason)

    def _room(self, waiting: list[Need]) -> ClusterRoom:
        return ClusterRoom(self._remote.nodes or (), self._cordoned(), waiting)

    def _not_ours(self, running: list[RemoteProcess]) -> ClusterRoom:
        """Return the room that workers with a node leave: what is free, and what others or starting workers have."""
        left = {node.id: dict(node.total) for node in self._remote.nodes or ()}
        for one in running:
            need = self._needs.get(env_of(one.identity.name))
            if one.node in left and need is not None:
                for name, amount in need.amounts.items():
                    left[one.node][name] = left[one.node].get(name, 0.0) - amount
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


def _runs(views: Mapping[str, ProcessView], one: RemoteProcess) -> bool:
    view = views.get(one.identity.name)
    return view is not None and view.phase is Phase.RUNNING


def short(node: str) -> str:
    """Return the first characters of a node's id, which tell it from the others."""
    return node[:8]
