import signal
import subprocess
import sys
import time
from dataclasses import replace

import psutil
import pytest

from rolloutmq.services.orchestrator.simulation.comparison import compared, processors
from rolloutmq.services.orchestrator.simulation.controllers import CONTROLLERS, REFERENCE
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios
from rolloutmq.services.orchestrator.simulation.table import table
from rolloutmq.services.orchestrator.simulation.trial import try_out
from rolloutmq.services.orchestrator.simulation.verdict import judged

SCENARIOS = {one.name: one for one in all_scenarios(2.0)}
TWO = replace(SCENARIOS["two"], lasts_s=700.0, changes=(600.0,))
CRASHING = replace(SCENARIOS["available 0.5"], lasts_s=700.0, changes=(600.0,))


def test_verdicts_come_by_scenario_environment_and_controller() -> None:
    found = list(compared([TWO, CRASHING], 2, ["ratio", REFERENCE]))
    assert [(one.scenario, one.env, one.law, one.seeds) for one in found] == [
        ("two", "math", "ratio", 2),
        ("two", "math", REFERENCE, 2),
        ("two", "code", "ratio", 2),
        ("two", "code", REFERENCE, 2),
        ("available 0.5", "tool", "ratio", 2),
        ("available 0.5", "tool", REFERENCE, 2),
    ]
    assert {one.peak.ratio for one in found[1::2]} == {1.0}


def test_each_is_judged_beside_the_reference_and_without_crashes() -> None:
    own, reference, calm = (
        [try_out(scenario, CONTROLLERS[law], seed) for seed in range(2)]
        for scenario, law in ((CRASHING, "pid"), (CRASHING, REFERENCE), (CRASHING.without_crashes, "pid"))
    )
    assert list(compared([CRASHING], 2, ["pid"])) == judged(CRASHING, "pid", own, reference, calm)


def test_other_processes_find_the_same() -> None:
    scenarios = [replace(TWO, lasts_s=5000.0), CRASHING]
    assert list(compared(scenarios, 1, ["ratio"], processes=2)) == list(compared(scenarios, 1, ["ratio"]))
    assert processors() >= 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_no_process_outlives_the_first(number: signal.Signals) -> None:
    command = [
        sys.executable,
        "-m",
        "rolloutmq.launch.cli",
        "simulate",
        "--scenario",
        "waves",
        "--seeds",
        "500",
    ]
    first = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    try:
        is_at_work = psutil.Process(first.pid)
        others: list[psutil.Process] = []
        until = time.monotonic() + 60.0
        while len(others := is_at_work.children()) < 2:
            assert first.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        first.send_signal(number)
        first.wait(60.0)
        _, alive = psutil.wait_procs(others, 60.0)
        assert not alive
    finally:
        first.kill()
        first.wait()


def test_the_table_has_a_block_for_each_environment_and_a_row_for_each_controller() -> None:
    text = "".join(table(compared([TWO], 1)))
    blocks = [block.splitlines() for block in text.split("\n\n")]
    assert [block[0].split(":")[0] for block in blocks] == [
        "two, environment math, start 2 s, 1 seed",
        "two, environment code, start 2 s, 1 seed",
    ]
    for block in blocks:
        rows = [line for line in block[2:] if not line.startswith(" ")]
        assert [row.split()[0] for row in rows] == list(CONTROLLERS)
        assert all(len(line) <= 120 for line in block)
        column = block[1].index("moves")
        assert "1.0x" in rows[0][column : column + 17]
        assert any("breaks: " in line for line in block)
