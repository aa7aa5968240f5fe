"""A whole run with weight transfer to a real vLLM, by configuration alone. `make test-vllm` runs it."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tests.services.inference.vllm.support.lent import PYTHON, missing

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun, steps_logged
from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.schemas.files import RunLayout

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

CONFIG = scenario.QUICKSTART.with_name("quickstart-vllm.toml")
DEADLINE_S = 540.0


def proven(layout: RunLayout) -> dict[str, dict[str, Any]]:
    """What `rolloutmq doctor --weights` finds."""
    command = [
        sys.executable,
        "-m",
        "rolloutmq.launch.cli",
        "doctor",
        "--weights",
        str(layout.root),
        "--json",
    ]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    return {one["what"]: one for one in json.loads(found.stdout)}


@pytest.mark.parametrize(("ranks", "killed"), [(1, "trainer"), (2, "trainer.rank1")])
def test_each_step_is_sent_and_stamped_and_whoever_dies_is_a_pause(
    tmp_path: Path, ranks: int, killed: str
) -> None:
    layout = RunLayout(tmp_path / "run")
    told: list[dict[str, dict[str, Any]]] = []

    def kill_one_after_another(live: LiveRun) -> None:
        live.wait_for_step(12)
        told.append(proven(layout))
        live.kill(killed, signal.SIGKILL)
        live.wait_for("the next trainer", lambda: b'"resumed":true' in layout.trained.read_bytes())
        live.wait_for_step(steps_logged(layout) + 5)
        first = layout.vllm.read_bytes()
        live.kill("inference", signal.SIGKILL)
        live.wait_for("the next vLLM", lambda: layout.vllm.read_bytes() != first)
        live.wait_for_step(steps_logged(layout) + 10)
        live.process.send_signal(signal.SIGINT)

    code, summary = scenario.run(
        layout.root,
        [
            "weights.backend=vllm_http",
            f"inference.vllm.python={PYTHON}",
            "trainer.steps=100000",
            f"trainer.ranks={ranks}",
            "trainer.checkpoint_interval=10",
        ],
        config=CONFIG,
        fault=kill_one_after_another,
        deadline_s=DEADLINE_S,
    )
    assert code == 130
    assert summary["groups_lost"] == summary["groups_trained_twice"] == 0
    assert summary["trainer_resumes"] == 1
    assert summary["staleness_max"] <= summary["staleness_bound"] == 2
    assert list(told[0]) == ["manifest", "sent", "served"]
    assert told[0]["sent"]["fine"], told
    lines = [json.loads(line) for line in layout.trained.read_text().splitlines()]
    sampled_from = {line["version"][1] - 1 - stale for line in lines for stale in line.get("staleness", ())}
    assert len(sampled_from) > 15
    assert "attached segment" not in layout.log("inference").read_text()
    assert not layout.weights.exists()


def test_a_run_is_evaluated_through_vllm_and_so_is_its_checkpoint(tmp_path: Path) -> None:
    layout, alone = RunLayout(tmp_path / "run"), RunLayout(tmp_path / "alone")
    asked = (
        f"inference.vllm.python={PYTHON}",
        "evaluation.enabled=true",
        "evaluation.tasks=16",
        "evaluation.samples=2",
        "evaluation.deadline_s=300",
    )
    code, summary = scenario.run(
        layout.root, [*asked, "trainer.steps=15"], config=CONFIG, deadline_s=DEADLINE_S
    )
    assert code == 0
    first, last = recorded(layout.evaluations)
    for point, step in ((first, 0), (last, 15)):
        assert point.version.step == step
        assert point.one_policy
        assert (point.all.answered, point.all.failed, point.all.missing) == (16, 0, 0)
    assert summary["evaluation"]["last"]["greedy"] == last.all.greedy

    command = [sys.executable, "-m", "rolloutmq.launch.cli", "evaluate", str(CONFIG), "--plain"]
    command += ["--checkpoint", str(layout.root), "--run-dir", str(alone.root)]
    for assignment in asked:
        command += ["--set", assignment]
    with (tmp_path / "alone.out").open("wb") as out:
        subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, timeout=DEADLINE_S, check=True)
    (again,) = recorded(alone.evaluations)
    assert again.all.greedy == last.all.greedy, "the same greedy answers of the same weights"
