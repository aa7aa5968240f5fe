"""A whole run on a host whose driver does what the test says, steered from the command line as a user does it."""

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.services.nvml.driver import GIB, Driver, gpu

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun, steps_logged
from rolloutmq.schemas.process import Role
from rolloutmq.services.process.identity import alive, variable_of

pytestmark = pytest.mark.extended


def test_a_run_places_its_workers_and_goes_on_where_gpus_are_cordoned_and_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, driver = tmp_path / "run", Driver(tmp_path / "nvml")
    for name, value in driver.environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    driver.show(gpu("GPU-a"), gpu("GPU-b", GIB), gpu("GPU-c", 2 * GIB))

    def rolloutmq(*arguments: str, code: int = 0) -> str:
        command = [sys.executable, "-m", "rolloutmq.launch.cli", *arguments]
        told = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert told.returncode == code, told.stdout + told.stderr
        return told.stdout + told.stderr

    def steer(live: LiveRun) -> None:
        def placed() -> list[str]:
            workers = [one for one in live.processes().values() if one.role is Role.WORKER and alive(one)]
            return sorted(variable_of(one.pid, "CUDA_VISIBLE_DEVICES") or "" for one in workers)

        def until(what: str, condition: Callable[[], bool]) -> None:
            live.wait_for(what, condition)

        until("two placed workers", lambda: placed() == ["GPU-a", "GPU-b"])
        live.wait_for_step(10)
        assert "no such GPU" in rolloutmq("cordon", "GPU-x", "--run-dir", str(run_dir), code=1)
        told = rolloutmq("cordon", "c", "--reason", "new fan", "--run-dir", str(run_dir))
        assert told == "GPU-c: cordoned, by hand: new fan\n"
        driver.change("GPU-a", lost=True)
        until("the end of the worker on the lost GPU", lambda: placed() == ["GPU-b"])
        gpus = {one["uuid"]: one for one in json.loads(rolloutmq("status", str(run_dir), "--json"))["gpus"]}
        assert (gpus["GPU-a"]["causes"], gpus["GPU-c"]["causes"]) == (["lost"], ["manual"])
        assert gpus["GPU-a"]["sample"]["state"] == "lost"
        assert "cordoned (manual); by hand: new fan" in rolloutmq("status", str(run_dir))
        rolloutmq("uncordon", "GPU-c", "--run-dir", str(run_dir))
        until("a worker on the GPU that is used again", lambda: placed() == ["GPU-b", "GPU-c"])
        live.wait_for_step(steps_logged(live.layout) + 10)
        live.process.send_signal(signal.SIGINT)

    code, summary = scenario.run(
        run_dir,
        [
            "environment.sort3.gpus=1",
            "environment.sort3.min_workers=2",
            "environment.sort3.max_workers=2",
            "trainer.steps=100000",
            "telemetry.interval_s=0.1",
        ],
        fault=steer,
        deadline_s=400.0,
    )

    assert code == 130
    assert summary["steps"] >= 20
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    reasons = [
        line["reason"]
        for line in map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
        if line["kind"] == "scale_decision"
    ]
    assert any("1 can be placed: no_gpu: 0 of 1 wanted; 2 cordoned, 1 taken" in reason for reason in reasons)
