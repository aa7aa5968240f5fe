"""Workers that crash, are given up and replaced: real processes, a fake broker or a real one."""

import asyncio
import os
import signal
import time
from pathlib import Path

import pytest
from tests.services.orchestrator.children import DRAINABLE, STUBBORN, argv, wait_up
from tests.services.orchestrator.fake_broker import TOKEN, broker, config, living, orchestrator, until

from rolloutmq.bus.rundir import read_json, write_json
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import WorkersFailedError
from rolloutmq.schemas.files import EnvironmentRecord, RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.process import ProcessSpec, Role
from rolloutmq.schemas.wire.control import GetStatus, RestartWorker, StatusReply, WorkerState
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.orchestrator import server
from rolloutmq.services.orchestrator.server import Orchestrator
from rolloutmq.services.orchestrator.supervision import replacement
from rolloutmq.services.process.child import spawn
from rolloutmq.services.process.identity import identify
from rolloutmq.services.process.runner import Stop


def failing_while(gone: Path) -> str:
    """Return a worker that ends with 3 at its start while a file exists."""
    return f"import os, sys\nif os.path.exists({str(gone)!r}): sys.exit(3)\n{DRAINABLE}"


def known(layout: RunLayout) -> Supervision:
    return read_json(layout.supervision, Supervision) or Supervision(
        orchestrator=identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), "none")
    )


def proven(layout: RunLayout) -> bool:
    return any(one.proven for one in known(layout).environments)


def restarts(layout: RunLayout) -> int:
    return sum(one.restarts for one in known(layout).workers)


async def test_code_3_after_good_work_is_a_crash_like_any_other(run_dir: Path, tmp_path: Path) -> None:
    layout, gone = RunLayout(run_dir), tmp_path / "gone"
    code = failing_while(gone)
    async with broker(layout) as fake, orchestrator(layout, config(crash_limit=50), code) as task:
        fake.produced = 1
        await until(lambda: proven(layout))
        gone.touch()
        os.kill(living(layout)["env-0"], signal.SIGKILL)
        await until(lambda: restarts(layout) >= 3)
        (worker,) = known(layout).workers
        assert worker.reason.startswith("exit code 3")
        assert worker.was_ready
        gone.unlink()
        await until(lambda: any(one.ready for one in known(layout).workers))
        assert not task.done()


async def test_code_3_before_any_work_ends_the_run_at_once(run_dir: Path, tmp_path: Path) -> None:
    """Even if a worker was ready: an environment whose rollouts always raise is ready, too."""
    layout, gone = RunLayout(run_dir), tmp_path / "gone"
    code = failing_while(gone)
    async with broker(layout), orchestrator(layout, config(), code) as task:
        await until(lambda: any(one.ready for one in known(layout).workers))
        gone.touch()
        os.kill(living(layout)["env-0"], signal.SIGKILL)
        await asyncio.wait({task}, timeout=10)
        error = task.exception()
        assert isinstance(error, ExceptionGroup)
        assert isinstance(error.exceptions[0], WorkersFailedError)
        assert "env-0: exit code 3" in str(error.exceptions[0])


SEGFAULTS = "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"


async def test_a_run_whose_groups_were_accepted_goes_on_though_no_heartbeat_told_of_one(
    run_dir: Path,
) -> None:
    """As with a faulty C extension: each life makes some groups, and ends before its next heartbeat."""
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config(), SEGFAULTS) as task:
        fake.accepted = 60
        await until(lambda: any(one.phase == "fatal" and one.due for one in known(layout).workers))
        assert proven(layout)
        assert not task.done()


async def test_a_verdict_waits_for_what_the_broker_accepted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "VERDICT_S", 600.0)
    layout = RunLayout(run_dir)
    async with orchestrator(layout, config(), SEGFAULTS) as task:
        await until(lambda: [one.phase for one in known(layout).workers] == ["fatal"])
        async with broker(layout) as fake:
            fake.accepted = 60
            await until(lambda: proven(layout))
        assert not task.done()


async def test_the_next_orchestrator_knows_that_groups_were_accepted_also_by_an_earlier_broker(
    run_dir: Path,
) -> None:
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config(), SEGFAULTS):
        fake.accepted = 60
        await until(lambda: proven(layout))
    async with broker(layout) as restarted, orchestrator(layout, config(), SEGFAULTS) as task:
        await until(lambda: not known(layout).over and known(layout).targets != ())
        await until(lambda: any(one.phase == "fatal" and one.due for one in known(layout).workers))
        assert restarted.accepted == 0
        assert proven(layout)
        assert not task.done()


async def test_the_next_orchestrator_asks_the_broker_what_it_accepted_from_the_earlier_workers(
    run_dir: Path,
) -> None:
    """An orchestrator that was killed may not have written it."""
    layout = RunLayout(run_dir)
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{TOKEN}/orchestrator")
    record = WorkerRecord(worker="env-0", env="env", phase="fatal", since=time.monotonic(), reason="SIGSEGV")
    write_json(layout.supervision, Supervision(orchestrator=me, workers=(record,)))
    async with broker(layout) as fake:
        fake.accepted = 60
        async with orchestrator(layout, config(), SEGFAULTS) as task:
            await until(lambda: proven(layout))
            assert not task.done()


async def test_a_run_whose_workers_all_failed_goes_on_with_one_and_then_with_all(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "FIRST_S", 0.5)
    layout, gone = RunLayout(run_dir), tmp_path / "gone"
    code = failing_while(gone)
    async with broker(layout) as fake, orchestrator(layout, config(crash_limit=2), code) as task:
        fake.wanted = {"env": 3}
        fake.produced = 1
        await until(lambda: proven(layout) and len(living(layout)) == 3)
        gone.touch()
        for pid in living(layout).values():
            os.kill(pid, signal.SIGKILL)
        await until(lambda: any(one.due for one in known(layout).workers if one.phase == "fatal"))
        await until(lambda: any("given_up: workers were" in one.reason for one in known(layout).targets))
        # It is tried again, and fails again.
        await until(
            lambda: {one.worker for one in known(layout).workers} - {"env-0", "env-1", "env-2"} != set()
        )
        assert len([one for one in known(layout).workers if one.phase != "fatal"]) <= 1
        assert not task.done()
        gone.unlink()
        await until(lambda: len(living(layout)) == 3)
        await until(lambda: known(layout).targets[0].current == 3)
        assert "given_up" not in known(layout).targets[0].reason


async def test_a_restart_of_one_that_was_given_up_does_not_wait_for_its_pause(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "FIRST_S", 3600.0)
    layout, gone = RunLayout(run_dir), tmp_path / "gone"
    async with broker(layout) as fake, orchestrator(layout, config(crash_limit=2), failing_while(gone)):
        fake.wanted = {"env": 2}
        fake.produced = 1
        await until(lambda: proven(layout) and len(living(layout)) == 2)
        gone.touch()
        for pid in living(layout).values():
            os.kill(pid, signal.SIGKILL)
        # The orchestrator remembers one of them: only one place may be taken until the next is ready.
        await until(lambda: [one.due is not None for one in known(layout).workers] == [True])
        gone.unlink()
        fake.restarts = (RestartWorker(worker=known(layout).workers[0].worker, order="o1"),)
        await until(lambda: len(living(layout)) == 2)
        assert known(layout).restarts["o1"].done


async def test_the_next_orchestrator_keeps_who_was_given_up_and_the_pause(
    run_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "FIRST_S", 3600.0)
    layout, gone = RunLayout(run_dir), tmp_path / "gone"
    settings, code = config(crash_limit=2), failing_while(gone)

    def given_up() -> list[tuple[str, str, float, float | None]]:
        return [
            (one.worker, one.reason, one.since, one.due)
            for one in known(layout).workers
            if one.phase == "fatal"
        ]

    async with broker(layout) as fake:
        async with orchestrator(layout, settings, code):
            fake.wanted = {"env": 2}
            fake.produced = 1
            await until(lambda: proven(layout) and len(living(layout)) == 2)
            gone.touch()
            for pid in living(layout).values():
                os.kill(pid, signal.SIGKILL)
            # One is enough to tell why: only one place may be taken until the next is ready.
            await until(lambda: len(given_up()) == 1 and given_up()[0][-1] is not None)
            before = given_up()
        gone.unlink()
        async with orchestrator(layout, settings, code):
            await until(lambda: not known(layout).over and known(layout).targets != ())
            await until(lambda: "given_up: workers were" in known(layout).targets[0].reason)
            assert given_up() == before
            assert living(layout) == {}
            fake.restarts = (RestartWorker(worker=before[0][0], order="o1"),)
            await until(lambda: len(living(layout)) == 2)
            # A slow machine may have begun another one before the first orchestrator ended.
            assert not {"env-0", "env-1"} & set(living(layout)), "the names of the earlier ones are taken"


async def test_one_that_was_given_up_is_replaced_beside_the_others(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replacement, "FIRST_S", 0.5)
    layout = RunLayout(run_dir)
    async with broker(layout) as fake, orchestrator(layout, config(crash_limit=1)):
        fake.wanted = {"env": 2}
        fake.produced = 1
        await until(lambda: proven(layout) and len(living(layout)) == 2)
        await until(lambda: all(one.ready for one in known(layout).workers))
        os.kill(living(layout)["env-1"], signal.SIGKILL)
        await until(lambda: any(one.phase == "fatal" for one in known(layout).workers))
        assert known(layout).targets[0].current <= 2
        await until(lambda: sorted(living(layout)) == ["env-0", "env-2"])
        await until(lambda: {one.phase for one in known(layout).workers} == {"running"})


async def test_the_next_orchestrator_knows_who_was_ready_and_what_has_worked(run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    spec = ProcessSpec(
        name="env-0", role=Role.WORKER, argv=argv(DRAINABLE), log=str(layout.log("env-0")), kind="env"
    )
    process = spawn(spec, TOKEN)
    wait_up(layout.log("env-0"))
    write_json(layout.workers, [process.identity])
    record = WorkerRecord(
        worker="env-0",
        env="env",
        phase="running",
        since=0.0,
        pid=process.identity.pid,
        was_ready=True,
        crashes=1,
    )
    learned = EnvironmentRecord(env="env", proven=True, starts=(4.0, 5.0))
    me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{TOKEN}/orchestrator")
    write_json(layout.supervision, Supervision(orchestrator=me, workers=(record,), environments=(learned,)))
    async with broker(layout) as fake:
        fake.states["env-0"] = WorkerState.STARTING
        async with orchestrator(layout, config()):
            await until(lambda: known(layout).targets != ())
            (worker,) = known(layout).workers
            assert (worker.pid, worker.was_ready, worker.ready) == (process.identity.pid, True, False)
            assert (worker.crashes, worker.restarts) == (1, 0)
            assert known(layout).environments == (learned,)
    other = Orchestrator(config(), layout, "the token of another run")
    assert other._earlier() is None
    process.close()


async def test_an_orchestrator_that_still_ends_strays_keeps_the_report_of_the_earlier_one(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Killed meanwhile, it must leave all that its own successor needs."""
    layout = RunLayout(run_dir)
    log = str(layout.log("env-0"))
    mine = spawn(ProcessSpec(name="env-0", role=Role.WORKER, argv=argv(DRAINABLE), log=log), TOKEN)
    log = str(layout.log("env-1"))
    stray = spawn(ProcessSpec(name="env-1", role=Role.WORKER, argv=argv(STUBBORN), log=log), "another run")
    try:
        for name in ("env-0", "env-1"):
            await asyncio.to_thread(wait_up, layout.log(name))
        write_json(layout.workers, [mine.identity, stray.identity])
        me = identify("orchestrator", Role.ORCHESTRATOR, os.getpid(), f"{TOKEN}/orchestrator")
        report = Supervision(orchestrator=me, environments=(EnvironmentRecord(env="env", proven=True),))
        write_json(layout.supervision, report)
        async with orchestrator(layout, config(term_grace_s=600.0)):
            try:
                await until(lambda: "ending remaining process name=env-1" in caplog.text)
                assert known(layout) == report
            finally:
                stray.send_group(signal.SIGKILL)
            await until(lambda: known(layout).targets != ())
            assert proven(layout)
    finally:
        for process in (mine, stray):
            process.send_group(signal.SIGKILL)
            process.close()


HUB = """
import asyncio, os
from rolloutmq import SingleTurn, Trajectory

class Hub(SingleTurn):
    def __init__(self, down):
        if os.path.exists(down):
            raise ConnectionError("503 Service Unavailable")

    def task(self, rng):
        return "1"

    def prompt(self, task):
        return task

    def score(self, task, completion):
        return 1.0

    async def rollout(self, policy, size, rng):
        await asyncio.sleep(0.05)
        sampled = {"token_ids": [1, 2], "mask": [False, True], "logprobs": [0.0, -0.5]}
        return [Trajectory(**sampled, score=float(one)) for one in range(size)]
"""


@pytest.mark.extended
async def test_a_hub_that_is_away_for_a_moment_ends_no_run(run_dir: Path, tmp_path: Path) -> None:
    """With our own workers and broker: one worker is killed while nobody can construct the environment."""
    (tmp_path / "hub.py").write_text(HUB)
    down = tmp_path / "down"
    section = {"entry": "hub.py:Hub", "options": {"down": str(down)}, "min_workers": 2, "max_workers": 2}
    settings = RunConfig.model_validate(
        {
            "base_dir": str(tmp_path),
            "environment": {"env": section},
            "inference": {"kind": "none"},
            "orchestrator": {"tick_s": 0.1, "backoff_s": 0.2, "backoff_max_s": 0.5, "crash_limit": 50},
        }
    )
    layout = RunLayout(run_dir)
    write_json(layout.config, settings)
    stop = Stop()
    with running_broker(settings, layout) as real:
        service = Orchestrator(settings, layout, TOKEN)
        task = asyncio.create_task(service.run(stop))
        try:
            async with asyncio.timeout(90):
                while not proven(layout) or sum(one.ready for one in known(layout).workers) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                down.touch()
                os.kill(living(layout)["env-0"], signal.SIGKILL)
                while restarts(layout) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                first = next(one for one in known(layout).workers if one.worker == "env-0")
                assert "503 Service Unavailable" in first.reason
                assert not task.done(), "the run goes on with the other"
                down.unlink()
                while sum(one.ready for one in known(layout).workers) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
            async with BrokerClient(real.endpoints.serve) as client:
                reply = await client.request(GetStatus())
            assert isinstance(reply, StatusReply)
            assert {one.state for one in reply.pressure.workers} == {WorkerState.READY}
            assert known(layout).environments[0].starts
        finally:
            stop.request("the test ends")
            await asyncio.wait({task})
        real.stop()
    task.result()
