"""The picture of a comparison: reward, throughput and staleness of several runs over steps and over time.

Each run has one colour in all panels. Drawing needs no display. matplotlib is imported on demand.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from rolloutmq.bus.files import private_file
from rolloutmq.services.monitor.compare.compared_run import ComparedRun, Points
from rolloutmq.services.monitor.compare.table import names
from rolloutmq.services.monitor.report.plot import COLOURS, SMOOTHED_STEPS, smoothed
from rolloutmq.services.plotting import INK, QUIET, blank, dress, name_text

WIDTH_PX: Final = 1500
HEIGHT_PX: Final = 1050
DPI: Final = 150
POINTS: Final = 1500
"""Most points of a line: as many as the picture has columns."""
STYLES: Final = ("-", "--", ":", "-.")
"""Styles of the lines, for runs beyond the number of colours."""


def draw(runs: Sequence[ComparedRun], to: Path) -> None:
    """Draw runs over each other.

    Args:
        runs: At least one; one without a record has no line.
        to: The picture (.png).

    Raises:
        MissingError: matplotlib is not installed.
    """
    figure = blank(WIDTH_PX / DPI, HEIGHT_PX / DPI, DPI)
    panels = figure.subplots(3, 2, sharex="col", gridspec_kw={"hspace": 0.22, "wspace": 0.14})
    figure.subplots_adjust(left=0.06, right=0.98, top=0.88, bottom=0.065)
    kinds = (
        ("reward", f"mean raw score of a step, mean of {SMOOTHED_STEPS}", [run.reward for run in runs]),
        ("throughput", "groups settled a second", [run.throughput for run in runs]),
        ("staleness", f"optimizer steps, mean of {SMOOTHED_STEPS}", [run.staleness for run in runs]),
    )
    for (over_steps, over_time), (name, meaning, series) in zip(panels, kinds, strict=True):
        for number, points in enumerate(series):
            _line(over_steps, points.steps, points, number, is_smooth=name != "throughput")
            _line(over_time, points.times, points, number, is_smooth=name != "throughput")
        for panel in (over_steps, over_time):
            dress(panel)
        over_steps.set_title(name, loc="left", fontsize=8, fontweight="bold", color=INK, pad=3)
        over_time.set_title(meaning, loc="right", fontsize=6.5, color=QUIET, pad=3)
    panels[-1][0].set_xlabel("optimizer steps", color=QUIET, fontsize=7)
    panels[-1][1].set_xlabel("seconds of the run, without those between its lives", color=QUIET, fontsize=7)
    _legend(figure, names(runs))
    with private_file(to, "wb") as file:
        figure.savefig(file, format="png", dpi=DPI)


def thinned(values: Sequence[Any], most: int = POINTS) -> list[Any]:
    """Return at most so many values at equal distances, the last one included."""
    if len(values) <= most:
        return list(values)
    return [values[round(number * (len(values) - 1) / (most - 1))] for number in range(most)]


def _line(panel: Any, places: Sequence[float], points: Points, number: int, *, is_smooth: bool) -> None:
    values = smoothed(points.values, SMOOTHED_STEPS) if is_smooth else points.values
    panel.plot(thinned(places), thinned(values), linewidth=1.2, **_look(number))


def _look(number: int) -> dict[str, Any]:
    turn, colour = divmod(number, len(COLOURS))
    return {"color": COLOURS[colour], "linestyle": STYLES[turn % len(STYLES)]}


def _legend(figure: Any, labels: Sequence[str]) -> None:
    from matplotlib.lines import Line2D

    lines = [Line2D([], [], linewidth=1.6, **_look(number)) for number in range(len(labels))]
    shown = [name_text(label) for label in labels]
    figure.legend(
        lines, shown, loc="upper left", bbox_to_anchor=(0.05, 0.985), ncol=4, fontsize=7, frameon=False
    )
