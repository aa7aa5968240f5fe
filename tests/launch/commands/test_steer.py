"""Commands that steer a living run reach its broker, or say in one line what is wrong."""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch import rundir
from rolloutmq.launch.commands import steer
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import ConfigError, RunDirInUseError, UsageError
from rolloutmq.schemas.files import (
    EndNotice,
    RestartOutcome,
    RunLayout,
    Supervision,
    Target,
    WorkerRecord,
)
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply, WorkerBeat, WorkerState
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.monitor.status import confirmation, orchestrator_view
from rolloutmq.services.monitor.text.exit_codes import FAILED, UNCONFIRMED
from rolloutmq.services.process.identity import MARKER, identify

LAUNCHER = """
import signal, sys, time
from pathlib import Path
root, seen = Path(sys.argv[1]), []
for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
    signal.signal(number, lambda number, _: seen.append(number))
(root / "ready").touch()
while not (root / "end").exists() and set(seen) != {signal.SIGTERM, signal.SIGINT}:
    time.sleep(0.01)
sys.exit(len({*seen} - {signal.SIGUSR1}))
"""
"""A launcher that ends at a file, or at once after two signals; its exit code is their number, without `down`'s."""
WAIT_S = 60.0


@pytest.fixture
def launcher(run_dir: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """The launcher of a run, as a process of its own."""
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({}))
    with subprocess.Popen([sys.executable, "-c", LAUNCHER, str(run_dir)]) as process:
        wait_until((run_dir / "ready").exists)
        write_json(layout.owner, identify("up", Role.LAUNCHER, process.pid, "t"))
        yield process
        process.kill()


def wait_until(holds: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not holds():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    """The broker of a run with one environment, `sort3`."""
    config = validate({"environment": {"sort3": {"entry": "env.py:Env"}}})
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with running_broker(config, layout) as broker:
        yield broker


def status(broker: Broker) -> Pressure:
    with BlockingClient(broker.endpoints.serve) as client:
        reply = client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure


def wanted(broker: Broker) -> dict[str, int | None]:
    return status(broker).wanted


def beat(broker: Broker, worker: str, state: WorkerState, *, pid: int = os.getpid(), error: str = "") -> None:
    with BlockingClient(broker.endpoints.serve) as client:
        client.request(WorkerBeat(worker=worker, env="sort3", state=state, pid=pid, error=error))


@contextmanager
def orchestrator(broker: Broker, run_dir: Path, most: int = 6, *, hangs: bool = False) -> Iterator[None]:
    """Report as an orchestrator that takes what the broker tells, at most so many workers."""
    ended, layout = threading.Event(), RunLayout(run_dir)
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "t/orchestrator")

    def write(*targets: Target) -> None:
        workers = tuple(
            WorkerRecord(
                worker=one.worker,
                env=one.env,
                phase={WorkerState.FAILED: "fatal"}.get(one.state, "stopping" if one.draining else "running"),
                since=0.0,
                pid=one.pid,
            )
            for one in status(broker).workers
        )
        restarts = {
            one.order: RestartOutcome(
                done=one.pid == os.getpid(), text="killed" if one.at_once else "draining"
            )
            for one in status(broker).restarts
        }
        engines = next((one for one in targets if one.env == "inference"), None)
        rest = tuple(one for one in targets if one is not engines)
        report = Supervision(
            settings=status(broker).settings,
            orchestrator=me,
            at=time.monotonic(),
            targets=rest,
            engines=engines,
            workers=workers,
            restarts=restarts,
        )
        write_json(layout.supervision, report)

    def run() -> None:
        while not ended.wait(0.02):
            write(
                *(
                    Target(
                        env=env,
                        target=min(count or 1, most),
                        current=1,
                        reason=f"1 to {most} allowed",
                        wanted=count,
                    )
                    for env, count in wanted(broker).items()
                )
            )

    write()
    thread = threading.Thread(target=run)
    if not hangs:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        if not hangs:
            thread.join()


def test_a_number_of_workers_is_asked_for_and_given_back(
    broker: Broker, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with orchestrator(broker, run_dir):
        assert steer.scale(run_dir, "sort3", 3) == 0
        assert wanted(broker) == {"sort3": 3}
        assert steer.scale(run_dir, "sort3", None) == 0
        assert wanted(broker) == {"sort3": None}
        assert steer.scale(run_dir, "sort3", 99) == 0
    assert capsys.readouterr().out.splitlines() == [
        "sort3: pinned to 3 workers",
        "sort3: autoscaling",
        "sort3: 6 workers, not 99: 1 to 6 allowed",
    ]


def test_an_order_that_no_orchestrator_confirms_is_kept_and_told(
    broker: Broker, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(confirmation, "CONFIRM_S", 0.1)
    assert steer.scale(run_dir, "sort3", 3) == UNCONFIRMED
    assert wanted(broker) == {"sort3": 3}
    assert capsys.readouterr().err == (
        "error: sort3: pinned to 3 workers: kept, but not confirmed: no orchestrator runs\n"
    )
    with orchestrator(broker, run_dir, hangs=True):
        assert steer.scale(run_dir, "sort3", 4) == UNCONFIRMED
    assert capsys.readouterr().err == (
        "error: sort3: pinned to 4 workers: kept, but not confirmed: the orchestrator did not carry it out within "
        "0.1 s\n"
    )
    write_json(RunLayout(run_dir).owner, identify("up", Role.LAUNCHER, os.getpid(), "t"))
    off = {"environment": {"sort3": {"entry": "env.py:Env"}}, "orchestrator": {"enabled": False}}
    monkeypatch.setattr(confirmation, "CONFIRM_S", 1e6)
    write_json(RunLayout(run_dir).config, validate(off))
    assert steer.scale(run_dir, "sort3", 2) == UNCONFIRMED, "at once"
    assert capsys.readouterr().err.endswith("no orchestrator runs (orchestrator.enabled is false)\n")
    monkeypatch.setattr(orchestrator_view, "SILENT_S", 0.0)
    assert steer.scale(run_dir, "sort3", 5) == UNCONFIRMED
    assert "not confirmed: the orchestrator is not heard for 0:0" in capsys.readouterr().err


def test_bounds_of_workers_are_set_and_confirmed(
    broker: Broker, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with orchestrator(broker, run_dir):
        assert steer.set_values(run_dir, ["env.sort3.max_workers=9", "env.sort3.weight=2"]) == 0
    assert capsys.readouterr().out == "environment.sort3.max_workers = 9\nenvironment.sort3.weight = 2.0\n"
    assert steer.set_values(run_dir, ["env.sort3.weight=3"]) == 0, "the broker alone applies it"
    assert steer.set_values(run_dir, ["env.sort3.max_workers=8"]) == UNCONFIRMED
    assert "environment.sort3.max_workers = 8: kept, but not confirmed" in capsys.readouterr().err
    with pytest.raises(ConfigError, match="min_workers must not exceed max_workers 8"):
        steer.set_values(run_dir, ["env.sort3.min_workers=9"])


def test_a_drain_is_confirmed_by_the_orchestrator_of_the_worker(
    broker: Broker, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(broker, "sort3-0", WorkerState.READY)
    assert steer.drain(run_dir, "sort3-0") == 0, "nobody supervises it"
    with orchestrator(broker, run_dir):
        assert steer.drain(run_dir, "sort3-0") == 0
    assert [one.worker for one in status(broker).workers if one.draining] == ["sort3-0"]
    assert capsys.readouterr().out == "draining sort3-0\n" * 2
    monkeypatch.setattr(confirmation, "CONFIRM_S", 0.1)
    with orchestrator(broker, run_dir, hangs=True):
        assert steer.drain(run_dir, "sort3-0") == UNCONFIRMED
    assert "drain of sort3-0: kept, but not confirmed" in capsys.readouterr().err


def test_names_that_the_run_does_not_know_are_refused(broker: Broker, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"sort4: unknown environment; this run has: sort3"):
        steer.scale(run_dir, "sort4", 3)
    with pytest.raises(UsageError, match=r"^sort3-9: no such worker; `rolloutmq workers` lists"):
        steer.drain(run_dir, "sort3-9")
    assert wanted(broker) == {}


def test_numbers_beyond_every_limit_are_refused_by_their_name(broker: Broker, run_dir: Path) -> None:
    most, largest, key = 10_000, 1 << 62, "env.sort3.max_workers"
    with pytest.raises(ConfigError, match=rf"^count: must be at most {most} \(got {10**20}\)"):
        steer.scale(run_dir, "sort3", 10**20)
    for value, problem in {
        10**18: rf"max_workers: must be less than or equal to {most}",
        10**23: rf"max_workers: must be at most {largest}",
        -(10**23): rf"max_workers: must be at least -{largest}",
    }.items():
        with pytest.raises(ConfigError, match=rf"{problem} \(got {value}\)"):
            steer.set_values(run_dir, [f"{key}={value}"])
    assert (wanted(broker), status(broker).settings) == ({}, {})


def test_a_restart_is_for_the_process_that_the_orchestrator_reports(
    broker: Broker, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(broker, "sort3-0", WorkerState.READY)
    with orchestrator(broker, run_dir):
        assert steer.restart(run_dir, "sort3-0") == 0
        assert steer.restart(run_dir, "sort3-0", at_once=True) == 0
        assert steer.restart(run_dir, "sort3-7") == FAILED, "no process of it is known"
    printed = capsys.readouterr()
    assert printed.out == "sort3-0: draining\nsort3-0: killed\n"
    assert printed.err == "error: sort3-7: draining\n"
    assert [one.pid for one in status(broker).restarts] == [os.getpid(), os.getpid(), 0]
    monkeypatch.setattr(confirmation, "CONFIRM_S", 0.1)
    with orchestrator(broker, run_dir, hangs=True):
        assert steer.restart(run_dir, "sort3-0") == UNCONFIRMED
    assert "restart of sort3-0: kept for a minute, but not confirmed" in capsys.readouterr().err


def test_the_first_engine_is_the_launchers(run_dir: Path) -> None:
    with pytest.raises(UsageError, match=r"^inference: is the first engine, which the launcher runs"):
        steer.restart(run_dir, "inference")


def test_a_worker_that_crashes_before_it_drains_is_told(
    broker: Broker, run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    beat(broker, "sort3-0", WorkerState.READY)
    monkeypatch.setattr(steer, "_require_process", lambda *_: None)  # it looked before the crash
    with orchestrator(broker, run_dir):
        beat(broker, "sort3-0", WorkerState.FAILED)
        assert steer.drain(run_dir, "sort3-0") == FAILED
    printed = capsys.readouterr()
    assert printed.err == "error: sort3-0: is fatal, so nothing drains; use `rolloutmq restart sort3-0`\n"


def supervised(run_dir: Path, phase: str, **about: Any) -> None:
    """Write what the orchestrator, which is this process, knows of the worker."""
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), os.environ.get(MARKER, ""))
    record = WorkerRecord(worker="sort3-0", env="sort3", phase=phase, since=time.monotonic(), **about)
    write_json(RunLayout(run_dir).supervision, Supervision(orchestrator=me, workers=(record,)))


@pytest.mark.parametrize(
    ("phase", "about", "told"),
    [
        ("fatal", {"reason": "crashed 5 times"}, r"nothing to drain \(fatal; crashed 5 times\)"),
        (
            "waiting",
            {"crashes": 2, "reason": "exit code 1: no"},
            r"waiting; after crash 2 in a row; exit code 1",
        ),
        (
            "running",
            {"crashes": 2, "pid": 8, "reason": "exit code 1: no"},
            r"starting; after crash 2 in a row",
        ),
    ],
)
def test_a_worker_that_cannot_drain_is_not_said_to(
    broker: Broker, run_dir: Path, phase: str, about: dict[str, Any], told: str
) -> None:
    beat(broker, "sort3-0", WorkerState.READY, pid=7)
    supervised(run_dir, phase, **about)
    with pytest.raises(UsageError, match=told):
        steer.drain(run_dir, "sort3-0")
    assert not any(one.draining for one in status(broker).workers)


def test_a_failed_worker_without_an_orchestrator_cannot_drain(broker: Broker, run_dir: Path) -> None:
    beat(broker, "sort3-0", WorkerState.FAILED, error="it always raises")
    with pytest.raises(UsageError, match=r"worker sort3-0: nothing to drain \(failed; it always raises\)"):
        steer.drain(run_dir, "sort3-0")


def test_nothing_is_detached_into_the_directory_of_a_living_run(run_dir: Path) -> None:
    output = run_dir.with_name(f"{run_dir.name}.out")
    output.write_text("what the living run says")
    config = validate({"run": {"dir": str(run_dir)}})
    with rundir.claimed(run_dir, "token", resume=False), pytest.raises(RunDirInUseError, match="process"):
        steer.detach(config, ["up", "--detach"])
    assert output.read_text() == "what the living run says"


def test_down_says_that_there_was_nothing_to_stop(
    broker: Broker, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The broker was started by hand: no launcher knows of it."""
    assert steer.down(run_dir) == FAILED
    assert (
        "has no launcher, so nothing was stopped: its broker was started by hand" in capsys.readouterr().err
    )
    assert wanted(broker) == {}


def test_down_says_what_it_waits_for_and_a_second_one_joins(
    launcher: "subprocess.Popen[bytes]",
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    monkeypatch.setattr(steer, "_say", said.append)
    monkeypatch.setattr(steer, "END_LOOK_S", 0.01)
    write_json(RunLayout(run_dir).ending, EndNotice("ending, waits for: broker"))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(steer.down, run_dir)
        wait_until(lambda: len(said) == 1)
        second = pool.submit(steer.down, run_dir)
        wait_until(lambda: len(said) == 2)
        (run_dir / "end").touch()
        assert [first.result(WAIT_S), second.result(WAIT_S)] == [0, 0]
    assert said == ["ending, waits for: broker"] * 2 + [f"ended {run_dir}"] * 2
    assert launcher.wait(WAIT_S) == 0, "no request was a signal that kills"


def test_down_now_kills(launcher: "subprocess.Popen[bytes]", run_dir: Path) -> None:
    assert steer.down(run_dir, at_once=True) == 0
    assert launcher.wait(WAIT_S) == 2


def test_an_interrupted_down_says_that_the_end_goes_on(
    launcher: "subprocess.Popen[bytes]",
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def interrupted(_layout: RunLayout) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(steer, "END_LOOK_S", 0.01)
    monkeypatch.setattr(steer, "end_waits", interrupted)
    assert steer.down(run_dir) == 130
    assert (
        f"run {run_dir} is still ending; to kill it: rolloutmq down {run_dir} --now"
        in capsys.readouterr().err
    )
    assert launcher.poll() is None


def test_down_of_a_run_that_never_ran_fails(run_dir: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_json(RunLayout(run_dir).config, validate({}))
    assert steer.down(run_dir) == FAILED
    assert "is not active, so nothing was stopped" in capsys.readouterr().err


def test_down_puts_away_what_a_killed_run_left(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({}))
    layout.sockets.mkdir()
    for left in (layout.sockets / "serve", layout.endpoints):
        left.touch()
    assert steer.down(run_dir) == 0
    assert [path.name for path in layout.sockets.iterdir()] == ["lock"]
    assert not layout.endpoints.exists()


def test_engines_are_asked_for_like_workers_where_there_may_be_more(
    broker: Broker, run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match=r"inference\.max_engines: is 1; raise it"):
        steer.scale(run_dir, "inference", 2)
    assert wanted(broker) == {}
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({"inference": {"max_engines": 3}}))
    with orchestrator(broker, run_dir):
        assert steer.scale(run_dir, "inference", 2) == 0
        assert wanted(broker) == {"inference": 2}
        assert steer.scale(run_dir, "inference", None) == 0
        assert wanted(broker) == {"inference": None}
    assert capsys.readouterr().out == "inference: pinned to 2 inference servers\ninference: autoscaling\n"
    write_json(layout.config, validate({"inference": {"kind": "external", "url": "http://x/v1"}}))
    with pytest.raises(ConfigError, match=r"inference\.kind: is `external`: this run does not start"):
        steer.scale(run_dir, "inference", 2)


def test_down_says_that_a_run_was_dead_and_what_became_of_it(
    run_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, validate({}))
    me = identify("up", Role.LAUNCHER, os.getpid(), "t")
    write_json(layout.owner, msgspec.structs.replace(me, start_ticks=1))
    assert steer.down(run_dir) == 0
    told = capsys.readouterr().out
    assert f"was dead: its launcher, process {os.getpid()}, was killed; ended 0 remaining processes" in told
    assert "ended      its launcher was killed" in told
    assert not layout.owner.exists()
    assert layout.summary.exists()

    assert steer.down(run_dir) == 0
    assert "had already ended: its launcher was killed" in capsys.readouterr().out
