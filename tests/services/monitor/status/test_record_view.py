"""A record that is not written is told, with the disk that is full, while telemetry runs."""

import os
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.schemas.files import RunLayout, ServiceCrash
from rolloutmq.schemas.process import Role
from rolloutmq.services.monitor.status.record_view import SCARCE_BYTES, SILENT_S, STEADY_S, full_disk, problem
from rolloutmq.services.process.identity import identify, started_at

ME = identify("telemetry", Role.TELEMETRY, os.getpid(), "t/telemetry")


def record(layout: RunLayout, *times: float, torn: bytes = b"") -> None:
    lines = [msgspec.json.encode({"t": at + LATER, "topic": "pressure"}) + b"\n" for at in times]
    layout.metrics.write_bytes(b"".join(lines) + torn)


BEGAN = started_at(ME)
"""Start of this process, the telemetry of these tests. The wall clock of these tests is `LATER` ahead."""
LATER = 1e9


def said(layout: RunLayout, now: float) -> str:
    return problem(layout, now, now + LATER)


def disk(monkeypatch: pytest.MonkeyPatch, free: int, inodes: int = 9) -> None:
    fields: dict[str, Any] = {"f_bavail": free >> 10, "f_frsize": 1 << 10, "f_blocks": 32 << 10}
    found = type("Found", (), fields | {"f_files": 100, "f_favail": inodes})
    monkeypatch.setattr(os, "statvfs", lambda _: found)


def test_a_record_that_ends_while_telemetry_runs_is_told(layout: RunLayout) -> None:
    write_json(layout.processes, [ME])
    now = BEGAN + 1000.0
    record(layout, now - 99.0, now - SILENT_S + 1.0)
    assert said(layout, now) == ""
    record(layout, now - 99.0, now - 62.5, torn=b'{"t": 1')
    assert said(layout, now).startswith("no event recorded for 1:02, since ")
    assert said(layout, now).endswith(f"see {layout.log('telemetry')}; the run goes on without metrics")


def test_a_full_disk_is_named(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(layout.processes, [ME])
    disk(monkeypatch, 12 << 10)
    full = "the disk of the run directory is full, 12.0 KiB of 32.0 MiB free"
    assert full in said(layout, BEGAN + 1000.0)


def test_a_disk_is_full_without_bytes_or_without_inodes(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk(monkeypatch, SCARCE_BYTES)
    assert full_disk(layout.root) == ""
    disk(monkeypatch, SCARCE_BYTES, inodes=0)
    assert "no inode is free" in full_disk(layout.root)
    monkeypatch.undo()
    assert full_disk(Path("/nowhere")) == ""


def test_the_start_of_telemetry_is_no_pause(layout: RunLayout) -> None:
    write_json(layout.processes, [ME])
    record(layout, BEGAN - 3600.0)
    assert said(layout, BEGAN + SILENT_S - 1.0) == ""
    assert said(layout, BEGAN + SILENT_S + 1.0) != ""


def test_without_telemetry_nothing_is_missing(layout: RunLayout) -> None:
    now = BEGAN + 1000.0
    assert said(layout, now) == ""
    write_json(layout.processes, [msgspec.structs.replace(ME, start_ticks=1)])
    assert said(layout, now) == ""
    layout.processes.write_text("{")
    assert said(layout, now) == ""
    write_json(layout.processes, [ME])
    layout.metrics.write_bytes(b"nonsense\n")
    assert said(layout, now) != ""


def crashed(layout: RunLayout, crashes: int, at: float) -> None:
    write_json(
        layout.crashes,
        [ServiceCrash("telemetry", crashes, at + LATER, "exit code 1: error: port 9 is taken")],
    )


def test_telemetry_that_crashes_on_and_on_is_told(layout: RunLayout) -> None:
    """Most of the time it does not live, and nothing else says that events are missing."""
    write_json(layout.owner, ME)
    now = BEGAN + 5.0
    crashed(layout, 1, now - 3.0)
    assert said(layout, now) == "", "a single crash costs a second"
    crashed(layout, 4, now - 42.0)
    expected = (
        "telemetry crashed 4 times in a row, last 0:42 ago: exit code 1: error: port 9 is taken; "
        f"see {layout.log('telemetry')}, it starts again within a minute; the run goes on without metrics"
    )
    assert said(layout, now) == expected
    write_json(layout.processes, [ME])
    record(layout, now)
    assert said(layout, now) == expected, "it has just started again"
    record(layout, BEGAN + STEADY_S)
    assert said(layout, BEGAN + STEADY_S) == ""


def test_the_crashes_of_a_run_whose_launcher_is_gone_are_not_told(layout: RunLayout) -> None:
    crashed(layout, 4, BEGAN)
    assert said(layout, BEGAN) == ""
    write_json(layout.owner, msgspec.structs.replace(ME, start_ticks=1))
    assert said(layout, BEGAN) == ""
    write_json(layout.owner, ME)
    layout.crashes.write_text("{")
    assert said(layout, BEGAN) == ""


def test_a_full_disk_is_the_reason_of_the_crashes(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> None:
    write_json(layout.owner, ME)
    crashed(layout, 4, BEGAN)
    disk(monkeypatch, 12 << 10)
    assert "ago: the disk of the run directory is full, 12.0 KiB" in said(layout, BEGAN)
