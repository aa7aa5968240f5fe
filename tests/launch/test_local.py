"""A launcher ends in order or at once, but always puts away what it started and says what became of it.

The processes are stand-ins of a few lines that signal their launcher: this process.
"""

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.bus.producer.test_spool_file import as_version as spool_as_version
from tests.bus.producer.test_spool_file import filled
from tests.services.broker.journal.handmade import Handmade, began, make_group
from tests.services.broker.journal.other_versions import as_version, listing

from rolloutmq import Consumer, Producer
from rolloutmq.bus.producer.spool_file import SpoolFile
from rolloutmq.bus.rundir import write_json
from rolloutmq.launch import local, results
from rolloutmq.launch.endings import UserCodeError
from rolloutmq.launch.preflight.checks import Examined
from rolloutmq.launch.settings import load, validate
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RecordVersionError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, ProcessSpec, Role
from rolloutmq.schemas.wire.health import HealthFinding
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.monitor.live.run_state import RunState
from rolloutmq.services.monitor.live.top import PlainView
from rolloutmq.services.process import logbook

ALONE = ["orchestrator.enabled=false"]  # the run has no environment
PRELUDE = """
import os, signal, sys, time
from pathlib import Path
run_dir, launcher = Path(sys.argv[1]), os.getppid()
"""


@pytest.fixture(autouse=True)
def hangup() -> Iterator[None]:
    """As without nohup, whoever started the tests under it."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


class Run:
    """A run of stand-ins, and the reasons for which it was concluded."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> None:
        self.layout = RunLayout(run_dir)
        self.concluded: list[str] = []
        self._specs: list[ProcessSpec] = []
        monkeypatch.setattr(local, "plan", lambda *_: self._specs)
        monkeypatch.setattr(local, "conclude", self.conclude)

    def add(self, role: Role, script: str, *, observer: bool = False) -> None:
        """Let the run have a process of this role."""
        argv = (sys.executable, "-c", PRELUDE + script, str(self.layout.root))
        log = str(self.layout.log(role.value))
        spec = ProcessSpec(name=role.value, role=role, argv=argv, log=log, observer=observer)
        self._specs.append(spec)

    def conclude(
        self, _config: RunConfig, _layout: RunLayout, reason: str, *, picture: bool, as_json: bool
    ) -> None:
        assert (picture, as_json) == (True, False)
        self.concluded.append(reason)

    def up(self, *assignments: str, as_json: bool = False) -> int:
        config = load(None, environ={}, assignments=[f'run.dir="{self.layout.root}"', *ALONE, *assignments])
        return local.up(config, local.UpOptions(plain=True, as_json=as_json))


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, run_dir: Path) -> Run:
    return Run(monkeypatch, run_dir)


def test_a_second_signal_kills_and_leaves_nothing(run: Run) -> None:
    run.add(
        Role.BROKER,
        "(run_dir / 'sockets').mkdir(mode=0o700)\n"
        "(run_dir / 'sockets' / 'serve').touch()\n"
        "(run_dir / 'endpoints.json').touch()\n"
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(launcher, signal.SIGINT))\n"
        "os.kill(launcher, signal.SIGINT)\n"
        "while True: time.sleep(60)\n",
    )
    assert run.up() == 130
    assert run.concluded == ["killed by a second signal"]
    assert [path.name for path in run.layout.sockets.iterdir()] == ["lock"]
    assert not run.layout.endpoints.exists()
    assert not run.layout.owner.exists()


def test_a_second_signal_lets_the_broker_save_its_queue(run: Run) -> None:
    run.add(
        Role.BROKER,
        "def save(*_):\n"
        "    (run_dir / 'saved.rmq').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "(run_dir / 'handler').touch()\n"
        "while True: time.sleep(60)\n",
    )
    run.add(
        Role.TRAINER,
        "signal.signal(signal.SIGTERM, lambda *_: os.kill(launcher, signal.SIGINT))\n"
        "while not (run_dir / 'handler').exists(): time.sleep(0.01)\n"
        "os.kill(launcher, signal.SIGINT)\n"
        "while True: time.sleep(60)\n",
    )
    assert run.up() == 130
    assert run.concluded == ["killed by a second signal"]
    assert run.layout.saved.exists()


def test_what_a_broker_reserved_that_is_killed_at_the_end_goes_back(run: Run) -> None:
    run.add(
        Role.BROKER,
        "from rolloutmq.services.broker.server import main\nsys.exit(main(run_dir))\n",
    )
    run.add(
        Role.TRAINER,
        "from rolloutmq.bus.transport.endpoint import read_endpoints\n"
        "def kill(*_):\n"
        "    os.kill(read_endpoints(run_dir).pid, signal.SIGKILL)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, kill)\n"
        "while not list((run_dir / 'journal').glob('groups-*')) or not read_endpoints(run_dir): time.sleep(0.01)\n"
        "os.kill(launcher, signal.SIGINT)\n"
        "while True: time.sleep(60)\n",
    )
    assert run.up() == 130
    assert not run.layout.endpoints.exists()
    # A broker that ends in order begins a second log.
    assert [path.name for path in run.layout.journal.iterdir()] == ["events-00000001.rmq"]


def test_no_signal_tears_the_summary(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        signal.raise_signal(signal.SIGINT)
        run.concluded.append("whole")

    monkeypatch.setattr(local, "conclude", interrupted)
    run.add(Role.TRAINER, "")
    assert run.up() == 0
    assert run.concluded == ["whole"]
    assert not run.layout.owner.exists()


def test_an_end_that_lasts_says_what_it_waits_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "END_TOLD_S", 0.05)
    run.add(
        Role.BROKER,
        "def slow(*_):\n"
        "    while not (run_dir / 'told').exists(): time.sleep(0.01)\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, slow)\n"
        "os.kill(launcher, signal.SIGINT)\n"
        "while True: time.sleep(60)\n",
    )
    said: list[str] = []

    def write(line: str) -> None:
        said.append(line)
        if line.startswith("ending"):
            (run.layout.root / "told").touch()

    view = PlainView(RunState.of(load(None, environ={})), write)
    monkeypatch.setattr(local, "make_view", lambda *_, **__: view)
    assert run.up() == 130
    assert run.concluded == ["interrupted by SIGINT"]
    (told,) = {line.rpartition(", killed in ")[0] for line in said if line.startswith("ending")}
    assert told == "ending, waits for: broker saves the queued groups"
    assert view.board.notice == "", "the last frame stays on the terminal"


def test_further_requests_of_down_join_the_first(run: Run) -> None:
    run.add(
        Role.BROKER,
        "def again(*_):\n"
        "    os.kill(launcher, signal.SIGUSR1)\n"
        "    os.kill(launcher, signal.SIGTERM)  # the first one that is not of `down`\n"
        "    (run_dir / 'saved.rmq').touch()\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, again)\n"
        "os.kill(launcher, signal.SIGUSR1)\n"
        "while True: time.sleep(60)\n",
    )
    assert run.up() == 130
    assert run.concluded == ["interrupted by down"]
    assert run.layout.saved.exists()


def test_down_can_read_what_a_lasting_end_waits_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "END_TOLD_S", 0.05)
    run.add(
        Role.BROKER,
        "def slow(*_):\n"
        "    while not (run_dir / 'ending.json').exists(): time.sleep(0.01)\n"
        "    (run_dir / 'ending.json').rename(run_dir / 'read')\n"
        "    sys.exit(0)\n"
        "signal.signal(signal.SIGTERM, slow)\n"
        "os.kill(launcher, signal.SIGUSR1)\n"
        "while True: time.sleep(60)\n",
    )
    assert run.up() == 130
    assert "waits for: broker saves the queued groups" in (run.layout.root / "read").read_text()
    assert not run.layout.ending.exists()


def test_views_can_read_that_telemetry_crashes_on_and_on(run: Run) -> None:
    """It is restarted for ever, and does not live most of the time: no view would say what is missing."""
    run.add(Role.TELEMETRY, "sys.exit('error: port 9 is taken')\n", observer=True)
    run.add(
        Role.BROKER,
        "found = run_dir / 'crashes.json'\n"
        "while not (found.exists() and b'\"crashes\":2' in (text := found.read_bytes()).replace(b' ', b'')):\n"
        "    time.sleep(0.01)\n"
        "(run_dir / 'read').write_bytes(text)\n"
        "os.kill(launcher, signal.SIGUSR1)\n"
        "signal.pause()\n",
    )
    assert run.up("orchestrator.backoff_s=0.01") == 130
    (told,) = json.loads((run.layout.root / "read").read_bytes())
    assert (told["name"], told["crashes"]) == ("telemetry", 2)
    assert told["reason"] == "exit code 1: error: port 9 is taken"
    assert not run.layout.crashes.exists(), "it ends with the run"


def test_a_hangup_ends_the_run_in_order(run: Run) -> None:
    run.add(Role.TRAINER, "os.kill(launcher, signal.SIGHUP)\ntime.sleep(60)\n")
    assert run.up() == 130
    assert run.concluded[0].endswith("SIGHUP")


def test_under_nohup_a_hangup_is_nothing(run: Run) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    run.add(Role.TRAINER, "os.kill(launcher, signal.SIGHUP)\n")
    assert run.up() == 0
    assert run.concluded == ["the trainer is done"]


def test_logs_of_services_are_kept_short(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of a worker is left to the orchestrator."""
    monkeypatch.setattr(logbook, "LOOK_S", 0.01)
    run.layout.logs.mkdir()
    run.layout.log("env-0").write_bytes(bytes(1 << 17))
    run.add(
        Role.TRAINER,
        "print('x' * (1 << 16), flush=True)\n"
        "while not (run_dir / 'logs' / 'trainer.log.1').exists(): time.sleep(0.01)\n"
        "print('after the cut', flush=True)\n",
    )
    assert run.up("run.log_bytes=65536") == 0
    assert run.layout.log("trainer").read_text().endswith("after the cut\n")
    assert run.layout.log("env-0").stat().st_size == 1 << 17


def dead_launcher() -> ProcessIdentity:
    return ProcessIdentity(
        name="up", role=Role.LAUNCHER, pid=os.getpid(), start_ticks=1, boot_id="gone", marker="token"
    )


def test_a_run_of_another_version_is_not_gone_on_with(run: Run) -> None:
    made = Handmade(run.layout.root)
    made.log(began(), [made.accept(1)])
    for path in made.journal.iterdir():
        as_version(path, 2)
    write_json(run.layout.owner, dead_launcher())
    (run.layout.root / "run.lock").touch()
    before = listing(run.layout.root)
    run.add(Role.TRAINER, "(run_dir / 'started').touch()")
    config = load(None, environ={}, assignments=[f'run.dir="{run.layout.root}"', *ALONE])
    with pytest.raises(RecordVersionError, match="got version 2"):
        local.up(config, local.UpOptions(resume=True, plain=True))
    assert listing(run.layout.root) == before
    assert not (run.layout.root / "started").exists()
    assert run.concluded == []


def test_spools_of_another_version_stop_a_resume_before_it_begins(run: Run) -> None:
    path = run.layout.spools / "env-0"
    SpoolFile(path, filled()).leave()
    spool_as_version(path, 1)
    (run.layout.root / "run.lock").touch()
    before = listing(run.layout.root)
    config = load(None, environ={}, assignments=[f'run.dir="{run.layout.root}"', *ALONE])
    with pytest.raises(RecordVersionError, match=r"env-0.*got version 1.*move the file away"):
        local.up(config, local.UpOptions(resume=True, plain=True))
    assert listing(run.layout.root) == before


def test_failures_and_advice_are_told_before_anything_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def claimed(*_: object, **__: object) -> None:
        raise RecordVersionError("here", 1, 2)

    failure, advice = (
        UserCodeError("environment.a", "is slow"),
        UserCodeError("environment.b", "mind it", "b.py:1"),
    )
    monkeypatch.setattr(local, "check", lambda *_, **__: Examined(failures=(failure,), advice=(advice,)))
    monkeypatch.setattr(local, "claimed", claimed)
    with pytest.raises(RecordVersionError):
        local.up(RunConfig(), local.UpOptions())
    said = capsys.readouterr().err
    assert said == "warning: environment.a: is slow\nadvice: environment.b: mind it\n\n    b.py:1\n\n"


async def test_a_run_is_over_once_its_own_trainer_has_taken_the_steps_and_left(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    config = load(None, environ={}, assignments=["trainer.enabled=false", "trainer.steps=2"])
    with running_broker(config, layout):
        over = asyncio.create_task(local.trained(layout, 2))
        async with (
            Producer.open(run_dir, env="mine", producer="p", group_size=2, slots=4) as producer,
            Consumer.open(run_dir, sequences=2) as consumer,
        ):
            for name in ("a", "b", "c"):
                await producer.send(make_group(name))
            async for batch in consumer:
                assert not over.done()
                await batch.ack()
            assert consumer.version.step == 2
            await asyncio.sleep(0)
            assert not over.done(), "it may still write a checkpoint"
        assert await asyncio.wait_for(over, 60.0) == local.DONE


def test_only_a_trainer_of_ones_own_with_steps_ends_a_run(
    monkeypatch: pytest.MonkeyPatch, run_dir: Path
) -> None:
    async def trained(_: RunLayout, steps: int) -> local.Ending:
        return local.Ending(0, f"{steps} steps")

    monkeypatch.setattr(local, "trained", trained)
    for assignments, reasons in (
        (["trainer.enabled=false", "trainer.steps=3"], ["3 steps"]),
        (["trainer.enabled=false"], ["interrupted by SIGINT"]),
    ):
        run = Run(monkeypatch, run_dir)
        stay = (
            "signal.pause()\n" if "3" in reasons[0] else "os.kill(launcher, signal.SIGINT)\nsignal.pause()\n"
        )
        run.add(Role.BROKER, stay)
        run.up(*assignments)
        assert run.concluded == reasons


def test_an_environment_that_ends_the_run_shows_the_exception_of_its_code(
    run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    last = "environment.bad: 20 rollouts in a row failed, the last with: ZeroDivisionError: division by zero"
    run.add(
        Role.ORCHESTRATOR,
        "(run_dir / 'failures').mkdir()\n"
        "(run_dir / 'failures' / 'bad.json').write_text('{\"error\": \"ZeroDivisionError: division by zero\", '\n"
        '    \'"where": "bad.py:16", "report": "bad.py:16: in score"}\')\n'
        f"print('error: environment.bad: all workers failed; bad-0: exit code 3: error: {last}', flush=True)\n"
        "sys.exit(3)\n",
    )
    assert run.up() == 1
    assert run.concluded == [last]
    assert capsys.readouterr().out.endswith(
        "\nlast error of environment bad: ZeroDivisionError: division by zero (bad.py:16)\n\n    bad.py:16: in score\n"
    )


@pytest.mark.parametrize(("finding", "code"), [("solved", 0), ("collapse", 1)])
def test_a_run_that_ends_on_a_finding_fails_unless_it_has_learned(finding: str, code: int) -> None:
    found = HealthFinding(env="math", at=0.0, finding=finding, problem="found", remedy="act")
    ending = local.StopOn(stopping_on([finding], "math")).take(found)
    assert ending == local.Ending(code, f"health.stop_on: {finding} of math: found; act")


def stopping_on(findings: list[str], *names: str, **sections: Any) -> RunConfig:
    own = {name: {"entry": "a:B"} for name in names} | sections
    return validate(
        {"environment": own, "health": {"stop_on": findings}, "evaluation": {"enabled": "held_out" in own}}
    )


def test_a_run_of_several_environments_ends_once_each_is_solved() -> None:
    def solved(env: str, *, ended: bool = False) -> HealthFinding:
        return HealthFinding(env=env, at=0.0, finding="solved", problem="found", remedy="act", ended=ended)

    held_out = {"split": "eval", "entry": "a:B", "min_workers": 1}
    unused = {"weight": 0.0, "entry": "a:B"}
    config = stopping_on(["solved"], "easy", "hard", held_out=held_out, unused=unused)
    findings = local.StopOn(config)
    assert findings.take(solved("easy")) is None
    assert findings.take(solved("easy")) is None, "told again while it lasts"
    assert findings.take(solved("easy", ended=True)) is None
    assert findings.take(solved("hard")) is None, "easy is solved no longer"
    why = "health.stop_on: solved of easy, hard, easy as the last: found; act"
    assert findings.take(solved("easy")) == local.Ending(0, why)


def test_trouble_in_one_of_several_environments_ends_the_run() -> None:
    findings = local.StopOn(stopping_on(["solved", "collapse"], "easy", "hard"))
    trouble = HealthFinding(env="hard", at=0.0, finding="collapse", problem="found", remedy="act")
    assert findings.take(msgspec.structs.replace(trouble, finding="drift")) is None
    assert findings.take(msgspec.structs.replace(trouble, ended=True)) is None
    assert findings.take(trouble) == local.Ending(1, "health.stop_on: collapse of hard: found; act")


def test_for_a_program_each_line_is_json_and_the_last_one_the_end(
    run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(local, "conclude", results.conclude)
    run.add(Role.TRAINER, "time.sleep(0.1)")
    assert run.up("gateway.enabled=true", "gateway.port=0", as_json=True) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["event"] for one in told[:3]] == ["serving", "dashboard", "progress"]
    assert told[0]["url"].startswith("http://127.0.0.1:")
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=[\w-]{43}", told[1]["url"])
    assert (told[2]["step"], told[2]["reward"], told[2]["workers"]) == (0, None, {})
    assert (told[-1]["event"], told[-1]["summary"]["ended"]) == ("end", "the trainer is done")
    assert {one["event"] for one in told} <= {"serving", "dashboard", "progress", "notice", "end"}
