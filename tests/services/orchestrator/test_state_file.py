"""What the orchestrator knows of its workers is in a file that anybody may read, at every moment whole and true."""

import asyncio
import os
import time
from pathlib import Path

import pytest
from tests.services.orchestrator.children import PATIENT, spec

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.files import EnvironmentRecord, RunLayout, Supervision, WorkerRecord
from rolloutmq.schemas.wire.control import ScaleDecision
from rolloutmq.services.orchestrator import state_file
from rolloutmq.services.orchestrator.state_file import StateFile
from rolloutmq.services.orchestrator.supervision.core import KILL_LADDER, Backoff, Phase
from rolloutmq.services.orchestrator.supervision.supervisor import Supervisor

TOKEN = f"record-{os.getpid()}"
QUICK = Backoff(first_s=0.01, max_s=0.05, crash_limit=2, stable_s=10.0)
FAILS = "print('one'); print('\\x1b[2Jtwo\\x07'); import sys; sys.exit('error: no such environment')"


class Stage:
    """A supervisor that keeps a record."""

    def __init__(self, run_dir: Path, backoff: Backoff = QUICK) -> None:
        self.layout = RunLayout(run_dir)
        self.record = StateFile(self.layout, TOKEN)
        self.supervisor = Supervisor(TOKEN, backoff, on_change=lambda _: self.record.soon(self.supervisor))

    def start(self, name: str, code: str) -> None:
        self.supervisor.start(spec(name, code, self.layout.logs))

    def told(self) -> Supervision:
        found = read_json(self.layout.supervision, Supervision)
        assert found is not None
        return found

    def worker(self, name: str) -> WorkerRecord:
        return next(one for one in self.told().workers if one.worker == name)

    async def until(self, name: str, phase: Phase) -> None:
        async with asyncio.timeout(30):
            await self.supervisor.until(lambda views: views[name].phase is phase)
        await asyncio.sleep(0)


async def test_a_worker_that_lives_is_there_with_its_process(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        stage.start("env-10", PATIENT)
        stage.start("env-2", PATIENT)
        await asyncio.sleep(0)
        told = stage.told()
        assert [one.worker for one in told.workers] == ["env-2", "env-10"]
        assert told.orchestrator.pid == os.getpid()
        one = stage.worker("env-2")
        identity = supervisor.identity("env-2")
        assert identity is not None
        assert (one.pid, one.phase, one.env, one.last_lines) == (identity.pid, "running", "env", ())
        assert one.start_ticks == identity.start_ticks
        assert one.started is not None
        assert abs(time.monotonic() - one.started) < 10.0
        assert abs(time.monotonic() - one.since) < 10.0


async def test_one_that_was_given_up_stays_with_the_end_of_its_log(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor:
        stage.start("env-0", FAILS)
        await stage.until("env-0", Phase.FATAL)
        one = stage.worker("env-0")
    assert (one.phase, one.pid, one.crashes, one.restarts, one.due) == ("fatal", 0, 2, 1, None)
    assert one.reason.endswith("exit code 1: error: no such environment")
    assert one.last_lines[-3:] == ("one", " [2Jtwo ", "error: no such environment")


async def test_the_end_of_the_log_is_that_of_the_last_life(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor:
        stage.start("env-0", "import os; print('life', os.getpid()); raise SystemExit(1)")
        await stage.until("env-0", Phase.FATAL)
        lines = stage.worker("env-0").last_lines
    assert len({line for line in lines if line.startswith("life ")}) == 2


async def test_one_that_waits_says_when_and_why(run_dir: Path) -> None:
    stage = Stage(run_dir, Backoff(first_s=60.0, crash_limit=9))
    async with stage.supervisor:
        stage.start("env-0", FAILS)
        async with asyncio.timeout(30):
            await stage.supervisor.until(lambda views: views["env-0"].crashes == 1)
        await asyncio.sleep(0)
        one = stage.worker("env-0")
        assert (one.phase, one.crashes) == ("waiting", 1)
        assert one.due is not None
        assert 0.0 < one.due - time.monotonic() <= 60.0
        assert one.last_lines[-1] == "error: no such environment"


async def test_one_that_left_in_order_is_left_out(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        stage.start("env-0", PATIENT)
        await supervisor.stop(["env-0"], KILL_LADDER, "enough")
        await asyncio.sleep(0)
        assert stage.told().workers == ()


async def test_lines_of_a_log_are_bounded(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor:
        stage.start("env-0", "print('x' * 100_000); print('y' * 1500); raise SystemExit(2)")
        await stage.until("env-0", Phase.FATAL)
        lines = stage.worker("env-0").last_lines
    assert sum(map(len, lines)) <= state_file.LINES_BYTES
    assert len(lines) <= state_file.LINES


async def test_a_new_number_is_said_at_once_and_an_old_reason_now_and_then(run_dir: Path) -> None:
    def decision(target: int, reason: str) -> ScaleDecision:
        return ScaleDecision(env="env", at=0.0, rollout_pressure=1.0, current=1, target=target, reason=reason)

    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        for now, target, reason, said in (
            (0.0, 1, "first", "first"),
            (0.1, 1, "second", "first"),
            (0.2, 2, "third", "third"),
            (0.3, 2, "fourth", "third"),
        ):
            stage.record.decided(decision(target, reason), time.monotonic() + now, None)
            stage.record.write(supervisor)
            (told,) = stage.told().targets
            assert (told.target, told.reason) == (target, said)
        stage.record.decided(decision(2, "fifth"), time.monotonic() + 2 * state_file.REASON_S, None)
        stage.record.write(supervisor)
        assert stage.told().targets[0].reason == "fifth"


async def test_the_file_is_a_heartbeat_until_the_orderly_end(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(state_file, "BEAT_S", 0.01)
    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        beating = asyncio.create_task(stage.record.beat(supervisor))
        async with asyncio.timeout(30):
            while not stage.layout.supervision.exists():  # noqa: ASYNC110
                await asyncio.sleep(0.005)
            first = stage.told().at
            assert first is not None
            while (stage.told().at or 0.0) <= first:  # noqa: ASYNC110
                await asyncio.sleep(0.005)
        beating.cancel()
        assert not stage.told().over
        stage.record.write(supervisor, over=True)
        assert stage.told().over


async def test_nothing_is_written_that_is_no_news(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_file, "BEAT_S", 1000.0)
    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        stage.start("env-0", PATIENT)
        await asyncio.sleep(0)
        before = stage.layout.supervision.stat().st_mtime_ns
        stage.record.write(supervisor)
        assert stage.layout.supervision.stat().st_mtime_ns == before


async def test_a_disk_that_is_full_ends_nobody(run_dir: Path, caplog: pytest.LogCaptureFixture) -> None:
    stage = Stage(run_dir)
    stage.layout.supervision.mkdir()
    async with stage.supervisor as supervisor:
        stage.start("env-0", PATIENT)
        await asyncio.sleep(0)
        assert "supervision not written" in caplog.text
        assert supervisor.identity("env-0") is not None


async def test_one_that_starts_again_still_says_how_its_last_process_ended(run_dir: Path) -> None:
    stage = Stage(run_dir, Backoff(first_s=0.05, crash_limit=9))
    once = run_dir / "once"
    code = f"import os\nif not os.path.exists({str(once)!r}): open({str(once)!r}, 'w'); {FAILS}\n{PATIENT}"
    async with stage.supervisor:
        stage.start("env-0", code)
        async with asyncio.timeout(30):
            await stage.supervisor.until(
                lambda views: views["env-0"].restarts == 1 and views["env-0"].phase is Phase.RUNNING
            )
        await asyncio.sleep(0)
        one = stage.worker("env-0")
    assert (one.phase, one.crashes, one.reason) == ("running", 1, "exit code 1: error: no such environment")
    assert one.last_lines[-1] == "error: no such environment"


async def test_what_was_learned_and_who_is_replaced_is_there(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor:
        stage.start("env-0", FAILS)
        await stage.until("env-0", Phase.FATAL)
        learned = EnvironmentRecord(env="env", proven=True, starts=(4.0,))
        stage.record.learned((learned,), {"env-0": 77.0})
        stage.record.write(stage.supervisor)
        assert stage.worker("env-0").due == 77.0
        assert stage.told().environments == (learned,)


async def test_a_file_that_cannot_be_written_is_told_once(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    stage = Stage(run_dir)
    async with stage.supervisor as supervisor:
        stage.layout.supervision.mkdir()
        for name in ("env-0", "env-1"):
            stage.start(name, PATIENT)
            stage.record.write(supervisor)
        stage.layout.supervision.rmdir()
        stage.record.write(supervisor)
        assert len(stage.told().workers) == 2
    assert [line.split(" path")[0] for line in caplog.messages if "supervision" in line] == [
        "supervision not written",
        "supervision written again",
    ]
