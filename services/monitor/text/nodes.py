"""The nodes of a cluster, with the workers and engines on them, as lines for status, `top` and the page. Pure."""

from collections.abc import Sequence
from typing import Final

from rolloutmq.schemas.files import NodeRecord, Supervision
from rolloutmq.schemas.printable import printable
from rolloutmq.services.monitor.text.network import NetworkLine

SHORT: Final = 8
"""Characters of an id that tell the nodes of a cluster apart."""
SHOWN: Final = 8
"""Most lines; the nodes of the run's workers come first."""
NAMES: Final = 3
"""Most names of each kind in a line."""


def nodes_of(known: Supervision | None) -> tuple[NodeRecord, ...]:
    """Return the nodes in the orchestrator's report."""
    return () if known is None else known.nodes


def placed(nodes: Sequence[NodeRecord]) -> frozenset[str]:
    """Return the workers and engines that a cluster has placed."""
    return frozenset(name for node in nodes for name in (*node.workers, *node.engines))


def lines(nodes: Sequence[NodeRecord]) -> list[NetworkLine]:
    """Return a line for each node, cordoned ones and those in use first."""
    ordered = sorted(
        nodes,
        key=lambda node: (not node.cordoned, not (node.workers or node.engines), node.host, node.node),
    )
    more = len(ordered) - SHOWN
    rest = [NetworkLine("node", f"and {more} more nodes")] if more > 0 else []
    return [NetworkLine("node", text_of(node), bool(node.cordoned)) for node in ordered[:SHOWN]] + rest


def text_of(node: NodeRecord) -> str:
    """Return a node as text: id, host, free resources, workers, engines, cordon."""
    free = " and ".join(
        f"{node.free.get(name, 0.0):g} of {all_:g} {name}" for name, all_ in node.total.items()
    )
    parts = [f"{node.node[:SHORT]} on {node.host or 'an unnamed host'}: {free or 'nothing'} free"]
    for what, found in (("worker", node.workers), ("engine", node.engines)):
        if found:
            names = ", ".join(found[:NAMES]) + (", ..." if len(found) > NAMES else "")
            parts.append(f"{len(found)} {what}{'s' * (len(found) > 1)}: {names}")
    if node.cordoned:
        parts.append(f"cordoned, {node.cordoned}")
    return printable("; ".join(parts))
