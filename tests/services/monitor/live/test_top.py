"""Views redraw in place on a terminal, print lines elsewhere, and never take a run down."""

import asyncio
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.shm.segment_file import SegmentOwner
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints, RunLayout, SentAddress, Supervision, Target, WorkerRecord
from rolloutmq.schemas.lives import Life
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import Pressure, ScaleDecision, StepDone, WorkerStatus
from rolloutmq.services.monitor.live import top
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.top import LiveView, PlainView, make_view, watch
from rolloutmq.services.monitor.liveness import Fate, RunLiveness, fate_of
from rolloutmq.services.monitor.status.worker_view import joined, still_given_up
from rolloutmq.services.process.identity import identify

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
    with LiveView(RunState.of(CONFIG), console, now=lambda: now[0]) as live:
        assert "not connected yet" in out.getvalue()
        live.feed(b"pressure", make_pressure())
        live.feed(b"step", make_step(33))
        now[0] = 2.0
        live.refresh()

    assert "step 33/400" in out.getvalue()
    assert "1.50 batches" in out.getvalue()


def test_redrawing_goes_up_by_what_was_drawn_and_never_clears_the_screen() -> None:
    console, out = terminal()
    with LiveView(RunState.of(CONFIG), console, now=lambda: 0.0) as live:
        out.truncate(0)
        live.refresh()
        drawn = out.getvalue()

    assert "\x1b[1A" in drawn
    assert "\x1b[2J" not in drawn


def test_whole_screen_is_given_back() -> None:
    console, out = terminal()
    with LiveView(RunState.of(CONFIG), console, screen=True, now=lambda: 0.0):
        assert "\x1b[?1049h" in out.getvalue()

    assert "\x1b[?1049l" in out.getvalue()
    assert "\x1b[?25h" in out.getvalue()


def test_plain_view_prints_a_line_when_one_is_due(make_step: Callable[..., StepDone]) -> None:
    said: list[str] = []
    view = PlainView(RunState.of(CONFIG), said.append, now=lambda: 5.0)
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
    view = PlainView(RunState.of(CONFIG), lambda _: drawn.set())
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
    task = asyncio.create_task(watch(RunLayout(run_dir), PlainView(RunState.of(CONFIG), broken), until))
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
    monkeypatch.setattr(top, "EventFeed", Fed)
    board = RunState.of(CONFIG)

    await watch(RunLayout(run_dir), PlainView(board, lambda _: None), until)

    assert board.steps_done == 17


def test_directory_without_a_run_is_a_usage_error(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert top.top(run_dir) == 2
    assert "config.json is missing" in capsys.readouterr().err


def killed_launcher(layout: RunLayout) -> None:
    me = identify("up", Role.LAUNCHER, os.getpid(), "t")
    write_json(layout.owner, msgspec.structs.replace(me, start_ticks=1))


@pytest.fixture
def plain(layout: RunLayout, monkeypatch: pytest.MonkeyPatch) -> RunLayout:
    """A configured run whose view is lines."""
    monkeypatch.setattr(top, "LOOK_S", 0.01)
    write_json(layout.config, CONFIG)
    return layout


def test_a_run_that_has_ended_is_not_watched(plain: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    plain.summary.write_text('{"ended": "the trainer is done"}')
    assert top.top(plain.root) == 0
    assert capsys.readouterr().out.endswith(f"the run in {plain.root} has ended: the trainer is done\n")


def test_a_dead_run_is_not_watched(plain: RunLayout, capsys: pytest.CaptureFixture[str]) -> None:
    killed_launcher(plain)
    assert top.top(plain.root) == 1
    assert "is dead: its launcher" in capsys.readouterr().out


def test_a_run_of_which_nothing_comes_is_given_up(
    plain: RunLayout, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(top, "GONE_S", 0.05)
    assert top.top(plain.root) == 1
    assert capsys.readouterr().out.endswith(f"no broker runs in {plain.root}\n")


async def test_watching_ends_with_the_run(plain: RunLayout) -> None:
    write_json(plain.owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    watching = asyncio.create_task(top._until_over(plain, PlainView(RunState.of(CONFIG), lambda _: None)))
    await asyncio.sleep(0.1)
    assert not watching.done()
    plain.summary.write_text('{"ended": "interrupted by SIGINT"}')
    plain.owner.unlink()
    fate = await asyncio.wait_for(watching, 10)
    assert fate == Fate(RunLiveness.ENDED, reason="interrupted by SIGINT")


@pytest.mark.parametrize("ended", [True, False])
async def test_watching_ends_at_once_with_a_broker_that_was_started_by_hand(
    plain: RunLayout, make_pressure: Callable[..., Pressure], ended: bool
) -> None:
    """It waited ten seconds, in which another broker might start; the recorded end says that none will."""
    board = RunState.of(CONFIG)
    board.feed(make_pressure(), time.monotonic())
    plain.settled.touch()
    write_json(plain.lives, [Life(1.0, 2.0 if ended else None)])
    assert fate_of(plain).by_hand
    watching = asyncio.create_task(top._over(plain, board))
    if ended:
        assert (await asyncio.wait_for(watching, top.GONE_S)).by_hand
        return
    for _ in range(50):
        await asyncio.sleep(0.0)
    assert not watching.done(), "its files say that it ended, and it was heard"
    watching.cancel()
    await asyncio.wait({watching})


@pytest.fixture
def gone() -> int:
    """The id of a process that has ended."""
    with subprocess.Popen([sys.executable, "-S", "-c", ""]) as child:
        child.wait()
    return child.pid


async def test_a_killed_broker_that_was_started_by_hand_is_told_at_once(plain: RunLayout, gone: int) -> None:
    write_json(plain.endpoints, Endpoints(ingest="", serve="", events="", publish="", pid=gone, epoch=1))
    board = RunState.of(CONFIG)
    watching = asyncio.create_task(top._over(plain, board))
    await asyncio.sleep(0.0)
    assert not watching.done()
    assert f"its process {gone} has ended" in board.notice
    watching.cancel()
    await asyncio.wait({watching})


async def test_a_dead_run_that_still_speaks_is_shown_with_a_notice(
    plain: RunLayout, make_pressure: Callable[..., Pressure]
) -> None:
    """Its launcher was killed, its broker lives, or the events come from another machine: who is heard is not over."""
    killed_launcher(plain)
    said: list[str] = []
    board = RunState.of(CONFIG)
    board.feed(make_pressure(), time.monotonic())
    watching = asyncio.create_task(top._until_over(plain, PlainView(board, said.append)))
    async with asyncio.timeout(30):
        while not any("is dead" in line for line in said):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert not watching.done()
    assert sum("is dead" in line for line in said) == 1
    assert board.is_dead, "every line says so"
    watching.cancel()
    await asyncio.wait({watching})


def test_a_dead_run_that_was_put_away_since_did_not_end_in_order(
    plain: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed_launcher(plain)

    def put_away(layout: RunLayout) -> Fate:
        found = fate_of(layout)
        plain.summary.write_text('{"ended": "its launcher was killed"}')
        plain.owner.unlink(missing_ok=True)
        return replace(found, broker=True)

    monkeypatch.setattr(top, "fate_of", put_away)
    assert top.top(plain.root) == 1


def test_lines_say_once_that_the_orchestrator_is_not_heard_and_that_it_is_again() -> None:
    said: list[str] = []
    board = RunState.of(CONFIG)
    with PlainView(board, said.append, now=lambda: 0.0) as lines:
        for problem in ("", "not heard for 0:06", "not heard for 0:07", "", ""):
            board.orchestrator = problem
            lines.refresh()
    told = [line for line in said if line.startswith("orchestrator")]
    assert told == ["orchestrator not heard for 0:06\n", "orchestrator is heard again\n"]


async def test_what_the_orchestrator_knows_is_shown(plain: RunLayout) -> None:
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    lost = WorkerRecord(worker="e-0", env="e", phase="fatal", since=0.0, reason="no such dataset")
    target = Target(env="e", target=2, current=2, reason="hold: no pressure received yet")
    write_json(plain.supervision, Supervision(orchestrator=me, workers=(lost,), targets=(target,)))
    console, out = terminal(100, 30)
    until = asyncio.Event()
    with LiveView(RunState.of(CONFIG), console) as live:
        watching = asyncio.create_task(watch(plain, live, until))
        async with asyncio.timeout(30):
            while "no such dataset" not in out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        until.set()
        await watching
    assert "e: target 2, current 2; hold: no pressure received yet" in out.getvalue()
    assert "e-0: fatal; no such dataset" in out.getvalue()


async def test_an_orchestrator_that_is_heard_is_at_work_though_its_report_is_old(plain: RunLayout) -> None:
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    write_json(plain.supervision, Supervision(orchestrator=me, at=time.monotonic() - 60.0))
    until, board = asyncio.Event(), RunState.of(CONFIG)
    decision = ScaleDecision(env="e", at=0.0, rollout_pressure=1.0, current=1, target=1, reason="hold")
    for heard in (False, True):
        if heard:
            board.feed(decision, time.monotonic() + 3600.0)
        until.clear()
        watching = asyncio.create_task(watch(plain, PlainView(board, lambda _: None), until))
        async with asyncio.timeout(30):
            while board.orchestrator.startswith("at work") != heard or not board.orchestrator:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        until.set()
        await watching
    assert "not been written for 1:0" in board.orchestrator


async def test_a_trainer_whose_weights_nobody_takes_is_shown(
    plain: RunLayout, make_pressure: Callable[..., Pressure]
) -> None:
    write_json(plain.weights, SentAddress(sender=SegmentOwner.current(), waits="no vLLM is there"))
    console, out = terminal(100, 30)
    until, board, said = asyncio.Event(), RunState.of(CONFIG), list[str]()
    board.feed(make_pressure(), time.monotonic())
    with LiveView(board, console) as live, PlainView(board, said.append) as lines:
        watching = asyncio.create_task(watch(plain, live, until))
        async with asyncio.timeout(30):
            while "waits: weights_unsent, no vLLM is there" not in out.getvalue():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        lines.refresh()
        until.set()
        await watching
    assert "trainer waits: weights_unsent" in said[0]


def test_an_environment_without_a_worker_is_told_once_until_it_works_again(
    run_dir: Path, make_worker: Callable[..., WorkerStatus]
) -> None:
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")
    reason = "exit code 3: error: environment.e: ValueError: planted"
    fatal = WorkerRecord(worker="e-0", env="e", phase="fatal", since=0.0, reason=reason)
    fresh = WorkerRecord(worker="e-1", env="e", phase="running", since=0.0, pid=os.getpid())
    said: list[str] = []
    view = PlainView(RunState.of(CONFIG), said.append, now=lambda: 5.0, as_json=True)

    def see(record: WorkerRecord, *heard: WorkerStatus) -> None:
        crew = joined(Supervision(orchestrator=me, workers=(record,)), heard, 5.0)
        view.board.given_up = still_given_up(view.board.given_up, crew, RunLayout(run_dir))
        view.refresh()

    tried = make_worker("e-1", env="e", pid=os.getpid(), produced=0)
    works = msgspec.structs.replace(tried, produced=1)
    for record, heard in ((fresh, [works]), (fatal, []), (fatal, []), (fresh, [tried]), (fatal, [])):
        see(record, *heard)
    told = [one["text"] for one in map(json.loads, said) if one["event"] == "notice"]
    assert told == [
        "environment e has no worker any more: exit code 3: error: environment.e: ValueError: planted; "
        f"see `rolloutmq workers {run_dir}` and `rolloutmq report {run_dir}`"
    ]
    see(fresh, works)
    see(fatal)
    assert [json.loads(one)["event"] for one in said].count("notice") == 2
