"""Plots of trials: a row for each scenario, a column for each controller, one seed; workers against the ideal.

Drawing needs no display; matplotlib is imported on demand.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rolloutmq.services.orchestrator.simulation.trial import Make, Scenario, TrialSample, try_out
from rolloutmq.services.plotting import GREEN, INK, ORANGE, PALE_RED, QUIET, blank, dress

ROW_IN: Final = 1.5
COLUMN_IN: Final = 3.2
DPI: Final = 110
MOST: Final = 2.5
"""Upper end of the axis, relative to the largest ideal count: a controller beyond it is far off."""
EMPTY: Final = 0.25
"""Batches in the queue below which the time is shaded."""


def draw(scenarios: Sequence[Scenario], laws: Mapping[str, Make], path: Path) -> None:
    """Draw and write a plot; the file name's suffix sets the format.

    Raises:
        MissingError: matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: The suffix is unknown.
    """
    rows, columns = len(scenarios), len(laws)
    figure = blank(COLUMN_IN * columns, ROW_IN * rows + 0.9, DPI)
    panels = figure.subplots(rows, columns, sharex="row", sharey="row", squeeze=False)
    figure.subplots_adjust(
        left=0.6 / (COLUMN_IN * columns),
        right=0.985,
        top=1.0 - 0.55 / (ROW_IN * rows + 0.9),
        bottom=0.45 / (ROW_IN * rows + 0.9),
        hspace=0.5,
        wspace=0.06,
    )
    figure.suptitle(
        "workers (green), ideal (orange), queue empty (red); minutes",
        fontsize=8,
        color=QUIET,
        y=0.995,
    )
    for row, scenario in zip(panels, scenarios, strict=True):
        for panel, (law, make) in zip(row, laws.items(), strict=True):
            _panel(panel, scenario, make)
            title = f"{law}: {scenario.name}, start {scenario.site.start_s:g} s"
            panel.set_title(title, loc="left", fontsize=7, color=INK, pad=3)
            dress(panel, label_size=6.0)
    figure.savefig(path, dpi=DPI)


def _panel(panel: Any, scenario: Scenario, make: Make) -> None:
    moments: list[TrialSample] = []
    try_out(scenario, make, 0, moments.append)
    minutes = [moment.at / 60.0 for moment in moments]
    most = MOST * max(moment.ideal for moment in moments) + 1.0
    empty = [moment.pressure < EMPTY for moment in moments]
    panel.fill_between(minutes, 0, most, where=empty, color=PALE_RED, linewidth=0)
    panel.plot(
        minutes, [moment.ideal for moment in moments], color=ORANGE, linewidth=1.0, drawstyle="steps-post"
    )
    panel.plot(
        minutes, [moment.ready for moment in moments], color=GREEN, linewidth=1.2, drawstyle="steps-post"
    )
    panel.set_ylim(0, most)
