"""One measured figure beside its rival's, taken in turns in one run; medians, so that a busy machine cancels out."""

from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

ROUNDS = 5


@dataclass(frozen=True)
class Row:
    """A line of `results.json`.

    Attributes:
        figure: What is measured, with its unit and the durability it was taken at.
        payload: What was moved.
        ours, rival: Medians of the rounds.
        ratio: Ours over the rival's, as the median of the ratios of the rounds.
        goal: Least ratio promised, None where nothing is.
        met: Whether it was reached, None without a goal.
    """

    figure: str
    payload: str
    ours: float
    rival: float
    rival_name: str
    ratio: float
    goal: float | None
    met: bool | None

    def line(self) -> str:
        verdict = "" if self.met is None else f"  goal {self.goal:g}: {'met' if self.met else 'UNMET'}"
        return (
            f"{self.figure}, {self.payload}: {self.ours:,.0f} against {self.rival:,.0f} "
            f"({self.rival_name}), ratio {self.ratio:.2f}{verdict}"
        )


def compare(
    figure: str,
    payload: str,
    ours: Callable[[], float],
    rival: Callable[[], float],
    rival_name: str,
    goal: float | None = None,
    rounds: int = ROUNDS,
) -> Row:
    """Take both in turns, `rounds` times; more is better for both."""
    pairs = [(ours(), rival()) if turn % 2 else (rival(), ours())[::-1] for turn in range(rounds)]
    ratio = median(own / other for own, other in pairs)
    return Row(
        figure,
        payload,
        round(median(own for own, _ in pairs), 1),
        round(median(other for _, other in pairs), 1),
        rival_name,
        round(ratio, 3),
        goal,
        None if goal is None else ratio >= goal,
    )
