"""`rolloutmq cordon` and `uncordon` of a node: its workers go elsewhere, and new ones keep off."""

import sys
import time
from collections.abc import Sequence
from typing import Final

from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import NodeRecord, RunLayout
from rolloutmq.schemas.wire.hardware import NODE_PREFIX, CordonGpu, GpuOrdered, UncordonGpu
from rolloutmq.services.monitor.status.confirmation import CONFIRM_S, LOOK_S, unconfirmed
from rolloutmq.services.monitor.status.worker_view import supervision_of
from rolloutmq.services.monitor.text.nodes import SHORT, nodes_of, text_of

ANSWER_S: Final = 5.0
"""Longest wait for the broker's reply."""


def named(given: str, nodes: Sequence[NodeRecord]) -> NodeRecord | None:
    """Return the node of an id, of the beginning of one, or of a host with no other node; None for another name.

    Raises:
        ConfigError: Several nodes match.
    """
    found = [one for one in nodes if given and (one.node.startswith(given) or one.host == given)]
    if len(found) > 1:
        ids = ", ".join(one.node[:SHORT] for one in found)
        raise ConfigError(given, f"several nodes match ({ids}); give more characters of an id")
    return found[0] if found else None


def order(layout: RunLayout, node: NodeRecord, *, cordoned: bool, reason: str = "") -> int:
    """Order the cordon of a node, or its end; wait until the orchestrator has followed; return the exit code."""
    name = f"{NODE_PREFIX}{node.node}"
    request = CordonGpu(gpu=name, reason=reason) if cordoned else UncordonGpu(gpu=name)
    found = resolve_blocking(layout.root, ANSWER_S)
    with BlockingClient(found.serve, keys=keys_of(found)) as client:
        reply = client.request(request, ANSWER_S)
    assert isinstance(reply, GpuOrdered)
    until = time.monotonic() + CONFIRM_S
    while time.monotonic() < until:
        for one in nodes_of(supervision_of(layout)):
            if one.node == node.node and one.order >= reply.order:
                sys.stdout.write(f"node {text_of(one)}\n")
                return 0
        time.sleep(LOOK_S)
    return unconfirmed(layout, name)
