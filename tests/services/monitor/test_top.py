"""Views redraw in place on a terminal, print lines elsewhere, and never take a run down."""

import asyncio
import io
from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import Console

from rolloutmq.bus import codec
from rolloutmq.schemas.config import EnvironmentConfig, RunConfig
from rolloutmq.schemas.control import Pressure, StepDone
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.monitor import top
from rolloutmq.services.monitor.board import Board
from rolloutmq.services.monitor.top import LiveView, PlainView, make_view, watch

CONFIG = RunConfig(environment={"e": EnvironmentConfig(entry="a:B")})


def terminal(width: int = 80, height: int = 24) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    console = Console(
        file=out, width=width, height=height, force_terminal=True, color_system=None, legacy_windows=False
    )
    return console, out


def test_live_view_shows_what_it_was_fed(
    make_pressure: Callable[..., Pressure], make_step: Callable[..., StepDone]
) -> None:
    console, out = terminal()
    now = [1.0]
    with LiveView(Board.of(CONFIG), console, now=lambda: now[0]) as live:
        assert "no word from it yet" in out.getvalue()
        live.feed(b"pressure", make_pressure())
        live.feed(b"step", make_step(33))
        now[0] = 2.0
        live.refresh()

    assert "step 33/400" in out.getvalue()
    assert "1.50 batches" in out.getvalue()


def test_redrawing_goes_up_by_what_was_drawn_and_never_clears_the_screen() -> None:
    console, out = terminal()
    with LiveView(Board.of(CONFIG), console, now=lambda: 0.0) as live:
        out.truncate(0)
        live.refresh()
        drawn = out.getvalue()

    assert "\x1b[1A" in drawn
    assert "\x1b[2J" not in drawn


def test_whole_screen_is_given_back() -> None:
    console, out = terminal()
    with LiveView(Board.of(CONFIG), console, screen=True, now=lambda: 0.0):
        assert "\x1b[?1049h" in out.getvalue()

    assert "\x1b[?1049l" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue()


def test_plain_view_prints_a_line_when_one_is_due(make_step: Callable[..., StepDone]) -> None:
    said: list[str] = []
    view = PlainView(Board.of(CONFIG), said.append, now=lambda: 5.0)
    with view:
        view.feed(b"step", make_step(1))
        view.refresh()
        view.refresh()

    assert said == ["[ 0:00] waiting for the broker\n"]


def test_pipe_gets_lines_and_a_terminal_a_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(top, "Console", lambda **_: Console(file=io.StringIO(), force_terminal=False))
    assert isinstance(make_view(CONFIG), PlainView)

    monkeypatch.setattr(top, "Console", lambda **_: terminal()[0])
    assert isinstance(make_view(CONFIG), LiveView)
    assert isinstance(make_view(CONFIG, plain=True), PlainView)


async def test_watching_draws_until_the_end_without_a_broker(run_dir: Path) -> None:
    drawn = asyncio.Event()
    until = asyncio.Event()
    view = PlainView(Board.of(CONFIG), lambda _: drawn.set())
    task = asyncio.create_task(watch(RunLayout(run_dir), view, until))

    await asyncio.wait_for(drawn.wait(), 10)
    until.set()

    await asyncio.wait_for(task, 10)


async def test_view_whose_terminal_went_does_not_end_the_run(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(_: str) -> None:
        failed.set()
        raise BrokenPipeError

    failed, until = asyncio.Event(), asyncio.Event()
    task = asyncio.create_task(watch(RunLayout(run_dir), PlainView(Board.of(CONFIG), broken), until))
    await asyncio.wait_for(failed.wait(), 10)
    await asyncio.sleep(0)
    assert not task.done()
    until.set()

    await asyncio.wait_for(task, 10)

    assert "view failed" in caplog.text


async def test_what_the_broker_publishes_is_shown(
    run_dir: Path, make_pressure: Callable[..., Pressure], monkeypatch: pytest.MonkeyPatch
) -> None:
    events = [(b"pressure", codec.encode(make_pressure(step=17))), (b"step", b"\xc1")]

    class Fed:
        def __init__(self, *_: object) -> None:
            """Hold what is to come."""

        async def __aenter__(self) -> "Fed":
            return self

        async def __aexit__(self, *_: object) -> None:
            """Nothing to close."""

        async def next(self, timeout_s: float) -> tuple[bytes, bytes] | None:
            if events:
                return events.pop(0)
            until.set()
            await asyncio.sleep(min(timeout_s, 0.01))
            return None

    until = asyncio.Event()
    monkeypatch.setattr(top, "Feed", Fed)
    board = Board.of(CONFIG)

    await watch(RunLayout(run_dir), PlainView(board, lambda _: None), until)

    assert board.steps_done == 17


def test_directory_without_a_run_is_a_usage_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.top(run_dir) == 2
    assert "config.json is missing" in capsys.readouterr().err
