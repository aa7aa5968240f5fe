"""What the processes of a run need of a cluster's nodes, and which need no node can meet. Pure."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from rolloutmq.bus.engine_registry import PLACED
from rolloutmq.schemas.config.run import RunConfig

CPU = "CPU"
GPU = "GPU"


@dataclass(frozen=True, slots=True)
class Need:
    """Resources of one process."""

    cpus: float = 1.0
    gpus: float = 0.0

    def __str__(self) -> str:
        return told({CPU: self.cpus, GPU: self.gpus})

    @property
    def amounts(self) -> dict[str, float]:
        """Return the amounts that are not 0, by the names of the cluster."""
        return {name: amount for name, amount in ((CPU, self.cpus), (GPU, self.gpus)) if amount}

    def fits(self, node: Mapping[str, float]) -> bool:
        """Return whether a node with these resources has room."""
        return all(node.get(name, 0.0) >= amount for name, amount in self.amounts.items())


def need_of(config: RunConfig, env: str) -> Need:
    """Return what a worker of an environment needs, or with `PLACED` an engine."""
    if env == PLACED:
        return Need(config.cluster.engine_cpus, config.cluster.engine_gpus)
    section = config.environment.get(env)
    return Need(config.cluster.worker_cpus, float(section.gpus) if section is not None else 0.0)


def shortage(need: Need, nodes: Iterable[Mapping[str, float]]) -> str:
    """Return why a need is not met.

    Args:
        need: What a process needs.
        nodes: All resources of each living node, free or not.
    """
    found = list(nodes)
    if not found:
        return f"needs {need}; the cluster has no node"
    if any(need.fits(node) for node in found):
        return f"needs {need}; every node that has as much is in use"
    largest = max(found, key=lambda node: (node.get(GPU, 0.0) >= need.gpus, node.get(CPU, 0.0)))
    has = told({CPU: largest.get(CPU, 0.0), GPU: largest.get(GPU, 0.0)})
    return f"needs {need}; the largest node has {has}"


def told(amounts: Mapping[str, float]) -> str:
    """Return amounts of resources as text."""
    parts = [f"{amount:g} {name}" for name, amount in amounts.items() if amount]
    return " and ".join(parts) or "no CPU"
