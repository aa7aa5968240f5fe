"""Tasks with the real broker between a trainer and its workers."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.tasks import client as tasks
from rolloutmq.bus.tasks import taker as taking
from rolloutmq.bus.tasks.client import Task, TaskClient
from rolloutmq.bus.tasks.taker import TaskTaker
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import (
    ClosedError,
    InvalidTaskError,
    RefusedError,
    SessionFencedError,
    TasksFullError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.tasks import (
    PAYLOAD_LIMIT_BYTES,
    AwaitTasks,
    NewTask,
    SubmitTasks,
    TakeTasks,
    TaskState,
    TaskStatus,
)
from rolloutmq.services.broker.server import Broker, running_broker

MakeGroup = Callable[..., Group]
LIMIT_S = 60.0


def config(**broker: Any) -> RunConfig:
    section = {"entry": "a:B", "group_size": 2, "pacing": False}
    return RunConfig(
        environment={
            "e": EnvironmentConfig(**section),
            "v": EnvironmentConfig(**section, split="eval"),
        },
        broker=BrokerConfig(**broker),
        trainer=TrainerConfig(batch_sequences=4),
        orchestrator=OrchestratorConfig(enabled=False),
    )


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(config(max_deliveries=2, max_tasks=20), RunLayout(run_dir)) as running:
        yield running


@asynccontextmanager
async def worker(
    run_dir: Path, name: str = "p", env: str = "e", split: Split = Split.TRAIN, lease_s: float = 60.0
) -> AsyncIterator[tuple[Producer, TaskTaker]]:
    """A producer that takes tasks."""
    async with (
        Producer.open(run_dir, env=env, producer=name, split=split, group_size=2, slots=8) as producer,
        TaskTaker.open(run_dir, name, lambda: producer.session, lease_s) as taker,
    ):
        yield producer, taker


def answer(group: Group, task: str) -> Group:
    return replace(group, task=task)


async def pressure(broker: Broker) -> Pressure:
    async with BrokerClient(broker.endpoints.serve) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure


async def test_a_task_goes_out_and_its_group_comes_back(
    run_dir: Path, broker: Broker, group: MakeGroup
) -> None:
    payload = {"prompt": [1, 2], "ref": None, "data": b"\0", "é": 1.5}
    async with (
        TaskClient.open(run_dir) as client,
        worker(run_dir) as (producer, taker),
        Consumer.open(run_dir, sequences=4) as consumer,
    ):
        waiting = asyncio.create_task(taker.take(2))
        ids = await client.submit(
            [Task(env="e", payload=payload, size=2), Task(env="e", payload=2, id="own")]
        )
        assert ids[1] == "own"
        taken = await waiting
        if len(taken) == 1:
            taken += await taker.take()
        assert [(task.id, task.payload, task.size) for task in taken] == [(ids[0], payload, 2), ("own", 2, 0)]
        results = asyncio.create_task(client.results(ids, LIMIT_S))
        for number, task in enumerate(taken):
            await producer.send(answer(group(f"g{number}"), task.id))
        assert [(one.state, one.group_id, one.worker) for one in await results] == [
            (TaskState.DONE, "g0", "p"),
            (TaskState.DONE, "g1", "p"),
        ]
        batch = await consumer.pull(1, PolicyVersion())
        assert [one.task for one in batch.groups] == ids
        await batch.ack()
    assert (await pressure(broker)).tasks.done == 2


@pytest.mark.usefixtures("broker")
async def test_some_results_come_before_all(run_dir: Path, group: MakeGroup) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (producer, taker):
        ids = await client.submit([Task(env="e", payload=number) for number in range(3)])
        assert [one.state for one in await client.results(ids, 0)] == [TaskState.QUEUED] * 3
        first = (await taker.take())[0]
        waiting = asyncio.create_task(client.results(ids, LIMIT_S, enough=1))
        await producer.send(answer(group("g"), first.id))
        assert sorted(one.state for one in await waiting) == ["done", "queued", "queued"]
        cancelled = await client.cancel(ids, "enough")
        assert [one.state for one in cancelled] == ["done", "cancelled", "cancelled"]
        assert await client.results([], 0) == []
        assert await client.results(["x"]) == [TaskStatus(id="x", state=TaskState.UNKNOWN)]


@pytest.mark.usefixtures("broker")
async def test_a_task_that_fails_twice_is_failed(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (_, taker):
        ids = await client.submit([Task(env="e", payload=1)])
        for reason in ("boom", "bang"):
            (task,) = await taker.take()
            await taker.hand_back(task.id, reason)
        (status,) = await client.results(ids, LIMIT_S)
        assert (status.state, status.reason, status.deliveries) == (TaskState.FAILED, "p: bang", 2)


@pytest.mark.usefixtures("broker")
async def test_who_drains_leaves_no_task_behind(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (_, taker):
        draining = asyncio.Event()
        waits = [asyncio.create_task(taker.take(until=draining)) for _ in range(4)]
        await asyncio.sleep(0)
        submitting = asyncio.create_task(client.submit([Task(env="e", payload=n) for n in range(4)]))
        draining.set()
        taken = [task for wait in waits for task in await wait]
        ids = await submitting
        kept = {task.id for task in taken}
        states = await client.results(ids, 0)
        assert {one.id for one in states if one.state is TaskState.LEASED} == kept
        assert all(one.deliveries == (one.id in kept) for one in states)


@pytest.mark.usefixtures("broker")
async def test_a_cancelled_take_is_given_back_by_its_producer(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client:
        async with worker(run_dir) as (_, taker):
            ids = await client.submit([Task(env="e", payload=1)])
            taking_one = asyncio.create_task(taker.take())
            async with asyncio.timeout(LIMIT_S):
                while (await client.results(ids, 0))[0].state is TaskState.QUEUED:  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
            taking_one.cancel()
            await asyncio.wait({taking_one})
        (status,) = await client.results(ids, 0)
        assert (status.state, status.reason) == (TaskState.QUEUED, "p closed its session")


@pytest.mark.usefixtures("broker")
async def test_more_tasks_than_one_request_takes_and_no_more_than_are_allowed(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (_, taker):
        big = bytes(200 << 10)
        ids = await client.submit([Task(env="e", payload=big) for _ in range(20)])
        assert {one.state for one in await client.results(ids, 0)} == {TaskState.QUEUED}
        with pytest.raises(
            TasksFullError, match=r"too many are open \(20 tasks.*\); try again in 5\.0 s$"
        ) as full:
            await client.submit([Task(env="e", payload=1)])
        assert full.value.retry_s == 5.0
        await client.cancel(ids[:1])
        assert len(await client.submit([Task(env="e", payload=1)])) == 1
        got: list[str] = []
        while len(got) < 20:
            got += [task.id for task in await taker.take(20)]
        assert got[:19] == ids[1:]


@pytest.mark.usefixtures("broker")
async def test_a_submission_waits_for_room(run_dir: Path, group: MakeGroup) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (producer, taker):
        await client.submit([Task(env="e", payload=n) for n in range(19)])
        for name in ("g0", "g1"):  # so that there is a rate at which tasks end
            await producer.send(answer(group(name), (await taker.take())[0].id))
        await producer.flush(LIMIT_S)
        await client.submit([Task(env="e", payload=n) for n in range(3)])
        waiting = asyncio.create_task(client.submit([Task(env="e", payload=99)], wait_s=LIMIT_S))
        await client.cancel([(await taker.take())[0].id])
        assert len(await waiting) == 1


@pytest.mark.parametrize(
    ("task", "problem"),
    [
        (
            Task(env="e", payload=bytes(300 << 10), id="t"),
            r"payload is too large \(got 307205 bytes, limit 262144\)",
        ),
        (Task(env="e", payload=object(), id="t"), "payload is not msgpack"),
        (Task(env="no/name", payload=1, id="t"), "Expected `str` matching"),
        (Task(env="e", payload=1, id="t", size=-1), "Expected `int` >= 0"),
        (Task(env="e", payload=1, id="x" * 129), "length <= 128"),
    ],
)
async def test_a_task_that_cannot_travel_is_refused_here(
    run_dir: Path, broker: Broker, task: Task, problem: str
) -> None:
    async with TaskClient.open(run_dir) as client:
        with pytest.raises(InvalidTaskError, match=problem):
            await client.submit([task])
        assert (await pressure(broker)).tasks.queued == 0


async def test_what_is_not_of_the_protocol_is_refused_at_the_border(run_dir: Path, broker: Broker) -> None:
    async with BrokerClient(broker.endpoints.serve) as client:
        too_large = NewTask(id="t", env="e", payload=bytes(PAYLOAD_LIMIT_BYTES + 1))
        for bad in (
            SubmitTasks(tasks=(too_large,)),
            SubmitTasks(tasks=()),
            SubmitTasks(tasks=(NewTask(id="", env="e", payload=b""),)),
            AwaitTasks(ids=("x",) * 1025),
            TakeTasks(producer="p", session=1, number=0),
        ):
            with pytest.raises(RefusedError) as refused:
                await client.request(bad)
            assert refused.value.code is ErrorCode.MALFORMED
    async with TaskClient.open(run_dir) as tasks_client:
        assert len(await tasks_client.submit([Task(env="e", payload=bytes(PAYLOAD_LIMIT_BYTES - 5))])) == 1


@pytest.mark.usefixtures("broker")
async def test_the_environments_of_the_run_are_named(run_dir: Path) -> None:
    async with TaskClient.open(run_dir, timeout_s=LIMIT_S) as client:
        assert await client.environments() == ("e", "v")


@pytest.mark.usefixtures("broker")
async def test_what_the_broker_refuses_says_why(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client:
        with pytest.raises(RefusedError, match="there is no environment nobody"):
            await client.submit([Task(env="nobody", payload=1)])
        with pytest.raises(RefusedError, match="environment v is of split eval"):
            await client.submit([Task(env="v", payload=1)])
        await client.submit([Task(env="e", payload=1, id="t")])
        await client.submit([Task(env="e", payload=1, id="t")])
        with pytest.raises(RefusedError, match="submitted before with other content"):
            await client.submit([Task(env="e", payload=2, id="t")])


@pytest.mark.usefixtures("broker")
@pytest.mark.parametrize("state", [TaskState.CANCELLED, TaskState.EXPIRED])
async def test_a_worker_hears_of_the_end_of_a_task_it_has(run_dir: Path, state: TaskState) -> None:
    async with TaskClient.open(run_dir) as client, worker(run_dir) as (_, taker):
        deadline_s = 0.5 if state is TaskState.EXPIRED else 0.0
        ids = await client.submit([Task(env="e", payload=1, deadline_s=deadline_s)])
        (task,) = await taker.take()
        hearing = asyncio.create_task(taker.ended(task.id))
        if state is TaskState.CANCELLED:
            await client.cancel(ids, "no longer")
        async with asyncio.timeout(LIMIT_S):
            ended = await hearing
        assert (ended.id, ended.state) == (task.id, state)


@pytest.mark.usefixtures("broker")
async def test_a_fenced_worker_can_take_no_more(run_dir: Path) -> None:
    async with (
        Producer.open(run_dir, env="e", producer="p") as producer,
        TaskTaker.open(run_dir, "p", lambda: old) as taker,
    ):
        old = producer.session
        async with Producer.open(run_dir, env="e", producer="p"):
            with pytest.raises(SessionFencedError):
                await taker.take()


@pytest.mark.usefixtures("broker")
async def test_a_closed_client_says_so(run_dir: Path) -> None:
    async with TaskClient.open(run_dir) as client:
        pass
    with pytest.raises(ClosedError):
        await client.submit([Task(env="e", payload=1)])


async def test_the_next_life_of_the_broker_is_found(
    run_dir: Path, group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Waits on both sides go on over a restart, and what was leased is still leased to the same worker."""
    monkeypatch.setattr(tasks, "POLL_S", 0.3)
    monkeypatch.setattr(taking, "POLL_S", 0.3)
    monkeypatch.setattr("rolloutmq.bus.tasks.connection.PATIENCE_S", 0.5)
    layout = RunLayout(run_dir)
    with running_broker(config(), layout) as first:
        assert first.endpoints
        client_opened, worker_opened = TaskClient.open(run_dir), worker(run_dir)
        client = await client_opened.__aenter__()
        producer, taker = await worker_opened.__aenter__()
        ids = await client.submit([Task(env="e", payload=1), Task(env="e", payload=2, priority=-1)])
        (task,) = await taker.take()
        results = asyncio.create_task(client.results(ids, LIMIT_S))
    with running_broker(config(), layout):
        await producer.send(answer(group("g1"), task.id))
        (other,) = await taker.take()
        assert other.id == ids[1]
        await producer.send(answer(group("g2"), other.id))
        assert [one.group_id for one in await results] == ["g1", "g2"]
        await worker_opened.__aexit__(None, None, None)
        await client_opened.__aexit__(None, None, None)


@pytest.mark.usefixtures("broker")
def test_code_without_a_loop_submits_too(run_dir: Path) -> None:
    with TaskClient.blocking(run_dir) as client:
        ids = client.submit([Task(env="e", payload=1)])
        assert client.cancel(ids)[0].state is TaskState.CANCELLED
        assert client.results(ids)[0].reason == "asked"


async def test_training_and_evaluation_stay_apart(run_dir: Path, group: MakeGroup) -> None:
    """Two producers, two consumers, tasks in both: no group, no pressure and no pacing goes over."""
    paced = {"entry": "a:B", "group_size": 2, "max_staleness": 1}
    settings = RunConfig(
        environment={
            "e": EnvironmentConfig(**paced),
            "v": EnvironmentConfig(**paced, split="eval", stale="pass"),
        },
        trainer=TrainerConfig(batch_sequences=4),
        orchestrator=OrchestratorConfig(enabled=False),
    )
    with running_broker(settings, RunLayout(run_dir)) as broker:
        async with (
            TaskClient.open(run_dir) as client,
            worker(run_dir) as (trains, train_taker),
            worker(run_dir, "q", "v", Split.EVAL) as (evaluates, eval_taker),
            Consumer.open(run_dir, sequences=4, consumer="t-0", group="trainer") as trainer,
            Consumer.open(
                run_dir, sequences=4, consumer="v-0", group="evaluator", split=Split.EVAL
            ) as evaluator,
        ):
            train_ids = await client.submit([Task(env="e", payload=n) for n in range(4)])
            eval_ids = await client.submit([Task(env="v", payload=n, split=Split.EVAL) for n in range(4)])
            eval_permits = [await evaluates.acquire() for _ in range(4)]
            for number, permit in enumerate(eval_permits):
                (task,) = await eval_taker.take()
                await evaluates.send(answer(group(f"eval-{number}"), task.id), permit)
            assert await evaluates.flush(LIMIT_S)
            found = await pressure(broker)
            assert (found.queued_sequences, found.rollout_pressure, found.produced_per_s) == (0, 0.0, 0.0)
            assert found.ledger.queued == 4
            # The staleness budget of evaluation is used up, that of training is whole: (1 + 1) * 4 / 2 rollouts.
            train_permits = [await trains.acquire() for _ in range(4)]
            assert await trainer.pull(1, PolicyVersion(), wait_s=0.0) is None
            for number, permit in enumerate(train_permits):
                (task,) = await train_taker.take()
                assert task.id in train_ids
                await trains.send(answer(group(f"train-{number}"), task.id), permit)
            assert await trains.flush(LIMIT_S)
            found = await pressure(broker)
            assert (found.queued_sequences, found.rollout_pressure) == (8, 2.0)
            for step in (1, 2):
                batch = await trainer.pull(step, PolicyVersion(0, step - 1))
                assert {one.group_id.split("-")[0] for one in batch.groups} == {"train"}
                assert {one.task for one in batch.groups} <= set(train_ids)
                await batch.ack()
            consumed = (await pressure(broker)).consumed_per_s
            assert consumed > 0
            for step in (1, 2):
                batch = await evaluator.pull(step, PolicyVersion(0, 2))
                assert {one.group_id.split("-")[0] for one in batch.groups} == {"eval"}
                assert {one.task for one in batch.groups} <= set(eval_ids)
                await batch.ack(PolicyVersion(0, 2))
            found = await pressure(broker)
            assert found.consumed_per_s <= consumed
            assert (found.step, found.tasks.done, found.ledger.trained) == (2, 8, 8)
            assert await trainer.pull(3, PolicyVersion(0, 2), wait_s=0.0) is None
