"""A picture of trials: for each scenario a row, for each law a column, one seed; workers against what would do.

Drawn without a display; matplotlib is loaded when a picture is asked for.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from rolloutmq.services.drawing import GREEN, INK, ORANGE, PALE_RED, QUIET, blank, dress
from rolloutmq.services.orchestrator.simulation.trial import Make, Moment, Scenario, try_out

ROW_IN: Final = 1.5
COLUMN_IN: Final = 3.2
DPI: Final = 110
MOST: Final = 2.5
"""Workers are shown up to so many times what is needed at most: a law that leaves the picture is far off."""
EMPTY: Final = 0.25
"""Batches; a queue with less is shaded."""


def draw(scenarios: Sequence[Scenario], laws: Mapping[str, Make], path: Path) -> None:
    """Draw and write a picture; its kind follows from the name.

    Raises:
        MissingError: matplotlib is not installed.
        OSError: It could not be written.
        ValueError: The name has no ending that is known.
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
        "workers (green), what would do (orange), queue empty (red); minutes",
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
    moments: list[Moment] = []
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
