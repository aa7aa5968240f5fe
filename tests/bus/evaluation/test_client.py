"""The call that evaluates a run: what it records, and that two callers do not disturb each other."""

import asyncio
import fcntl
import json
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bus.evaluation.answering import VERSION, answering, configured, of_index, until

import rolloutmq
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.evaluation import client
from rolloutmq.bus.evaluation.client import PointRequest, evaluate, evaluate_async
from rolloutmq.bus.evaluation.log import recorded
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.bus.transport.pubsub import Subscriber
from rolloutmq.schemas.errors import ConfigError, MissingError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import OpenPoint, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.evaluation import EvaluationDone
from rolloutmq.schemas.wire.tasks import TaskState
from rolloutmq.services.broker.server import Broker, running_broker


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(configured(run_dir), RunLayout(run_dir)) as running:
        yield running


async def test_a_point_is_recorded_and_published(run_dir: Path, broker: Broker) -> None:
    async with answering(run_dir), Subscriber(broker.endpoints.events, [topics.TELEMETRY]) as events:
        done = await evaluate_async(run_dir, version=VERSION)
        topic, payload = await asyncio.wait_for(anext(events), 30.0)
    assert (topic, codec.decode_event(payload)) == (b"telemetry.evaluation.run", done)
    assert list(recorded(RunLayout(run_dir).evaluations)) == [done]
    assert done.one_policy
    assert (done.version, done.oldest, done.newest) == (VERSION, VERSION, VERSION)
    assert (done.rollouts, done.sequences, done.seed, done.why, done.waited) == (6, 15, 0, "", False)
    assert done.environments == {"e": done.all}
    assert not RunLayout(run_dir).evaluation.exists()


@pytest.mark.usefixtures("broker")
def test_it_blocks_for_a_trainer_without_an_event_loop(run_dir: Path) -> None:
    stop, ready = threading.Event(), threading.Event()

    async def work() -> None:
        async with answering(run_dir):
            ready.set()
            await asyncio.to_thread(stop.wait, 60.0)

    worker = threading.Thread(target=lambda: asyncio.run(work()))
    worker.start()
    try:
        assert ready.wait(30.0)
        done = rolloutmq.evaluate(run_dir, tasks=2, samples=0)
    finally:
        stop.set()
        worker.join(30.0)
    assert (done.all.tasks, done.all.greedy, done.all.mean, done.rollouts) == (2, 1.0, None, 2)
    assert done.version == PolicyVersion(), "the trainer's policy, as the broker knows it"
    assert not done.one_policy, "version 3 answered"


@pytest.mark.usefixtures("broker")
async def test_a_second_caller_waits_for_the_first(run_dir: Path) -> None:
    taken: list[LeasedTask] = []

    def note(task: LeasedTask) -> list[float]:
        taken.append(task)
        return of_index(task)

    async with answering(run_dir, note):
        both = await asyncio.gather(*(evaluate_async(run_dir) for _ in range(2)))
    assert [(one.all.answered, one.rollouts, one.all.mean) for one in both] == [(3, 6, 0.5)] * 2
    points = [task.id.split("/")[0] for task in taken]
    assert points == sorted(points, key=points.index), "the tasks of one point, then those of the other"
    assert len(list(recorded(RunLayout(run_dir).evaluations))) == 2


@pytest.mark.usefixtures("broker")
async def test_tasks_of_a_killed_caller_are_cancelled(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as tasks:
        left = await tasks.submit(
            [Task(env="e", id=f"dead/{n}", split=Split.EVAL, index=n) for n in range(3)]
        )
        write_json(RunLayout(run_dir).evaluation, OpenPoint("dead", tuple(left)))
        async with answering(run_dir, lambda task: None if task.id in left else of_index(task)):
            done = await evaluate_async(run_dir)
        found = await tasks.results(left, 0.0)
    assert done.all.answered == 3
    assert {one.state for one in found} <= {TaskState.CANCELLED, TaskState.FAILED}
    assert any(one.reason == "its evaluation was killed" for one in found)


@pytest.mark.usefixtures("broker")
async def test_a_cancelled_call_leaves_no_task_behind(run_dir: Path) -> None:
    asking = asyncio.create_task(evaluate_async(run_dir))
    layout = RunLayout(run_dir)
    await until(layout.evaluation.exists)
    ids = json.loads(layout.evaluation.read_text())["tasks"]
    async with TaskClient.open(run_dir) as tasks:
        while any(one.state is not TaskState.QUEUED for one in await tasks.results(ids, 0.0)):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert {one.state for one in await tasks.results(ids, 30.0)} == {TaskState.CANCELLED}
    assert not layout.evaluations.exists()


@pytest.mark.usefixtures("broker")
async def test_what_only_the_caller_knows_is_recorded_too(run_dir: Path) -> None:
    def completed(done: EvaluationDone) -> EvaluationDone:
        return rolloutmq.EvaluationDone(
            **{name: getattr(done, name) for name in done.__struct_fields__}
            | {"total_s": 9.0, "waited": True}
        )

    layout = RunLayout(run_dir)
    async with answering(run_dir):
        await PointRequest(configured(run_dir)).answered(layout, VERSION, completed=completed)
    (found,) = recorded(layout.evaluations)
    assert (found.total_s, found.waited) == (9.0, True)


@pytest.mark.usefixtures("broker")
async def test_answers_of_several_policies_are_a_span(run_dir: Path) -> None:
    async with answering(run_dir, version=lambda task: PolicyVersion(0, 3 + task.index)):
        done = await evaluate_async(run_dir, version=VERSION)
    assert (done.oldest, done.newest, done.one_policy) == (VERSION, PolicyVersion(0, 5), False)


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"environments": ["x"]}, "x is not evaluated (evaluated: e)"),
        ({"tasks": 0}, "tasks: must be a number of at least 1 (got 0)"),
        ({"samples": -1}, "samples: must be a number of at least 0 (got -1)"),
        ({"samples": 1.5}, "samples: must be a number of at least 0 (got 1.5)"),
        ({"samples": 0, "greedy": False}, "samples: must be at least 1 with greedy=False"),
        ({"environments": []}, "an environment named"),
        ({"environments": ["e", "e"]}, "environments: must name each environment once (got e, e)"),
        ({"deadline_s": 2e9}, "deadline_s: must be seconds above 0, at most 1e+09"),
        ({"deadline_s": 0.0}, "deadline_s: must be seconds above 0"),
        ({"deadline_s": "9"}, "deadline_s: must be seconds above 0, at most 1e+09 (got '9')"),
        (
            {"version": 10},
            "version: must be a PolicyVersion (got 10); pass `PolicyVersion(incarnation, step)`",
        ),
    ],
)
def test_a_wrong_argument_is_refused_before_anything_is_asked(
    run_dir: Path, given: dict[str, object], problem: str
) -> None:
    configured(run_dir)
    with pytest.raises(UsageError) as refused:
        evaluate(run_dir, **given)  # type: ignore[arg-type]
    assert problem in str(refused.value)


def test_a_run_without_evaluation_is_refused(run_dir: Path) -> None:
    with pytest.raises(MissingError):
        evaluate(run_dir)
    configured(run_dir, evaluation={"enabled": False})
    with pytest.raises(ConfigError) as refused:
        evaluate(run_dir)
    assert refused.value.path == "evaluation.enabled"


@pytest.mark.usefixtures("broker")
async def test_a_lock_that_another_holds_ends_the_call_at_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CLOSING_S", 0.1)
    with RunLayout(run_dir).evaluation_lock.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(WaitTimeoutError, match="another evaluation of the run"):
            await evaluate_async(run_dir, deadline_s=0.2)
    assert not list(recorded(RunLayout(run_dir).evaluations))


async def test_a_killed_broker_ends_the_call_at_its_deadline(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "CLOSING_S", 0.1)
    layout = RunLayout(run_dir)
    with running_broker(configured(run_dir), layout):
        address = layout.endpoints.read_bytes()
    layout.endpoints.write_bytes(address)  # as a kill leaves it
    with pytest.raises(WaitTimeoutError, match="no answer from the broker"):
        await evaluate_async(run_dir, deadline_s=0.5)
