"""Keys change the panel, and an order needs its question and its yes."""

import pytest

from rolloutmq.schemas.config.base import PROCESSES_LIMIT
from rolloutmq.services.monitor.live.listings import Column, Entry, Listing, TableName, text
from rolloutmq.services.monitor.live.orders import Answer, Order
from rolloutmq.services.monitor.live.panel import Mode, Panel

COLUMNS = (
    Column("name", text, str),
    Column("length", lambda row: text(len(row)), lambda row: -len(row), is_number=True),
)


class Operator:
    """A panel over rows of names, of one environment and on one GPU each."""

    def __init__(self, *names: str, page: int = 3) -> None:
        self.panel, self.names, self.page = Panel(), list(names), page
        self.made = 0
        self.see()

    def source(self, table: TableName) -> Listing:
        self.made += 1
        names = self.names if table is not TableName.GROUPS else [f"g-{name}" for name in self.names]
        gpu = table is TableName.GPUS
        rows = [Entry(one, one, one, "" if gpu else "math", one * gpu, gpu and one == "b") for one in names]
        return Listing(COLUMNS, rows, "nothing")

    def see(self) -> tuple[list[str], int]:
        _, entries, selected = self.panel.see(self.source, self.page)
        return [entry.key for entry in entries], selected

    def press(self, *keys: str) -> list[Order]:
        found = [self.panel.press(key, 0.0) for key in keys]
        return [order for order in found if order is not None]


def test_the_selection_scrolls_the_rows_and_follows_its_name() -> None:
    operator = Operator("a", "b", "c", "d", "e")
    assert operator.see() == (["a", "b", "c"], 0)
    operator.press("j", "down", "j")
    assert operator.see() == (["b", "c", "d"], 2)
    operator.names.insert(0, "0")
    assert operator.see() == (["b", "c", "d"], 2)
    operator.names.remove("d")
    assert operator.see() == (["b", "c", "e"], 2), "the row in its place is next"
    operator.press("page up", "k")
    assert operator.see() == (["0", "a", "b"], 0)
    operator.press("G")
    assert operator.see() == (["b", "c", "e"], 2)
    operator.names.clear()
    assert operator.see() == ([], -1)
    operator.press("j", "d")
    assert operator.panel.told(0.0) == ("no row is selected", True)


def test_until_a_row_is_chosen_the_first_is_selected() -> None:
    operator = Operator("b", "c")
    operator.names.insert(0, "a")
    assert operator.see() == (["a", "b", "c"], 0)
    operator.press("j", "g")
    operator.names.insert(0, "0")
    assert operator.see() == (["0", "a", "b"], 0)


def test_a_filter_leaves_rows_with_every_word() -> None:
    operator = Operator("math-1 ready", "math-2 failed", "code-1 ready", "code-11 ready")
    operator.press("G", *"/READY 1", "enter")
    assert operator.see() == (["math-1 ready", "code-1 ready", "code-11 ready"], 2)
    operator.press("/", "backspace", *"11")
    assert operator.see() == (["code-11 ready"], 0)
    operator.press("escape")
    assert operator.panel.total == 1
    operator.see()
    assert operator.panel.total == 3, "what was typed since is dropped"
    operator.press("/", "ctrl-u", *"nowhere", "enter")
    assert operator.see() == ([], -1)
    operator.press("escape")
    assert len(operator.see()[0]) == 3


def test_a_key_after_a_filter_is_about_the_rows_that_it_leaves() -> None:
    """Keys that arrive together are taken before the next frame."""
    operator = Operator("a", "b", "c")
    (order,) = operator.press(*"/b", "enter", "d", "y")
    assert order.arguments == ("b",)
    operator.panel.take(order, Answer(0, ""), 0.0)
    operator.press("3", *"/b", "enter", "c")
    assert operator.panel.order == Order("uncordon", ("b",), note="New workers may come to it.")


def test_sorts_go_round_and_turn() -> None:
    operator = Operator("bb", "a", "ccc")
    for keys, wanted in (("s", "a bb ccc"), ("s", "ccc bb a"), ("S", "a bb ccc"), ("s", "ccc a bb")):
        operator.press(keys)
        assert operator.see()[0] == wanted.split()


def test_tables_go_round_and_keep_their_selection() -> None:
    operator = Operator("a", "b")
    operator.press("j", "tab")
    assert operator.panel.table == "environments"
    assert operator.see()[1] == 0
    operator.press("back tab", "left", "left")
    assert operator.panel.table == "gpus"
    operator.press("1")
    assert operator.see()[1] == 1


def test_an_order_needs_its_yes_and_one_is_carried_out_at_a_time() -> None:
    operator = Operator("a", "b")
    for no in ("n", "escape", "enter", "d"):
        assert operator.press("d", no) == []
        assert operator.panel.told(0.0) == ("nothing was ordered", False)
    (order,) = operator.press("j", "d", "y")
    assert (order.command, order.arguments) == ("drain", ("b",))
    assert operator.panel.told(0.0)[0] == "drain b: waiting for the answer ..."
    assert operator.press("d", "y") == []
    operator.panel.take(order, Answer(1, "told before\nrolloutmq: b: no such worker"), 5.0)
    assert operator.panel.told(5.0) == ("b: no such worker", True)
    assert operator.panel.told(100.0) == ("", False)


def test_workers_are_scaled_from_their_target() -> None:
    operator = Operator("a")
    operator.panel.targets = {"math": 3}
    assert operator.press("+", "+", "-", "y")[0].arguments == ("math", "4")
    operator.panel.running = None
    assert operator.press("-", *"-----", "y")[0].arguments == ("math", "0")
    operator.panel.running = None
    assert operator.press("=", *"12", "enter", "Y")[0].arguments == ("math", "12")
    operator.panel.running = None
    assert operator.press("=", *"auto", "enter", "+") == []
    assert operator.press("=", *"auto", "enter", "y")[0].arguments == ("math", "auto")
    operator.panel.running = None
    for wrong in ("", "-1", "1.5", str(PROCESSES_LIMIT + 1), "9" * 200, "²"):
        operator.press("=", *wrong, "enter")
        assert operator.panel.told(0.0)[1], wrong
        assert operator.panel.mode is Mode.BROWSE


@pytest.mark.parametrize(
    ("table", "key"), [("2", "d"), ("1", "c"), ("1", "e"), ("3", "+"), ("3", "d"), ("4", "c")]
)
def test_a_key_of_another_table_says_where_it_works(table: str, key: str) -> None:
    operator = Operator("a")
    assert operator.press(table, key, "y") == []
    assert operator.panel.told(0.0)[1]


def test_a_group_is_explained_at_once_and_its_text_is_read() -> None:
    operator = Operator("a")
    (order,) = operator.press("4", "e")
    assert (order.command, order.arguments) == ("explain", ("g-a",))
    operator.panel.take(order, Answer(0, "\n".join(map(str, range(10)))), 0.0)
    assert list(operator.panel.page_of(4, 80)) == ["0", "1", "2", "3"]
    operator.press("j", "page down")
    assert list(operator.panel.page_of(4, 80)) == ["5", "6", "7", "8"]
    operator.press("G")
    assert list(operator.panel.page_of(4, 80)) == ["6", "7", "8", "9"]
    assert operator.panel.page_of(100, 80)[0] == "0"
    operator.press("escape")
    assert operator.panel.mode is Mode.BROWSE


def test_help_pause_and_the_end() -> None:
    operator = Operator("a")
    operator.press("?", "d")
    assert operator.panel.mode is Mode.BROWSE, "a key that closes the help orders nothing"
    operator.press("p")
    assert operator.panel.is_paused
    operator.press("p", "q")
    assert (operator.panel.is_paused, operator.panel.is_over) == (False, True)
