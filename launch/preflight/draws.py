"""Tasks of an environment, drawn as a run will: rows that a data set lacks, and prompts that the model cannot read."""

import random
from collections.abc import Callable, Iterator
from contextlib import AbstractAsyncContextManager
from functools import partial
from inspect import iscoroutine
from typing import Any, Final, NamedTuple, TypeGuard

from rolloutmq.launch.preflight.scripted import SPECIAL, is_built, texts_of
from rolloutmq.launch.preflight.verdicts import Problem, Verdict
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.environment import GroupPerTask
from rolloutmq.services.worker.user_code.failures import UserFailure, UserFiles, failure_of, one_line
from rolloutmq.services.worker.user_code.methods import MethodError, prompt_of
from rolloutmq.services.worker.verifiers.rows import RowEnvironment

DRAWN: Final = 8
"""Tasks drawn by `task`."""
SHOWN_CHARS: Final = 60
"""Longest part of a prompt that an error shows."""


class Draw(NamedTuple):
    """How to draw one task.

    `key` is the key that says how many tasks there are, and `number` that of the last one; both are empty for a task
    that any environment has.
    """

    method: str
    task: Callable[[], Any]
    key: str = ""
    number: int = 0


def draws_alone(environment: Any) -> TypeGuard["GroupPerTask[Any]"]:
    """Return whether tasks can be drawn here: a class that a worker enters first may get its data there."""
    if isinstance(environment, RowEnvironment):
        return True
    return isinstance(environment, GroupPerTask) and not isinstance(environment, AbstractAsyncContextManager)


def check_rows(config: RunConfig, name: str, environment: Any) -> None:
    """Refuse an evaluation that asks a data set for more rows than the task space of the environment has.

    Raises:
        ConfigError: The numbers do not fit.
    """
    count, tasks, kind = config.environment[name].task_count, config.evaluation.tasks, type(environment)
    if not count or tasks <= count or name not in config.evaluated:
        return
    if isinstance(environment, GroupPerTask):
        held_out = kind.eval_task_at is not GroupPerTask.eval_task_at
        looked_up, own = kind.task_at is not GroupPerTask.task_at, "eval_task_at"
        held_out = held_out or kind.rollout_eval is not GroupPerTask.rollout_eval
    else:
        held_out, own = hasattr(environment, "rollout_eval"), "rollout_eval"
        looked_up = hasattr(environment, "rollout_at")
    if looked_up and not held_out:
        raise ConfigError(
            "evaluation.tasks",
            f"must not exceed environment.{name}.task_count {count}, because {kind.__name__} has no `{own}` and is "
            f"asked for the tasks of its task space (got {tasks}); lower it, or give the class `{own}`",
        )


def draw(config: RunConfig, name: str, environment: "GroupPerTask[Any]", files: UserFiles) -> Verdict:
    """Draw tasks and check their prompts. If only some cannot be drawn, the run may survive it.

    Raises:
        ConfigError: The model lacks a character of a prompt, or a data set the row of a number.
    """
    alphabet = config.model.alphabet if is_built(config) else ""
    failures: list[tuple[str, UserFailure]] = []
    draws = list(_draws(config, name, environment))
    for each in draws:
        what = f"drawing a task by `{each.method}` raised "
        try:
            task = each.task()
            if iscoroutine(task):
                task.close()
                return Verdict(env=name)
            what = f"`{type(environment).__name__}.prompt` raised "
            texts = list(texts_of(_prompt(environment, task)))
        except MethodError as error:
            failures.append(("", failure_of(error, files)))
            continue
        except Exception as error:
            if each.key and isinstance(error, LookupError):
                raise ConfigError(
                    each.key,
                    f"{type(environment).__name__}.{each.method} of environment {name} has no task {each.number}, it "
                    f"raised {one_line(error)} (got {each.number + 1}); lower it to the number of tasks",
                ) from error
            failures.append((what, failure_of(error, files)))
            continue
        for text in texts if alphabet else ():
            _check_characters(text, alphabet, name)
    return _verdict(name, failures, len(draws))


def _prompt(environment: "GroupPerTask[Any]", task: Any) -> Any:
    """Return the prompt of a task; the rows of a package may have one without messages."""
    if isinstance(environment, RowEnvironment):
        return environment.prompt(task)
    return prompt_of(environment, task)


def _verdict(name: str, failures: list[tuple[str, UserFailure]], drawn: int) -> Verdict:
    if not failures:
        return Verdict(env=name, tried=f"{drawn} tasks drawn" if drawn else "")
    what, first = failures[0]
    text = f"{what}{first.headline} in {len(failures)} of {drawn} draws"
    problem = Problem(path=f"environment.{name}.entry", problem=text, report=first.report)
    if len(failures) == drawn:
        return Verdict(env=name, problems=(problem,))
    return Verdict(env=name, failures=(problem,))


def _draws(config: RunConfig, name: str, environment: "GroupPerTask[Any]") -> Iterator[Draw]:
    section, evaluated, kind = config.environment[name], name in config.evaluated, type(environment)

    def is_ours(method: str) -> bool:
        """Return whether the rollout draws and asks as `GroupPerTask` does."""
        return getattr(kind, method) is getattr(GroupPerTask, method)

    def numbered(method: str, key: str, count: int, seed: object) -> Iterator[Draw]:
        for index in sorted({0, count - 1}):
            rng = random.Random(f"{seed}/{name}/task {index}")
            call = partial(getattr(environment, method), index, rng)
            yield Draw(method, call, key if index else "", index)

    if name in config.curriculum and is_ours("rollout_at"):
        key = f"environment.{name}.task_count"
        yield from numbered("task_at", key, section.task_count, config.run.seed)
    elif section.tasks != "submitted" and not (evaluated and section.split == "eval") and is_ours("rollout"):
        for number in range(DRAWN):
            yield Draw("task", partial(environment.task, random.Random(f"trial/{name}/{number}")))
    if evaluated and is_ours("rollout_eval"):
        seed = f"evaluation {config.evaluation.seed}"
        yield from numbered("eval_task_at", "evaluation.tasks", config.evaluation.tasks, seed)


def _check_characters(text: str, alphabet: str, name: str) -> None:
    left = text
    for special in SPECIAL:
        left = left.replace(special, "")
    if missing := [each for each in dict.fromkeys(left) if each not in alphabet]:
        shown = text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…"
        raise ConfigError(
            "model.alphabet",
            f"lacks {', '.join(map(repr, missing))} of the prompt {shown!r} of environment {name} (got {alphabet!r}); "
            "add the characters",
        )
