"""The operator's part of the picture: table with selection, help, text of an answer, last line. Pure.

The selected row is marked by `>` as well as in reverse, so that it shows without colours.
"""

from collections.abc import Sequence
from typing import Final

from rich.text import Text

from rolloutmq.services.monitor.live.listings import Entry, Listing, TableName, listing, text
from rolloutmq.services.monitor.live.panel import Mode, Panel
from rolloutmq.services.monitor.live.run_state import RunState

QUIET: Final = "dim"
GAP: Final = 2
"""Cells between two columns."""
LEAST_WIDTH: Final = 8
"""Least width of a last column that is cut."""
HELP: Final = (
    ("up down j k", "select a row; page up and page down, home and end (g, G)"),
    ("Tab  1 2 3 4", "next table, also left and right; workers, environments, GPUs, groups"),
    ("s  S", "sort by the next column; reverse the order"),
    ("/", "filter the rows: every word must occur; Esc ends the filter"),
    ("d", "drain the selected worker"),
    ("+  -", "one worker more or less for the environment of the selected row"),
    ("=", "set their number, or auto"),
    ("c", "cordon the selected GPU, or use it again"),
    ("e", "explain the selected group"),
    ("p", "pause the picture; the run goes on"),
    ("q  Ctrl-C", "leave; the run goes on"),
    ("Ctrl-Z", "stop; fg continues"),
)
HINTS: Final = "? help · q quit · Tab table · s sort · / filter · p pause"
HINTS_OF: Final = {
    TableName.WORKERS: "d drain · + - = scale",
    TableName.ENVIRONMENTS: "+ - = scale",
    TableName.GPUS: "c cordon",
    TableName.GROUPS: "e explain",
}


def help_lines() -> list[Text]:
    """Return the keys, one a line."""
    return [Text(" Keys", style="bold", no_wrap=True), *(_help_line(keys, does) for keys, does in HELP)]


def _help_line(keys: str, does: str) -> Text:
    return Text(f"  {keys:<14}", no_wrap=True, overflow="ellipsis").append(does, style=QUIET)


def read_lines(panel: Panel, room: int, width: int) -> list[Text]:
    """Return the part of the text that is read, at most `room` lines of `width` cells with its foot."""
    lines = panel.page_of(max(1, room - 1), width)
    foot = f" {panel.row + 1} to {panel.row + len(lines)} of {len(panel.rows)} lines"
    return [*(_line(one) for one in lines), Text(foot, style=QUIET, no_wrap=True, overflow="ellipsis")]


def _line(told: str) -> Text:
    line = text(told)
    line.no_wrap, line.overflow = True, "ellipsis"
    return line


def table_lines(board: RunState, panel: Panel, now: float, room: int, width: int) -> list[Text]:
    """Return the tabs and the rows of the present table that fit into `room` lines."""
    found, entries, selected = panel.see(lambda name: listing(name, board, now), max(1, room - 2))
    if not entries:
        empty = "no row has all these words" if found.entries else found.empty
        body = [Text(f"  {empty}", style=QUIET, no_wrap=True, overflow="ellipsis")]
    else:
        body = _rows(found, entries, selected, width)
    return [_tabs(panel, found), *body][: max(0, room)]


def _tabs(panel: Panel, found: Listing) -> Text:
    """Return the names of the tables, and which rows of the present one are shown in which order."""
    line, view = Text(no_wrap=True, overflow="ellipsis"), panel.view
    for number, name in enumerate(TableName, 1):
        style = "bold reverse" if name is panel.table else QUIET
        line.append(" ").append(f" {number} {name} ", style=style)
    line.append(f"  {view.place + 1} of {panel.total}" if panel.total else "  0")
    if 0 <= view.column < len(found.columns):
        line.append(f"  by {found.columns[view.column].title}")
    if view.is_reversed:
        line.append("  reversed")
    if view.wanted:
        line.append("  with ").append_text(text(view.wanted, "bold"))
    return line


def _rows(found: Listing, entries: Sequence[Entry], selected: int, width: int) -> list[Text]:
    """Return the head and the rows. A column without room is left out; the last one is cut to the room."""
    head = Text("  ", style=QUIET, no_wrap=True, overflow="ellipsis")
    lines = [Text("> " if place == selected else "  ") for place in range(len(entries))]
    for number, column in enumerate(found.columns):
        cells = [column.cell(entry.row) for entry in entries]
        cut = head.cell_len + (GAP if number else 0)
        wanted = max(column.width, len(column.title), *(cell.cell_len for cell in cells))
        is_last = number == len(found.columns) - 1
        wide = min(wanted, width - cut) if is_last or not number else wanted
        if cut + wide > width or (is_last and wide < min(wanted, LEAST_WIDTH)):
            continue
        for line, cell in zip((head, *lines), (Text(column.title), *cells), strict=True):
            cell.truncate(wide, overflow="ellipsis")
            room = " " * (wide - cell.cell_len)
            line.append(" " * GAP if number else "")
            line.append_text(Text(room).append_text(cell) if column.is_number else cell.append(room))
    for place, line in enumerate(lines):
        line.no_wrap, line.overflow = True, "ellipsis"
        if place == selected:
            line.pad_right(width - line.cell_len)
            line.stylize("reverse")
    return [head, *lines]


def last_line(panel: Panel, now: float) -> Text:
    """Return the last line: what is typed or asked, the answer of an order, or the keys."""
    line = Text(no_wrap=True, overflow="ellipsis")
    if panel.is_paused:
        line.append(" PAUSED ", style="bold reverse yellow").append(" p continues ·", style=QUIET)
    match panel.mode:
        case Mode.FILTER:
            return line.append(" filter: ").append_text(text(panel.typed, "bold")).append("_")
        case Mode.COUNT:
            line.append(" number of workers, or auto: ")
            return line.append_text(text(panel.typed, "bold")).append("_  Esc leaves it", style=QUIET)
        case Mode.CONFIRM if panel.order is not None:
            line.append(" ").append_text(text(f"{panel.order.text}?", "bold")).append(
                f" {panel.order.note}  "
            )
            return line.append("y / n", style="bold reverse")
        case Mode.HELP:
            return line.append(" any key closes the help", style=QUIET)
        case Mode.TEXT:
            return line.append(" up, down, page up, page down · Esc closes", style=QUIET)
    told, is_error = panel.told(now)
    if told:
        return line.append(" ").append_text(text(told, "bold red" if is_error else "bold"))
    return line.append(f" {HINTS_OF[panel.table]} · {HINTS}", style=QUIET)
