"""The orchestrator's heartbeat, as its readers see it.

A hung orchestrator cannot report itself: its file gets old. Nothing of a run stops with it, but nobody starts,
restarts, scales or ends workers meanwhile. A file also gets old if it cannot be written, for example because the disk
is full: then the orchestrator works and is heard on the bus, where it repeats its decisions.
"""

import time
from contextlib import suppress
from typing import Any, Final

import msgspec

from rolloutmq.bus.encoding import topics
from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.files import RunLayout, Supervision
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.monitor.status.record_view import full_disk
from rolloutmq.services.monitor.text import format
from rolloutmq.services.process.identity import alive, started_at

SILENT_S: Final = 5.0
"""Silence shown as trouble; the orchestrator writes its file at least once a second."""
LISTEN_S: Final = 3.0
"""Longest wait for a decision on the bus; each is repeated once a second, or once a tick."""
DECISIONS: Final = topics.telemetry("scale", "")
"""Prefix of the topics of decisions."""
MEANWHILE: Final = "no worker is started, restarted, scaled or ended meanwhile; running workers go on"


def launcher_of(layout: RunLayout) -> ProcessIdentity | None:
    """Return the launcher of a run if it runs: it starts the orchestrator again."""
    with suppress(msgspec.DecodeError, NotADirectoryError):
        launcher = read_json(layout.owner, ProcessIdentity)
        return launcher if launcher is not None and alive(launcher) else None
    return None


def listen(layout: RunLayout, known: Supervision | None) -> float | None:
    """Return when the orchestrator was heard on the bus, on CLOCK_MONOTONIC; None if it was not.

    Listens only if its report is old, which may also be that of an earlier one. Blocks up to `LISTEN_S`.
    """
    silent_s = silence_s(layout, known, time.monotonic())
    if silent_s is None or silent_s <= SILENT_S:
        return None
    endpoints = endpoints_of(layout)
    if endpoints is None or not endpoints.events:
        return None
    with BlockingSubscriber(endpoints.events, [DECISIONS], keys=keys_of(endpoints)) as events:
        return None if events.poll(LISTEN_S) is None else time.monotonic()


def silence_s(layout: RunLayout, known: Supervision | None, now: float) -> float | None:
    """Return how old the report of the orchestrator of a run is; None if it ended in order, or nobody would restart
    it.

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


def problem(
    layout: RunLayout, known: Supervision | None, now: float, wall: float, heard_at: float | None = None
) -> str:
    """Return since when the orchestrator has not reported, and what does not work; empty if it has.

    Args:
        layout: Run directory.
        known: The orchestrator's last report.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
        heard_at: Time at which it was heard on the bus, see `listen`; None if it was not.
    """
    silent_s = silence_s(layout, known, now)
    if known is None or silent_s is None or silent_s <= SILENT_S:
        return ""
    since = f"{format.clock(silent_s)}, since {format.time_of_day(wall - silent_s)}"
    if heard_at is not None and now - heard_at <= SILENT_S:
        why = full_disk(layout.root) or f"see {layout.log(known.orchestrator.name)}"
        return (
            f"at work, but its report has not been written for {since} ({why}): what it knows of the workers is "
            "shown as of then, and orders are carried out without a confirmation"
        )
    process = "runs" if alive(known.orchestrator) else "has ended"
    return f"not heard for {since} (process {known.orchestrator.pid} {process}): {MEANWHILE}"


def fields(
    layout: RunLayout, known: Supervision | None, now: float, wall: float, heard_at: float | None = None
) -> dict[str, Any] | None:
    """Return process, silence and problem of the orchestrator as a JSON object; None if it never reported.

    For the arguments see `problem`.
    """
    if known is None:
        return None
    silent_s = silence_s(layout, known, now)
    return {
        "pid": known.orchestrator.pid,
        "alive": alive(known.orchestrator),
        "silent_s": silent_s if silent_s is None or heard_at is None else min(silent_s, now - heard_at),
        "problem": problem(layout, known, now, wall, heard_at),
    }
