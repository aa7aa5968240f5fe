"""The shell of supervision with real processes: restart, give up, end in order, remember."""

import asyncio
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest
import uvloop
from tests.services.orchestrator.children import (
    DRAINABLE,
    PATIENT,
    STUBBORN,
    spec,
    wait_for,
    wait_up,
)

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.process import ProcessIdentity, Restart
from rolloutmq.services.orchestrator.supervision.core import (
    KILL_LADDER,
    Backoff,
    Phase,
    ProcessView,
    drain_ladder,
    term_ladder,
)
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor, identities_of
from rolloutmq.services.process.child import adopt
from rolloutmq.services.process.identity import alive

TOKEN = f"keeper-{os.getpid()}"
QUICK = Backoff(first_s=0.01, max_s=0.05, crash_limit=3, stable_s=10.0)
ORDERLY = """
import signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
print('up', flush=True)
while True: signal.pause()
"""
"""Ends with 0 at SIGTERM."""
FAILS = "import sys; sys.stderr.write('error: no such environment\\n'); sys.exit(1)"


async def up(log: Path) -> None:
    await asyncio.to_thread(wait_up, log)


async def until(supervisor: Supervisor, name: str, phase: Phase) -> ProcessView:
    async with asyncio.timeout(30):
        await supervisor.until(lambda views: views[name].phase is phase)
    return supervisor.views()[name]


async def kill_one(tmp_path: Path) -> None:
    async with Supervisor(TOKEN, QUICK) as supervisor:
        supervisor.start(spec("w", PATIENT, tmp_path))
        first = supervisor.identity("w")
        assert first is not None
        os.kill(first.pid, 9)
        async with asyncio.timeout(30):
            await supervisor.until(lambda views: views["w"].restarts == 1)
        second = supervisor.identity("w")
        assert second is not None
        assert second.pid != first.pid
        assert supervisor.views()["w"].crashes == 1


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_a_killed_process_comes_back_as_another(
    loop: Callable[[], asyncio.AbstractEventLoop], tmp_path: Path
) -> None:
    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(kill_one(tmp_path))


async def test_a_crash_loop_ends_and_says_what_the_log_says(tmp_path: Path) -> None:
    async with Supervisor(TOKEN, QUICK) as supervisor:
        supervisor.start(spec("w", FAILS, tmp_path))
        view = await until(supervisor, "w", Phase.FATAL)
    assert view.restarts == 2
    assert view.reason.startswith("crashed 3 times in a row")
    assert view.reason.endswith("exit code 1: error: no such environment")


async def test_a_fatal_signal_is_told_with_the_place_of_the_code(tmp_path: Path) -> None:
    users = "import ctypes\n\ndef score():\n    ctypes.string_at(0)\n\nscore()\n"
    code = f"import faulthandler; faulthandler.enable(); exec(compile({users!r}, '/home/me/sums.py', 'exec'))"
    async with Supervisor(TOKEN, QUICK) as supervisor:
        supervisor.start(spec("w", code, tmp_path))
        view = await until(supervisor, "w", Phase.FATAL)
    assert view.reason.endswith("killed by SIGSEGV at /home/me/sums.py:4")


async def test_what_cannot_be_started_is_given_up_too(tmp_path: Path) -> None:
    async with Supervisor(TOKEN, QUICK) as supervisor:
        nowhere = spec("w", "", tmp_path)
        supervisor.start(type(nowhere)(name="w", role=nowhere.role, argv=("/nowhere",), log=nowhere.log))
        view = await until(supervisor, "w", Phase.FATAL)
    assert "cannot be started" in view.reason


async def test_work_that_is_done_is_not_done_again(tmp_path: Path) -> None:
    seen: list[Phase] = []
    async with Supervisor(TOKEN, QUICK, on_change=lambda view: seen.append(view.phase)) as supervisor:
        supervisor.start(spec("w", "raise SystemExit(0)", tmp_path, Restart.ON_FAILURE))
        await until(supervisor, "w", Phase.ENDED)
        supervisor.forget("w")
        assert supervisor.views() == {}
    assert seen == [Phase.RUNNING, Phase.ENDED]


async def test_the_ladder_is_gone_down_until_the_process_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    drained: list[tuple[str, str]] = []

    async with Supervisor(TOKEN, QUICK, drain=lambda *what: drained.append(what)) as supervisor:
        supervisor.start(spec("s", STUBBORN, tmp_path))
        supervisor.start(spec("d", DRAINABLE, tmp_path))
        await up(tmp_path / "s.log")
        await up(tmp_path / "d.log")
        async with asyncio.timeout(30):
            await supervisor.stop(["s"], drain_ladder(0.05, 0.1, 0.05), "enough")
            await supervisor.stop(["d"], drain_ladder(0.05, 60.0, 0.05), "enough")
        views = supervisor.views()
    assert drained == [("s", "enough"), ("d", "enough")]
    assert {view.phase for view in views.values()} == {Phase.ENDED}
    assert (views["d"].reason, views["s"].reason) == ("exit code 0", "killed by SIGKILL")
    steps = [line.split("step=")[1].split()[0] for line in caplog.messages if "name=s step=" in line]
    assert steps == ["drain", "SIGUSR1", "SIGTERM", "SIGKILL"]


async def test_a_stopped_process_still_ends_in_order(tmp_path: Path) -> None:
    """The kernel ends a stopped process at SIGTERM by itself, unless it has a handler."""
    async with Supervisor(TOKEN, QUICK) as supervisor:
        supervisor.start(spec("w", ORDERLY, tmp_path))
        await up(tmp_path / "w.log")
        identity = supervisor.identity("w")
        assert identity is not None
        os.kill(identity.pid, 19)
        async with asyncio.timeout(30):
            await supervisor.stop(["w"], term_ladder(60.0), "enough")
        assert supervisor.views()["w"].reason == "exit code 0"


async def test_the_file_lists_who_lives(tmp_path: Path) -> None:
    file = tmp_path / "processes.json"

    def listed() -> list[str]:
        return [one.name for one in read_json(file, list[ProcessIdentity]) or [] if alive(one)]

    async with Supervisor(TOKEN, QUICK, identities=file) as supervisor:
        supervisor.start(spec("a", PATIENT, tmp_path))
        supervisor.start(spec("b", PATIENT, tmp_path))
        assert listed() == ["a", "b"]
        await supervisor.stop(["a"], KILL_LADDER, "enough")
        assert listed() == ["b"]
    assert read_json(file, list[ProcessIdentity]) == []


async def test_a_file_that_cannot_be_written_is_told_at_intervals(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with Supervisor(TOKEN, QUICK, identities=tmp_path / "nowhere" / "workers.json") as supervisor:
        for name in ("a", "b"):
            supervisor.start(spec(name, PATIENT, tmp_path))
        for _ in range(5):
            supervisor.hold("a", held=False)
        assert supervisor.identity("a") is not None
    assert len([line for line in caplog.messages if line.startswith("identities not written")]) == 1


async def test_the_living_are_adopted_and_none_is_started_twice(tmp_path: Path) -> None:
    what = {name: spec(name, PATIENT, tmp_path) for name in ("a", "b")}
    file = tmp_path / "workers.json"
    first = Supervisor(TOKEN, QUICK, identities=file)
    await first.__aenter__()
    for one in what.values():
        first.start(one)
    await up(tmp_path / "a.log")
    await up(tmp_path / "b.log")
    previous = read_json(file, list[ProcessIdentity]) or []
    # The first supervisor is as good as dead from here on: it is not asked any more.
    os.kill(previous[1].pid, 9)
    wait_for(lambda: not alive(previous[1]))
    async with Supervisor(TOKEN, QUICK) as second:
        assert second.adopt([(one, what[one.name]) for one in previous]) == ["a"]
        with pytest.raises(ValueError, match="process a is running"):
            second.start(what["a"])
        await second.stop(["a"], term_ladder(5.0), "enough")
        assert second.views()["a"].phase is Phase.ENDED
    await first.__aexit__(None, None, None)


async def test_leaving_the_block_leaves_nobody(tmp_path: Path) -> None:
    async with Supervisor(TOKEN, QUICK) as supervisor:
        supervisor.start(spec("w", STUBBORN, tmp_path))
        identity = supervisor.identity("w")
    assert identity is not None
    assert adopt(identity) is None


async def test_kill_waits_for_nothing_and_reaches_everybody(tmp_path: Path) -> None:
    def dead(views: Mapping[str, ProcessView]) -> bool:
        return all(view.phase is Phase.FATAL for view in views.values())

    async with Supervisor(TOKEN, QUICK) as supervisor:
        for name in ("a", "b"):
            supervisor.start(spec(name, STUBBORN, tmp_path, Restart.NEVER))
        supervisor.kill()
        async with asyncio.timeout(30):
            await supervisor.until(dead)
        assert {view.reason for view in supervisor.views().values()} == {"killed by SIGKILL"}


def test_what_cannot_be_read_of_an_earlier_life_is_put_aside(tmp_path: Path) -> None:
    path = tmp_path / "workers.json"
    assert identities_of(path) == []
    path.write_text("{nonsense")
    assert identities_of(path) == []
    assert not path.exists()
    assert (tmp_path / "workers.damaged").read_text() == "{nonsense"
