"""`rolloutmq report` over the files of a run, for a person and for a program, also where lines are damaged."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.services.broker.journal.handmade import batch, write_lines

from rolloutmq.bus.rundir import write_json
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import AckedGroup, DroppedGroup


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    """A run without a journal: of its 400 groups, all that took longer than 3 s expired."""
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({"broker": {"durability": "memory"}}))
    groups = [
        AckedGroup(
            group_id=f"g{number}",
            session=1,
            seq=number + 1,
            at=1.0,
            env="sort3",
            sequences=2,
            tokens=2 * (20 + number % 7),
            duration_s=float(number % 5),
            reward=number % 3 / 2,
        )
        for number in range(400)
    ]
    slow = [group for group in groups if (group.duration_s or 0) > 3]
    write_lines(layout.ack_log("sort3-0"), groups)
    write_lines(layout.trained, [batch(1, *[group.group_id for group in groups if group not in slow])])
    write_lines(
        layout.dropped,
        [DroppedGroup(at=1.0, group_id=one.group_id, state="expired", reason="stale") for one in slow],
    )
    return layout


def report(layout: RunLayout, *arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "rolloutmq.launch.cli", "report", str(layout.root), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_report_shows_a_bias_to_a_person_and_to_a_program(layout: RunLayout) -> None:
    told = report(layout)
    assert (told.returncode, told.stderr) == (0, "")
    assert "bias       shows: sort3 by duration (trained, expired)\n" in told.stdout
    assert "groups     400 accepted: 320 trained" in told.stdout
    assert "  duration    trained: BIASED (p" in told.stdout
    assert "  length      trained: no bias shows" in told.stdout
    fields = json.loads(report(layout, "--json").stdout)
    assert fields["bias"]["environments"]["sort3"]["dimensions"]["duration"]["verdict"] == "biased"
    short = {"length": "none shows", "duration": "biased", "reward": "none shows"}
    summary = json.loads(layout.summary.read_text())
    assert summary["bias"]["environments"] == {"sort3": short}
    assert fields["summary"] == summary


def test_damaged_line_costs_the_summary_but_not_the_comparison(layout: RunLayout) -> None:
    path = layout.ack_log("sort3-0")
    path.write_bytes(b"garbage\n" + path.read_bytes())
    told = report(layout)
    assert told.returncode == 1
    assert "sort3-0.jsonl, line 1" in told.stderr
    assert "not read: 1 line of sort3-0.jsonl" in told.stdout
    assert "  duration    trained: BIASED (p" in told.stdout
    fields = json.loads(report(layout, "--json").stdout)
    assert fields["summary"] is None
    assert fields["bias"]["unreadable_lines"] == {"sort3-0.jsonl": 1}
