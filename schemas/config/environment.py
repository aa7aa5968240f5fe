"""`[environment.NAME]`: one environment and its workers."""

from typing import Any, Literal, Self

from pydantic import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from rolloutmq.schemas.config.base import Fraction, Section


class EnvironmentConfig(Section):
    """`[environment.NAME]`: one environment and its workers."""

    entry: str
    """Class of the environment: `package.module:Class`, or `file.py:Class` relative to the configuration file."""
    options: dict[str, Any] = {}
    """Keyword arguments of the class."""
    group_size: PositiveInt = 8
    """Sequences sampled for one task."""
    weight: NonNegativeFloat = 1.0
    """Share of the batches, relative to the other environments of the split."""
    min_share: Fraction = 0.0
    """Part of every batch reserved for this environment, 0 to 1."""
    high_bytes: NonNegativeInt = 0
    """High-water mark of this environment: its queued, leased and granted bytes stay below it. Only its own workers
    wait for that. 0: no mark."""
    split: Literal["train", "eval"] = "train"
    """Split of its groups. A batch has groups of one split only."""
    min_workers: NonNegativeInt = 1
    """Fewest worker processes."""
    max_workers: PositiveInt = 4
    """Most worker processes."""
    gpus: NonNegativeInt = 0
    """GPUs for each worker process; it sees no others. 0: the run assigns no GPU and hides none."""
    vram_bytes: NonNegativeInt = 0
    """Memory that one worker process uses on each of its GPUs. The orchestrator starts a worker only where this much is
    free. 0: a worker has its GPUs for itself."""
    concurrency: PositiveInt = 8
    """Most concurrent rollouts of one worker. Credit may allow fewer."""
    max_staleness: NonNegativeInt = 4
    """Most optimizer steps between the sampling and the training policy of a group."""
    pacing: bool = True
    """Enforce `max_staleness` ahead: a worker may not start a rollout that would be too stale when it is trained on."""
    stale: Literal["drop", "pass"] = "drop"
    """For a group beyond the bound nevertheless: `drop` counts it as expired, `pass` trains on it and counts it."""
    rollout_timeout_s: PositiveFloat = 600.0
    """A worker abandons a longer rollout."""
    min_group_size: NonNegativeInt = 0
    """Fewest sequences of a group that is sent at `group_deadline_s`. 0: all of them."""
    group_deadline_s: NonNegativeFloat = 0.0
    """With `min_group_size` sequences at this time a group is sent without the rest, and these count as late members.
    0: wait for all. The environment needs a method `member`, as every `SingleTurn` has."""
    tasks: Literal["own", "submitted", "both"] = "own"
    """Source of tasks. `own`: the environment draws them; `submitted`: a trainer submits them; `both`: submitted ones
    first, own ones while there are none. Submitted tasks need a method `rollout_task`, as every `SingleTurn` has."""
    failure_limit: PositiveInt = 20
    """Failed rollouts in a row after which a worker gives up. The run fails when all workers of an environment have."""

    @model_validator(mode="after")
    def _bounds(self) -> Self:
        if self.min_workers > self.max_workers:
            raise ValueError(
                f"min_workers must not exceed max_workers {self.max_workers} (got {self.min_workers})"
            )
        if self.min_group_size > self.group_size:
            raise ValueError(
                f"min_group_size must not exceed group_size {self.group_size} (got {self.min_group_size})"
            )
        if self.vram_bytes and not self.gpus:
            raise ValueError("vram_bytes is memory of a GPU; set gpus to the number of GPUs for each worker")
        if self.entry.count(":") != 1:
            raise ValueError(f"entry must be `package.module:Class` or `file.py:Class` (got {self.entry!r})")
        return self
