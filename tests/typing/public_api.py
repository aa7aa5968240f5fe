"""How a user writes against the public names. Nothing here runs: mypy --strict and pyright read it in `make check`.

What `assert_type` says is what an editor shows. A call that has to be refused bears an ignore for each checker, and an
ignore without an error is an error.
"""

import random
from collections.abc import Sequence
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import rolloutmq
from rolloutmq import (
    Batch,
    BlockingBatch,
    BlockingConsumer,
    BlockingProducer,
    BlockingTaskClient,
    BrokerUnavailableError,
    Column,
    Completion,
    Consumer,
    Durability,
    Environment,
    ErrorCode,
    Group,
    InvalidGroupError,
    LeasedBatch,
    LeaseLostError,
    Permit,
    Policy,
    PolicyVersion,
    Producer,
    RefusedError,
    Rejected,
    RetryableError,
    RolloutMQError,
    RunInfo,
    ScriptedPolicy,
    Settled,
    SingleTurn,
    Split,
    Task,
    TaskClient,
    TasksFullError,
    TaskState,
    TaskStatus,
    TaskTaker,
    Trajectory,
    Wait,
    play,
)
from rolloutmq.testing import (
    Answer,
    LocalBroker,
    assert_nothing_lost,
    assert_settled,
    roll_out,
    roll_out_async,
)

RUN = Path("runs/mine")


def a_group() -> Group:
    group = Group.build(
        "g-1",
        tokens=[[1, 2, 3], np.array([4, 5])],
        mask=[[0, 1, 1], [0, 1]],
        scores=[0.0, 1.0],
        oldest=PolicyVersion(0, 3),
        inference_logprobs=[[0.0, -0.5, -0.1], [0.0, -0.7]],
        mine=[1, 2],
    )
    assert_type(group.columns["tokens"], Column)
    assert_type(group.scores, NDArray[Any])
    assert_type(group["tokens"], list[NDArray[np.integer[Any]]])
    assert_type(group["tokens"][0], NDArray[np.integer[Any]])
    assert_type(group["mask"], list[NDArray[Any]])
    assert_type(group["inference_logprobs"], list[NDArray[Any]])
    assert_type(group["distill_logprobs"], list[list[NDArray[Any]]])
    assert_type(group["scores"], list[Any])
    assert_type(group["mine"], list[Any])
    assert_type(group.newest.step, int)
    return group


async def a_producer() -> None:
    async with Producer.open(RUN, env="e", split=Split.EVAL, ack_log=RUN / "acks") as producer:
        assert_type(producer, Producer)
        permit = await producer.acquire()
        assert_type(permit, Permit)
        await producer.send(a_group(), permit)
        assert_type(await producer.flush(1.0), bool)
        assert_type(producer.info, RunInfo)
        assert_type(producer.durability, Durability)
        assert_type(producer.policy, PolicyVersion)
    Producer.open(RUN)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def a_blocking_producer() -> None:
    assert_type(Producer.blocking(RUN, env="e"), BlockingProducer)
    with Producer.blocking("tcp://broker:5555", env="e", group_size=8, drain_s=1.0) as producer:
        assert_type(producer, BlockingProducer)
        assert_type(producer.acquire(), Permit)
        producer.send(a_group())
        assert_type(producer.accepted, int)
    Producer.blocking(RUN, env="e", size=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    Producer.blocking(RUN, env=8)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    Producer.blocking(RUN)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def a_consumer() -> None:
    opened = Consumer.open(RUN, tokens=4096, info=RunInfo(run="mine"), views=True)
    as_manager: AbstractAsyncContextManager[Consumer] = opened
    async with as_manager as consumer:
        async for batch in consumer:
            assert_type(batch, LeasedBatch)
            assert_type(await batch.ack(), Settled)
        pulled = await consumer.pull(1, PolicyVersion(0, 1), wait_s=1.0)
        assert_type(pulled, LeasedBatch | None)
        assert_type(consumer.wait, Wait)
        waited = await consumer.pull(1, PolicyVersion(0, 1))
        assert_type(waited, LeasedBatch)
        await consumer.settle(waited, rejected=[Rejected(group_id="g-1", reason="too long")])


def a_blocking_consumer() -> None:
    with Consumer.blocking(RUN, sequences=64, resume=PolicyVersion(0, 7)) as consumer:
        assert_type(consumer, BlockingConsumer)
        for batch in consumer:
            assert_type(batch, BlockingBatch)
            a_step(batch)
            try:
                assert_type(batch.ack().commit_wanted, bool)
            except LeaseLostError as error:
                assert_type(error.why, str)
        consumer.progress()
    Consumer.blocking(RUN, sequence=64)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


def a_step(batch: Batch) -> None:
    assert_type(batch.groups, tuple[Group, ...])
    assert_type(batch.staleness(), tuple[int, ...])


async def some_tasks() -> None:
    async with TaskClient.open(RUN) as tasks:
        ids = await tasks.submit([Task(env="e", payload={"any": ["msgpack"]}, size=8)], wait_s=5.0)
        assert_type(ids, list[str])
        assert_type(await tasks.results(ids), list[TaskStatus])
    async with TaskTaker.open(RUN, "p", lambda: 1) as taker:
        assert_type(taker, TaskTaker)


def some_blocking_tasks() -> None:
    with TaskClient.blocking(RUN) as tasks:
        assert_type(tasks, BlockingTaskClient)
        for status in tasks.results(["t-1"], wait_s=1.0):
            assert_type(status.state, TaskState)
    TaskClient.blocking(RUN, env="e")  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


class Addition(SingleTurn[tuple[int, int]]):
    max_tokens = 8

    def task(self, rng: random.Random) -> tuple[int, int]:
        return rng.randrange(50), rng.randrange(50)

    def prompt(self, task: tuple[int, int]) -> str:
        return f"{task[0]}+{task[1]}="

    def score(self, task: tuple[int, int], completion: Completion) -> float:
        return float(completion.text == str(sum(task)))


class TwoTurns:
    async def rollout(self, policy: Policy, size: int, rng: random.Random) -> Sequence[Trajectory]:
        completions = await policy.chat([{"role": "user", "content": str(rng.random())}], n=size)
        assert_type(completions, list[Completion])
        return [Trajectory.of(completion, score=0.0) for completion in completions]


async def turns(policy: Policy) -> None:
    (first,) = await policy.complete(await policy.render([{"role": "user", "content": "q"}], tools=[]))
    sequence = Trajectory.of(first)
    assert_type(await policy.complete("a", after=sequence), list[Completion])
    assert_type(await policy.complete(sequence.token_ids), list[Completion])
    assert_type(await policy.detokenize(sequence.token_ids), str)
    assert_type(await policy.tokenize("a"), list[int])
    assert_type(await policy.chat([{"role": "tool", "content": "7"}], after=sequence), list[Completion])
    await policy.complete([1, 2], after=first)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_test_of_an_environment() -> None:
    environments: list[Environment] = [Addition(), TwoTurns()]
    policy: Policy = ScriptedPolicy(lambda prompt: prompt)
    assert_type([play(each, ScriptedPolicy("4"), size=2) for each in environments], list[Group])
    play(object(), policy)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def a_test_of_a_trainer() -> None:
    answers = ScriptedPolicy({r"(\d)": lambda found: found[1], "": Answer("1", truncated=True)})
    with LocalBroker("broker.lease_s=2") as broker:
        assert_type(broker, LocalBroker)
        assert_type(roll_out(Addition(), answers, 4, to=broker), list[Group])
        assert_settled(broker, 4)
        assert_nothing_lost(RUN, ["g"], dropped={"expired"})
        assert_type(rolloutmq.run_status(broker.run_dir).text, str)
    roll_out(Addition(), answers)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    ScriptedPolicy(1)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


async def the_same_in_a_loop() -> None:
    async with LocalBroker() as broker:
        assert_type(await roll_out_async(Addition(), ScriptedPolicy("1"), 4, to=broker), list[Group])


def again(error: RetryableError) -> None:
    assert_type(str(error), str)


def errors() -> None:
    try:
        a_blocking_producer()
    except TasksFullError as error:
        assert_type(error.retry_s, float)
    except BrokerUnavailableError as error:
        again(error)
    except RefusedError as error:
        assert_type(error.code, ErrorCode)
    except InvalidGroupError as error:
        assert_type(error.column, str)
    except RolloutMQError as error:
        assert_type(error, RolloutMQError)


def a_name_that_is_not_there() -> None:
    _ = rolloutmq.Prodcuer  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    assert_type(rolloutmq.__version__, str)
