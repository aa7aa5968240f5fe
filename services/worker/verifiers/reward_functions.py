"""Reward functions of a rubric of `verifiers`: their weights, their values as columns, and their exceptions.

A rubric gives an answer 0 if a reward function raises, or returns something else than a number. Here the rollout fails
instead: a policy must not learn from a judge that was away. `watch` wraps the functions in place, also those that the
package adds later; `failures` collects what goes wrong in the calls of a block.

A function with a weight is a rater: its values are a column of `ratings`, in the order of `raters`, as those of an
ensemble are. One without is a metric, and has a column `metric_NAME` of its own. Rubrics add up or overwrite the values
of functions with one name, so a second function of a name gets a number: `length_2`.

From 0.4 a function may return a map, with a rater for each key. `require_ratings` refuses an empty one, which would
leave the function out of the reward.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from inspect import isawaitable
from typing import Any, Final

import numpy as np

from rolloutmq.schemas.group import RATERS, RATINGS
from rolloutmq.services.worker.user_code.exits import EXITS

METRIC: Final = "metric_"
NAME_CHARS: Final = 48
"""Longest name of a column."""
_STRANGE: Final = re.compile(r"[^a-z0-9_]+")
_WATCHED: Final = "_rolloutmq_watched"
_failures: ContextVar[list[BaseException] | None] = ContextVar("failures", default=None)

Function = Callable[..., Any]


class NoRatingError(ValueError):
    """A reward function returned an empty map."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"the reward function {name} must return a number, or a map with a key for each (got {{}})"
        )


class NotANumberError(TypeError):
    """A reward function returned something else than a number."""

    def __init__(self, name: str, value: Any) -> None:
        super().__init__(f"the reward function {name} must return a number (got {value!r:.80})")


def watch(rubric: Any) -> dict[str, float]:
    """Wrap the functions of a rubric and of those inside it in place; return their weights by name.

    Called again, it wraps the functions added meanwhile; names once given stay.
    """
    found = []
    for one, scope in _rubrics(rubric):
        _watch_additions(one, rubric)
        found += [(one, place, scope, float(weight)) for place, weight in enumerate(one.weights)]
    found.sort(key=lambda item: not _is_watched(item[0].funcs[item[1]]))
    taken: dict[str, dict[int, float]] = {}
    for one, place, scope, weight in found:
        function = one.funcs[place]
        if not _is_watched(function):
            name = _free_name(_name_of(function), scope, weight, taken)
            function = one.funcs[place] = _watched(function, name, of_group=one._is_group_func(function))
        taken.setdefault(function.__name__, {})[scope] = weight
    return {name: next(iter(weights.values())) for name, weights in taken.items()}


def _watch_additions(one: Any, rubric: Any) -> None:
    """Let a rubric watch the functions added since the last time, such as by a rollout, before it scores."""
    for method in ("score_rollout", "score_group"):
        score = getattr(one, method, None)
        if score is not None and not _is_watched(score):
            setattr(one, method, _watched_score(score, rubric))


def _watched_score(score: Function, rubric: Any) -> Function:
    @wraps(score)
    async def call(*args: Any, **kwargs: Any) -> Any:
        watch(rubric)
        return await score(*args, **kwargs)

    return _mark(call)


def _name_of(function: Function) -> str:
    """Return the name of a function; of a partial one that of the whole, of a callable object its class."""
    while isinstance(function, partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _free_name(wanted: str, scope: int, weight: float, taken: Mapping[str, Mapping[int, float]]) -> str:
    """Return a name for a function: functions share one if they score other rows with the same weight."""
    name, number = wanted, 1
    while scope in taken.get(name, {}) or any(weight != other for other in taken.get(name, {}).values()):
        number += 1
        name = f"{wanted}_{number}"
    return name


@contextmanager
def failures() -> Iterator[list[BaseException]]:
    """Collect why watched functions gave no number in the calls of this block, in the order of time."""
    found: list[BaseException] = []
    token = _failures.set(found)
    try:
        yield found
    finally:
        _failures.reset(token)


def reason(failure: BaseException) -> str:
    """Return a collected failure as the reason of a failed rollout."""
    return str(failure) if isinstance(failure, NotANumberError) else f"a reward function raised {failure!r}"


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


def require_ratings(kind: Any) -> None:
    """Let the reward functions of a class of tasks (0.4) raise where they return an empty map. In place, once."""
    hooks = kind.hooks
    if _is_watched(hooks):
        return

    @wraps(hooks)
    def checked(task: Any, attr: str) -> list[Function]:
        found = hooks(task, attr)
        return [_rated(function) for function in found] if attr == "reward" else list(found)

    kind.hooks = _mark(checked)


def _rated(function: Function) -> Function:
    def required(value: Any) -> Any:
        if isinstance(value, Mapping) and not value:
            raise NoRatingError(_name_of(function))
        return value

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        returned = function(*args, **kwargs)
        return _then(returned, required) if isawaitable(returned) else required(returned)

    return call


async def _then(returned: Any, checked: Function) -> Any:
    return checked(await returned)


def _rubrics(rubric: Any) -> Iterator[tuple[Any, int]]:
    """Yield the rubric and those inside it, each once: of a group of rubrics, and of a group of environments.

    Rubrics of one scope, the second value, score the same answers.
    """
    seen: set[int] = set()
    todo = [(rubric, 0)]
    while todo:
        one, scope = todo.pop(0)
        if id(one) in seen:
            continue
        seen.add(id(one))
        yield one, scope
        todo += [(inner, scope) for inner in getattr(one, "rubrics", ())]
        todo += [
            (environment.rubric, id(environment)) for environment in getattr(one, "env_map", {}).values()
        ]


def _watched(function: Function, name: str, *, of_group: bool) -> Function:
    def checked(value: Any) -> Any:
        if not of_group:
            try:
                float(value)
            except Exception:  # noqa: BLE001 - theirs makes any of them a zero
                _note(NotANumberError(name, value))
        return value

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            returned = function(*args, **kwargs)
        except (Exception, *EXITS) as error:
            _note(error)
            raise
        return _awaited(returned, checked) if isawaitable(returned) else checked(returned)

    call.__name__ = name
    return _mark(call)


async def _awaited(returned: Any, checked: Function) -> Any:
    try:
        value = await returned
    except (Exception, *EXITS) as error:
        _note(error)
        raise
    return checked(value)


def _mark(function: Function) -> Function:
    setattr(function, _WATCHED, True)
    return function


def _is_watched(function: Function) -> bool:
    return getattr(function, _WATCHED, False)


def _note(error: BaseException) -> None:
    found = _failures.get()
    if found is not None:
        found.append(error)
