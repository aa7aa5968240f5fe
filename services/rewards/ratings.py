"""Ratings of the answers of one group, the scores combined from them, and the columns in which they travel.

    ratings     `[n][raters]`, float64 as the raters gave them; NaN for a missing one
    raters      for each sequence the weights in force by name, in the order of `ratings`
    overrides   `set_advantage_to_zero` with the reason, for sequences that must not be trained on

The columns are the journal's record of who rated what: `rolloutmq ratings` recomputes the agreement from them.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.group import RATERS, RATINGS
from rolloutmq.services.rewards.agreement import Alpha

OVERRIDES: Final = "overrides"
NOT_TRAINED: Final = "set_advantage_to_zero"
"""Key of the override that trainers know, and of the reason beside it."""
REASON: Final = "reason"


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ratings:
    """Ratings of `n` answers to one task.

    Attributes:
        names: Names of the raters.
        ratings: `[n][raters]` as given; NaN where missing.
        scores: `[n]`, finite. An answer with too few ratings has the mean score of the others, and a reason.
        weights: `[raters]` in force.
        reasons: `[n]`, why an answer must not be trained on; empty if it may be.
        alpha: Agreement of the window with these answers.
        may_withhold: The ensemble may withhold answers, so `apply` always gives the column `overrides`.
    """

    names: tuple[str, ...]
    ratings: NDArray[np.float64]
    scores: tuple[float, ...]
    weights: tuple[float, ...]
    reasons: tuple[str, ...]
    alpha: Alpha
    may_withhold: bool = False

    def apply(self, trajectories: Sequence[T]) -> list[T]:
        """Return trajectories `[n]` with their scores, and with the columns `ratings`, `raters` and `overrides`.

        Columns of the trajectories are kept, and overrides are added to theirs.

        Raises:
            ValueError: Another number of trajectories.
        """
        if len(trajectories) != len(self.scores):
            raise ValueError(
                f"trajectories must be one for each answer (got {len(trajectories)}, {len(self.scores)})"
            )
        return [self._applied(row, one) for row, one in enumerate(trajectories)]

    def _applied(self, row: int, trajectory: Any) -> Any:
        columns = {
            **(trajectory.columns or {}),
            RATINGS: self.ratings[row],
            RATERS: dict(zip(self.names, self.weights, strict=True)),
        }
        if self.may_withhold or self.reasons[row]:
            columns[OVERRIDES] = {**columns.get(OVERRIDES, {}), **self._overrides(row)}
        return replace(trajectory, score=self.scores[row], columns=columns)

    def _overrides(self, row: int) -> dict[str, Any]:
        reason = self.reasons[row]
        return {NOT_TRAINED: True, REASON: reason} if reason else {}
