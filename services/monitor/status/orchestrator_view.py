"""The orchestrator's heartbeat, as its readers see it.

A hung orchestrator cannot report itself: its file gets old. Nothing of a run stops with it, but nobody starts,
restarts, scales or ends workers meanwhile.
"""

from contextlib import suppress
from typing import Any, Final

import msgspec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.monitor.text import format
from rolloutmq.services.process.identity import alive, started_at

SILENT_S: Final = 5.0
"""Silence shown as trouble; the orchestrator writes its file at least once a second."""
MEANWHILE: Final = "no worker is started, restarted, scaled or ended meanwhile; running workers go on"


def launcher_of(layout: RunLayout) -> ProcessIdentity | None:
    """Return the launcher of a run if it runs: it starts the orchestrator again."""
    with suppress(msgspec.DecodeError, NotADirectoryError):
        launcher = read_json(layout.owner, ProcessIdentity)
        return launcher if launcher is not None and alive(launcher) else None
    return None


def silence_s(layout: RunLayout, known: Supervision | None, now: float) -> float | None:
    """Return how long the orchestrator of a run has not been heard; None if it ended in order, or nobody would
    restart it.

    Args:
        layout: Run directory.
        known: The orchestrator's last report.
        now: CLOCK_MONOTONIC.
    """
    if known is None or known.over or known.at is None:
        return None
    if (launcher := launcher_of(layout)) is not None:
        # A report of an earlier life of the run says nothing about this one.
        return max(0.0, now - max(known.at, started_at(launcher)))
    return max(0.0, now - known.at) if alive(known.orchestrator) else None


def problem(layout: RunLayout, known: Supervision | None, now: float, wall: float) -> str:
    """Return since when the orchestrator has not been heard, and what does not work; empty if it was.

    Args:
        layout: Run directory.
        known: The orchestrator's last report.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
    """
    silent_s = silence_s(layout, known, now)
    if known is None or silent_s is None or silent_s <= SILENT_S:
        return ""
    process = "runs" if alive(known.orchestrator) else "has ended"
    return (
        f"not heard for {format.clock(silent_s)}, since {format.time_of_day(wall - silent_s)} (process "
        f"{known.orchestrator.pid} {process}): {MEANWHILE}"
    )


def fields(layout: RunLayout, known: Supervision | None, now: float, wall: float) -> dict[str, Any] | None:
    """Return process, silence and problem of the orchestrator as a JSON object; None if it never reported."""
    if known is None:
        return None
    return {
        "pid": known.orchestrator.pid,
        "alive": alive(known.orchestrator),
        "silent_s": silence_s(layout, known, now),
        "problem": problem(layout, known, now, wall),
    }
