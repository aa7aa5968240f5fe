"""`[evaluation]`: points at which the policy answers a fixed set of tasks, beside the training."""

from collections.abc import Mapping
from typing import Annotated, Final, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from rolloutmq.schemas.config.base import Fraction, NameText, Section
from rolloutmq.schemas.config.environment import EnvironmentConfig

DEADLINE_MAX_S: Final = 1e9
"""Longest deadline that the broker accepts for a task, in seconds."""
NAME_CHARS: Final = 48
"""Longest name of an evaluated environment: the names of the workers' evaluating producers are longer."""


class EvaluationConfig(Section):
    """`[evaluation]`: points at which the policy answers a fixed set of tasks, beside the training."""

    enabled: bool = False
    """Evaluate the policy: before the first step, after the last, and in between as `every` says. With a trainer of
    your own the workers answer, and the trainer asks with `rolloutmq.evaluate`."""
    every: NonNegativeInt = 0
    """Optimizer steps between two points. Training goes on meanwhile, so such a point names the oldest and the newest
    policy of its answers. 0: only at both ends."""
    tasks: Annotated[int, Field(ge=1, le=100_000)] = 64
    """Tasks of each environment. They are drawn by generators seeded with `seed`, the environment and the number of the
    task: the same tasks in every run, at every point and in every worker."""
    samples: Annotated[int, Field(ge=0, le=1 << 16)] = 8
    """Sampled answers to each task, for pass@1, pass@k with this k, mean and standard error. 0: none."""
    greedy: bool = True
    """Also answer each task once with temperature 0."""
    seed: NonNegativeInt = 0
    """Seed of the tasks, apart from the seed of the run: runs of different seeds compare on the same tasks."""
    environments: tuple[NameText, ...] = ()
    """Environments to evaluate. Empty: all with a class."""
    pass_score: Annotated[float, Field(allow_inf_nan=False)] = 1.0
    """Least score of an answer that passes, where `environment.NAME.pass_score` gives no other."""
    concurrency: PositiveInt = 4
    """Tasks that one worker evaluates at once, beside its rollouts for the training."""
    max_share: Fraction = 0.1
    """Largest part of the run's time for all points together. A point in between is postponed if it would exceed it;
    `status`, `top` and `report` say how many were. The points at both ends always run. 1: no limit; a point still waits
    for the one before it."""
    deadline_s: Annotated[float, Field(gt=0, le=DEADLINE_MAX_S)] = 600.0
    """Longest time of one point. Tasks without an answer by then are reported as missing, and the run continues."""

    @model_validator(mode="after")
    def _asks_something(self) -> Self:
        if self.enabled and not (self.greedy or self.samples):
            raise ValueError(
                "samples must be at least 1 with greedy = false: no answer would be asked for (got 0)"
            )
        return self

    @model_validator(mode="after")
    def _has_time_in_between(self) -> Self:
        if self.enabled and self.every and not self.max_share:
            raise ValueError(
                "max_share must be above 0 with every: each point in between would be postponed (got 0)"
            )
        return self

    @model_validator(mode="after")
    def _names_once(self) -> Self:
        if len(set(self.environments)) < len(self.environments):
            raise ValueError(
                f"environments must name each environment once (got {', '.join(self.environments)})"
            )
        return self


Environments = Mapping[str, EnvironmentConfig]


def evaluated(asked: EvaluationConfig, environments: Environments) -> tuple[str, ...]:
    """Return the names of the environments that answer tasks of the evaluation; none if it is off."""
    if not asked.enabled:
        return ()
    return asked.environments or tuple(name for name, env in environments.items() if not env.command)


def problem_of_evaluation(
    asked: EvaluationConfig, environments: Environments, *, trains: bool, starts: bool
) -> str:
    """Return why a run could not evaluate as configured, or would have an environment that nobody asks; or nothing.

    Args:
        asked: The section.
        environments: Those of the run.
        trains: The run starts its own trainer.
        starts: The run starts the workers of its environments.
    """
    if asked.enabled and asked.every and not trains:
        return (
            "evaluation.every: must be 0 with trainer.enabled = false, because only the run's trainer counts steps "
            f"(got {asked.every}); call rolloutmq.evaluate in your own trainer"
        )
    for name in asked.environments:
        if name not in environments:
            known = ", ".join(environments) or "none"
            return f"evaluation.environments: there is no environment {name} (configured: {known}); name one of them"
        if environments[name].command:
            return f"evaluation.environments: {name} is a program, which answers no tasks; remove it"
    return _problem_of_environments(asked, environments, alone=trains and starts) or _problem_of_workers(
        asked, environments, starts=starts
    )


def _problem_of_workers(asked: EvaluationConfig, environments: Environments, *, starts: bool) -> str:
    """Return which environment could be without a worker while its evaluation is waited for."""
    for name in evaluated(asked, environments) if starts else ():
        if not environments[name].min_workers:
            return (
                f"environment.{name}.min_workers: must be at least 1 with evaluation (got 0), because tasks of the "
                "evaluation start no worker; raise it, or name the others in evaluation.environments"
            )
    return ""


def _problem_of_environments(asked: EvaluationConfig, environments: Environments, *, alone: bool) -> str:
    answering = evaluated(asked, environments)
    if asked.enabled and not answering:
        return "evaluation.enabled: must be false without an environment that has a class (got true); add one"
    for name, env in environments.items():
        if name in answering and len(name) > NAME_CHARS:
            return (
                f"environment.{name}: the name must have at most {NAME_CHARS} characters with evaluation "
                f"(got {len(name)}); shorten it"
            )
        if env.split == "eval" and alone and name not in answering:
            remedy = (
                f"add {name} to evaluation.environments" if asked.enabled else "set evaluation.enabled = true"
            )
            return (
                f"environment.{name}.split: nobody asks an environment of split eval (got eval); {remedy}, or set "
                "trainer.enabled = false and pull split eval in your own trainer"
            )
    return ""
