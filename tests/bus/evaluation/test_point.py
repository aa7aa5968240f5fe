"""One point against a real broker: what is asked, what becomes of each task, and what the broker counts."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.bus.evaluation.answering import VERSION, answering, configured, group_of, of_index, until

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.evaluation import point
from rolloutmq.bus.evaluation.plan import plan
from rolloutmq.bus.evaluation.point import PointRun
from rolloutmq.bus.evaluation.scores import PointScores
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.tasks.client import TaskClient
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify
from rolloutmq.services.broker.server import Broker, running_broker


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(configured(run_dir), RunLayout(run_dir)) as running:
        yield running


async def pressure(broker: Broker) -> Pressure:
    async with BrokerClient(broker.endpoints.serve) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure


async def asked(
    run_dir: Path, *, name: str = "p", tasks: int = 3, samples: int = 4, deadline_s: float = 60.0
) -> tuple[str, PointScores]:
    """Ask one point and return why it ended early, and its scores."""
    planned = plan(name, ["e"], tasks=tasks, samples=samples, greedy=True)
    scores = PointScores(planned, 1.0)
    async with (
        TaskClient.open(run_dir) as client,
        Consumer.open(
            run_dir, sequences=1, consumer="evaluator", group="evaluator", split=Split.EVAL
        ) as consumer,
    ):
        running = PointRun(name, client, consumer, planned, scores, deadline_s, awaited=True)
        return await running.run(), scores


@pytest.mark.usefixtures("broker")
async def test_every_task_is_answered_once_and_scored(run_dir: Path) -> None:
    async with answering(run_dir) as taken:
        why, scores = await asked(run_dir)
    assert why == ""
    assert sorted((one.index, one.greedy, one.size) for one in taken) == [
        (index, greedy, 1 if greedy else 4) for index in range(3) for greedy in (False, True)
    ]
    found = scores.of_all()
    assert (found.answered, found.failed, found.missing) == (3, 0, 0)
    assert (found.greedy, found.mean, found.pass_1) == (1.0, 0.5, 0.5)
    assert found.pass_k == pytest.approx(2 / 3)
    assert (scores.oldest, scores.newest) == (VERSION, VERSION)
    assert (scores.rollouts, scores.sequences, scores.tokens) == (6, 15, 45)


async def test_it_counts_for_nothing_that_belongs_to_the_training(run_dir: Path, broker: Broker) -> None:
    before = await pressure(broker)
    async with answering(run_dir):
        await asked(run_dir)
    found = await pressure(broker)
    assert found.batch_sequences == before.batch_sequences == 4
    assert (found.rollout_pressure, found.queued_sequences, found.trainers) == (0.0, 0, 0)
    assert (found.produced_per_s, found.consumed_per_s, found.starved_s) == (0.0, 0.0, 0.0)
    assert (found.step, found.staleness_max, found.trainer_waits_s) == (0, 0, {})
    assert (found.ledger.accepted, found.ledger.committed, found.ledger.filtered) == (6, 6, 0)
    assert {(lane.env, lane.split, lane.accepted_groups) for lane in found.lanes} == {("e", Split.EVAL, 6)}
    assert (found.tasks.done, found.tasks.queued, found.tasks.leased) == (6, 0, 0)


async def test_its_groups_are_never_stale_and_need_no_permit_of_the_training(run_dir: Path) -> None:
    config = configured(run_dir, environment={"e": {"entry": "a:B", "max_staleness": 0, "group_size": 2}})
    with running_broker(config, RunLayout(run_dir)) as broker:
        async with (
            Consumer.open(run_dir, sequences=4) as trainer,
            Producer.open(run_dir, env="e", producer="e-0", group_size=2, slots=9) as training,
        ):
            assert await trainer.pull(90, PolicyVersion(0, 89), wait_s=0.0) is None
            permits = [
                await training.acquire() for _ in range(2)
            ]  # (0 + 1) * 4 sequences: the budget is used up
            async with answering(run_dir):  # its groups are of policy 3, 86 steps old
                why, scores = await asked(run_dir, tasks=20)
            for permit in permits:
                training.abandon(permit)
        assert (why, scores.of_all().answered) == ("", 20)
        ledger = (await pressure(broker)).ledger
        assert (ledger.expired, ledger.reasons) == (0, {})


@pytest.mark.usefixtures("broker")
async def test_a_task_that_a_worker_gives_up_is_failed_and_named(
    run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def hard(task: LeasedTask) -> list[float] | None:
        return None if task.index == 1 and not task.greedy else of_index(task)

    async with answering(run_dir, hard) as taken:
        why, scores = await asked(run_dir)
    found = scores.of_all()
    assert (why, found.answered, found.failed, found.missing) == ("", 2, 1, 0)
    assert found.greedy == 1.0
    assert sum(one.index == 1 and not one.greedy for one in taken) == 2, "every delivery of it"
    assert "evaluation task failed task=p/1/sampled" in caplog.text.replace("p/e/", "p/")


async def test_without_workers_the_deadline_ends_it_and_the_wait_is_told(
    run_dir: Path, broker: Broker, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "HEAR_S", 0.1)
    why, scores = await asked(run_dir, deadline_s=2.6)
    assert why == "its deadline of 2.6 s passed"
    assert (scores.of_all().missing, scores.of_all().greedy) == (3, None)
    assert "waiting for the evaluation point=p ended=0 of=6 without_worker=6 at_a_worker=0" in caplog.text
    counts = (await pressure(broker)).tasks
    assert (counts.queued, counts.cancelled + counts.expired) == (0, 6)


async def test_groups_that_came_too_late_are_taken_away_by_the_next_point(
    run_dir: Path, broker: Broker
) -> None:
    async with Producer.open(
        run_dir, env="e", producer="late", split=Split.EVAL, group_size=4, slots=9
    ) as late:
        for name in ("old/e/0/greedy", "old/e/0/sampled", ""):
            await late.send(group_of(name, [9.0] * 4))
        assert await late.flush(30.0)
    async with answering(run_dir):
        why, scores = await asked(run_dir)
    assert (why, scores.rollouts, scores.of_all().answered) == ("", 6, 3)
    assert scores.of_all().mean == 0.5
    found = await pressure(broker)
    assert (found.ledger.accepted, found.ledger.queued, found.ledger.committed) == (9, 0, 9)


async def test_more_tasks_than_may_be_open_are_asked_one_after_another(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "WINDOW", 4)
    with running_broker(configured(run_dir, broker={"max_tasks": 3}), RunLayout(run_dir)):
        async with answering(run_dir):
            why, scores = await asked(run_dir, tasks=10)
    assert (why, scores.of_all().answered, scores.rollouts) == ("", 10, 20)


async def test_a_point_survives_a_broker_that_forgets_everything(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(point, "LOST_S", 0.5)
    config = configured(run_dir, broker={"durability": "memory"})
    asking: asyncio.Task[tuple[str, PointScores]]
    with running_broker(config, RunLayout(run_dir)):
        async with answering(run_dir, name="early") as taken:
            asking = asyncio.create_task(asked(run_dir, tasks=40))
            await until(lambda: len(taken) >= 5)
    RunLayout(run_dir).saved.unlink(missing_ok=True)
    with running_broker(config, RunLayout(run_dir)):
        async with answering(run_dir, name="later"):
            why, scores = await asyncio.wait_for(asking, 60.0)
    assert (why, scores.of_all().answered, scores.rollouts) == ("", 40, 80)


async def test_the_ledger_on_disk_adds_up_behind_a_point(run_dir: Path) -> None:
    with running_broker(configured(run_dir), RunLayout(run_dir)):
        async with answering(run_dir):
            await asked(run_dir)
    verdict = verify(run_dir / "journal", run_dir / "dead", Witness)
    assert (verdict.problems, verdict.accepted) == ([], 6)
