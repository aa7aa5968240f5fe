"""Every command, in one table: how it names its run, whether its JSON parses, and its exit codes.

The commands run in this process, on the files of a run that has ended, of one whose broker was started by hand and has
ended, and on none. No error is a traceback.
"""

import contextlib
import io
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer
from tests.services.broker.journal.handmade import Handmade, batch, began, settles

from rolloutmq.bus.rundir import read_run, write_json
from rolloutmq.launch import cli
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import running_broker

WITHOUT_RUN = frozenset(
    {
        "up",
        "try",
        "check",
        "evaluate",
        "gateway",
        "run-api-alias",
        "replay",
        "init",
        "simulate",
        "compare",
        "keys init",
        "keys new",
        "keys tls",
        "keys list",
        "keys revoke",
    }
)
"""Commands that take a configuration, recorded runs or nothing; most make their own run."""
PROCESSES = frozenset(
    {
        "broker",
        "orchestrator",
        "cluster",
        "telemetry",
        "inference",
        "teacher",
        "curriculum",
        "worker",
        "engine",
        "trainer",
        "relay",
        "serve-gateway",
        "serve-dashboard",
    }
)
"""Processes of a run, which require its name."""
SERVERS = frozenset({"dashboard"})
"""Commands that serve until a signal; they have tests of their own."""
WITHOUT_JSON = frozenset({"logs", "tail"})
"""Watching commands: the output of a process, and lines that are JSON always."""


class Row(NamedTuple):
    """A command as the table calls it.

    Attributes:
        words: The command with its arguments, without a run.
        ended: Its exit code on a run that has ended in order.
        takes_argument: It also takes the run as its argument.
    """

    words: tuple[str, ...]
    ended: int
    takes_argument: bool = False


TABLE = {
    "down": Row(("down",), 0, takes_argument=True),
    "doctor": Row(("doctor", "--weights"), 1, takes_argument=True),
    "ratings": Row(("ratings",), 1, takes_argument=True),
    "status": Row(("status",), 0, takes_argument=True),
    "workers": Row(("workers",), 0, takes_argument=True),
    "top": Row(("top",), 0, takes_argument=True),
    "logs": Row(("logs", "broker"), 0),
    "tail": Row(("tail", "step"), 0),
    "explain": Row(("explain", "g1"), 0),
    "report": Row(("report",), 0, takes_argument=True),
    "profile": Row(("profile",), 0, takes_argument=True),
    "drain": Row(("drain", "sort3-0"), 1),
    "restart": Row(("restart", "sort3-0"), 1),
    "scale": Row(("scale", "sort3", "2"), 1),
    "set": Row(("set", "broker.lease_s=60"), 1),
    "cordon": Row(("cordon", "GPU-1"), 1),
    "uncordon": Row(("uncordon", "GPU-1"), 1),
    "ledger verify": Row(("ledger", "verify"), 0, takes_argument=True),
    "dead list": Row(("dead", "list"), 0, takes_argument=True),
    "dead show": Row(("dead", "show", "g9"), 1),
    "dead requeue": Row(("dead", "requeue", "--all"), 1),
}
"""All commands that mean one run."""
READS = sorted(name for name, row in TABLE.items() if row.ended == 0 and name != "down")


class Told(NamedTuple):
    """Exit code and output of a command."""

    code: int
    out: str
    err: str


Call = Callable[..., Told]


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Call:
    """Run a command in this process, in an empty directory."""
    monkeypatch.chdir(tmp_path)

    def run(*words: str) -> Told:
        monkeypatch.setattr(sys, "argv", ["rolloutmq", *words])
        out, err, code = io.StringIO(), io.StringIO(), 0
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            try:
                cli.main()
            except SystemExit as ended:
                code = ended.code if isinstance(ended.code, int) else 0
        told = Told(code, out.getvalue(), err.getvalue())
        assert "Traceback" not in told.err + told.out
        return told

    return run


def parameters(group: Any, path: str = "") -> dict[str, Any]:
    """Return the parameters of every command, by its full name."""
    found: dict[str, Any] = {}
    for name, command in group.commands.items():
        full = f"{path} {name}".strip()
        found |= parameters(command, full) if hasattr(command, "commands") else {full: command.params}
    return found


COMMANDS = parameters(typer.main.get_command(cli.app))


def ended(root: Path) -> RunLayout:
    """Leave what a run that ended in order leaves: one group of two was trained."""
    root.mkdir(parents=True)
    made = Handmade(root)
    layout = made.layout
    write_json(
        layout.config, validate({"environment": {"sort3": {"entry": "a:B"}}, "run": {"dir": str(root)}})
    )
    lease = made.lease([1, 2])
    made.log(began(), [made.accept(1), made.accept(2)], [lease, settles(lease, "g1", filtered=("g2",))])
    made.trained(batch(1, "g1", filtered=("g2",)))
    layout.summary.write_text('{"ended": "the trainer is done", "wall_s": 2.5, "steps": 1}')
    layout.metrics.write_text('{"t": 1.0, "topic": "step", "number": 1}\n')
    layout.logs.mkdir(exist_ok=True)
    layout.log("broker").write_text("started\n")
    layout.log("up").touch()
    return layout


def test_the_table_has_every_command() -> None:
    assert COMMANDS.keys() == TABLE.keys() | WITHOUT_RUN | PROCESSES | SERVERS


def test_every_command_names_its_run_in_one_way() -> None:
    for name, params in COMMANDS.items():
        options = {option for param in params for option in param.opts}
        names_run = name in TABLE or name in PROCESSES or "--run-dir" in options
        assert not names_run or {"--run-dir", "-r"} <= options, name
        if name in TABLE:
            takes = any(param.name == "run_dir" and param.opts == ["run_dir"] for param in params)
            assert takes == TABLE[name].takes_argument, name


def test_every_command_that_prints_facts_prints_them_as_json() -> None:
    for name in (TABLE.keys() - WITHOUT_JSON) | {"up", "try", "check", "simulate", "compare"}:
        assert "--json" in {option for param in COMMANDS[name] for option in param.opts}, name


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_wrong_option_is_code_2(call: Call, name: str) -> None:
    told = call(*name.split(), "--no-such-option")
    assert (told.code, told.out) == (2, "")
    assert "No such option" in told.err


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_run_that_is_not_there_is_code_1_and_one_line(call: Call, name: str) -> None:
    row = TABLE[name]
    for named, why in ((("-r", "nowhere"), "nowhere has no run"), ((), "runs/ has no active run")):
        told = call(*row.words, *named)
        assert (told.code, told.out) == (1, ""), told
        assert why in told.err
        assert told.err.count("\n") == 1


@pytest.mark.parametrize("name", sorted(TABLE))
def test_a_run_that_has_ended(call: Call, name: str) -> None:
    """However it is named: in both options, as the argument, and by default where a command reads."""
    row = TABLE[name]
    ended(Path("runs/mine"))
    ways: list[tuple[str, ...]] = [("-r", "runs/mine"), ("--run-dir", "runs/mine")]
    ways += [("runs/mine",)] if row.takes_argument else []
    ways += [()] if name in READS else []
    told = [call(*row.words, *way) for way in ways]
    assert {one.code for one in told} == {row.ended}, told
    assert len({one.out for one in told}) == 1
    if name in {"drain", "restart", "scale", "set", "cordon", "uncordon", "dead requeue"}:
        assert all("runs/mine has ended (the trainer is done)" in one.err for one in told)


@pytest.mark.parametrize("name", sorted(TABLE.keys() - WITHOUT_JSON))
def test_the_json_of_a_run_that_has_ended_parses(call: Call, name: str) -> None:
    row = TABLE[name]
    ended(Path("runs/mine"))
    told = call(*row.words, "-r", "runs/mine", "--json")
    assert told.code == row.ended
    if row.ended == 0:
        assert json.loads(told.out) is not None


def test_two_runs_are_not_one(call: Call) -> None:
    ended(Path("runs/mine"))
    for name, row in TABLE.items():
        if row.takes_argument:
            told = call(*row.words, "runs/mine", "-r", "runs/other")
            assert told.code == 2, name
            assert "names another run" in told.err


def test_watching_changes_nothing(call: Call) -> None:
    layout = ended(Path("runs/mine"))
    layout.dead.mkdir(exist_ok=True)
    before = {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()}
    for name in READS:
        assert call(*TABLE[name].words).code == 0
    assert {path: path.read_bytes() for path in layout.root.rglob("*") if path.is_file()} == before


def test_a_run_whose_broker_was_started_by_hand_has_ended_too(call: Call) -> None:
    """Nobody recorded its end; `tail` and `top` waited for events for ever."""
    layout = ended(Path("runs/mine"))
    for path in (layout.summary, layout.log("up")):
        path.unlink()
    why = "its broker, which was started by hand, has ended"
    for name in ("status", "workers", "top", "report"):
        told = call(*TABLE[name].words)
        assert told.code == 0, told
        assert why in told.out
    told = call("tail", "step")
    assert (told.code, json.loads(told.out)["topic"]) == (0, "step")
    assert why in told.err
    told = call("scale", "sort3", "2", "-r", "runs/mine")
    assert "so there is nothing to change: `rolloutmq broker --run-dir runs/mine` continues it" in told.err


def test_an_ended_run_has_no_weights_to_verify(call: Call) -> None:
    ended(Path("runs/mine"))
    told = call("doctor", "--weights", "-r", "runs/mine")
    assert told.code != 0
    assert "has ended (the trainer is done), so it shares no weights: " in told.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("logs", "sort3-9"), 1),
        (("explain", "g9"), 1),
        (("dead", "show", "g9"), 1),
        (("tail", "nonsense"), 2),
        (("ratings", "--metric", "nonsense"), 2),
        (("scale", "sort3", "many"), 2),
    ],
)
def test_a_name_is_wrong_by_itself_or_on_this_run(call: Call, words: tuple[str, ...], code: int) -> None:
    ended(Path("runs/mine"))
    told = call(*words)
    assert (told.code, told.out) == (code, "")
    assert told.err


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("drain", "nobody-0"), 1),
        (("restart", "nobody-0"), 6),
        (("cordon", "GPU-9"), 1),
        (("scale", "nowhere", "2"), 2),
        (("scale", "sort3", "2"), 6),
        (("set", "nothing=1"), 2),
        (("set", "broker.lease_s=60"), 0),
        (("dead", "requeue", "--all"), 0),
        (("down",), 1),
    ],
)
def test_orders_to_an_active_run(call: Call, words: tuple[str, ...], code: int) -> None:
    """Its broker was started by hand: no orchestrator confirms an order."""
    layout = active(Path("runs/mine"))
    with running_broker(read_run(layout.root)[0], layout):
        told = call(*words, "--json")
    assert told.code == code, told
    assert bool(told.err) == (code != 0)
    if told.out:
        assert json.loads(told.out)["code"] == code
    else:
        assert code in {1, 2}


def test_looking_at_an_active_run(call: Call) -> None:
    layout = active(Path("runs/mine"))
    with running_broker(read_run(layout.root)[0], layout):
        for words in (("status",), ("workers",), ("report",), ("ledger", "verify"), ("dead", "list")):
            plain = call(*words)
            assert plain.code == 0, plain
            assert plain.out
            assert json.loads(call(*words, "-r", "runs/mine", "--json").out) is not None
        assert "ended      not yet" in call("report").out
        assert not layout.summary.exists()
    assert "its broker, which was started by hand, has ended" in call("status").out


def active(root: Path) -> RunLayout:
    """Configure a run with an environment and a trainer of one's own."""
    root.mkdir(parents=True)
    layout = RunLayout(root)
    about = {"environment": {"sort3": {"entry": "a:B"}}, "trainer": {"enabled": False}}
    write_json(layout.config, validate({**about, "run": {"dir": str(root)}}))
    return layout
