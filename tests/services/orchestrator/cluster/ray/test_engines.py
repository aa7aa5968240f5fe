"""Engines on real Ray: workers of all nodes use one, and it survives its node, its relay and the orchestrator."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from tests.services.orchestrator.cluster.ray.nodes import Nodes, Run, directories, raylet_of, wait_until

from rolloutmq.bus.engine_registry import engines_of, placed_name
from rolloutmq.bus.shm.segment_file import PREFIX, SHM
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.process.identity import MARKER, find_marked, runs

Start = Callable[..., Run]

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]

NAME = placed_name(1)


def address(run: Run) -> InferenceAddress | None:
    """Return the address of the engine on the cluster."""
    return next((one for one in engines_of(run.layout) if one.name == NAME), None)


def works(run: Run, pid: int) -> bool:
    """Return whether workers use this process of the engine, with weights that follow the trainer."""
    found = address(run)
    return (
        found is not None
        and found.pid == pid
        and found.busy > 0.0
        and found.version is not None
        and found.version.step > 0
        and run.step - found.version.step < 20
    )


def another(run: Run, *before: int) -> int:
    """Wait for a process of the engine that is none of these, and that works; return its pid."""
    wait_until(lambda: run.engines().get(NAME, 0) not in {0, *before}, "a process of the engine")
    pid = run.engines()[NAME]
    wait_until(lambda: works(run, pid) or run.engines().get(NAME) != pid, "work for the engine")
    assert run.engines()[NAME] == pid, run.layout.log(NAME).read_text()
    return pid


def segments() -> set[Path]:
    """Return the memory shared on this machine."""
    return set(SHM.glob(f"{PREFIX}*"))


def test_an_engine_comes_back_after_the_loss_of_its_node(start: Start, nodes: Nodes) -> None:
    keys, shared = directories(), segments()
    run = start(
        *("trainer.steps=4000", "orchestrator.stable_s=3"),
        *("environment.sort3.max_workers=2", "inference.max_engines=2"),
    )
    run.progresses()
    assert run.command("scale", "inference", "2").returncode == 0
    first = another(run)
    place = run.engine_node(NAME)
    assert place
    status = run.command("status").stdout
    assert f"1 engine: {NAME}" in status, status
    assert f"placed   {NAME} on " in status, status
    assert "joined" not in status, status
    assert f"serving name={NAME}" in run.command("logs", NAME).stdout
    os.kill(raylet_of(first), signal.SIGKILL)
    second = another(run, first)
    assert run.engine_node(NAME) not in {"", place}
    wait_until(lambda: not runs(first), "the end of the lost engine")
    (relay,) = (
        pid
        for pid in find_marked(psutil.Process(second).environ()[MARKER])
        if "relay" in psutil.Process(pid).cmdline()
    )
    os.kill(relay, signal.SIGKILL)
    third = another(run, first, second)
    orchestrator = run.pid("orchestrator")
    os.kill(orchestrator, signal.SIGKILL)
    wait_until(lambda: run.pid("orchestrator") not in {orchestrator, 0}, "another orchestrator")
    run.progresses(10)
    assert run.engines() == {NAME: third}, "the next orchestrator takes it over"
    assert run.command("cordon", run.engine_node(NAME)).returncode == 0
    wait_until(lambda: any(one != third for one in run.engines().values()), "an engine on another node")
    wait_until(lambda: not runs(third), "the end of the drained engine")
    run.progresses(10)
    assert run.command("down").returncode == 0
    assert run.summary()["groups_lost"] == 0
    assert run.summary()["groups_trained_twice"] == 0
    assert run.command("ledger", "verify").returncode == 0
    assert "inference" not in nodes.asks("print(ray.util.list_named_actors(True))")
    assert directories() <= keys
    assert segments() <= shared
    assert not run.layout.cluster_engine_key.exists()


def test_an_engine_that_fits_nowhere_is_told(start: Start, nodes: Nodes) -> None:
    run = start(
        *("trainer.steps=4000", "environment.sort3.max_workers=2"),
        *("inference.max_engines=2", "inference.min_engines=2", "cluster.engine_cpus=64"),
    )
    told = "no_room: the cluster has no room for another engine: it needs 64 CPU; the largest node has 2 CPU"
    wait_until(lambda: run.layout.supervision.exists(), "the orchestrator")
    wait_until(lambda: run.supervision().limits.get("inference") == told, told)
    run.progresses()
    assert f"inference: {told}" in run.command("status").stdout
    assert "inference" not in nodes.asks("print(ray.util.list_named_actors(True))")
    assert run.command("down").returncode == 0
    assert run.command("ledger", "verify").returncode == 0
