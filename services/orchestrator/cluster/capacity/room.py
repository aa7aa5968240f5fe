"""The room of a cluster for the workers of a run. Pure.

A node counts with what is free on it, unless it is cordoned: by an operator, or because the cluster is about to remove
it. Processes without a node yet are about to take some of that, so they are counted as if they had it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from rolloutmq.schemas.wire.hardware import NODE_PREFIX, GpuOrder
from rolloutmq.services.orchestrator.autoscaling.pressure import WorkerRoom
from rolloutmq.services.orchestrator.cluster.messages import Node
from rolloutmq.services.orchestrator.cluster.resources import Need

NO_ROOM: Final = "no_room"
"""Bound of workers for which no node has room."""
LEAVES: Final = "the cluster is about to remove it"


def cordons(nodes: Iterable[Node], orders: Mapping[str, GpuOrder]) -> dict[str, str]:
    """Return why nodes get no new workers, and lose those that they have, by their ids.

    Args:
        nodes: The living nodes.
        orders: The operators' last orders.
    """
    found = {}
    for node in nodes:
        order = orders.get(f"{NODE_PREFIX}{node.id}")
        if order is not None and order.cordoned:
            found[node.id] = f"by hand: {order.reason or 'asked'}"
        elif node.draining:
            found[node.id] = LEAVES
    return found


class ClusterRoom:
    """What the nodes have left at one moment.

    Args:
        nodes: The living nodes.
        cordoned: Those that get no new workers.
        waiting: What each process without a node needs.
    """

    def __init__(
        self, nodes: Iterable[Node], cordoned: Iterable[str] = (), waiting: Sequence[Need] = ()
    ) -> None:
        left_out = set(cordoned)
        self._free = [dict(node.free) for node in nodes if node.id not in left_out]
        for need in waiting:
            self.take(need)

    def take(self, need: Need) -> bool:
        """Take the room of one process; return whether there was some."""
        return _taken(self._free, need)

    def fits(self, need: Need, most: int) -> int:
        """Return for how many more processes there is room, at most so many."""
        trial = [dict(one) for one in self._free]
        return next((count for count in range(most) if not _taken(trial, need)), most)

    def limit(self, need: Need, current: int, most: int, wanted: int) -> WorkerRoom | None:
        """Return the limit on the workers of an environment; None without one.

        One of them is always allowed: where no node ever has room for it, its end tells the reason.

        Args:
            need: What a worker needs.
            current: Workers that count towards the target.
            most: Most that the environment may have.
            wanted: Number that the control law asks for.
        """
        more = max(0, most - current)
        if (room := self.fits(need, more)) >= more:
            return None
        count = max(1, current + room)
        short = max(0, wanted - count)
        who = f"{short} more worker{'s' * (short != 1)}" if short else f"more than {count} workers"
        return WorkerRoom(
            count, NO_ROOM, f"{NO_ROOM}: the cluster has no room for {who}, waiting for {need} each"
        )


def _taken(free: list[dict[str, float]], need: Need) -> bool:
    """Take the room of one process from the first node that has it; return whether one had."""
    node = next((one for one in free if need.fits(one)), None)
    if node is None:
        return False
    for name, amount in need.amounts.items():
        node[name] -= amount
    return True
