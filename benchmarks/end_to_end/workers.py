"""Promises on autoscaling in a real run; those of simulated runs are in `benchmarks.scaling`."""

import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from benchmarks.end_to_end import elastic
from benchmarks.end_to_end.scenario import ScenarioError
from benchmarks.harness.figure import Figure, at_most, equal

SLACK_S: Final = 10.0
"""Starvation allowed in addition to the start of a worker."""


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
