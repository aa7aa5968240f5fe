"""Promises on autoscaling: limits in simulated runs, and a real run."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.end_to_end import elastic
from benchmarks.end_to_end.scenario import ScenarioError
from benchmarks.harness.figure import Figure, at_most, equal
from rolloutmq.launch.commands.simulate import LAWS
from rolloutmq.services.orchestrator.simulation.scenarios import all_scenarios
from rolloutmq.services.orchestrator.simulation.trial import try_out
from rolloutmq.services.orchestrator.simulation.verdict import Verdict, judged

SEEDS: Final = 20
START_S: Final = 20.0
SLACK_S: Final = 10.0
"""Starvation allowed in addition to the start of a worker."""


def simulated() -> Iterator[Figure]:
    """Run the controller on every scenario, with workers that take 20 s to start; exceeded limits are unmet."""
    for scenario in all_scenarios(START_S):
        law = "rolloutmq"
        verdict = judged(scenario, law, [try_out(scenario, LAWS[law], seed) for seed in range(SEEDS)])
        yield Figure(
            f"simulated {START_S:g} s", scenario.name, _worst(verdict), _said(verdict), not verdict.broken
        )


def _worst(verdict: Verdict) -> str:
    settle = max((figure.worst for figure in verdict.settle_s[1:]), default=0.0)
    return f"settle {settle:.0f} peak {verdict.peak.worst:.0f} flips {verdict.flips.worst:.0f}"


def _said(verdict: Verdict) -> str:
    settle = max((figure.median for figure in verdict.settle_s[1:]), default=0.0)
    moves = f"moves {verdict.moves.median:.0f}/{verdict.moves.worst:.0f} of {verdict.least_moves}"
    peak = f"peak {verdict.peak.median:.0f} of {verdict.ideal}"
    said = f"worst of {SEEDS} seeds; medians: settle {settle:.0f}, {peak}, {moves}"
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
