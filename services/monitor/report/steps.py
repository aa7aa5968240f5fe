"""Steps and figures of learning from the events of a run: each step once, as its last life took it.

A resumed trainer takes steps again, in a new incarnation. Its first step voids the earlier ones from there on, as the
broker's log of settled batches does. A step whose lease was lost is logged again by whoever takes it: the last value
counts.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from rolloutmq.schemas.wire.envelope import PolicyVersion

Series = dict[str, list["FigurePoint"]]
"""Values of each figure of learning in the order of steps, by name."""


@dataclass(frozen=True, slots=True)
class StepPoint:
    """One published step."""

    t: float
    step: int
    reward: float
    staleness_max: int
    tokens: int


@dataclass(frozen=True, slots=True)
class FigurePoint:
    """One value of a figure of learning, with its wall-clock time."""

    t: float
    step: int
    value: float


@dataclass(slots=True)
class _Figures:
    """Figures of one step, as one incarnation told them."""

    incarnation: int
    points: dict[str, FigurePoint] = field(default_factory=dict)


@dataclass(slots=True)
class StepRecord:
    """Steps by policy version: each once, as its trainer reported it, or else as the broker did."""

    _told: dict[PolicyVersion, StepPoint] = field(default_factory=dict)
    _settled: dict[PolicyVersion, StepPoint] = field(default_factory=dict)
    _figures: dict[int, _Figures] = field(default_factory=dict)
    _fork: PolicyVersion = PolicyVersion()
    """First step of the newest incarnation."""

    def settled(self, version: PolicyVersion, point: StepPoint) -> None:
        """Take a step that the broker reported."""
        if self._counts(version):
            self._settled.setdefault(version, point)

    def told(self, version: PolicyVersion, point: StepPoint, figures: Mapping[str, float | None]) -> None:
        """Take a step that its trainer reported; a repeated report changes nothing."""
        if self._counts(version) and version not in self._told:
            self._told[version] = point
            self.logged(version, point.t, figures)

    def logged(self, version: PolicyVersion, t: float, figures: Mapping[str, float | None]) -> None:
        """Take figures of a step. Those of a later life replace all of an earlier one."""
        known = self._figures.get(version.step)
        if self._is_void(version) or (known is not None and known.incarnation > version.incarnation):
            return
        if known is None or known.incarnation < version.incarnation:
            known = self._figures[version.step] = _Figures(version.incarnation)
        for name, value in figures.items():
            if value is not None:  # JSON has no NaN
                known.points[name] = FigurePoint(t, version.step, value)

    def _is_void(self, version: PolicyVersion) -> bool:
        return version.incarnation < self._fork.incarnation and version.step >= self._fork.step

    def _counts(self, version: PolicyVersion) -> bool:
        """Return whether a step counts. The first of an incarnation voids the steps of earlier ones from there on."""
        if version.incarnation > self._fork.incarnation:
            self._fork = version
            for points in (self._told, self._settled):
                for void in [one for one in points if self._is_void(one)]:
                    del points[void]
            for step, known in list(self._figures.items()):
                if self._is_void(PolicyVersion(known.incarnation, step)):
                    del self._figures[step]
        return not self._is_void(version)

    def points(self) -> list[StepPoint]:
        """Return the steps in order of arrival."""
        return sorted((self._settled | self._told).values(), key=lambda point: point.t)

    def figures(self) -> Series:
        """Return the values of each figure in the order of steps; the names in order of their arrival."""
        found: Series = {}
        ordered = (point for known in self._figures.values() for point in known.points.items())
        for name, point in sorted(ordered, key=lambda named: named[1].t):
            found.setdefault(name, []).append(point)
        return {name: sorted(points, key=lambda point: point.step) for name, points in found.items()}
