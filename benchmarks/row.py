"""One measured figure beside its rival's, taken in turns in one run; medians, so that a busy machine cancels out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, Literal

ROUNDS: Final = 5

Measure = Callable[[], float]
Bound = Literal["ratio, at least", "ratio, at most", "ours, at most"]


@dataclass(frozen=True)
class Row:
    """A line of `results.json`.

    Attributes:
        figure: What is measured, with its unit and the durability it was taken at.
        payload: What was moved.
        ours, rival: Medians of the rounds.
        ratio: Ours over the rival's, as the median of the ratios of the rounds.
        goal: What is promised, None where nothing is.
        met: Whether it was kept, None without a goal.
        bound: What the goal bounds: the least or the most that the ratio, or the most that ours may be.
    """

    figure: str
    payload: str
    ours: float
    rival: float
    rival_name: str
    ratio: float
    goal: float | None
    met: bool | None
    bound: Bound = "ratio, at least"

    @property
    def key(self) -> tuple[str, str, str]:
        """What makes it this row: a later measurement of the same takes its place."""
        return self.figure, self.payload, self.rival_name

    def line(self) -> str:
        verdict = "met" if self.met else "UNMET"
        promised = "" if self.met is None else f"  goal ({self.bound}) {self.goal:g}: {verdict}"
        return (
            f"{self.figure}, {self.payload}: {_short(self.ours)} against {_short(self.rival)} "
            f"({self.rival_name}), ratio {self.ratio:.2f}{promised}"
        )


def compare(
    figure: str,
    payload: str,
    ours: Measure,
    rival: Measure,
    rival_name: str,
    goal: float | None = None,
    rounds: int = ROUNDS,
    bound: Bound = "ratio, at least",
) -> Row:
    """Take both in turns, `rounds` times; more is better for both, and the goal is the least ratio."""
    own, other, ratio = _in_turns(ours, rival, rounds)
    return Row(
        figure,
        payload,
        _rounded(own),
        _rounded(other),
        rival_name,
        round(ratio, 3),
        goal,
        _met(own, ratio, goal, bound),
        bound,
    )


def _met(own: float, ratio: float, goal: float | None, bound: Bound) -> bool | None:
    if goal is None:
        return None
    if bound == "ratio, at least":
        return ratio >= goal
    return (ratio if bound == "ratio, at most" else own) <= goal


near = partial(compare, bound="ratio, at most")
"""Less is better for both, and the goal is the greatest ratio."""
within = partial(compare, bound="ours, at most")
"""Less is better for both, and the goal is the most that ours may be."""


def _in_turns(ours: Measure, rival: Measure, rounds: int) -> tuple[float, float, float]:
    """Return the medians of ours, of the rival's and of their ratios."""
    pairs = [(ours(), rival()) if turn % 2 else (rival(), ours())[::-1] for turn in range(rounds)]
    own, other = (median(values) for values in zip(*pairs, strict=True))
    return own, other, median(own / other for own, other in pairs)


def _rounded(value: float) -> float:
    """One decimal is enough for rates; seconds and the like keep four digits."""
    return round(value, 1) if value >= 100 else float(f"{value:.4g}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
