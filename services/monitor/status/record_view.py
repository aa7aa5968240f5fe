"""The record of a run, as its readers see it: whether `metrics.jsonl` is being written, and why not.

Telemetry that crashes on and on is not there most of the time. Its launcher tells its crashes.

Telemetry drops events that it cannot write, and the run goes on. It cannot say so in a file if the disk is full: the
time of the last recorded event does. A broker publishes its state four times a second, so a pause is no quiet run.
"""

import os
from pathlib import Path
from typing import Final

import msgspec

from rolloutmq.bus.files import open_regular
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import RunLayout, ServiceCrash
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.services.monitor.text import format
from rolloutmq.services.process.identity import alive, started_at

SILENT_S: Final = 10.0
"""Pause shown as trouble: after a restart the broker publishes nothing for some seconds."""
SCARCE_BYTES: Final = 1 << 20
"""Free bytes below which a disk counts as full: a process may write more at once."""
TAIL_BYTES: Final = 128 << 10
"""End of the file that has at least one whole line."""


STEADY_S: Final = 10.0
"""Time after which telemetry that lives has left its crashes behind: the default of `orchestrator.stable_s`."""
LOOP: Final = 2
"""Crashes in a row that are told: a single one costs a second of the record."""


class _Recorded(msgspec.Struct):
    t: float


def full_disk(directory: Path) -> str:
    """Return that the disk of a directory is full, with the numbers; empty if it has room or cannot be asked."""
    try:
        found = os.statvfs(directory)
    except OSError:
        return ""
    free = found.f_bavail * found.f_frsize
    if free < SCARCE_BYTES:
        whole = found.f_blocks * found.f_frsize
        return f"the disk of the run directory is full, {format.amount(free)} of {format.amount(whole)} free"
    if found.f_files and not found.f_favail:
        return "the disk of the run directory takes no more files, no inode is free"
    return ""


def problem(layout: RunLayout, now: float, wall: float) -> str:
    """Return since when no event is recorded, or how often telemetry crashed, and why; empty if all is well.

    Empty as well for a run without telemetry.

    Args:
        layout: Run directory.
        now: CLOCK_MONOTONIC.
        wall: Seconds since the epoch.
    """
    recorder = _recorder_of(layout)
    up_s = 0.0 if recorder is None else now - started_at(recorder)
    if up_s < STEADY_S and (told := _crashes(layout, wall)):
        return told
    if recorder is None:
        return ""
    began = wall - up_s
    silent_s = wall - max(began, _last_at(layout.metrics))
    if silent_s <= SILENT_S:
        return ""
    why = full_disk(layout.root) or f"see {layout.log(recorder.name)}"
    return (
        f"no event recorded for {format.clock(silent_s)}, since {format.time_of_day(wall - silent_s)}: {why}; "
        "the run goes on without metrics"
    )


def _crashes(layout: RunLayout, wall: float) -> str:
    """Return that telemetry crashes on and on, as its launcher says; empty if it does not, or if that one is gone."""
    try:
        known = read_json(layout.crashes, list[ServiceCrash]) or []
        launcher = read_json(layout.owner, ProcessIdentity)
    except (msgspec.DecodeError, NotADirectoryError):
        return ""
    found = next((one for one in known if one.name == Role.TELEMETRY and one.crashes >= LOOP), None)
    if found is None or launcher is None or not alive(launcher):
        return ""
    ago = format.clock(max(0.0, wall - found.at))
    reason = full_disk(layout.root) or found.reason
    return (
        f"telemetry crashed {found.crashes} times in a row, last {ago} ago: {reason}; see {layout.log(found.name)}, "
        "it starts again within a minute; the run goes on without metrics"
    )


def _recorder_of(layout: RunLayout) -> ProcessIdentity | None:
    """Return the telemetry service of a run if it runs."""
    try:
        known = read_json(layout.processes, list[ProcessIdentity]) or []
    except (msgspec.DecodeError, NotADirectoryError):
        return None
    return next((one for one in known if one.role is Role.TELEMETRY and alive(one)), None)


def _last_at(path: Path) -> float:
    """Return the wall clock of the last whole line; minus infinity if there is none."""
    try:
        with open_regular(path) as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            *_, last, _ = [b"", *file.read().split(b"\n")]
        return msgspec.json.decode(last, type=_Recorded).t if last else float("-inf")
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return float("-inf")
