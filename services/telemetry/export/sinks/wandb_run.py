"""Weights & Biases: one run for each run of ours, resumed by its id after a restart."""

import math
import secrets

import wandb

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.telemetry.export.sinks.identity import TrackerFiles, project_of
from rolloutmq.services.telemetry.export.sinks.points import Point

STEP = "policy_step"
"""Figure that all others are drawn over."""


class WandbRun:
    """A run of W&B.

    Its own statistics of the machine are off: telemetry samples all hosts. So are the logs, the code and git.
    """

    def __init__(self, config: RunConfig, layout: RunLayout) -> None:
        files = TrackerFiles(layout, "wandb")
        files.id = known = files.id or secrets.token_hex(4)
        settings = wandb.Settings(
            console="off",
            silent=True,
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_stats=True,
        )
        self._run = wandb.init(
            project=project_of(config),
            group=config.run.tracking_group or None,
            name=config.run.name,
            id=known,
            resume=None if config.telemetry.wandb_mode == "offline" else "allow",
            dir=str(files.directory),
            mode=config.telemetry.wandb_mode,
            config=config.model_dump(mode="json"),
            settings=settings,
        )
        self._run.define_metric(STEP)
        self._run.define_metric("*", step_metric=STEP)

    def log(self, point: Point) -> None:
        """Queue a point; W&B's own process uploads it."""
        values = {name: math.nan if value is None else value for name, value in point.values.items()}
        self._run.log({STEP: point.step, "at": point.at, **values})

    def finish(self) -> None:
        """Upload the rest."""
        self._run.finish()
