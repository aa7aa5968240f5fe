"""Steps and figures of learning from the events of a run: each step once, as its last life took it.

A resumed trainer takes steps again, in a new incarnation. Its first step voids the earlier ones from there on, as the
broker's log of settled batches does. A step whose lease was lost is logged again by whoever takes it: the last value
counts.

The memory is bounded: the last steps are kept as they are, `STEPS_KEPT` of them and `POINTS_KEPT` values of figures.
What is older is folded into sums of ever more steps and into thinned courses. A trainer that goes back further voids it
as well: exact while a sum is of one step, else to within the steps of one sum.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import islice
from math import isfinite
from typing import Final, NamedTuple

from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.monitor.report.figure_course import FigureCourse, FigurePoint

STEPS_KEPT: Final = 16_384
SUMS_KEPT: Final = 16_384
"""Most sums of tokens of folded steps."""
POINTS_KEPT: Final = 32_768
NAMES_LIMIT: Final = 64
"""Most figures; further names are left out."""


class _Step(NamedTuple):
    """Tokens of one step, and whether its trainer told them, not only the broker."""

    tokens: int
    is_told: bool


@dataclass(slots=True)
class _Figures:
    """Figures of one step, as one incarnation told them."""

    incarnation: int
    points: dict[str, FigurePoint] = field(default_factory=dict)

    @property
    def cost(self) -> int:
        """Places that it takes: a step without a value takes one, too."""
        return 1 + len(self.points)


class FoldedTokens:
    """Tokens of early steps: sums of as many consecutive steps, which double whenever there are too many sums.

    Args:
        limit: Most sums.
    """

    def __init__(self, limit: int = SUMS_KEPT) -> None:
        self._limit = limit
        self._width = 1
        self._sums: dict[int, int] = {}
        self._highest = 0

    def add(self, step: int, tokens: int) -> None:
        """Take the tokens of a step."""
        self._highest = max(self._highest, step)
        self._sums[step // self._width] = self._sums.get(step // self._width, 0) + tokens
        while len(self._sums) > self._limit:
            self._width *= 2
            joined: dict[int, int] = {}
            for number, value in self._sums.items():
                joined[number // 2] = joined.get(number // 2, 0) + value
            self._sums = joined

    def void(self, step: int) -> None:
        """Forget the tokens from a step on; those of a sum that begins before it by the part of its steps."""
        if step > self._highest:
            return
        cut, begin = step // self._width, step // self._width * self._width
        part = self._sums.get(cut, 0)
        self._sums = {number: value for number, value in self._sums.items() if number < cut}
        if step > begin:
            steps = min(self._highest + 1, begin + self._width) - max(begin, 1)
            self._sums[cut] = part * (step - max(begin, 1)) // steps
        self._highest = step - 1

    def total(self) -> int:
        """Return the tokens of all steps."""
        return sum(self._sums.values())


class StepRecord:
    """Steps by policy version: each once, as its trainer reported it, or else as the broker did.

    Args:
        steps_kept: Most steps that are kept as they are.
        points_kept: Most values of figures that are.
    """

    def __init__(self, steps_kept: int = STEPS_KEPT, points_kept: int = POINTS_KEPT) -> None:
        self._steps_kept = steps_kept
        self._points_kept = points_kept
        self._steps: dict[PolicyVersion, _Step] = {}
        self._older_tokens = FoldedTokens()
        self._figures: dict[int, _Figures] = {}
        self._points = 0
        self._courses: dict[str, FigureCourse] = {}
        self._fork = PolicyVersion()
        """First step of the newest incarnation."""

    def settled(self, version: PolicyVersion, tokens: int) -> None:
        """Take a step that the broker reported."""
        if self._counts(version) and version not in self._steps:
            self._keep(version, _Step(tokens, is_told=False))

    def told(
        self, version: PolicyVersion, t: float, tokens: int, figures: Mapping[str, float | None]
    ) -> None:
        """Take a step that its trainer reported; a repeated report changes nothing."""
        known = self._steps.get(version)
        if self._counts(version) and not (known is not None and known.is_told):
            self._keep(version, _Step(tokens, is_told=True))
            self.logged(version, t, figures)

    def logged(self, version: PolicyVersion, t: float, figures: Mapping[str, float | None]) -> None:
        """Take figures of a step. Those of a later life replace all of an earlier one."""
        known = self._figures.get(version.step)
        if self._is_void(version) or (known is not None and known.incarnation > version.incarnation):
            return
        if known is None or known.incarnation < version.incarnation:
            self._points += 1 - (known.cost if known is not None else 0)
            known = self._figures[version.step] = _Figures(version.incarnation)
        before = len(known.points)
        for name, value in figures.items():
            if value is not None and isfinite(value) and self._is_known(name):  # JSON has no NaN
                known.points[name] = FigurePoint(t, version.step, value)
        self._points += len(known.points) - before
        if self._points > self._points_kept:
            self._fold_figures()

    def _is_known(self, name: str) -> bool:
        if name not in self._courses and len(self._courses) < NAMES_LIMIT:
            self._courses[name] = FigureCourse()
        return name in self._courses

    def _keep(self, version: PolicyVersion, step: _Step) -> None:
        self._steps[version] = step
        if len(self._steps) > self._steps_kept:
            for oldest in list(islice(self._steps, 1 + self._steps_kept // 4)):
                self._older_tokens.add(oldest.step, self._steps.pop(oldest).tokens)

    def _fold_figures(self) -> None:
        """Fold the figures of the lowest steps, until there is room for a quarter."""
        for step in sorted(self._figures):
            if self._points <= self._points_kept - self._points_kept // 4:
                break
            folded = self._figures.pop(step)
            self._points -= folded.cost
            for name, point in folded.points.items():
                self._courses[name].fold(point)

    def _is_void(self, version: PolicyVersion) -> bool:
        return version.incarnation < self._fork.incarnation and version.step >= self._fork.step

    def _counts(self, version: PolicyVersion) -> bool:
        """Return whether a step counts. The first of an incarnation voids the steps of earlier ones from there on."""
        if version.incarnation > self._fork.incarnation:
            self._fork = version
            self._older_tokens.void(version.step)
            for course in self._courses.values():
                course.void(version.step)
            for void in [one for one in self._steps if self._is_void(one)]:
                del self._steps[void]
            for step, known in list(self._figures.items()):
                if self._is_void(PolicyVersion(known.incarnation, step)):
                    self._points -= known.cost
                    del self._figures[step]
        return not self._is_void(version)

    @property
    def steps(self) -> list[int]:
        """Numbers of the last steps, in the order of their arrival."""
        return [version.step for version in self._steps]

    @property
    def tokens(self) -> int:
        """Tokens of all steps."""
        return self._older_tokens.total() + sum(step.tokens for step in self._steps.values())

    def figures(self) -> dict[str, FigureCourse]:
        """Return the course of each figure that has a value; the names in the order of their arrival."""
        recent: dict[str, list[FigurePoint]] = {}
        for step in sorted(self._figures):
            for name, point in self._figures[step].points.items():
                recent.setdefault(name, []).append(point)
        for name, course in self._courses.items():
            course.recent = recent.get(name, ())
        return {name: course for name, course in self._courses.items() if course.ends() is not None}
