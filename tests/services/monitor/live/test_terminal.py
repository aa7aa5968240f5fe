"""`rolloutmq top` on a real terminal: keys, sizes, signals, colours, and what it leaves."""

import contextlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.services.monitor.live.played_terminal import COLOUR, PlayedTerminal

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.bus.transport.way.route import endpoints_of
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import python_command
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerState
from rolloutmq.services.broker.server import running_broker

ROLLOUTMQ = python_command(sys.executable, "rolloutmq.launch.cli")
ENVIRONMENTS = {"math": EnvironmentConfig(entry="a:B"), "code": EnvironmentConfig(entry="a:B")}
HOSTILE = "ValueError: \x1b]0;owned\x07\x1b[2J\u202egnp.exe"


class Run:
    """A run of a broker alone, whose workers are heartbeats."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout

    def beat(self, count: int, **fields: Any) -> None:
        """Let workers be heard, half of each environment."""
        endpoints = endpoints_of(self.layout)
        assert endpoints is not None
        with BlockingClient(endpoints.serve) as client:
            for number in range(count):
                env = ("math", "code")[number % 2]
                usual: dict[str, Any] = {
                    "state": WorkerState.READY,
                    "pid": 1,
                    "host": "elsewhere",
                    "produced": number,
                }
                client.request(WorkerBeat(worker=f"{env}-{number}", env=env, **(usual | fields)), 30.0)

    @contextlib.contextmanager
    def beating(self, count: int) -> Iterator[None]:
        """Let workers be heard for as long as the block lasts."""
        over = threading.Event()

        def beat() -> None:
            while not over.wait(0.5):
                self.beat(count)

        self.beat(count)
        thread = threading.Thread(target=beat)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def top(self, *options: str, **size: Any) -> PlayedTerminal:
        return PlayedTerminal([*ROLLOUTMQ, "top", str(self.layout.root), *options], **size)


@pytest.fixture
def run(run_dir: Path) -> Iterator[Run]:
    layout = RunLayout(run_dir)
    config = RunConfig(environment=ENVIRONMENTS)
    write_json(layout.config, config)
    with running_broker(config, layout):
        yield Run(layout)


def test_keys_select_filter_sort_and_ask_before_an_order(run: Run) -> None:
    run.beat(6)
    with run.top() as terminal:
        lines = terminal.shows("> code-1")
        assert len(lines) == 24
        assert "? help" in lines[-2]
        terminal.type("jj")
        terminal.shows("> code-5")
        terminal.type("\x1b[A")
        terminal.shows("> code-3")
        terminal.type("/math 4\r")
        terminal.until(
            lambda lines: "> math-4" in str(lines) and "code-" not in str(lines), "the filtered rows"
        )
        terminal.type("d")
        terminal.shows("drain math-4?")
        terminal.type("n")
        terminal.shows("nothing was ordered")
        terminal.type("d")
        terminal.shows("drain math-4?")
        terminal.type("y")
        terminal.shows("draining math-4")
        terminal.shows("with math 4")
        terminal.type("\x1b")
        terminal.until(lambda lines: not any("with math 4" in line for line in lines), "end of the filter")
        terminal.type("gsss")
        terminal.shows("by pid")
        terminal.type("?")
        terminal.shows("drain the selected worker")
        terminal.type("?q")
        assert terminal.ended() == 0
        assert terminal.modes() == terminal.before
    assert not terminal.screen.is_alternate
    assert terminal.screen.is_cursor_shown


def test_an_order_that_fails_shows_its_error(run: Run) -> None:
    run.beat(2, state=WorkerState.FAILED, error="ValueError: bad")
    with run.top() as terminal:
        terminal.shows("> code-1")
        terminal.type("d")
        terminal.shows("drain code-1?")
        terminal.type("y")
        terminal.shows("worker code-1: nothing to drain")
        terminal.type("4e")
        terminal.shows("no row is selected")
        terminal.type("3d")
        terminal.shows("no GPUs")
        terminal.type("2=")
        terminal.shows("number of workers, or auto")
        terminal.type("many\r")
        terminal.shows("must be a number up to")
        terminal.type("=7\r")
        terminal.shows("scale code 7?")
        terminal.type("+")
        terminal.shows("scale code 8?")
        terminal.type("y")
        terminal.shows("code: pinned to 8 workers: kept, but not confirmed")
        terminal.type("q")
        assert terminal.ended() == 0


def test_a_thousand_workers_are_scrolled(run: Run) -> None:
    with run.beating(1000), run.top() as terminal:
        terminal.shows("1 of 1000")
        terminal.type("G")
        terminal.shows("> math-998")
        terminal.shows("1000 of 1000")
        terminal.type("\x1b[5~")
        terminal.until(lambda lines: not any("1000 of 1000" in line for line in lines), "the page before")
        terminal.type("/code-77\r")
        terminal.shows("1 of 6")
        terminal.type("q")
        assert terminal.ended() == 0


def test_a_window_that_changes_its_size_is_filled(run: Run) -> None:
    run.beat(3)
    with run.top() as terminal:
        terminal.shows("> code-1")
        for width, height in ((50, 12), (20, 5), (132, 43), (4, 2), (80, 24)):
            terminal.resize(width, height)
            if height >= 12:
                lines = terminal.shows("> code-1")
                assert "RolloutMQ" in lines[0]
                terminal.shows("help" if width > 50 else "drain")
        terminal.type("q")
        assert terminal.ended() == 0
    assert "Traceback" not in terminal.output


def test_an_interrupt_leaves_the_terminal_as_it_was(run: Run) -> None:
    with run.top() as terminal:
        terminal.shows("accepted 0")
        assert terminal.modes() != terminal.before
        terminal.type("\x03")
        assert terminal.ended() == 0
        assert terminal.modes() == terminal.before
    assert not terminal.screen.is_alternate
    assert terminal.screen.is_cursor_shown


def test_a_signal_leaves_the_terminal_as_it_was(run: Run) -> None:
    with run.top() as terminal:
        terminal.shows("accepted 0")
        terminal.process.send_signal(signal.SIGTERM)
        assert terminal.ended() == 128 + signal.SIGTERM
        assert terminal.modes() == terminal.before
    assert not terminal.screen.is_alternate


def test_a_terminal_that_goes_ends_the_view(run: Run) -> None:
    with run.top() as terminal:
        terminal.shows("accepted 0")
        terminal.hang_up()
        assert terminal.process.wait(timeout=60) in {1, 128 + signal.SIGHUP}


def test_a_stop_gives_the_terminal_to_the_shell_and_takes_it_again(run: Run) -> None:
    run.beat(1)
    command = shlex.join([*ROLLOUTMQ, "top", str(run.layout.root)])
    with PlayedTerminal(["bash", "--norc", "--noprofile", "-i"], env={"PS1": "ready> "}) as terminal:
        terminal.shows("ready>")
        terminal.type(f"{command}\n")
        terminal.shows("> math-0")
        terminal.type("\x1a")
        terminal.until(lambda _: not terminal.screen.is_alternate, "the shell's screen")
        terminal.type("stty -a\n")
        terminal.shows("icanon")
        assert re.search(r" icanon\b", terminal.output)
        assert re.search(r" echo\b", terminal.output)
        terminal.type("fg\n")
        terminal.until(lambda _: terminal.screen.is_alternate, "the view's screen")
        terminal.shows("> math-0")
        terminal.type("q")
        terminal.until(lambda _: not terminal.screen.is_alternate, "the shell's screen")
        terminal.type("exit 5\n")
        assert terminal.ended() == 5


def test_the_end_of_the_run_ends_the_view_with_its_notice(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), RunConfig(environment=ENVIRONMENTS)
    write_json(layout.config, config)
    with PlayedTerminal([*ROLLOUTMQ, "top", str(run_dir)]) as terminal:
        with running_broker(config, layout):
            terminal.shows("accepted 0")
        layout.summary.write_text('{"ended": "the trainer is done"}')
        assert terminal.ended() == 0
        # The path of the directory may break the line anywhere.
        ended = "hasended:thetrainerisdone"
        terminal.until(lambda lines: ended in "".join(lines).replace(" ", ""), "notice of the end")
        assert terminal.modes() == terminal.before


@pytest.mark.parametrize(("options", "env"), [(("--no-color",), {}), ((), {"NO_COLOR": "1"})])
def test_no_colour_is_used_where_none_is_wanted(
    run: Run, options: tuple[str, ...], env: dict[str, str]
) -> None:
    run.beat(1)
    words = [*ROLLOUTMQ, "top", str(run.layout.root), *options]
    with PlayedTerminal(words, env=env) as terminal:
        terminal.shows("> math-0")
        terminal.type("q")
        terminal.ended()
    assert COLOUR.search(terminal.output) is None
    with run.top() as terminal:
        terminal.shows("> math-0")
        terminal.type("q")
        terminal.ended()
    assert COLOUR.search(terminal.output), "the pattern finds colours"


def test_a_dumb_terminal_gets_lines(run: Run) -> None:
    with PlayedTerminal([*ROLLOUTMQ, "top", str(run.layout.root)], env={"TERM": "dumb"}) as terminal:
        terminal.shows("pressure 0.00")
        terminal.type("\x03")
        assert terminal.ended() == 0
    assert "\x1b" not in terminal.output


def test_hostile_texts_are_shown_and_not_obeyed(run: Run) -> None:
    run.beat(1, state=WorkerState.FAILED, error=HOSTILE)
    with run.top(width=200) as terminal:
        terminal.shows(r"\u001b]0;owned\u0007\u001b[2J\u202egnp.exe")
        terminal.type("q")
        terminal.ended()
    assert "\x1b]0;owned" not in terminal.output
    assert "\u202e" not in terminal.output


def printed(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*ROLLOUTMQ, "top", *words], capture_output=True, text=True, timeout=120)


def test_once_prints_the_state_and_ends(run: Run) -> None:
    run.beat(30)
    told = printed(str(run.layout.root), "--once")
    assert told.returncode == 0, told.stderr
    assert "\x1b" not in told.stdout
    assert {f"{('math', 'code')[n % 2]}-{n}" for n in range(30)} <= set(told.stdout.split())
    (line,) = printed(str(run.layout.root), "--once", "--json").stdout.splitlines()
    state = json.loads(line)
    assert (state["event"], sum(state["worker_states"].values()), len(state["workers"])) == ("state", 30, 30)
    assert state["counts"]["train"] == dict.fromkeys(state["counts"]["train"], 0)


def test_json_is_a_line_a_second_until_the_end(run_dir: Path) -> None:
    layout, config = RunLayout(run_dir), RunConfig(environment=ENVIRONMENTS)
    write_json(layout.config, config)
    with running_broker(config, layout):
        command = [*ROLLOUTMQ, "top", str(run_dir), "--json"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            timer = threading.Timer(120, process.kill)
            timer.start()
            assert process.stdout is not None
            first, second = (json.loads(process.stdout.readline()) for _ in range(2))
            layout.summary.write_text('{"ended": "the trainer is done"}')
            endpoints = endpoints_of(layout)
            assert endpoints is not None
            os.kill(process.pid, signal.SIGINT)
            assert process.wait(timeout=60) == 0
            timer.cancel()
    assert first["event"] == second["event"] == "state"
    assert second["t"] - first["t"] >= 0.9
    told = printed(str(run_dir), "--json")
    assert json.loads(told.stdout)["ended"] == "the trainer is done"


@pytest.mark.parametrize("options", [["--json"], []])
def test_it_ends_when_its_reader_has_left(run: Run, options: list[str]) -> None:
    """As with `rolloutmq top --json | head -1`, while the run goes on."""
    pipe = subprocess.PIPE
    with (
        run.beating(2),
        subprocess.Popen(
            [*ROLLOUTMQ, "top", str(run.layout.root), *options], stdout=pipe, stderr=pipe
        ) as process,
    ):
        try:
            assert process.stdout is not None
            assert process.stderr is not None
            assert process.stdout.readline()
            process.stdout.close()
            assert process.wait(timeout=60) == 0
            assert process.stderr.read() == b""
        finally:
            process.kill()


def test_a_full_disk_fails(run: Run) -> None:
    with run.beating(2), Path("/dev/full").open("wb") as full:
        command = [*ROLLOUTMQ, "top", str(run.layout.root), "--json"]
        told = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, timeout=120, check=False)
    assert told.returncode == 1
    assert b"No space left" in told.stderr


def test_once_of_a_run_that_nobody_serves_fails(run_dir: Path) -> None:
    write_json(RunLayout(run_dir).config, RunConfig(environment=ENVIRONMENTS))
    told = printed(str(run_dir), "--once")
    assert told.returncode == 1
    assert "no broker runs" in told.stderr
