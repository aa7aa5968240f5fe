"""What the methods and attributes of an environment's class must return and be.

Each error names `Class.method`, what it must be, and what came instead. Nobody's code has raised, so the error has the
code of the method: its place stands for the frames.
"""

from collections.abc import Iterable, Mapping
from inspect import isawaitable, iscoroutine
from math import inf, isfinite
from numbers import Integral, Real
from typing import Any, Final

from rolloutmq.schemas.errors import InvalidGroupError, UsageError
from rolloutmq.services.worker.completion import is_stop

TEXTS: Final = (str, bytes, bytearray)
STOP: Final = "non-empty text in UTF-8, a list of such texts, or None"
SHOWN_CHARS: Final = 80
"""Longest value that an error shows."""


class MethodError(UsageError):
    """A method returned what it must not, or an attribute has a value that it must not have.

    Attributes:
        problem: What is wrong.
        users_function: The method; None for an attribute.
    """

    def __init__(self, problem: str, users_function: Any = None) -> None:
        self.problem = problem
        self.users_function = users_function

    def __str__(self) -> str:
        return self.problem


class ScoreError(InvalidGroupError):
    """`score` returned no finite number.

    Attributes:
        users_function: The method.
    """

    def __init__(self, problem: str, users_function: Any) -> None:
        super().__init__("scores", problem)
        self.users_function = users_function


def prompt_of(environment: Any, task: Any) -> str | list[Any]:
    """Return the prompt of a task: text, or a list of token ids or of messages, which is not empty.

    Raises:
        MethodError: `prompt` returned something else.
    """
    returned = environment.prompt(task)
    if isinstance(returned, str):
        return returned
    listed = (
        [] if isinstance(returned, (*TEXTS, Mapping)) or not isinstance(returned, Iterable) else [*returned]
    )
    if listed and (_are_all(listed, (dict, Mapping)) or _are_all(listed, (int, Integral))):
        return listed
    problem = (
        f"{_named(environment, 'prompt')} must return text, token ids or messages (got {_shown(returned)})"
    )
    raise MethodError(problem, environment.prompt)


def task_of(environment: Any, method: str, *given: Any) -> Any:
    """Return the task that a method of the environment returns for its arguments.

    Raises:
        MethodError: The method is `async def`: the prompt would get a coroutine.
    """
    returned = getattr(environment, method)(*given)
    if iscoroutine(returned):
        problem = f"{_named(environment, method)} must return a task (got {_shown(returned)})"
        raise MethodError(problem, getattr(environment, method))
    return returned


def sampling_of(environment: Any) -> dict[str, Any]:
    """Return `max_tokens`, `temperature` and `stop` of a class, as arguments of a policy.

    Raises:
        MethodError: One of them has a value that no policy takes.
    """
    max_tokens: Any = environment.max_tokens
    temperature: Any = environment.temperature
    stop: Any = environment.stop
    problem = ""
    if isinstance(max_tokens, bool) or not isinstance(max_tokens, Integral) or int(max_tokens) < 1:
        problem = _attribute(environment, "max_tokens", "a positive integer", max_tokens)
    elif not isinstance(temperature, Real) or not 0 <= float(temperature) < inf:
        problem = _attribute(environment, "temperature", "a finite number of at least 0", temperature)
    elif not is_stop(stop):
        problem = _attribute(environment, "stop", STOP, stop)
    if problem:
        raise MethodError(problem)
    return {"max_tokens": int(max_tokens), "temperature": float(temperature), "stop": stop}


async def awaited(method: str, returned: Any) -> Any:
    """Await what a call of a method returned, and return its result. TypeError if the method is no `async def`."""
    if not isawaitable(returned):
        raise TypeError(f"`{method}` must be `async def` (it returned {type(returned).__name__})")
    return await returned


def check_score(environment: Any, score: Any) -> None:
    """Check what `score` returned. Raises ScoreError."""
    if not _is_finite(score):
        problem = f"{_named(environment, 'score')} must return a finite number (got {_shown(score)})"
        raise ScoreError(problem, environment.score)


def _named(environment: Any, name: str) -> str:
    return f"`{type(environment).__name__}.{name}`"


def _attribute(environment: Any, name: str, wanted: str, value: Any) -> str:
    return f"{_named(environment, name)} must be {wanted} (got {_shown(value)})"


def _are_all(values: Iterable[Any], kind: Any) -> bool:
    return all(isinstance(one, kind) for one in values)


def _is_finite(score: Any) -> bool:
    """Return whether a score is a finite number. Text that reads as one is none."""
    if isinstance(score, TEXTS):
        return False
    try:
        return isfinite(float(score))
    except (TypeError, ValueError, OverflowError):
        return False


def _shown(value: Any) -> str:
    if iscoroutine(value):
        value.close()  # else Python warns that nobody awaited it
        return "a coroutine: it must not be `async def`"
    return f"{value!r:.{SHOWN_CHARS}}"
