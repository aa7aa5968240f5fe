"""One promised number beside its bound, met or unmet."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Figure:
    """One promised number."""

    scenario: str
    name: str
    value: Any
    bound: str
    met: bool

    def line(self) -> str:
        verdict = "met  " if self.met else "UNMET"
        return f"{verdict}  {self.scenario:<20} {self.name:<34} {self.value!s:>10}  {self.bound}"


def at_least(where: str, name: str, value: float, bound: float) -> Figure:
    return Figure(where, name, round(value, 4), f">= {bound}", value >= bound)


def at_most(where: str, name: str, value: float, bound: float) -> Figure:
    return Figure(where, name, round(value, 4), f"<= {bound}", value <= bound)


def equal(where: str, name: str, value: Any, bound: Any) -> Figure:
    return Figure(where, name, value, f"== {bound}", value == bound)
