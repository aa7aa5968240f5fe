"""What `rolloutmq evaluate` makes of a configuration, and what it refuses before it touches anything."""

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.launch.commands import evaluate
from rolloutmq.launch.plan import plan
from rolloutmq.launch.settings import load, validate
from rolloutmq.schemas.errors import ConfigError, RolloutMQError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.worker.loader import check_abilities
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.trajectory import Trajectory
from rolloutmq.trainer.checkpoint import _seal
from rolloutmq.trainer.files.checkpoints import TrainerState

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.toml"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_the_environments_of_every_example_can_be_evaluated(example: Path) -> None:
    config = load(example, environ={})
    if not any(not env.command for env in config.environment.values()):
        with pytest.raises(RolloutMQError):
            evaluate._alone(config, 5)
        return
    alone = evaluate._alone(config, 5)
    assert alone.evaluated
    assert {env.split for env in alone.environment.values()} == {"eval"}
    assert alone.curriculum == {}
    assert not alone.teacher.path
    assert not alone.gateway.enabled
    assert alone.trainer.steps == 5


def test_it_starts_workers_although_the_run_had_none(tmp_path: Path) -> None:
    config = validate(
        {"environment": {"e": {"entry": "a:B", "min_workers": 0}}, "orchestrator": {"enabled": False}}
    )
    alone = evaluate._alone(config, 5)
    assert alone.environment["e"].min_workers == 1
    assert "orchestrator" in [process.name for process in plan(alone, RunLayout(tmp_path), "python")]


class Numbered:
    """A class of one's own, with neither `rollout_task` nor `rollout_at`: a curriculum needs no more."""

    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> list[Trajectory]:
        return [Trajectory.of(one, 0.0) for one in await policy.complete(str(rng.random()), n=size)]


@pytest.mark.parametrize("sections", [{"curriculum": {"e": {}}}, {}])
def test_a_class_without_submitted_tasks_is_evaluated_whatever_its_training_asks(
    sections: dict[str, Any],
) -> None:
    section = {"entry": "a:B", "task_count": 32} | ({} if sections else {"tasks": "submitted"})
    alone = evaluate._alone(validate({"environment": {"e": section}, **sections}), 5)
    check_abilities("e", alone.environment["e"], Numbered(), numbered="e" in alone.curriculum)


def test_the_checkpoint_is_found_and_proven_without_torch(tmp_path: Path) -> None:
    """Its import takes seconds, before any process of the evaluation starts."""
    for step, good in ((5, True), (7, False)):
        checkpoint = RunLayout(tmp_path / "run").checkpoints / f"step-{step:06d}"
        checkpoint.mkdir(parents=True)
        (checkpoint / "model.safetensors").write_bytes(b"weights")
        _seal(checkpoint, TrainerState(version=PolicyVersion(0, step)))
        if not good:
            (checkpoint / "model.safetensors").write_bytes(b"damaged")
    code = (
        "import sys\nfrom pathlib import Path\n"
        "from rolloutmq.launch.commands import evaluate\nfrom rolloutmq.schemas.files import RunLayout\n"
        "root = Path(sys.argv[1])\n"
        "found = evaluate._found(root / 'run')\n"
        "print(found.name, evaluate._copied(found, RunLayout(root / 'alone')), 'torch' in sys.modules)\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    told = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    assert told.stdout.split() == ["step-000005", "5", "False"]
    with pytest.raises(ConfigError, match="is damaged"):
        evaluate._copied(
            RunLayout(tmp_path / "run").checkpoints / "step-000007", RunLayout(tmp_path / "other")
        )


def test_a_checkpoint_inside_of_the_new_run_is_refused_and_stays(tmp_path: Path) -> None:
    step = tmp_path / "run" / "checkpoints" / "step-000005"
    step.mkdir(parents=True)
    (step / "state.json").write_text("{}")
    config = validate({"environment": {"e": {"entry": "a:B"}}, "run": {"dir": str(tmp_path / "run")}})
    with pytest.raises(ConfigError, match="--run-dir: holds the checkpoint, and would be moved aside"):
        evaluate.evaluate(config, step)
    assert (step / "state.json").exists()
