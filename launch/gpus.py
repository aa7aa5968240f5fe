"""Commands about GPUs of a living run: keep new workers off one, and use it again."""

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rolloutmq.bus.client import BlockingClient
from rolloutmq.bus.endpoint import resolve_blocking
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.hardware import CordonGpu, GpuOrdered, UncordonGpu
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import GpuRecord
from rolloutmq.services.monitor.gpus import read_gpus

ANSWER_S: Final = 5.0
"""Longest wait for the broker's answer."""
CONFIRM_S: Final = 10.0
"""Longest wait for the orchestrator to have done it: it hears four times a second, and decides once."""
LOOK_S: Final = 0.05
PREFIX: Final = "GPU-"
REASON_LIMIT: Final = 200


def cordon(run_dir: Path, gpu: str, reason: str) -> int:
    """Keep new workers off a GPU; returns the exit code.

    Raises:
        ConfigError: The run knows no such GPU, or several.
    """
    if len(reason) > REASON_LIMIT:
        raise ConfigError("reason", f"is longer than {REASON_LIMIT} characters")
    uuid = resolve(gpu, read_gpus(RunLayout(run_dir)).gpus)
    return _order(run_dir, CordonGpu(gpu=uuid, reason=reason))


def uncordon(run_dir: Path, gpu: str) -> int:
    """Use a GPU again, whatever it was cordoned for; returns the exit code.

    Raises:
        ConfigError: The run knows no such GPU, or several.
    """
    uuid = resolve(gpu, read_gpus(RunLayout(run_dir)).gpus)
    return _order(run_dir, UncordonGpu(gpu=uuid))


def resolve(given: str, records: Sequence[GpuRecord]) -> str:
    """Return the UUID that is meant: a whole one, or the beginning of one alone; `GPU-` may be left out."""
    known = sorted(record.standing.uuid for record in records)
    if given in known:
        return given
    found = [uuid for uuid in known if given and uuid.startswith((given, PREFIX + given))]
    if len(found) == 1:
        return found[0]
    if found:
        raise ConfigError(given, f"is the beginning of several GPUs: {', '.join(found)}")
    there = f"there are: {', '.join(known)}" if known else "its orchestrator has heard of none"
    raise ConfigError(given or "GPU", f"is no GPU of this run; {there}")


def _order(run_dir: Path, request: CordonGpu | UncordonGpu) -> int:
    with BlockingClient(resolve_blocking(run_dir, ANSWER_S).serve) as client:
        reply = client.request(request, ANSWER_S)
    assert isinstance(reply, GpuOrdered)
    record = _carried_out(run_dir, request.gpu, reply.order)
    if record is None:
        _say(f"{request.gpu}: the order is kept, but the orchestrator has not carried it out yet")
        return 1
    standing = record.standing
    workers = f"; workers on it stay: {', '.join(standing.holders)}" if standing.holders else ""
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
