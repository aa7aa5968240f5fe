"""Reward functions of a rubric of `verifiers`: their weights, their values as columns, and their exceptions.

A rubric gives an answer 0 if a reward function raises. Here the rollout fails instead: a policy must not learn from a
judge that was away. `watch` wraps the functions in place; `failures` collects what they raise in the calls of a block.

A function with a weight is a rater: its values are a column of `ratings`, in the order of `raters`, as those of an
ensemble are. One without is a metric, and has a column `metric_NAME` of its own.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import wraps
from inspect import isawaitable
from typing import Any, Final

import numpy as np

from rolloutmq.schemas.group import RATERS, RATINGS

METRIC: Final = "metric_"
NAME_CHARS: Final = 48
"""Longest name of a column."""
_STRANGE: Final = re.compile(r"[^a-z0-9_]+")
_failures: ContextVar[list[Exception] | None] = ContextVar("failures", default=None)

Function = Callable[..., Any]


def watch(rubric: Any) -> dict[str, float]:
    """Wrap the functions of a rubric and of those inside it in place; return their weights by name."""
    weights: dict[str, float] = {}
    for one in _rubrics(rubric):
        for function, weight in zip(one.funcs, one.weights, strict=True):
            weights.setdefault(function.__name__, float(weight))
        one.funcs[:] = [_watched(function) for function in one.funcs]
    return weights


@contextmanager
def failures() -> Iterator[list[Exception]]:
    """Collect what watched functions raise in the calls of this block, in the order of time."""
    found: list[Exception] = []
    token = _failures.set(found)
    try:
        yield found
    finally:
        _failures.reset(token)


def columns_of(metrics: Mapping[str, Any], weights: Mapping[str, float]) -> dict[str, Any]:
    """Return the columns of one sequence.

    Args:
        metrics: Values of the functions by name.
        weights: Weights of the functions by name; one without a weight is a metric.
    """
    raters = {name: weights[name] for name in metrics if weights.get(name)}
    others = [name for name in metrics if name not in raters]
    columns: dict[str, Any] = {
        column: float(metrics[name]) for name, column in zip(others, _names(others), strict=True)
    }
    if raters:
        columns[RATINGS] = np.array([float(metrics[name]) for name in raters])
        columns[RATERS] = raters
    return columns


def _names(metrics: Sequence[str]) -> list[str]:
    """Return a column for each metric; names that become the same have a number."""
    names: list[str] = []
    for metric in metrics:
        name = wanted = (METRIC + _STRANGE.sub("_", metric.lower()))[:NAME_CHARS]
        number = 1
        while name in names:
            number += 1
            name = f"{wanted[: NAME_CHARS - len(str(number)) - 1]}_{number}"
        names.append(name)
    return names


def _rubrics(rubric: Any) -> Iterator[Any]:
    """Yield the rubric and those inside it, each once: of a group of rubrics, and of a group of environments."""
    seen: set[int] = set()
    todo = [rubric]
    while todo:
        one = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one
        todo += getattr(one, "rubrics", ())
        todo += [environment.rubric for environment in getattr(one, "env_map", {}).values()]


def _watched(function: Function) -> Function:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(*args, **kwargs)
        except Exception as error:
            _note(error)
            raise
        return _awaited(returned) if isawaitable(returned) else returned

    return call


async def _awaited(returned: Any) -> Any:
    try:
        return await returned
    except Exception as error:
        _note(error)
        raise


def _note(error: Exception) -> None:
    found = _failures.get()
    if found is not None:
        found.append(error)
