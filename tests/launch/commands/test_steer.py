"""Commands that steer a living run reach its broker, or say in one line what is wrong."""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.launch import rundir
from rolloutmq.launch.commands import steer
from rolloutmq.launch.settings import validate
from rolloutmq.schemas.errors import ConfigError, RefusedError, RunDirInUseError, UsageError
from rolloutmq.schemas.files import RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.process import Role
from rolloutmq.schemas.wire.control import GetStatus, StatusReply, WorkerBeat, WorkerState
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.monitor.text.exit_codes import FAILED
from rolloutmq.services.process.identity import MARKER, identify


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    """The broker of a run with one environment, `sort3`."""
    config = validate({"environment": {"sort3": {"entry": "env.py:Env"}}})
    layout = RunLayout(run_dir)
    write_json(layout.config, config)
    with running_broker(config, layout) as broker:
        yield broker


def wanted(broker: Broker) -> dict[str, int | None]:
    with BlockingClient(broker.endpoints.serve) as client:
        reply = client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure.wanted


def test_a_number_of_workers_is_asked_for_and_given_back(broker: Broker, run_dir: Path) -> None:
    assert steer.scale(run_dir, "sort3", 3) == 0
    assert wanted(broker) == {"sort3": 3}
    assert steer.scale(run_dir, "sort3", None) == 0
    assert wanted(broker) == {"sort3": None}


def test_names_that_the_run_does_not_know_are_refused(broker: Broker, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match=r"sort4: unknown environment; this run has: sort3"):
        steer.scale(run_dir, "sort4", 3)
    with pytest.raises(RefusedError, match="worker sort3-9 is not known"):
        steer.drain(run_dir, "sort3-9")
    assert wanted(broker) == {}


def beat(broker: Broker, pid: int, state: WorkerState, error: str = "") -> None:
    with BlockingClient(broker.endpoints.serve) as client:
        client.request(WorkerBeat(worker="sort3-0", env="sort3", state=state, pid=pid, error=error))


def supervised(run_dir: Path, phase: str, **about: Any) -> None:
    """Write what the orchestrator, which is this process, knows of the worker."""
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), os.environ.get(MARKER, ""))
    record = WorkerRecord(worker="sort3-0", env="sort3", phase=phase, since=time.monotonic(), **about)
    write_json(RunLayout(run_dir).supervision, Supervision(orchestrator=me, workers=(record,)))


def draining(broker: Broker) -> list[str]:
    with BlockingClient(broker.endpoints.serve) as client:
        reply = client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return [one.worker for one in reply.pressure.workers if one.draining]


def test_a_worker_that_works_is_drained(broker: Broker, run_dir: Path) -> None:
    beat(broker, 7, WorkerState.READY)
    supervised(run_dir, "running", pid=7)
    assert steer.drain(run_dir, "sort3-0") == 0
    assert draining(broker) == ["sort3-0"]


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
    beat(broker, 7, WorkerState.READY)
    supervised(run_dir, phase, **about)
    with pytest.raises(UsageError, match=told):
        steer.drain(run_dir, "sort3-0")
    assert draining(broker) == []


def test_a_failed_worker_without_an_orchestrator_cannot_drain(broker: Broker, run_dir: Path) -> None:
    beat(broker, 7, WorkerState.FAILED, "it always raises")
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
