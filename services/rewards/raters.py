"""Raters: functions that rate an answer.

    def polite(task: Any, answer: Completion) -> float:
        return float("please" in answer.text)

A rater is any function of a task and an answer. It returns a finite number, or a `Rating` with its cost, or None if it
has no opinion; or it is `async def`. Another function runs in a thread, so it may block.
"""

from collections.abc import Awaitable
from contextvars import ContextVar
from typing import Any, Final, NamedTuple, Protocol

EVALUATING: Final = ContextVar("evaluating", default=False)
"""Whether the present rollout answers an evaluation. Its ratings then leave no trace in the window, and nothing acts on
their agreement."""


class Rating(NamedTuple):
    """A rating with what it cost.

    Attributes:
        value: The rating, a finite number; None is no opinion.
        cost: Cost in a unit of the rater, such as dollars or tokens; added up by rater.
    """

    value: float | None
    cost: float = 0.0


class Rater(Protocol):
    """Rates one answer to a task."""

    def __call__(self, task: Any, answer: Any, /) -> float | Rating | Awaitable[float | Rating | None] | None:
        """Return the rating of an answer, a finite number; None is no opinion, so the rating is missing.

        May be `async def`; it may then be cancelled. Otherwise it runs in a thread, and may block. If it raises,
        takes longer than its `timeout_s` or returns anything else, the rating is missing too.

        Args:
            task: The task, as the environment draws it.
            answer: What the environment rates: a `Completion` of a `SingleTurn`, text, or a trajectory.
        """
        ...
