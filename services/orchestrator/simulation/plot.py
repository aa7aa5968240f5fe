"""Plots of trials: a row for each environment of a scenario, a column for each controller, one seed.

Workers stand beside the need. Drawing needs no display; matplotlib is imported on demand.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from rolloutmq.services.orchestrator.simulation.site import Scenario
from rolloutmq.services.orchestrator.simulation.trial import Make, Moment, try_out
from rolloutmq.services.plotting import GREEN, INK, ORANGE, PALE_RED, QUIET, blank, dress

ROW_IN: Final = 1.5
COLUMN_IN: Final = 3.2
HEAD_IN: Final = 0.9
"""Height of the title and of the last labels."""
DPI: Final = 110
MOST: Final = 2.5
"""Upper end of the axis, relative to the largest need: a controller beyond it is far off."""
EMPTY: Final = 1.0
"""Batches in the queue below which the time is shaded: a trainer that is ready waits."""
MOST_ROWS: Final = 60
"""More rows would exceed the largest picture."""


def draw(scenarios: Sequence[Scenario], laws: Mapping[str, Make], path: Path) -> None:
    """Draw and write a plot; the file name's suffix sets the format.

    Raises:
        MissingError: matplotlib is not installed.
        OSError: The file cannot be written.
        ValueError: The suffix is unknown, or there are too many rows.
    """
    rows, columns = sum(len(one.site.environments) for one in scenarios), len(laws)
    if rows > MOST_ROWS:
        raise ValueError(f"at most {MOST_ROWS} rows (got {rows}); name scenarios")
    height_in = ROW_IN * rows + HEAD_IN
    figure = blank(COLUMN_IN * columns, height_in, DPI)
    panels = figure.subplots(rows, columns, sharex="row", sharey="row", squeeze=False)
    figure.subplots_adjust(
        left=0.6 / (COLUMN_IN * columns),
        right=0.985,
        top=1.0 - 0.55 / height_in,
        bottom=0.45 / height_in,
        hspace=0.5,
        wspace=0.06,
    )
    figure.suptitle(
        "workers (green), need (orange), less than a batch queued (red); minutes",
        fontsize=8,
        color=QUIET,
        y=0.995,
    )
    _fill(panels, scenarios, laws)
    figure.savefig(path, dpi=DPI)


def _fill(panels: Any, scenarios: Sequence[Scenario], laws: Mapping[str, Make]) -> None:
    row = 0
    for scenario in scenarios:
        everything = replace(scenario, changes=(), since_s=0.0)  # moments count from the start
        tried = {law: try_out(everything, make, 0) for law, make in laws.items()}
        for name, env in scenario.site.environments.items():
            where = f"{scenario.name} ({name})" if len(scenario.site.environments) > 1 else scenario.name
            for panel, (law, out) in zip(panels[row], tried.items(), strict=True):
                _panel(panel, out[name].moments)
                title = f"{law}: {where}, start {env.start_s:g} s"
                panel.set_title(title, loc="left", fontsize=7, color=INK, pad=3)
                dress(panel, label_size=6.0)
            row += 1


def _panel(panel: Any, moments: Sequence[Moment]) -> None:
    minutes = [moment.at / 60.0 for moment in moments]
    most = MOST * max(moment.need for moment in moments) + 1.0
    empty = [moment.pressure < EMPTY for moment in moments]
    panel.fill_between(minutes, 0, most, where=empty, color=PALE_RED, linewidth=0)
    for values, color, width in (
        ([moment.need for moment in moments], ORANGE, 1.0),
        ([moment.workers for moment in moments], GREEN, 1.2),
    ):
        panel.plot(minutes, values, color=color, linewidth=width, drawstyle="steps-post")
    panel.set_ylim(0, most)
