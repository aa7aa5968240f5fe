"""The evaluation of a run as figures for `summary.json` and as lines for people. Pure."""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from rolloutmq.schemas.wire.evaluation import EnvironmentScores, EvaluationDone


def figures(points: Sequence[EvaluationDone]) -> dict[str, Any] | None:
    """Return the figures of all points; None if there are none.

    - points: number of points.
    - first, last: step, policies and scores of the first and the last point.
    - environments: scores of each environment at the last point.
    - seconds: time of all points of the trainer's last process; share: part of its wall time.
    """
    if not points:
        return None
    last = points[-1]
    return {
        "points": len(points),
        "seed": last.seed,
        "first": _point(points[0]),
        "last": _point(last),
        "environments": {env: msgspec.to_builtins(one) for env, one in last.environments.items()},
        "seconds": round(last.total_s or sum(one.seconds for one in points), 3),
        "share": None if last.share is None else round(last.share, 4),
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


def lines(points: Sequence[EvaluationDone]) -> Iterator[str]:
    """Yield the lines of the report: the first and the last point, each environment if there are several, the cost."""
    if not points:
        return
    first, last = points[0], points[-1]
    if last is not first:
        yield f"{policies(first)}: {scores_text(first.all)}"
    yield f"{policies(last)}: {scores_text(last.all)}"
    if len(last.environments) > 1:
        yield from (f"  {env}: {scores_text(one)}" for env, one in last.environments.items())
    yield f"{len(points)} point{'s' * (len(points) > 1)}, {cost_text(last)}"


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


def cost_text(point: EvaluationDone) -> str:
    """Return the cost of the evaluation so far."""
    share = "" if point.share is None else f", {point.share:.1%} of the wall time"
    return f"{point.total_s or point.seconds:.1f} s{share}"
