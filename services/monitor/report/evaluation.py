"""The evaluation of a run as figures for `summary.json` and as lines for people. Pure."""

from collections.abc import Iterator, Sequence
from math import ceil, floor
from typing import Any, Final, NamedTuple, Self

import msgspec

from rolloutmq.bus.evaluation.log import in_force, postponed, recorded
from rolloutmq.schemas.files import PostponedPoint, RunLayout
from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone


class LeftOut(NamedTuple):
    """The points in between that were due and never began.

    Attributes:
        postponed: Points that did not begin when they were due, later ones included.
        by_share, by_point: Those that never began: no room in `evaluation.max_share`; the point before was under way.
        every, max_share: As configured when the last of them was due; `max_share` is None without one of `by_share`.
        point_s: Seconds of a point, as last known.
        needed_share: Part of the run's time that all points together would have taken so far.
    """

    postponed: int = 0
    by_share: int = 0
    by_point: int = 0
    every: int = 0
    max_share: float | None = None
    point_s: float = 0.0
    needed_share: float = 0.0

    @classmethod
    def of(cls, points: Sequence[EvaluationDone], lines: Sequence[PostponedPoint]) -> Self:
        """Count the postponed points of a run; of a step that was taken again, the last line counts."""
        if not lines:
            return cls()
        due = {line.step // line.every: line for line in lines if line.every}
        left = [
            line
            for number, line in due.items()
            if not any(one.version.step // line.every == number for one in points)
        ]
        last, by_share = lines[-1], [line for line in left if line.max_share is not None]
        cost_s = last.spent_s + len(left) * last.point_s
        return cls(
            len(due),
            len(by_share),
            len(left) - len(by_share),
            last.every,
            by_share[-1].max_share if by_share else None,
            last.point_s,
            cost_s / last.wall_s if last.wall_s > 0 else 0.0,
        )

    @property
    def total(self) -> int:
        """Points that never began."""
        return self.by_share + self.by_point

    def text(self) -> str:
        """Return how many points were left out, why, and what to set; empty if none was."""
        if not self.total:
            return ""
        reasons = [
            f"{self.by_share} by evaluation.max_share = {self.max_share:g}" if self.by_share else "",
            f"{self.by_point} because the point before was under way" if self.by_point else "",
        ]
        every = f"evaluation.every = {self.every}"
        count = f"{self.total} point{'s' * (self.total > 1)} of {every} left out"
        return f"{count} ({', '.join(filter(None, reasons))}); {self._remedy()}"

    def _remedy(self) -> str:
        fewer = "raise evaluation.every or lower evaluation.tasks"
        if self.max_share is None:
            return f"a point takes {self.point_s:.1f} s: {fewer}"
        above = (
            floor(round(100 * self.max_share, 6)) + 1
        )  # a point did not fit, though the run had more time later
        share = max(ceil(100 * self.needed_share), above) / 100
        if share >= 1:
            return f"all of {self.point_s:.1f} s each do not fit into the time of the run: {fewer}"
        return f"with points of {self.point_s:.1f} s all need about {share:g}: raise max_share, or {fewer}"


class Evaluations(NamedTuple):
    """All points of a run as recorded, and the points left out."""

    points: Sequence[EvaluationDone] = ()
    left_out: LeftOut = LeftOut()

    @property
    def in_force(self) -> list[EvaluationDone]:
        """The points whose scores count, by step: one for each policy that the present one descends from."""
        return in_force(self.points)

    @property
    def seconds(self) -> float:
        """Time of all points, also of those whose scores no longer count."""
        return sum(one.seconds for one in self.points)

    def share(self, wall_s: float | None) -> float | None:
        """Return the part of `wall_s`, the run's time so far, that the points took; without it, as last recorded."""
        if wall_s:
            return min(1.0, self.seconds / wall_s)
        return self.points[-1].share if self.points else None

    @classmethod
    def read(cls, layout: RunLayout) -> Self:
        """Read `evaluations.jsonl`; a missing file counts as empty."""
        points = list(recorded(layout.evaluations))
        return cls(points, LeftOut.of(points, list(postponed(layout.evaluations))))


NO_EVALUATIONS: Final = Evaluations()


def figures(found: Evaluations, wall_s: float | None = None) -> dict[str, Any] | None:
    """Return the figures of all points; None if there are none. `wall_s` is the time of the run so far.

    - points: number of points, also of several at one step.
    - postponed, left_out: points in between that did not begin when they were due, and those of them that never did;
      left_out_why: the same for a person, with what to set, or empty.
    - first, last: step, policies and scores of the first and the last point.
    - environments: scores of each environment at the last point.
    - seconds: time of all points; share: part of the run's time.
    """
    points, left, share = found.in_force, found.left_out, found.share(wall_s)
    if not points:
        return None
    last = points[-1]
    return {
        "points": len(found.points),
        "postponed": left.postponed,
        "left_out": left.total,
        "left_out_why": left.text(),
        "seed": last.seed,
        "first": _point(points[0]),
        "last": _point(last),
        "environments": {env: msgspec.to_builtins(one) for env, one in last.environments.items()},
        "seconds": round(found.seconds, 3),
        "share": None if share is None else round(share, 4),
    }


def _point(point: EvaluationDone) -> dict[str, Any]:
    return {
        "id": point.id,
        "step": point.version.step,
        "oldest": list(msgspec.structs.astuple(point.oldest)),
        "newest": list(msgspec.structs.astuple(point.newest)),
        "one_policy": point.one_policy,
        "seconds": round(point.seconds, 3),
        "sequences": point.sequences,
        **msgspec.to_builtins(point.all),
    }


def lines(found: Evaluations, wall_s: float | None = None) -> Iterator[str]:
    """Yield the lines of the report: the first and the last point, the cost, and the points left out."""
    points = found.in_force
    if not points:
        return
    first, last = points[0], points[-1]
    for point in [last] if last is first else [first, last]:
        yield f"{policies(point)}: {point_text(point)}"
        if len(point.environments) > 1:
            yield from (f"  {env}: {scores_text(one)}" for env, one in point.environments.items())
    count = len(found.points)
    yield f"{count} point{'s' * (count > 1)}, {cost_text(found.seconds, found.share(wall_s))}"
    if text := found.left_out.text():
        yield text


def point_text(point: EvaluationDone) -> str:
    """Return the scores of a point in one line; of several environments without the means, whose scales may differ."""
    if len(point.environments) < 2:
        return scores_text(point.all)
    return scores_text(msgspec.structs.replace(point.all, greedy=None, mean=None))


def policies(point: EvaluationDone) -> str:
    """Return the policy of a point, or those that answered."""
    if point.one_policy or not point.rollouts:
        return f"step {point.version.step}"
    return f"steps {point.oldest.step} to {point.newest.step}"


def scores_text(scores: EnvironmentScores) -> str:
    """Return scores in one line; tasks without every answer are always named."""
    parts = [
        f"greedy {scores.greedy:.3f}" if scores.greedy is not None else "",
        f"mean {scores.mean:.3f}{_error(scores)}" if scores.mean is not None else "",
        f"pass@1 {scores.pass_1:.3f}" if scores.pass_1 is not None else "",
        f"pass@{scores.k} {scores.pass_k:.3f}" if scores.pass_k is not None and scores.k > 1 else "",
        f"{scores.failed} of {scores.tasks} tasks failed" if scores.failed else "",
        f"{scores.missing} of {scores.tasks} tasks missing" if scores.missing else "",
    ]
    return ", ".join(filter(None, parts)) or "no answer"


def _error(scores: EnvironmentScores) -> str:
    return "" if scores.mean_error is None else f" ± {scores.mean_error:.3f}"


def cost_text(seconds: float, share: float | None) -> str:
    """Return the cost of the evaluation: the time of its points, and the part of the run's time."""
    return f"{seconds:.1f} s" + ("" if share is None else f", {share:.1%} of the wall time")
