"""The service's view of a cluster's capacity: when the nodes are looked at, and what the cluster is asked for. Pure.

Before the first demand nothing is asked: what an earlier life of the service has asked holds until then.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.orchestrator.cluster.messages import Demand, Node, Nodes
from rolloutmq.services.orchestrator.cluster.resources import Need, need_of

LOOK_S: Final = 1.0
"""Interval of looks at the nodes."""
AGAIN_S: Final = 30.0
"""Interval at which an unchanged request is repeated: a cluster keeps one, and others may have replaced it."""


class CapacityWatch:
    """What the service knows of the nodes, and what it asks for them.

    Args:
        config: Configuration of the run.
    """

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._nodes: tuple[Node, ...] = ()
        self._looked_at = float("-inf")
        self._demand: Demand | None = None
        self._asked: Demand | None = None
        self._asked_at = float("-inf")

    @property
    def avoid(self) -> Sequence[str]:
        """Return the nodes that get no new process."""
        return () if self._demand is None else self._demand.avoid

    def is_due(self, now: float) -> bool:
        """Return whether to look at the nodes."""
        return now - self._looked_at >= LOOK_S

    def seen(self, nodes: Sequence[Node], now: float) -> Nodes:
        """Record the nodes; return the report of them."""
        self._nodes, self._looked_at = tuple(nodes), now
        return self.report()

    def report(self) -> Nodes:
        """Return the nodes of the last look; none before the first."""
        return Nodes(nodes=self._nodes)

    def wants(self, demand: Demand) -> None:
        """Take a demand in place of the one before."""
        self._demand = demand

    def request(self, now: float) -> Mapping[Need, int] | None:
        """Return the processes that the cluster is to have room for; None while its last request holds."""
        if self._demand is None or not self._config.cluster.autoscale:
            return None
        if self._demand == self._asked and now - self._asked_at < AGAIN_S:
            return None
        self._asked, self._asked_at = self._demand, now
        needs: Counter[Need] = Counter()
        for env, count in self._demand.workers.items():
            needs[need_of(self._config, env)] += count
        return +needs
