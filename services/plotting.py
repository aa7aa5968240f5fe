"""Style of all plots: colours, a headless figure, plain axes. matplotlib is imported on demand."""

from typing import Any, Final

from rolloutmq.schemas.errors import MissingError, install_remedy
from rolloutmq.schemas.printable import printable

INK: Final = "#1f2933"
QUIET: Final = "#7b8794"
GRID: Final = "#e4e7eb"
BLUE: Final = "#2563a8"
ORANGE: Final = "#c05621"
VIOLET: Final = "#6b46a3"
GREEN: Final = "#2f855a"
AMBER: Final = "#f6ad55"
BROWN: Final = "#b7791f"
RED: Final = "#c53030"
PALE_RED: Final = "#fbd5d5"
NAME_LIMIT: Final = 40
"""Characters of a name in a picture."""


def blank(width_in: float, height_in: float, dpi: int) -> Any:
    """Return a white figure of matplotlib that can be saved.

    Raises:
        MissingError: matplotlib is not installed.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise MissingError("matplotlib", install_remedy("report")) from None
    figure = Figure(figsize=(width_in, height_in), dpi=dpi, facecolor="white")
    FigureCanvasAgg(figure)
    return figure


def dress(panel: Any, label_size: float = 7.0) -> None:
    """Leave of the axes of a panel what helps to read it."""
    panel.grid(axis="y", color=GRID, linewidth=0.7)
    panel.set_axisbelow(True)
    panel.margins(x=0.01)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color(GRID)
    panel.tick_params(colors=QUIET, labelsize=label_size, length=0)


def name_text(name: str) -> str:
    """Return a name as matplotlib shows it: `$` would begin a formula, and a leading `_` hides a label."""
    text = printable(name)[:NAME_LIMIT].replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text
