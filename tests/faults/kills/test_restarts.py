"""`rolloutmq restart` in runs of processes: what was begun is finished, and another takes the place."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.faults.support.fleet import ENGINES, first_engine
from tests.faults.support.processes import LIMIT_S, status, wait_until
from tests.faults.support.staff import PROGRAM, Staff, Staffed

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.process import ProcessIdentity
from rolloutmq.services.process.identity import alive


def slow(entry: str = "Slow", **about: Any) -> dict[str, Any]:
    """Return an environment whose rollouts take a second."""
    return {"entry": f"envs.py:{entry}", "options": {"own_s": 1.0}, **about}


def restart(staff: Staff, name: str, *options: str) -> str:
    """Restart a worker or an engine, as an operator does; return what the command says."""
    return staff.cli("restart", name, *options, "--run-dir", str(staff.layout.root)).strip()


def engines(staff: Staff) -> dict[str, ProcessIdentity]:
    """Return the live engines beyond the first."""
    known = read_json(staff.layout.engines, list[ProcessIdentity]) or []
    return {one.name: one for one in known if alive(one)}


@pytest.mark.extended
def test_a_restarted_worker_finishes_its_rollouts_and_another_takes_its_place(
    staffed: Staffed, run_dir: Path
) -> None:
    with staffed(e=slow(min_workers=2, max_workers=3)) as (_, staff):
        staff.scale("e", 2)
        before = staff.until_ready(2)
        wait_until(lambda: staff.rows()["e-0"].in_hand == 2, "rollouts in hand")
        assert restart(staff, "e-0") == "e-0: draining; another takes its place"
        assert staff.until_ended("e-0") == "exit code 0"
        wait_until(lambda: {"e-1", "e-2"} <= staff.living().keys(), "another in its place")
        staff.until_ready(2)
        (gone,) = [
            line for line in staff.layout.log("e-0").read_text().splitlines() if " worker ended " in line
        ]
        assert gone.endswith(f" produced={len(staff.acked('e-0'))} abandoned=0 untaught=0")
        assert staff.living()["e-1"] == before["e-1"]

        assert restart(staff, "e-1", "--now") == "e-1: killed; another takes its place"
        assert staff.until_ended("e-1") == "killed by SIGKILL"
        wait_until(lambda: {"e-2", "e-3"} <= staff.living().keys(), "another in its place")
        staff.until_more(["e-2", "e-3"])
        assert len(staff.log_lines("started name=")) == 4, "nobody else was started"
        ledger = status(run_dir).pressure.ledger
        assert (ledger.lost_before_accept, ledger.dead) == (0, 0)


@pytest.mark.extended
def test_a_restarted_engine_answers_what_it_has_and_another_takes_its_place(
    staffed: Staffed, run_dir: Path
) -> None:
    inference = {"kind": "tiny", "min_engines": 2, "max_engines": 2}
    about = {"e": slow("Served", min_workers=1, max_workers=1), "inference": inference}
    with first_engine(run_dir, 20.0) as first, staffed((*ENGINES, "20"), **about) as (_, staff):
        wait_until(lambda: len(engines_of(staff.layout)) == 2, "the second engine")
        staff.until_ready(1)
        staff.until_more(["e-0"])
        (old,) = engines(staff).values()
        assert restart(staff, old.name) == f"{old.name}: draining; another takes its place"
        wait_until(lambda: not alive(old), "its end")
        assert staff.until_ended(old.name) == "exit code 0", "it was not killed"
        (new,) = wait_until(lambda: engines(staff), "another in its place").values()
        assert new.pid != old.pid
        wait_until(lambda: new.pid in {one.pid for one in engines_of(staff.layout)}, "its address")
        staff.until_more(["e-0"])
        assert "broken off" not in staff.layout.log("e-0").read_text(), "every request was answered"

        refused = subprocess.run(
            [sys.executable, *PROGRAM, "restart", "inference", "--run-dir", str(run_dir)],
            env=os.environ,
            capture_output=True,
            text=True,
            timeout=2 * LIMIT_S,
            check=False,
        )
        assert refused.returncode == 1
        assert first.poll() is None, "the launcher's own is not ended"
