"""The orchestrator with real worker processes, against a broker that says what the test wants."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path

import msgspec
import pytest
from tests.services.orchestrator.children import DRAINABLE, STUBBORN, argv, wait_for, wait_up
from tests.services.orchestrator.fake_broker import TOKEN, broker, config, living, orchestrator, until

from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RunDirInUseError, WorkersFailedError
from rolloutmq.schemas.files import Hang, RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.process import PERMANENT_FAILURE, ProcessIdentity
from rolloutmq.schemas.wire.control import (
    RestartWorker,
    WorkerState,
)
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.orchestrator import server
from rolloutmq.services.orchestrator.autoscaling.decision_log import (
    DecisionLogHeader,
    LoggedDecision,
    read,
    replay,
    resume,
)
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.process.identity import MARKER
from rolloutmq.services.process.runner import Stop

SLOW_TO_GO = """
import signal, sys
signal.signal(signal.SIGUSR1, lambda *_: print('drained', flush=True))
signal.signal(signal.SIGUSR2, lambda *_: sys.exit(0))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGUSR1})
print('up', flush=True)
while True: signal.pause()
"""
"""Takes note of SIGUSR1 and ends at SIGUSR2."""
FAILS = "import sys; sys.exit('error: no such environment')"


def records(layout: RunLayout) -> tuple[WorkerRecord, ...]:
    """Return the orchestrator's view of its workers."""
    found = read_json(layout.supervision, Supervision)
    return found.workers if found is not None else ()


def phases(layout: RunLayout) -> list[str]:
    return [one.phase for one in records(layout)]


async def test_workers_come_and_go_as_it_is_decided(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()):
        await until(lambda: list(living(layout)) == ["env-0"])
        fake.wanted = {"env": 9}
        await until(lambda: len(living(layout)) == 3)
        fake.wanted = {"env": 1}
        await until(lambda: list(living(layout)) == ["env-0"])
        assert sorted(fake.drained) == ["env-1", "env-2"]
        await until(lambda: len(fake.decisions) > 0 and fake.decisions[-1].target == 1)
        targets = [target for target, _ in groupby(decision.target for decision in fake.decisions)]
        assert targets[-2:] == [3, 1]
        assert "pinned to 1" in fake.decisions[-1].reason
    assert sorted(fake.drained) == ["env-0", "env-1", "env-2"]
    assert read_json(layout.workers, list[ProcessIdentity]) == []


async def test_it_only_decides_where_others_start_the_workers(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    tree = config(start_workers=False).model_dump()
    tree["environment"]["env"]["gpus"] = 1  # of hosts that this one does not know
    about = RunConfig.model_validate(tree)
    async with broker(layout) as fake, orchestrator(layout, about):
        fake.wanted = {"env": 2}
        await until(lambda: bool(fake.decisions) and fake.decisions[-1].target == 2)
        number = len(fake.decisions)
        fake.wanted = {"env": 3}
        await until(lambda: len(fake.decisions) > number and fake.decisions[-1].target == 3)
        assert not living(layout)
        assert not list(layout.logs.glob("env-*"))


async def test_decisions_are_written_down_and_come_out_the_same_again(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()):
        await until(lambda: len(living(layout)) == 1)
        fake.wanted = {"env": 2}
        await until(lambda: len(living(layout)) == 2)
        await until(lambda: layout.decisions.read_bytes().count(b"\n") > 20)
    again = replay(read(layout.decisions))
    assert again.decisions >= 20
    assert (again.differences, again.orphans) == (0, 0)
    targets = {one.decision.target for one in read(layout.decisions) if isinstance(one, LoggedDecision)}
    assert targets == {1, 2}


async def test_silence_keeps_the_workers_and_no_broker_is_needed(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with orchestrator(layout, config()):
        await until(lambda: len(living(layout)) == 1)
        await asyncio.to_thread(wait_up, layout.log("env-0"))
    assert living(layout) == {}


async def test_a_killed_worker_comes_back_under_its_name(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout), orchestrator(layout, config()):
        await until(lambda: len(living(layout)) == 1)
        first = living(layout)["env-0"]
        os.kill(first, signal.SIGKILL)
        await until(lambda: living(layout).get("env-0", first) != first)


async def test_a_drained_worker_is_replaced_under_another_name(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        fake.states["env-0"] = WorkerState.DRAINING
        await until(lambda: list(living(layout)) == ["env-1"])


def acking_late(settings: RunConfig) -> RunConfig:
    """Return a configuration whose broker acks nothing for a minute, so that a producer leaves its spool."""
    broker = settings.broker.model_copy(update={"commit_ms": 60_000.0})
    return settings.model_copy(update={"broker": broker})


async def test_what_a_worker_left_comes_home_though_its_name_never_does(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "ORPHANS_S", 0.05)
    layout = RunLayout(run_dir)
    settings = config()
    late_acks = acking_late(settings)
    spool = layout.spools / "env-7"
    group = Group.build("left", tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0])
    with running_broker(late_acks, layout) as real:
        async with Producer.open(run_dir, env="env", producer="env-7", save_to=spool, drain_s=0.0) as left:
            await left.send(group)
        assert spool.exists()
        async with orchestrator(layout, config()):
            await until(lambda: not spool.exists())
        real.stop()
    assert b'"left"' in layout.ack_log("env-7").read_bytes()


@pytest.mark.parametrize("producer", ["env-0", "env-0.eval"])
async def test_what_a_drained_worker_left_comes_home_in_the_same_life(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, producer: str
) -> None:
    """Also of its second producer, that of the evaluation: whoever sends for a living one fences it."""
    monkeypatch.setattr(server, "ORPHANS_S", 0.05)
    layout = RunLayout(run_dir)
    settings = config()
    late_acks = acking_late(settings)
    spool = layout.spools / producer
    group = Group.build("left", tokens=[[1, 2]], mask=[[0, 1]], scores=[1.0])
    with running_broker(late_acks, layout) as real:
        async with orchestrator(layout, settings):
            await asyncio.to_thread(wait_up, layout.log("env-0"))
            async with Producer.open(
                run_dir, env="env", producer=producer, save_to=spool, drain_s=0.0
            ) as left:
                await left.send(group)
            assert spool.exists()
            await asyncio.sleep(0.2)
            assert spool.exists(), "a worker that lives sends its own"
            os.kill(living(layout)["env-0"], signal.SIGUSR1)
            await until(lambda: not spool.exists())
        real.stop()


async def test_who_left_in_order_is_forgotten(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "ENDED_S", 0.05)
    layout = RunLayout(run_dir)
    settings = config()
    stop = Stop()
    service = Orchestrator(settings, layout, TOKEN, lambda name: (*argv(DRAINABLE), name))
    task = asyncio.create_task(service.run(stop))
    try:
        for name in ("env-0", "env-1", "env-2"):
            await asyncio.to_thread(wait_up, layout.log(name))
            os.kill(living(layout)[name], signal.SIGUSR1)
        await until(lambda: list(service._workers.views()) == ["env-3"])
        await until(lambda: list(service._pids) == ["env-3"])
    finally:
        stop.request("the test ends")
        await asyncio.wait({task})


async def test_a_place_is_free_only_when_its_process_is_gone(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    settings = config(drain_deadline_s=60.0)
    one = settings.environment["env"].model_copy(update={"max_workers": 1})
    settings = settings.model_copy(update={"environment": {"env": one}})
    async with broker(layout) as fake, orchestrator(layout, settings, SLOW_TO_GO):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        first = living(layout)["env-0"]
        fake.states["env-0"] = WorkerState.DRAINING
        await until(lambda: "drained" in layout.log("env-0").read_text())
        await asyncio.sleep(0.2)  # ten decisions
        assert list(living(layout)) == ["env-0"]
        os.kill(first, signal.SIGUSR2)
        await until(lambda: list(living(layout)) == ["env-1"])
        os.kill(living(layout)["env-1"], signal.SIGKILL)


async def test_one_that_was_told_to_drain_and_does_not_say_so_is_ended(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONFIRM_S", 0.02)
    monkeypatch.setattr(server, "OVERTIME_S", 0.0)
    layout = RunLayout(run_dir)
    async with (
        broker(layout) as fake,
        orchestrator(layout, config(drain_deadline_s=0.05, term_grace_s=0.05), STUBBORN),
    ):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        fake.told.add("env-0")
        await until(lambda: list(living(layout)) == ["env-1"])


async def test_a_drain_lasts_as_long_as_a_rollout_may_and_the_end_of_the_run_does_not(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "CONFIRM_S", 0.02)
    monkeypatch.setattr(server, "OVERTIME_S", 0.0)
    layout = RunLayout(run_dir)
    settings = config(end_deadline_s=0.05, term_grace_s=0.05)
    async with broker(layout) as fake, orchestrator(layout, settings, SLOW_TO_GO):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        asked = time.monotonic()
        fake.told.add("env-0")
        await until(lambda: any(one.phase == "stopping" for one in records(layout)))
        (drained,) = (one for one in records(layout) if one.phase == "stopping")
        assert drained.ends is not None
        assert drained.ends - asked >= settings.environment["env"].rollout_timeout_s
    assert living(layout) == {}


async def test_rollouts_are_told_before_a_drain_abandons_them(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RunLayout(run_dir)
    settings = config(drain_deadline_s=20.0, end_deadline_s=0.05, term_grace_s=0.05)
    async with broker(layout) as fake, orchestrator(layout, settings, SLOW_TO_GO):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        fake.in_hand["env-0"] = 4
        fake.told.add("env-0")
        await until(lambda: "abandoned soon worker=env-0 in_hand=4" in caplog.text)
        assert "env-0" in living(layout)


async def test_a_worker_that_hangs_is_killed_and_restarted(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    layout = RunLayout(run_dir)
    settings = config(term_grace_s=0.05)
    section = settings.environment["env"].model_copy(update={"liveness_s": 0.2})
    settings = settings.model_copy(update={"environment": {"env": section}})
    async with broker(layout) as fake, orchestrator(layout, settings, STUBBORN):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        first = living(layout)["env-0"]
        os.kill(first, signal.SIGSTOP)
        layout.hangs.mkdir()
        write_json(layout.hang("env-0"), Hang(pid=first, where="sums.py:14", task="(3, 4)"))
        fake.silent_since[first] = time.monotonic() - 60.0
        await until(lambda: living(layout).get("env-0", first) != first)
        await until(lambda: [record.restarts for record in records(layout)] == [1])
        (record,) = records(layout)
        assert record.reason.startswith("hangs: no heartbeat for ")
        assert record.reason.endswith("; its code is at sums.py:14, with task (3, 4)")
        assert caplog.text.count("worker hangs worker=env-0 reason=hangs: no heartbeat") >= 1
        os.kill(living(layout)["env-0"], signal.SIGKILL)


async def test_a_restarted_worker_is_ended_and_another_takes_its_place(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config(), STUBBORN):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
        order = RestartWorker(worker="env-0", order="o1", pid=living(layout)["env-0"], at_once=True)
        fake.restarts = (order,)
        await until(lambda: list(living(layout)) == ["env-1"])
        report = read_json(layout.supervision, Supervision)
        assert report is not None
        assert report.restarts["o1"].done
        fake.restarts = ()
        for pid in living(layout).values():
            os.kill(pid, signal.SIGKILL)


async def test_a_worker_that_was_given_up_is_restarted(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config(backoff_s=0.001)):
        fake.wanted = {"env": 2}
        await until(lambda: len(living(layout)) == 2)
        fake.states["env-1"] = WorkerState.FAILED
        await until(lambda: any(one.phase == "fatal" for one in records(layout)))
        fake.restarts = (RestartWorker(worker="env-1", order="o1"),)
        await until(lambda: sorted(living(layout)) == ["env-0", "env-2"])
        assert [one.worker for one in records(layout)] == ["env-0", "env-2"]


async def test_bounds_change_while_it_runs_and_outlive_the_orchestrator(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake:
        async with orchestrator(layout, config()):
            fake.wanted = {"env": 9}
            await until(lambda: len(living(layout)) == 3)
            fake.settings = {"environment.env.max_workers": 5}
            await until(lambda: len(living(layout)) == 5)
            fake.settings = {"environment.env.max_workers": 2}
            await until(lambda: len(living(layout)) == 2)
            report = read_json(layout.supervision, Supervision)
            assert report is not None
            assert report.settings == fake.settings
            fake.settings = {"environment.env.max_workers": 0}
            await asyncio.sleep(0.1)
            assert len(living(layout)) == 2, "what the configuration does not allow changes nothing"
            fake.settings = {}
            await until(lambda: len(living(layout)) == 3)
        again = replay(read(layout.decisions))
        assert (again.differences, again.orphans) == (0, 0)


def test_live_bounds_outlive_a_killed_orchestrator(run_dir: Path) -> None:
    """The next one has them before it hears the broker, and keeps what was measured."""
    layout = RunLayout(run_dir)
    write_json(layout.config, config())
    with running(run_dir, DRAINABLE) as first:
        wait_up(layout.log("env-0"))
        wait_for(lambda: len(living(layout)) == 1)
        first.kill()
        first.wait()
    report = read_json(layout.supervision, Supervision)
    assert report is not None
    write_json(
        layout.supervision, msgspec.structs.replace(report, settings={"environment.env.min_workers": 2})
    )
    with running(run_dir, DRAINABLE) as second:
        wait_for(lambda: len(living(layout)) == 2)
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=10) == 0


async def test_an_operator_sets_the_number(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()):
        fake.wanted = {"env": 3}
        await until(lambda: len(living(layout)) == 3)
        fake.wanted = {"env": 1}
        await until(lambda: len(living(layout)) == 1)


async def test_workers_that_joined_count_and_are_only_drained_at_the_end(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()):
        fake.wanted = {"env": 3}
        await until(lambda: len(living(layout)) == 3)
        fake.joined = {"env-far.0": WorkerState.READY, "env-far.1": WorkerState.STARTING}
        await until(lambda: len(living(layout)) == 1)
        await until(lambda: fake.decisions[-1].joined == 2)
        assert (fake.decisions[-1].current, fake.decisions[-1].target) == (3, 3)
        fake.wanted = {"env": 1}
        await until(lambda: not living(layout))
        fake.joined["env-far.1"] = WorkerState.GONE
        fake.wanted = {"env": 3}
        await until(lambda: len(living(layout)) == 2)
        assert not any(name.startswith("env-far") for name in fake.drained)
        await until(lambda: layout.supervision.exists())
    assert fake.drained.count("env-far.0") == 1


async def test_a_crash_loop_of_all_workers_ends_the_run_with_the_reason(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with orchestrator(layout, config(), FAILS) as task:
        await asyncio.wait({task}, timeout=10)
        error = task.exception()
        assert isinstance(error, ExceptionGroup)
        (failed,) = error.exceptions
    assert isinstance(failed, WorkersFailedError)
    assert str(failed) == (
        "environment.env: all workers failed; env-0: crashed 3 times in a row, "
        "each before it was ready for 10 s; the last: exit code 1: error: no such environment"
    )


async def test_a_worker_that_says_it_failed_is_believed(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config()) as task:
        fake.states["env-0"] = WorkerState.FAILED
        await asyncio.wait({task}, timeout=10)
        error = task.exception()
        assert isinstance(error, ExceptionGroup)
        assert str(error.exceptions[0]).endswith("env-0: it always raises")
    assert living(layout) == {}


async def test_a_stubborn_worker_ends_at_the_deadline(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONFIRM_S", 0.02)
    monkeypatch.setattr(server, "OVERTIME_S", 0.0)
    layout = RunLayout(run_dir)
    settings = config(drain_deadline_s=0.05, term_grace_s=0.05)
    async with orchestrator(layout, settings, STUBBORN):
        await asyncio.to_thread(wait_up, layout.log("env-0"))
    assert living(layout) == {}


async def test_one_run_has_one_orchestrator(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    async with orchestrator(layout, config()):
        await until(lambda: len(living(layout)) == 1)
        second = Orchestrator(config(), layout, TOKEN)
        with pytest.raises(RunDirInUseError, match="another orchestrator"):
            await second.run(Stop())


MAIN = """
import sys
from pathlib import Path
from rolloutmq.services.orchestrator import server
run_dir, code = Path(sys.argv[1]), sys.argv[2]
server.worker_command = lambda run_dir: lambda name: (sys.executable, "-S", "-c", code, name)
sys.exit(server.main(run_dir))
"""


@contextmanager
def running(run_dir: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    """Run the orchestrator as its own process; its workers are killed with the block."""
    command = [sys.executable, "-c", MAIN, str(run_dir), code]
    environment = {**os.environ, MARKER: f"{TOKEN}/orchestrator"}
    process = subprocess.Popen(command, env=environment, stderr=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def test_sigterm_drains_the_workers_and_ends_with_0(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, config())
    with running(run_dir, DRAINABLE) as process:
        wait_up(layout.log("env-0"))
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=10)
    assert process.returncode == 0
    assert "how=exit code 0" in log
    assert living(layout) == {}


def test_a_second_signal_kills_the_workers_too(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, config())
    with running(run_dir, STUBBORN) as process:
        wait_up(layout.log("env-0"))
        process.send_signal(signal.SIGINT)
        assert process.stderr is not None
        while "stopping" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert process.wait(timeout=10) == 130
    wait_for(lambda: living(layout) == {})


def test_the_last_line_says_why_it_failed(run_dir: Path) -> None:
    write_json(RunLayout(run_dir).config, config())
    with running(run_dir, FAILS) as process:
        _, log = process.communicate(timeout=20)
    assert process.returncode == PERMANENT_FAILURE
    assert log.splitlines()[-1].startswith("error: environment.env: all workers failed; env-0: ")
    assert "Traceback" not in log


def headers(layout: RunLayout) -> list[DecisionLogHeader]:
    return [entry for entry in read(layout.decisions) if isinstance(entry, DecisionLogHeader)]


def test_the_workers_of_a_killed_orchestrator_are_adopted(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    write_json(layout.config, config())
    with running(run_dir, DRAINABLE) as first:
        wait_up(layout.log("env-0"))
        wait_for(lambda: len(living(layout)) == 1)
        workers = living(layout)
        first.kill()
        first.wait()
    assert living(layout) == workers
    measured = resume(layout.decisions, 1, time.monotonic(), time.time())["env"].state
    with running(run_dir, DRAINABLE) as second:
        assert second.stderr is not None
        while "adopted name=env-0" not in second.stderr.readline():
            assert second.poll() is None
        assert living(layout) == workers
        wait_for(lambda: len(headers(layout)) == 2)
        assert headers(layout)[1].state == measured, "it continues from what the first measured"
        second.send_signal(signal.SIGTERM)
        assert second.wait(timeout=10) == 0
    assert living(layout) == {}


def report_of(layout: RunLayout, pid: int) -> Supervision | None:
    """Return the report of this orchestrator, once it has decided something."""
    found = read_json(layout.supervision, Supervision)
    return found if found is not None and found.orchestrator.pid == pid and found.targets else None


@pytest.mark.parametrize("reported", [True, False], ids=["reported", "killed before its report"])
async def test_the_next_orchestrator_drains_none_but_the_draining(run_dir: Path, reported: bool) -> None:
    """Also before it hears the broker: more workers run than are wanted, since one of them drains."""
    layout = RunLayout(run_dir)
    settings = config(drain_deadline_s=600.0, end_deadline_s=0.05, term_grace_s=0.05)
    write_json(layout.config, settings)
    async with broker(layout) as fake:
        fake.wanted = {"env": 2}
        with running(run_dir, SLOW_TO_GO):
            await until(lambda: len(living(layout)) == 2)
            await asyncio.to_thread(wait_up, layout.log("env-0"))
            fake.told.add("env-0")
            await until(lambda: phases(layout) == ["stopping", "running", "running"])
    layout.endpoints.unlink()
    before = read_json(layout.supervision, Supervision)
    assert before is not None
    drained, *others = before.workers
    if not reported:
        unknown = msgspec.structs.replace(drained, phase="running", ends=None, rungs=())
        write_json(layout.supervision, msgspec.structs.replace(before, workers=(unknown, *others)))
    with running(run_dir, SLOW_TO_GO) as second:
        await until(lambda: report_of(layout, second.pid) is not None)
        assert phases(layout) == ["stopping" if reported else "running", "running", "running"]
        async with broker(layout) as fake:
            fake.wanted, fake.told = {"env": 2}, {"env-0"}
            await until(lambda: any("pinned to 2" in one.reason for one in fake.decisions))
            assert phases(layout) == ["stopping", "running", "running"]
            assert fake.drained == ["env-0"]
        again = records(layout)[0]
        second.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(second.wait, 20) == 0
    if reported:
        assert (again.since, again.ends, again.reason) == (drained.since, drained.ends, drained.reason)
