"""Promises on autoscaling: limits in simulated runs, and a real run."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.end_to_end import elastic
from benchmarks.end_to_end.scenario import ScenarioError
from benchmarks.harness.figure import Figure, at_most, equal
from rolloutmq.services.orchestrator.simulation.comparison import compared, processors
from rolloutmq.services.orchestrator.simulation.scenarios import STARTS_S, all_scenarios
from rolloutmq.services.orchestrator.simulation.verdict import Verdict

SEEDS: Final = 20
LAW: Final = "rolloutmq"
SLACK_S: Final = 10.0
"""Starvation allowed in addition to the start of a worker."""


def simulated() -> Iterator[Figure]:
    """Run the controller on every scenario and start of workers, beside the reference fleet.

    An exceeded bound is unmet.
    """
    scenarios = [scenario for start_s in STARTS_S for scenario in all_scenarios(start_s)]
    for verdict in compared(scenarios, SEEDS, (LAW,), processors()):
        name = f"{verdict.scenario} ({verdict.env})"
        where = f"simulated {verdict.start_s:g} s"
        yield Figure(where, name, _found(verdict), _said(verdict), not verdict.broken)


def _found(verdict: Verdict) -> str:
    return f"starved {verdict.starved_s.median:.0f} s waste {verdict.waste.median:.0%}"


def _said(verdict: Verdict) -> str:
    """Return the figures beside those of the reference fleet, and the exceeded bounds."""
    beside = [
        f"{name} {'-' if figure.ratio is None else f'{figure.ratio:.1f}x'}"
        for name, figure in (
            ("starved", verdict.starved_s),
            ("waste", verdict.waste),
            ("moves", verdict.moves),
        )
    ]
    settle = " ".join(f"{figure.median:.0f}" for figure in verdict.settle_s) or "-"
    said = f"medians of {SEEDS} seeds; of the reference: {', '.join(beside)}; settle s {settle}"
    return f"{said}; breaks: {', '.join(verdict.broken)}" if verdict.broken else said


def followed() -> Iterator[Figure]:
    """Let real workers follow a trainer with a demand of 1x, 4x, 1x."""
    where = "elastic"
    with tempfile.TemporaryDirectory(prefix="rolloutmq-elastic-") as directory:
        try:
            out = elastic.run(Path(directory))
        except ScenarioError as error:
            yield Figure(where, "the run itself", "failed", str(error), met=False)
            return
    for phase, (appetite, there) in enumerate(out.ends()):
        wanted = appetite / elastic.MADE
        near = abs(there - wanted) <= max(1.0, 0.1 * wanted)
        yield Figure(where, f"workers at the end of phase {phase}", there, f"{wanted:.1f} needed", near)
    yield at_most(where, "longest starving, s", out.starved_s(), round(out.start_s + SLACK_S, 1))
    yield equal(where, "groups lost", out.lost, 0)
    yield equal(where, "groups trained twice", out.twice, 0)
    yield equal(where, "processes left", out.orphans, 0)
