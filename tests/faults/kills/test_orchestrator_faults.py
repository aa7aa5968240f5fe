"""An orchestrator killed, doubled, deceived and starved, and workers that refuse to end or to live.

Broker, orchestrator and workers are processes of their own. The tests look at what an operator sees: pids with their
start ticks, logs, the ack logs of the workers.
"""

import asyncio
import contextlib
import os
import random
import signal
import subprocess
import time
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import psutil
import pytest
from tests.faults.support.processes import LIMIT_S, Trainer, acked, status, wait_until
from tests.faults.support.staff import SITE, Staff, Staffed, sleeping

from benchmarks.end_to_end import scenario
from benchmarks.end_to_end.scenario import LiveRun
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.launch.commands import steer
from rolloutmq.schemas.errors import RefusedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.process import ProcessIdentity, Role
from rolloutmq.schemas.wire.control import Drain
from rolloutmq.services.monitor.status.worker_view import supervision_of
from rolloutmq.services.process.identity import alive, find_marked, identify

SOAK: Final = int(os.environ.get("ROLLOUTMQ_SOAK_ROUNDS", "10"))
KILLS: Final = SOAK // 2
DRAINS: Final = SOAK // 3
SILENCE_S: Final = 7.0
"""Twice the age at which the orchestrator ignores its last message."""
HOUR_S: Final = 3600.0


def is_gone(pid: int) -> bool:
    return not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def grandchild(run_dir: Path, worker: ProcessIdentity) -> int:
    """Return the child of a `Parent`, which left its group."""
    file = run_dir.parent / f"child-{worker.pid}"
    return int(wait_until(lambda: file.exists() and file.read_text(), "a child of the worker"))


# The orchestrator dies.


@pytest.mark.extended
def test_an_orchestrator_that_is_killed_in_a_run_adopts_every_worker(tmp_path: Path) -> None:
    """A whole run under load: the same workers before and after each kill, none twice, no group lost, nobody left."""
    workers: list[dict[str, ProcessIdentity]] = []
    tokens: list[str] = []

    def there(live: LiveRun) -> dict[str, ProcessIdentity]:
        return {name: one for name, one in live.processes().items() if one.role is Role.WORKER and alive(one)}

    def kill_again_and_again(live: LiveRun) -> None:
        tokens.append(live.wait_for_process("broker").marker.partition("/")[0])
        live.wait_for("a broker", lambda: live.layout.endpoints.exists())
        steer.scale(live.layout.root, "sort3", 3)
        live.wait_for("three workers", lambda: len(there(live)) == 3)
        live.wait_for_step(5)
        workers.append(there(live))
        for _ in range(KILLS):
            old = live.wait_for_process("orchestrator")
            os.kill(old.pid, signal.SIGKILL)
            live.wait_for("another life", partial(_is_another, live, old))
            live.wait_for("its record", lambda: _has_decided(live.layout))
            live.wait_for_step(scenario.steps_logged(live.layout) + 2)
            workers.append(there(live))
            doubled = [name for _, name in _processes(tokens[0]) if name.startswith("sort3-")]
            assert sorted(doubled) == sorted(workers[0])
        live.process.send_signal(signal.SIGINT)

    code, summary = scenario.run(
        tmp_path / "run",
        [
            *("trainer.steps=1000000", "environment.sort3.min_workers=3", "environment.sort3.max_workers=3"),
            *(
                "orchestrator.crash_limit=1000",
                "orchestrator.backoff_s=0.05",
                "orchestrator.backoff_max_s=0.1",
            ),
        ],
        fault=kill_again_and_again,
        deadline_s=60.0 + 10.0 * KILLS,
    )
    assert code == 130
    assert len(workers) == KILLS + 1
    assert all(seen == workers[0] for seen in workers)
    assert (summary["groups_lost"], summary["groups_trained_twice"]) == (0, 0)
    assert not find_marked(f"{tokens[0]}/")


def _has_decided(layout: RunLayout) -> bool:
    """Whether the orchestrator that lives now has looked at its workers and decided."""
    known = supervision_of(layout)
    return known is not None and alive(known.orchestrator) and bool(known.targets)


def _is_another(live: LiveRun, old: ProcessIdentity) -> bool:
    found = live.processes().get(old.name)
    return found is not None and found.pid != old.pid and alive(found)


def _processes(token: str) -> list[tuple[int, str]]:
    """Return pid and name of each leader of a session that belongs to the run, from /proc alone."""
    found = []
    for pid in find_marked(f"{token}/"):
        try:
            if os.getsid(pid) == pid:
                marker = psutil.Process(pid).environ()["ROLLOUTMQ_PROCESS"]
                found.append((pid, marker.rpartition("/")[2]))
        except (ProcessLookupError, psutil.Error):
            continue
    return found


@pytest.mark.extended
def test_what_an_operator_asked_for_survives_the_orchestrator(staffed: Staffed) -> None:
    """A life that has heard nothing yet ends nobody, though the configuration would do with one worker."""
    light = {"entry": "envs.py:Light", "min_workers": 1, "max_workers": 4}
    with staffed(e=light) as (_, staff):
        staff.until_ready(1)
        staff.scale("e", 3)
        before = staff.until_ready(3)
        staff.kill()
        assert staff.living() == before
        staff.start()
        wait_until(lambda: len(staff.log_lines("adopted")) == 3, "the adoption")
        wait_until(lambda: staff.supervision().orchestrator.pid == staff.process.pid, "its record")
        staff.until_ready(3)
        assert staff.living() == before
        row = staff.rows()["e-0"]
        assert row.age_s is not None
        assert row.phase_s is not None
        assert row.age_s > row.phase_s, "it is as old as its process, though it was adopted only now"
        assert sorted(staff.marked().values()) == sorted(before)
        assert {one.worker: one.pid for one in staff.supervision().workers} == {
            name: one.pid for name, one in before.items()
        }
        assert staff.end() == 0
        assert staff.living() == {}
        assert not staff.marked()


def test_a_second_orchestrator_is_told_who_is_there(staffed: Staffed) -> None:
    with staffed(e={"entry": "envs.py:Light", "max_workers": 1}) as (_, staff):
        before = staff.until_ready(1)
        second = subprocess.run(
            staff.command, env=staff.variables, capture_output=True, text=True, timeout=LIMIT_S, check=False
        )
        assert second.returncode == 4
        told = second.stderr.splitlines()[-1]
        assert f"is in use by process {staff.process.pid} (another orchestrator) since 20" in told
        assert staff.living() == before
        assert staff.process.poll() is None


def test_a_pid_that_another_process_has_now_is_never_signalled(staffed: Staffed) -> None:
    light = {"entry": "envs.py:Light", "min_workers": 2, "max_workers": 2}
    with staffed(e=light) as (_, staff), sleeping(2) as (other, unmarked):
        workers = staff.until_ready(2)
        staff.kill()
        ours = workers["e-0"]
        recycled = msgspec.structs.replace(workers["e-1"], pid=other.pid)
        forged = identify("e-7", Role.WORKER, unmarked.pid, f"{staff.token}/e-7")
        os.kill(workers["e-1"].pid, signal.SIGKILL)
        write_json(staff.layout.workers, [ours, recycled, forged])
        staff.start()
        found = staff.until_ready(2)
        assert found["e-0"] == ours
        assert len(staff.log_lines("adopted name=")) == 1
        assert staff.end() == 0
    # The fixture has checked that both strangers lived to the end, without a signal.


def test_a_worker_that_was_not_written_down_yet_is_not_doubled(staffed: Staffed) -> None:
    """Its orchestrator was killed between the start and the file: it is ended, and another is started in its place."""
    light = {"entry": "envs.py:Light", "min_workers": 2, "max_workers": 2}
    with staffed(e=light) as (_, staff):
        before = staff.until_ready(2)
        staff.kill()
        write_json(staff.layout.workers, [before["e-0"]])
        staff.start()
        after = staff.until_ready(2)
        assert after["e-0"] == before["e-0"]
        wait_until(lambda: not alive(before["e-1"]), "the end of the unknown worker")
        assert sorted(staff.marked().values()) == sorted(after) == ["e-0", "e-2"]


# A worker ends.


@pytest.mark.extended
def test_a_deaf_worker_goes_down_the_whole_ladder_and_takes_its_child_along(
    staffed: Staffed, run_dir: Path
) -> None:
    limits = {"drain_deadline_s": 1.0, "term_grace_s": 1.0}
    deaf = {"entry": "envs.py:Deaf", "min_workers": 1, "max_workers": 1}
    with staffed(e=deaf, orchestrator=limits) as (_, staff):
        worker = staff.until_ready(1)["e-0"]
        child = grandchild(run_dir, worker)
        assert os.getsid(child) != os.getsid(worker.pid)
        began = time.monotonic()
        staff.cli("drain", "e-0", "--run-dir", str(run_dir))
        wait_until(lambda: not alive(worker), "the end of the worker")
        # Deadline, two seconds of overtime for a worker that keeps it, then the grace of SIGTERM.
        assert 4.0 <= time.monotonic() - began < LIMIT_S
        assert staff.until_ended("e-0") == "killed by SIGKILL"
        assert staff.steps("e-0") == ["drain", "SIGUSR1", "SIGTERM", "SIGKILL"]
        wait_until(lambda: is_gone(child), "the end of its child")
        wait_until(lambda: "e-1" in staff.living(), "a worker in its place")


@pytest.mark.parametrize("how", ["drain", pytest.param("kill", marks=pytest.mark.extended)])
def test_what_a_worker_started_in_another_session_ends_with_it(
    staffed: Staffed, run_dir: Path, how: str
) -> None:
    with staffed(e={"entry": "envs.py:Parent", "max_workers": 1}) as (_, staff):
        worker = staff.until_ready(1)["e-0"]
        child = grandchild(run_dir, worker)
        assert alive(worker)
        assert not is_gone(child)
        if how == "drain":
            staff.cli("drain", "e-0", "--run-dir", str(run_dir))
        else:
            os.kill(worker.pid, signal.SIGKILL)
        wait_until(lambda: is_gone(child), "the end of the child")
        assert staff.until_ended("e-0") == ("exit code 0" if how == "drain" else "killed by SIGKILL")


async def order_thrice(staff: Staff, worker: ProcessIdentity) -> None:
    """Send everything that drains a worker three times, all at once."""
    drain = Drain(worker=worker.name, reason="three times")

    async def ask() -> None:
        async with BrokerClient(resolve_blocking(staff.layout.root, LIMIT_S).serve) as client:
            with contextlib.suppress(RefusedError):  # it may be quicker than the message
                await client.request(drain, LIMIT_S)

    async def signal_it() -> None:
        await asyncio.sleep(random.uniform(0.0, 0.01))
        if alive(worker):
            os.kill(worker.pid, signal.SIGUSR1)

    await asyncio.gather(*(act() for _ in range(3) for act in (ask, signal_it)))


@pytest.mark.extended
def test_a_worker_that_is_told_to_drain_six_times_drains_once(staffed: Staffed, run_dir: Path) -> None:
    """Started rollouts finish, all groups are acked, each worker closes its session and exits with 0."""
    light = {"entry": "envs.py:Light", "min_workers": 2, "max_workers": 2, "concurrency": 4}
    with staffed(e=light, broker={"high_groups": 100_000}) as (_, staff):
        drained = []
        for _ in range(DRAINS):
            workers = staff.until_ready(2)
            victim = workers[random.choice(sorted(workers))]
            asyncio.run(order_thrice(staff, victim))
            most = 0
            while alive(victim):
                most = max(most, len(staff.living()))
                time.sleep(0.01)
            assert most <= 2, "its place is free only when its process is gone"
            assert staff.until_ended(victim.name) == "exit code 0"
            drained.append(victim.name)
        staff.until_ready(2)
        for name in drained:
            log = staff.layout.log(name).read_text()
            assert log.count(" draining reason=") == 1
            assert "cut off" not in log
            (gone,) = [line for line in log.splitlines() if " worker ended produced=" in line]
            ids = staff.acked(name)
            assert gone.endswith(f" worker ended produced={len(ids)} abandoned=0 untaught=0")
            assert set(Counter(ids).values()) <= {1}
        assert not list(staff.layout.spools.glob("*"))
        every = sum(len(staff.acked(name)) for name in [*drained, *staff.living()])
        assert staff.end() == 0
        ledger = status(run_dir).pressure.ledger
        assert every <= ledger.accepted
        assert (ledger.lost_before_accept, ledger.dead) == (0, 0)


def test_a_drain_waits_for_the_rollout_in_hand(staffed: Staffed, run_dir: Path) -> None:
    held = {"entry": "envs.py:Held", "min_workers": 1, "max_workers": 2}
    with staffed(e=held) as (_, staff):
        worker = staff.until_ready(1)["e-0"]
        wait_until(lambda: staff.rows()["e-0"].in_hand == 2, "rollouts in hand")
        asyncio.run(order_thrice(staff, worker))
        wait_until(lambda: staff.rows()["e-0"].state == "draining", "the worker to say so")
        assert staff.rows()["e-0"].in_hand == 2
        assert alive(worker)
        (run_dir.parent / "go").touch()
        assert staff.until_ended("e-0") == "exit code 0"
        assert len(staff.acked("e-0")) == 2


# A worker does not live.


@pytest.mark.extended
def test_a_crash_loop_is_given_up_and_said_while_the_others_go_on(staffed: Staffed, run_dir: Path) -> None:
    """One of two workers can never live; its environment and the other one go on without it."""
    (run_dir.parent / "mortal").write_text("bad-0")
    bad = {"entry": "envs.py:Mortal", "min_workers": 2, "max_workers": 2}
    good = {"entry": "envs.py:Light", "min_workers": 1, "max_workers": 1}
    with staffed(bad=bad, good=good) as (_, staff):
        wait_until(lambda: _state(staff, "bad-0") == "fatal", "bad-0 to be given up")
        rows = {row["worker"]: row for row in staff.cli_json("status")["supervision"]["workers"]}
        reason = rows["bad-0"]["reason"]
        assert reason.startswith(
            "crashed 3 times in a row, each before it was ready for 10 s; the last: exit code 9: "
            "environment ended its worker env=bad error=os._exit(9) ends the process (envs.py:"
        )
        assert rows["bad-0"]["last_lines"][-3:-1] == ["line one", "the reason is here"]
        assert len(rows["bad-0"]["last_lines"]) <= 8
        assert len(staff.log_lines("started name=bad-0 ")) == len(staff.log_lines("ended name=bad-0 ")) == 3
        for text in (staff.cli("status", str(run_dir)), staff.cli("workers", str(run_dir))):
            assert "crashed 3 times in a row" in text
            assert "| the reason is here" in text
        staff.until_more(["bad-1", "good-0"])
        wait_until(lambda: "bad-2" in staff.living(), "another worker in its place, after the pause")
        assert len(staff.log_lines("started name=bad-0 ")) == 3


def _state(staff: Staff, worker: str) -> str:
    row = staff.rows().get(worker)
    return "" if row is None else row.state


@pytest.mark.extended
def test_an_environment_without_a_living_worker_ends_the_run_and_says_why_afterwards(
    staffed: Staffed, run_dir: Path
) -> None:
    (run_dir.parent / "mortal").write_text("bad-0")
    bad = {"entry": "envs.py:Mortal", "min_workers": 1, "max_workers": 1}
    good = {"entry": "envs.py:Light", "min_workers": 1, "max_workers": 1}
    with staffed(bad=bad, good=good) as (_, staff):
        assert staff.process.wait(LIMIT_S) == 3
        assert "environment.bad: all workers failed; bad-0: crashed 3 times" in staff.tail().splitlines()[-1]
        assert not staff.marked()
        (row,) = [row for row in staff.cli_json("workers")["workers"] if row["worker"] == "bad-0"]
        assert (row["state"], row["last_lines"][-2]) == ("fatal", "the reason is here")


# Nothing is heard, or the clock lies.


@pytest.mark.extended
def test_a_silent_broker_moves_nobody(staffed: Staffed) -> None:
    """Silence is not zero pressure: where more are allowed nobody is started, and nobody is ended; then all goes on."""
    light = {"entry": "envs.py:Light", "min_workers": 2, "max_workers": 4}
    with staffed(e=light, broker={"high_groups": 4000}) as (broker, staff):
        staff.until_ready(2)
        wait_until(lambda: status(broker.layout.root).pressure.rollout_pressure > 20.0, "a full queue")
        staff.scale("e", 2)
        staff.until_ready(2)
        staff.scale("e", None)
        wait_until(lambda: "pinned to" not in staff.supervision().targets[0].reason, "its own judgement")
        before, said = staff.living(), len(staff.log_lines(" name="))
        broker.child.signal(signal.SIGSTOP)
        try:
            time.sleep(SILENCE_S)  # the time itself is the fault
            assert staff.living() == before
            assert len(staff.log_lines(" name=")) == said
            assert {one.worker for one in staff.supervision().workers} == set(before)
        finally:
            broker.child.signal(signal.SIGCONT)
        staff.until_more(before)
        staff.until_ready(2)
        assert staff.living() == before
        staff.scale("e", 3)
        staff.until_ready(3)


@pytest.mark.extended
def test_a_wall_clock_that_is_moved_restarts_nobody_and_costs_no_lease(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, staffed: Staffed
) -> None:
    clock = run_dir.parent / "clock"
    site = run_dir.parent / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(SITE)
    monkeypatch.setenv("PYTHONPATH", str(site))
    monkeypatch.setenv("ROLLOUTMQ_FAULTS_CLOCK", str(clock))
    light = {"entry": "envs.py:Light", "min_workers": 1, "max_workers": 4}
    with staffed(e=light) as (_, staff), Trainer(run_dir) as trainer:
        staff.scale("e", 2)
        before = staff.until_ready(2)
        for number, jump_s in enumerate((HOUR_S, -HOUR_S), 1):
            assert trainer.pull(number).what == "batch"
            clock.write_text(str(jump_s))
            staff.until_more(before)
            time.sleep(1.0)  # ten decisions
            assert trainer.settle((0, number)).what == "settled"
            assert staff.living() == before
            rows = staff.cli_json("workers")["workers"]
            assert all(row["state"] == "ready" and 0.0 <= row["age_s"] < 2 * LIMIT_S for row in rows)
            assert not staff.log_lines("ending name=")
            assert len(staff.log_lines("started name=")) == 2
            (moved,) = {
                round((acked(staff.layout.ack_log(name))[-1].at - time.time()) / HOUR_S) for name in before
            }
            assert moved == round(jump_s / HOUR_S), "the clocks of the workers did move"
        pressure = status(run_dir).pressure
        assert abs(pressure.at - time.time() + HOUR_S) < LIMIT_S, "the clock of the broker did move"
        assert (pressure.ledger.expired, pressure.ledger.dead) == (0, 0)
        there = time.strftime("%Y-%m-%d %H:", time.localtime(time.time() - HOUR_S))
        assert staff.end() == 0
        assert staff.log_lines(there, "stopping reason=SIGTERM"), "the clock of the orchestrator did move"


# The output is bounded.


@pytest.mark.extended
def test_the_log_of_an_adopted_worker_is_cut_and_followed(staffed: Staffed, run_dir: Path) -> None:
    layout = RunLayout(run_dir)
    with staffed(e={"entry": "envs.py:Light", "max_workers": 1}) as (_, staff):
        before = staff.until_ready(1)
        log = layout.log("e-0")
        staff.kill()
        with log.open("ab") as file:
            file.write(b"".join(b"%07d\n" % number for number in range(150_000)))
        followed = run_dir.with_name("followed")
        with followed.open("wb") as output:
            follower = subprocess.Popen(
                [
                    "env",
                    "PYTHONUNBUFFERED=1",
                    *staff.command[:3],
                    "logs",
                    "e-0",
                    "-f",
                    "--run-dir",
                    str(run_dir),
                ],
                stdout=output,
            )
        try:
            wait_until(lambda: followed.stat().st_size > 0, "the first lines")
            staff.start()
            wait_until(lambda: Path(f"{log}.1").exists(), "the cut")
            with log.open("ab") as file:
                file.write(b"after the cut\n")
            wait_until(lambda: followed.read_bytes().endswith(b"after the cut\n"), "what came after")
        finally:
            follower.kill()
            follower.wait()
        assert staff.living() == before
        parts = [path.read_bytes() for path in (Path(f"{log}.1"), log)]
        assert len(parts[0]) <= 1 << 20
        assert b"".join(parts).endswith(followed.read_bytes())
