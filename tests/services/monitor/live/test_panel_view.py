"""The operator's picture fits its terminal, makes only the rows it shows, and obeys no text."""

import io
from collections.abc import Callable

import pytest
from rich.cells import cell_len
from rich.console import Console

from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Pressure, WorkerState, WorkerStatus
from rolloutmq.schemas.wire.hardware import Cause, GpuStanding
from rolloutmq.services.monitor.live import listings, view
from rolloutmq.services.monitor.live.orders import Answer, Order
from rolloutmq.services.monitor.live.panel import Panel
from rolloutmq.services.monitor.live.run_state import GroupEnd, RunState
from rolloutmq.services.monitor.status import worker_view

NOW = 10.0


@pytest.fixture
def crowd(make_pressure: Callable[..., Pressure], make_worker: Callable[..., WorkerStatus]) -> RunState:
    """A run of a thousand workers, one of them in trouble."""
    board = RunState.of(RunConfig(environment={"sort3": EnvironmentConfig(entry="a:B")}))
    workers = [make_worker(f"sort3-{n}", produced=n) for n in range(999)]
    workers.append(make_worker("sort3-999", state=WorkerState.FAILED, error="ValueError: \x1b[2J\u202eevil"))
    board.feed(make_pressure(workers=tuple(workers)), NOW)
    return board


def drawn(board: RunState, panel: Panel, width: int = 80, height: int = 23) -> list[str]:
    out = io.StringIO()
    console = Console(file=out, width=width, height=height + 1, color_system=None, legacy_windows=False)
    console.print(view.frame(board, NOW, width, height, panel), end="")
    return out.getvalue().splitlines()


@pytest.mark.parametrize(("width", "height"), [(80, 23), (200, 60), (40, 12), (20, 6), (5, 2), (1, 1)])
@pytest.mark.parametrize("keys", ["", "2", "3", "4", "?", "/x", "=", "+"])
def test_picture_of_an_operator_fits(crowd: RunState, width: int, height: int, keys: str) -> None:
    panel = Panel()
    drawn(crowd, panel, width, height)
    for key in keys:
        panel.press(key, NOW)
    lines = drawn(crowd, panel, width, height)
    assert len(lines) <= max(1, height)
    assert all(len(line) <= width for line in lines)


def test_of_a_thousand_workers_only_shown_rows_are_made_and_views_are_joined_once(
    crowd: RunState, monkeypatch: pytest.MonkeyPatch
) -> None:
    joins, cells = [], []
    made = listings.text

    def counted(value: object, style: str = "") -> object:
        cells.append(value)
        return made(value, style)

    def joined(*arguments: object) -> object:
        joins.append(arguments)
        return worker_view.joined(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(listings, "text", counted)
    monkeypatch.setattr("rolloutmq.services.monitor.live.run_state.joined", joined)
    panel = Panel()
    for key in ("G", "k", "page up", "s", "s"):
        drawn(crowd, panel)
        panel.press(key, NOW)
    lines = drawn(crowd, panel)
    assert any("by state" in line for line in lines)
    assert len(joins) == 1
    assert len(cells) < 6 * 30 * len(listings.TableName)


def test_the_columns_that_matter_fit_into_80_cells(crowd: RunState) -> None:
    head = next(line for line in drawn(crowd, Panel()) if "produced" in line)
    assert head.split() == [
        "worker",
        "state",
        "pid",
        "age",
        "in",
        "hand",
        "produced",
        "abandoned",
        "silent",
        "cpu",
    ]
    assert "last error" in "\n".join(drawn(crowd, Panel(), width=120))


def test_an_operator_s_table_has_room_where_the_figures_do_not_fit(crowd: RunState) -> None:
    panel = Panel()
    drawn(crowd, panel, height=14)
    lines = drawn(crowd, panel, height=14)
    assert sum("sort3-" in line and "ready" in line for line in lines) >= 5
    assert "RolloutMQ" in lines[0]
    assert "? help" in lines[-1]


@pytest.mark.parametrize("width", [200, 80, 40, 13])
def test_a_text_that_is_read_is_whole_at_any_width(crowd: RunState, width: int) -> None:
    """A line of `explain` is longer than 80 cells; its end was cut off."""
    panel, order = Panel(), Order("explain", ("g",))
    line = "accepted\tsegment=1 " + "漢字" * 20 + " \u202eoffset=1065696 consumer=trainer-0"
    panel.take(order, Answer(0, f"first\n\n{line}\nlast"), NOW)
    told = drawn(crowd, panel, width, 400)
    whole = f"first{line}last".replace("\t", " ").replace("\u202e", "\\u202e").replace(" ", "")
    assert whole in "".join(told).replace(" ", "")
    assert all(cell_len(row) <= width for row in told)


def test_hostile_texts_are_escaped_in_every_table(crowd: RunState) -> None:
    evil = "\x1b]0;x\x07\u202e\n"
    crowd.groups = [GroupEnd(f"{evil}{n}", f"dead ({evil})", 0.0) for n in range(3)]
    crowd.feed(GpuStanding(uuid="GPU-1", host="", name="", at=0.0, causes=(Cause.MANUAL,), reason=evil), NOW)
    crowd.name = crowd.notice = evil
    panel = Panel()
    shown = ""
    for table in "1234":
        panel.press(table, NOW)
        panel.press("S", NOW)
        shown += "\n".join(drawn(crowd, panel, width=250, height=40))
    panel.press("d", NOW)
    for text in (evil, f"error: {evil}"):
        panel.take(Order("drain", (evil,), note="x"), Answer(1, text), NOW)
        shown += "\n".join(drawn(crowd, panel))
    panel.take(Order("explain", (evil,)), Answer(0, evil * 3), NOW)
    shown += "\n".join(drawn(crowd, panel))
    assert not any(char in shown for char in "\x1b\x07\u202e")
    assert r"\u001b]0;x\u0007\u202e" in shown


def test_a_paused_picture_stands_still_while_events_come(
    crowd: RunState, make_pressure: Callable[..., Pressure]
) -> None:
    frozen = crowd.frozen()
    before = drawn(frozen, Panel())
    crowd.feed(make_pressure(step=99), NOW + 1)
    assert drawn(frozen, Panel()) == before
    assert drawn(crowd, Panel()) != before
