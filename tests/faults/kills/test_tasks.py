"""Tasks while workers and brokers are killed: each is answered once, none is lost, and the ledger adds up."""

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.faults.support.processes import LIMIT_S, ROOT, BrokerProcess, config, status, wait_until

from rolloutmq.bus.tasks import client as tasks
from rolloutmq.bus.tasks import connection
from rolloutmq.bus.tasks.client import BlockingTaskClient, Task, TaskClient
from rolloutmq.schemas.wire.tasks import TaskState, TaskStatus
from rolloutmq.services.broker.journal.inspect.explain import group_histories
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

pytestmark = pytest.mark.usefixtures("impatient")


@pytest.fixture(autouse=True)
def impatient_client(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "POLL_S", 0.3)
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)


@contextmanager
def answering(run_dir: Path, name: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a worker that answers tasks; it is killed at the end, if it still lives."""
    log = run_dir.with_name("answering.log")
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.faults.support.answering", str(run_dir), name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=output,
            text=True,
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait(LIMIT_S)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None
            pipe.close()


def taken(process: "subprocess.Popen[str]") -> str:
    """Wait until the worker has a task and return its id."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


def submit(client: BlockingTaskClient, count: int, *hang: str, **given: Any) -> list[str]:
    new = [Task(env="e", payload=[f"g{n}", *hang], id=f"t{n}", **given) for n in range(count)]
    return client.submit(new)


def done(client: BlockingTaskClient, ids: list[str]) -> list[TaskStatus]:
    found = client.results(ids, LIMIT_S)
    assert [one.state for one in found] == [TaskState.DONE] * len(ids), found
    return found


def sound(run_dir: Path, groups: int) -> None:
    """Check the ledger from disk: that many groups were accepted, and each is where it should be."""
    verdict = verify(run_dir / "journal", run_dir / "dead", Witness)
    assert (verdict.problems, verdict.accepted) == ([], groups)


def test_what_a_killed_worker_had_is_answered_by_another(run_dir: Path) -> None:
    with BrokerProcess(run_dir, config()), TaskClient.blocking(run_dir) as client:
        ids = submit(client, 3, "p")
        with answering(run_dir, "p") as p:
            assert taken(p) == "t0"
            p.send_signal(signal.SIGKILL)
            p.wait(LIMIT_S)
        assert [one.worker for one in client.results(ids[:1], 0)] == ["p"]
        with answering(run_dir, "q"):
            found = done(client, ids)
        assert [(one.worker, one.deliveries) for one in found] == [("q", 2), ("q", 1), ("q", 1)]
        assert status(run_dir).pressure.tasks.extra == 0
        story = next(iter(group_histories(run_dir / "journal", "g0")))
        events = [(moment.event, moment.details) for moment in story.moments]
        assert [event for event, _ in events] == [
            "task submitted",
            "task taken",
            "task came back",
            "task taken",
            "accepted",
        ]
        assert events[2][1] == {"reason": "p fell silent"}
        sound(run_dir, 3)


@pytest.mark.extended
def test_a_task_that_kills_every_worker_is_failed(run_dir: Path) -> None:
    with (
        BrokerProcess(run_dir, config(max_deliveries=2)),
        TaskClient.blocking(run_dir) as client,
    ):
        ids = submit(client, 1, "p", "q")
        for name in ("p", "q"):
            with answering(run_dir, name) as process:
                assert taken(process) == "t0"
        (found,) = client.results(ids, LIMIT_S)
        assert (found.state, found.deliveries, found.reason) == (TaskState.FAILED, 2, "q fell silent")


@pytest.mark.extended
@pytest.mark.parametrize("durability", ["os", "disk"])
def test_a_killed_broker_forgets_no_task(run_dir: Path, durability: str) -> None:
    with BrokerProcess(run_dir, config(durability=durability, silence_s=4.0)) as broker:
        with TaskClient.blocking(run_dir) as client, answering(run_dir, "p") as p:
            early = client.submit([Task(env="e", payload=["early"], id="early", priority=9)])
            done(client, early)
            taken(p)
            ids = submit(client, 4, "p")
            client.cancel(ids[3:], "not this one")
            assert taken(p) == "t0"
            before = client.results([*early, *ids], 0)
            assert [one.state.value for one in before] == ["done", "leased", "queued", "queued", "cancelled"]
            broker.kill_and_start()
            assert client.results([*early, *ids], 0) == before
            assert submit(client, 3, "p") == ids[:3]
            p.kill()
            with answering(run_dir, "q"):
                found = done(client, ids[:3])
        assert [one.worker for one in found] == ["q"] * 3
        assert [one.deliveries for one in found] == [2, 1, 1]
        assert status(run_dir).pressure.ledger.accepted == 4
        sound(run_dir, 4)


@pytest.mark.extended
def test_each_task_is_answered_once_however_often_the_broker_dies(run_dir: Path) -> None:
    with (
        BrokerProcess(run_dir, config(durability="os", silence_s=10.0)) as broker,
        TaskClient.blocking(run_dir) as client,
        answering(run_dir, "p"),
        answering(run_dir, "q"),
    ):
        ids: list[str] = []
        for life in range(3):
            ids += client.submit(
                [Task(env="e", payload=[f"g{life}-{n}"], id=f"t{life}-{n}") for n in range(30)]
            )
            client.results(ids, LIMIT_S, enough=len(ids) - 20)
            broker.kill_and_start()
        found = done(client, ids)
        assert Counter(one.group_id for one in found) == {
            f"g{life}-{n}": 1 for life in range(3) for n in range(30)
        }
        assert {one.deliveries for one in found} == {1}
        counts = status(run_dir).pressure.tasks
        assert (counts.done, counts.extra, counts.late, counts.unmatched) == (90, 0, 0, 0)
        wait_until(lambda: status(run_dir).pressure.ledger.accepted == 90, "every group")
        sound(run_dir, 90)
