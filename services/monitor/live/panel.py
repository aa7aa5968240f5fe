"""The operator's part of the live view: table, selection, filter, question and status line. Keys in, orders out. Pure.

Nothing is ordered without a question and its `y`, but `explain`, which changes nothing. One order is carried out at a
time: the next one is refused until the answer is there. The selection follows its row by name, whatever the sort.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Final

from rich.cells import chop_cells

from rolloutmq.schemas.config.base import PROCESSES_LIMIT
from rolloutmq.schemas.printable import printable
from rolloutmq.services.monitor.live import keys
from rolloutmq.services.monitor.live.listings import Entry, Listing, TableName, shown
from rolloutmq.services.monitor.live.orders import Answer, Order

ANSWER_SHOWN_S: Final = 30.0
"""Time for which an answer stays in the status line."""
TYPED_LIMIT: Final = 100
"""Most characters of a filter or a number."""
REASON: Final = "by hand in top"
"""Reason of a cordon."""
_YES: Final = frozenset({"y", "Y"})


def wrapped(line: str, width: int) -> list[str]:
    """Return the rows of a line: its cells in order, none left out but a character that is wider than the screen."""
    return [row for row in chop_cells(printable(line.expandtabs()), max(1, width)) if row] or [""]


class Mode(Enum):
    """What a key means."""

    BROWSE = auto()
    HELP = auto()
    FILTER = auto()
    COUNT = auto()
    """The number of workers is typed."""
    CONFIRM = auto()
    TEXT = auto()
    """The output of a command is read."""


@dataclass
class View:
    """How one table is shown."""

    selected: str = ""
    is_chosen: bool = False
    """The operator has moved to a row, which stays selected; before, it is the first one."""
    place: int = 0
    """Place of the selected row when it was last seen: the row there is next, if it has gone."""
    first: int = 0
    column: int = -1
    is_reversed: bool = False
    wanted: str = ""


@dataclass
class Panel:
    """State of the operator's part.

    Attributes:
        table: The table on the screen.
        views: How each table is shown.
        mode: What a key means.
        typed: The filter or number so far.
        order: Order that a question is about.
        running: Order that is carried out; None if there is none.
        is_paused: The picture stands still; events are received all the same.
        is_over: The operator leaves.
        lines: The text that is read.
        rows, row: Its lines as wide as the screen, and the first of them on it.
    """

    table: TableName = TableName.WORKERS
    views: dict[TableName, View] = field(default_factory=lambda: {name: View() for name in TableName})
    mode: Mode = Mode.BROWSE
    typed: str = ""
    order: Order | None = None
    running: Order | None = None
    is_paused: bool = False
    is_over: bool = False
    lines: Sequence[str] = ()
    rows: Sequence[str] = ()
    row: int = 0
    targets: dict[str, int] = field(default_factory=dict)
    """Number of workers of each environment, from which `+` and `-` count."""
    status: str = ""
    is_error: bool = False
    _told_at: float = float("-inf")
    _source: Callable[[TableName], Listing] | None = None
    _is_dirty: bool = False
    """The rows are those of an earlier table, sort or filter."""
    _columns: int = 0
    _rows: list[Entry] = field(default_factory=list)
    _page: int = 1
    _env: str = ""
    _count: int = 0
    _wrapped_for: int = 0

    @property
    def view(self) -> View:
        """How the present table is shown."""
        return self.views[self.table]

    def see(self, source: Callable[[TableName], Listing], page: int) -> tuple[Listing, list[Entry], int]:
        """Take the present rows; return the table, its rows on the screen, and the place of the selected one, or -1.

        Args:
            source: Returns a table as it is now.
            page: Rows that fit on the screen, at least 1.
        """
        self._source, self._page = source, page
        found = self._update(source)
        view = self.view
        view.first = min(view.first, view.place, max(0, len(self._rows) - page))
        view.first = max(view.first, view.place - page + 1)
        return (
            found,
            self._rows[view.first : view.first + page],
            view.place - view.first if self._rows else -1,
        )

    def _update(self, source: Callable[[TableName], Listing]) -> Listing:
        found, view = source(self.table), self.view
        wanted = self.typed if self.mode is Mode.FILTER else view.wanted
        self._columns, self._is_dirty = len(found.columns), False
        self._rows = shown(found, view.column, wanted, is_reversed=view.is_reversed)
        view.place = self._place()
        if view.is_chosen:
            view.selected = self._rows[view.place].key if self._rows else view.selected
        return found

    def _present(self) -> list[Entry]:
        """Return the rows; after a key that changed which they are, those of now."""
        if self._is_dirty and self._source is not None:
            self._update(self._source)
        return self._rows

    def _place(self) -> int:
        """Return the place of the selected row; without it, of the one in its place. At first it is the top."""
        view = self.view
        if not view.is_chosen:
            return 0
        for place, entry in enumerate(self._rows):
            if entry.key == view.selected:
                return place
        return 0 if self.mode is Mode.FILTER else max(0, min(view.place, len(self._rows) - 1))

    @property
    def total(self) -> int:
        """Rows of the present table that the filter leaves."""
        return len(self._rows)

    @property
    def selected(self) -> Entry | None:
        """The selected row."""
        rows = self._present()
        return rows[self.view.place] if rows else None

    def told(self, now: float) -> tuple[str, bool]:
        """Return the text of the status line, and whether it is an error; empty once it is old."""
        if self.running is not None:
            return f"{self.running.text}: waiting for the answer ...", False
        return (self.status, self.is_error) if now - self._told_at <= ANSWER_SHOWN_S else ("", False)

    def tell(self, text: str, now: float, *, is_error: bool = False) -> None:
        """Show a text in the status line."""
        self.status, self.is_error, self._told_at = text, is_error, now

    def take(self, order: Order, answer: Answer, now: float) -> None:
        """Take the answer of the order that was carried out: into the status line, or as a text to read."""
        self.running = None
        is_error = answer.code != 0
        if not order.note and not is_error:
            self.lines, self.row, self.mode = answer.text.splitlines() or [""], 0, Mode.TEXT
            self._wrapped_for = 0
            return
        last = (
            answer.text.splitlines()[-1]
            if answer.text
            else f"{order.text}: ended with exit code {answer.code}"
        )
        self.tell(last.removeprefix("rolloutmq: ").removeprefix("error: "), now, is_error=is_error)

    def press(self, key: str, now: float) -> Order | None:
        """Take a key; return the order to carry out now, if any."""
        match self.mode:
            case Mode.BROWSE:
                return self._browse(key, now)
            case Mode.HELP:
                self.mode = Mode.BROWSE
            case Mode.FILTER:
                self._type_filter(key)
            case Mode.COUNT:
                self._type_count(key, now)
            case Mode.CONFIRM:
                return self._confirm(key, now)
            case Mode.TEXT:
                self._read(key)
        return None

    def _browse(self, key: str, now: float) -> Order | None:
        if self._move(key) or self._arrange(key):
            return None
        match key:
            case "q" | "ctrl-d":
                self.is_over = True
            case "?" | "h":
                self.mode = Mode.HELP
            case "p" | " ":
                self.is_paused = not self.is_paused
            case "d" | "c" | "e" | keys.ENTER | "+" | "-" | "=":
                return self._ask(key, now)
        return None

    def _move(self, key: str) -> bool:
        """Move the selection; return whether the key does."""
        steps = {
            keys.UP: -1,
            "k": -1,
            keys.DOWN: 1,
            "j": 1,
            keys.PAGE_UP: -self._page,
            keys.PAGE_DOWN: self._page,
            keys.HOME: -len(self._rows),
            "g": -len(self._rows),
            keys.END: len(self._rows),
            "G": len(self._rows),
        }
        if key not in steps:
            return False
        if rows := self._present():
            view = self.view
            view.place = max(0, min(view.place + steps[key], len(rows) - 1))
            view.selected, view.is_chosen = rows[view.place].key, view.place > 0
        return True

    def _arrange(self, key: str) -> bool:
        """Change table, sort or filter; return whether the key does."""
        names, view = list(TableName), self.view
        match key:
            case keys.TAB | keys.RIGHT:
                self.table = names[(names.index(self.table) + 1) % len(names)]
            case keys.BACK_TAB | keys.LEFT:
                self.table = names[names.index(self.table) - 1]
            case "1" | "2" | "3" | "4":
                self.table = names[int(key) - 1]
            case "s":
                view.column = view.column + 1 if view.column + 1 < self._columns else -1
            case "S":
                view.is_reversed = not view.is_reversed
            case "/":
                self.mode, self.typed = Mode.FILTER, view.wanted
            case keys.ESCAPE:
                view.wanted, self.status = "", ""
            case _:
                return False
        self._is_dirty = True
        return True

    def _ask(self, key: str, now: float) -> Order | None:
        """Begin an order about the selected row, or say why it has none."""
        if self.running is not None:
            self.tell(f"{self.running.text}: has no answer yet; wait for it", now, is_error=True)
            return None
        if (entry := self.selected) is None:
            self.tell("no row is selected", now, is_error=True)
            return None
        match key:
            case "d":
                self._ask_drain(entry, now)
            case "c":
                self._ask_cordon(entry, now)
            case "e" | keys.ENTER:
                return self._explain(entry, now)
            case _:
                self._ask_scale(key, entry, now)
        return None

    def _ask_drain(self, entry: Entry, now: float) -> None:
        if self.table is not TableName.WORKERS:
            self.tell("d drains a worker: select one in the table of workers (1)", now, is_error=True)
            return
        self._question(Order("drain", (entry.key,), note="Its rollouts are finished first."))

    def _ask_cordon(self, entry: Entry, now: float) -> None:
        if not entry.gpu:
            self.tell("c cordons a GPU: select one in the table of GPUs (3)", now, is_error=True)
        elif entry.is_cordoned:
            self._question(Order("uncordon", (entry.gpu,), note="New workers may come to it."))
        else:
            self._question(Order("cordon", (entry.gpu,), ("--reason", REASON), "Running workers stay."))

    def _explain(self, entry: Entry, now: float) -> Order | None:
        if self.table is not TableName.GROUPS:
            self.tell("e explains a group: select one in the table of groups (4)", now, is_error=True)
            return None
        self.running = Order("explain", (entry.key,))
        return self.running

    def _ask_scale(self, key: str, entry: Entry, now: float) -> None:
        if not entry.env:
            self.tell(
                f"{key} scales an environment: select it, or one of its workers (1, 2)", now, is_error=True
            )
            return
        self._env = entry.env
        if key == "=":
            self.mode, self.typed = Mode.COUNT, ""
        else:
            self._count = self.targets.get(entry.env, 0)
            self._question_scale(self._count + (1 if key == "+" else -1))

    def _question_scale(self, count: int) -> None:
        self._count = max(0, min(count, PROCESSES_LIMIT))
        note = "The number stays pinned; + and - change it."
        self._question(Order("scale", (self._env, str(self._count)), note=note))

    def _question(self, order: Order) -> None:
        self.order, self.mode = order, Mode.CONFIRM

    def _confirm(self, key: str, now: float) -> Order | None:
        order = self.order
        if (
            order is not None
            and order.command == "scale"
            and key in {"+", "-"}
            and order.arguments[1] != "auto"
        ):
            self._question_scale(self._count + (1 if key == "+" else -1))
            return None
        self.order, self.mode = None, Mode.BROWSE
        if order is None or key not in _YES:
            self.tell("nothing was ordered", now)
            return None
        self.running = order
        return order

    def _type_filter(self, key: str) -> None:
        if key in {keys.ENTER, keys.ESCAPE}:
            self._present()  # the selection goes to a row that the filter leaves
            self.view.wanted = self.typed if key == keys.ENTER else self.view.wanted
            self.mode = Mode.BROWSE
        elif not self._edit(key):
            self._move(key)
            return
        self._is_dirty = True

    def _type_count(self, key: str, now: float) -> None:
        if key == keys.ESCAPE:
            self.mode = Mode.BROWSE
        elif key != keys.ENTER:
            self._edit(key)
        elif self.typed.isdecimal() and self.typed.isascii() and int(self.typed) <= PROCESSES_LIMIT:
            self._question_scale(int(self.typed))
        elif self.typed == "auto":
            self._question(Order("scale", (self._env, "auto"), note="Autoscaling decides again."))
        else:
            self.mode = Mode.BROWSE
            self.tell(
                f"must be a number up to {PROCESSES_LIMIT:,} or auto (got {self.typed!r})", now, is_error=True
            )

    def _edit(self, key: str) -> bool:
        """Change the typed text; return whether the key does."""
        if key == keys.BACKSPACE:
            self.typed = self.typed[:-1]
        elif key == "ctrl-u":
            self.typed = ""
        elif len(key) == 1:
            self.typed = (self.typed + key)[:TYPED_LIMIT]
        else:
            return False
        return True

    def _read(self, key: str) -> None:
        """Scroll the text, or close it."""
        if key in {"q", keys.ESCAPE, keys.ENTER, "e"}:
            self.mode, self.lines, self.rows = Mode.BROWSE, (), ()
            return
        steps = {
            keys.UP: -1,
            "k": -1,
            keys.DOWN: 1,
            "j": 1,
            keys.PAGE_UP: -self._page,
            keys.PAGE_DOWN: self._page,
            " ": self._page,
            keys.HOME: -len(self.rows),
            "g": -len(self.rows),
            keys.END: len(self.rows),
            "G": len(self.rows),
        }
        last = max(0, len(self.rows) - self._page)
        self.row = max(0, min(self.row + steps.get(key, 0), last))

    def page_of(self, room: int, width: int) -> Sequence[str]:
        """Return the part of the text that fits into so many rows of so many cells; a longer line goes on below."""
        if self._wrapped_for != width:
            self._wrapped_for = width
            self.rows = [row for line in self.lines for row in wrapped(line, width)]
        self._page = max(1, room)
        self.row = max(0, min(self.row, len(self.rows) - self._page))
        return self.rows[self.row : self.row + self._page]
