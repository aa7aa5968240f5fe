"""One figure beside its rival's, measured in turns in one run; medians, so that load on the machine cancels out."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Final, Literal

ROUNDS: Final = 5

Measure = Callable[[], float]
Bound = Literal["ratio, at least", "ratio, at most", "ours, at least", "ours, at most", "ours, below"]


@dataclass(frozen=True)
class Row:
    """A line of `results.json`.

    Attributes:
        figure: Quantity, with its unit and durability.
        payload: Data moved.
        ours, rival: Medians of the rounds.
        ratio: Ours over the rival's, the median over the rounds.
        goal: Promised value, or None.
        met: Whether the goal is met, None without one.
        bound: Meaning of the goal: minimum or maximum of the ratio or of ours; `below` excludes the goal itself.
        spread: Half of the ratio's 95 % interval, None if it is not known.
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
    spread: float | None = None

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of the row: a later measurement of it replaces the earlier one."""
        return self.figure, self.payload, self.rival_name

    def line(self) -> str:
        verdict = "met" if self.met else "UNMET"
        promised = "" if self.met is None else f"  goal ({self.bound}) {self.goal:g}: {verdict}"
        return (
            f"{self.figure}, {self.payload}: {_short(self.ours)} against {_short(self.rival)} "
            f"({self.rival_name}), ratio {shown_ratio(self.ratio, self.spread)}{promised}"
        )


def shown_ratio(ratio: float, spread: float | None) -> str:
    """Return a ratio as text, with its spread if it is known."""
    return f"{ratio:.2f}" if spread is None else f"{ratio:.4f} ± {spread:.4f}"


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
    """Measure both in turns, `rounds` times; higher is better, and the goal is the minimum ratio."""
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
"""Lower is better, and the goal is the maximum ratio."""
within = partial(compare, bound="ours, at most")
"""Lower is better, and the goal is the maximum of ours."""


def _in_turns(ours: Measure, rival: Measure, rounds: int) -> tuple[float, float, float]:
    """Return the medians of ours, of the rival's and of their ratios."""
    pairs = [(ours(), rival()) if turn % 2 else (rival(), ours())[::-1] for turn in range(rounds)]
    own, other = (median(values) for values in zip(*pairs, strict=True))
    return own, other, median(own / other for own, other in pairs)


def _rounded(value: float) -> float:
    """Round to one decimal for rates, to four digits for small values such as seconds."""
    return round(value, 1) if value >= 100 else float(f"{value:.4g}")


def _short(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
