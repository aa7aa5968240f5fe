"""`rolloutmq evaluate`: evaluate a checkpoint alone, in a run directory of its own.

The run is an ordinary one that resumes from a copy of the checkpoint and has no step left: its trainer shares the
weights, its workers answer the evaluation and nothing else, and then it ends.
"""

import secrets
import shutil
from pathlib import Path
from typing import Any

from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.bus.files import PRIVATE_DIRECTORY, copy_private
from rolloutmq.launch import local
from rolloutmq.launch.rundir import claimed
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.config.evaluation import evaluated
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.trainer.files.checkpoints import PREFIX, STATE, is_whole, newest_whole, state_of


def evaluate(config: RunConfig, checkpoint: Path, *, plain: bool = False) -> int:
    """Evaluate a checkpoint and return the exit code: 0 if there was an answer. Blocks; for the main thread.

    An earlier run in `run.dir` is moved aside. The checkpoint is only read.

    Args:
        config: Configuration of the run that wrote the checkpoint, with the directory of this run.
        checkpoint: Directory of a checkpoint, or a run directory, of which the newest is meant.
        plain: Print progress lines even on a terminal.

    Raises:
        ConfigError: There is no checkpoint, it is damaged, or the configuration does not fit.
        RunDirInUseError: An active run owns the directory.
    """
    source = _found(checkpoint)
    if source.resolve().is_relative_to(config.run.dir.resolve()):
        raise ConfigError(
            "--run-dir",
            f"holds the checkpoint, and would be moved aside (got {config.run.dir}); name another directory",
        )
    _alone(config, 1)  # refuses what does not fit before anything is moved or copied
    with claimed(config.run.dir, secrets.token_hex(8), resume=False) as layout:
        step = _copied(source, layout)
        if (hub := RunLayout(source.parent.parent).hub).is_file():  # the same commits
            copy_private(hub, layout.hub)
    code = local.up(_alone(config, step), local.UpOptions(resume=True, plain=plain, picture=False))
    answers = sum(done.rollouts for done in recorded(RunLayout(config.run.dir).evaluations))
    return code or int(not answers)


def _found(checkpoint: Path) -> Path:
    if (checkpoint / STATE).is_file():
        return checkpoint
    newest = newest_whole(RunLayout(checkpoint).checkpoints)
    if newest is None:
        raise ConfigError(
            "--checkpoint",
            f"holds no checkpoint (got {checkpoint}); name one, such as checkpoints/step-000050, or a run directory",
        )
    return newest


def _copied(source: Path, layout: RunLayout) -> int:
    """Copy a checkpoint into a run, and return its step once it is proven to be whole."""
    target = layout.checkpoints / f"{PREFIX}000000"
    target.mkdir(mode=PRIVATE_DIRECTORY, parents=True)
    for file in source.iterdir():
        if file.is_file():
            copy_private(file, target / file.name)
    if not is_whole(target):
        shutil.rmtree(target)
        raise ConfigError("--checkpoint", f"is damaged (got {source}); name another one")
    step = state_of(target).version.step
    target.rename(layout.checkpoints / f"{PREFIX}{step:06d}")
    return step


def _alone(config: RunConfig, step: int) -> RunConfig:
    """Return the configuration of a run that takes no step: its environments only answer the evaluation."""
    tree: dict[str, Any] = config.model_dump()
    tree["evaluation"] |= {"enabled": True, "every": 0}
    tree["trainer"] |= {"enabled": True, "steps": step}
    tree["trainer"].pop("distillation")
    tree["orchestrator"] |= {"enabled": True}
    for section in ("curriculum", "teacher", "gateway"):  # nobody needs them
        tree.pop(section)
    named = evaluated(config.evaluation.model_copy(update={"enabled": True}), config.environment)
    tree["environment"] = {
        # Workers of split eval answer the evaluation whatever `tasks` says; the value for the training would ask for
        # a `rollout_task` that no evaluation calls.
        name: {**env, "split": "eval", "tasks": "own", "min_workers": max(1, env["min_workers"])}
        for name, env in tree["environment"].items()
        if name in named
    }
    return validate(tree)
