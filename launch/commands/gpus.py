"""`rolloutmq cordon` and `uncordon`: keep new workers off a GPU or a node of a running run, or allow them again."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch.commands.remote import nodes
from rolloutmq.schemas.errors import ConfigError, UsageError
from rolloutmq.schemas.files import GpuRecord, RunLayout
from rolloutmq.schemas.wire.hardware import CordonGpu, GpuOrdered, UncordonGpu
from rolloutmq.services.monitor.status.confirmation import CONFIRM_S, LOOK_S, unconfirmed
from rolloutmq.services.monitor.status.gpus import read_gpus
from rolloutmq.services.monitor.status.worker_view import supervision_of
from rolloutmq.services.monitor.text.nodes import nodes_of

ANSWER_S: Final = 5.0
"""Longest wait for the broker's reply."""
PREFIX: Final = "GPU-"
REASON_LIMIT: Final = 200


def cordon(run_dir: Path, gpu: str, reason: str) -> int:
    """Keep new workers off a GPU or a node; return the exit code.

    Raises:
        UsageError: No GPU and no node of the run matches.
        ConfigError: Several do, or the reason is too long.
    """
    if len(reason) > REASON_LIMIT:
        raise ConfigError("reason", f"too long; use at most {REASON_LIMIT} characters")
    layout = RunLayout(run_dir)
    if (node := nodes.named(gpu, nodes_of(supervision_of(layout)))) is not None:
        return nodes.order(layout, node, cordoned=True, reason=reason)
    uuid = resolve(gpu, read_gpus(layout).gpus)
    return _order(run_dir, CordonGpu(gpu=uuid, reason=reason))


def uncordon(run_dir: Path, gpu: str) -> int:
    """Allow new workers on a GPU or a node again, for any cause of the cordon; return the exit code.

    Raises:
        UsageError: No GPU and no node of the run matches.
        ConfigError: Several do.
    """
    layout = RunLayout(run_dir)
    if (node := nodes.named(gpu, nodes_of(supervision_of(layout)))) is not None:
        return nodes.order(layout, node, cordoned=False)
    uuid = resolve(gpu, read_gpus(layout).gpus)
    return _order(run_dir, UncordonGpu(gpu=uuid))


def resolve(given: str, records: Sequence[GpuRecord]) -> str:
    """Return the UUID that a full UUID or an unambiguous prefix names; the prefix `GPU-` may be omitted."""
    known = sorted(record.standing.uuid for record in records)
    if given in known:
        return given
    found = [uuid for uuid in known if given and uuid.startswith((given, PREFIX + given))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(given, f"ambiguous GPU prefix (matches {', '.join(found)}); give more characters")
    known_text = f"this run has: {', '.join(known)}" if known else "its orchestrator has reported no GPU"
    raise UsageError(f"{given or 'GPU'}: no such GPU; {known_text}")


def _order(run_dir: Path, request: CordonGpu | UncordonGpu) -> int:
    found = resolve_blocking(run_dir, ANSWER_S)
    with BlockingClient(found.serve, keys=keys_of(found)) as client:
        reply = client.request(request, ANSWER_S)
    assert isinstance(reply, GpuOrdered)
    record = _carried_out(run_dir, request.gpu, reply.order)
    if record is None:
        return unconfirmed(RunLayout(run_dir), request.gpu)
    standing = record.standing
    workers = f"; running workers stay: {', '.join(standing.holders)}" if standing.holders else ""
    if standing.cordoned:
        _say(f"{standing.uuid}: cordoned, {standing.reason}{workers}")
    else:
        _say(f"{standing.uuid}: in use" + (f", {standing.reason}" if standing.reason else ""))
    return 0


def _carried_out(run_dir: Path, gpu: str, order: int) -> GpuRecord | None:
    until = time.monotonic() + CONFIRM_S
    while time.monotonic() < until:
        for record in read_gpus(RunLayout(run_dir)).gpus:
            if record.standing.uuid == gpu and record.standing.order >= order:
                return record
        time.sleep(LOOK_S)
    return None


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
