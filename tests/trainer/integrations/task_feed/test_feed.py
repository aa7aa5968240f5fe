"""The feed with the real broker, without SkyRL: matching, attempts, losses, other lives, leases."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from rolloutmq import Group, Producer, TaskTaker
from rolloutmq.bus.consumer import connection
from rolloutmq.bus.tasks.taker import LeasedTask
from rolloutmq.bus.transport import discovery
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ClosedError, ConsumerFencedError
from rolloutmq.schemas.files import RunLayout, SettledBatch
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply, StepDone
from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import WINDOW_LIMIT
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.monitor.text.jsonl import read_lines
from rolloutmq.trainer.integrations.task_feed import feed as feeds
from rolloutmq.trainer.integrations.task_feed.answers import Answer, Missing
from rolloutmq.trainer.integrations.task_feed.feed import Feed

LIMIT_S = 60.0


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon, and a lost group is given up soon."""
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.5)
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)
    monkeypatch.setattr(feeds, "POLL_S", 0.1)
    monkeypatch.setattr(feeds, "LOST_S", 0.5)
    monkeypatch.setattr(feeds, "GRACE_S", 0.5)


def config(**broker: Any) -> RunConfig:
    env = EnvironmentConfig(entry="a:B", group_size=2, pacing=False, stale="pass")
    return RunConfig(environment={"e": env}, broker=BrokerConfig(max_deliveries=2, **broker))


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(config(), RunLayout(run_dir)) as running:
        yield running


@asynccontextmanager
async def worker(
    run_dir: Path, name: str = "w", split: Split = Split.TRAIN
) -> AsyncIterator[tuple[Producer, TaskTaker]]:
    async with (
        Producer.open(
            run_dir, env="e", producer=name, split=split, group_size=2, slots=64, timeout_s=LIMIT_S
        ) as producer,
        TaskTaker.open(run_dir, name, lambda: producer.session) as taker,
    ):
        yield producer, taker


@asynccontextmanager
async def joined(run_dir: Path, **options: Any) -> AsyncIterator[Feed]:
    given: dict[str, Any] = {
        "training": "t", "batch_sequences": 4, "deadline_s": LIMIT_S, "timeout_s": LIMIT_S,
    }  # fmt: skip
    async with Feed.open(run_dir, **given | options) as feed:
        yield feed


def answer(task: LeasedTask | str, mark: int = 0) -> Group:
    name = task if isinstance(task, str) else task.id
    return Group.build(
        f"g-{name.replace('/', '.')}-{mark}",
        tokens=[[mark, 1], [mark, 2]],
        mask=[[0, 1], [0, 1]],
        scores=[0.0, 1.0],
        task=name,
    )


async def taken(taker: TaskTaker, count: int) -> list[LeasedTask]:
    found: list[LeasedTask] = []
    async with asyncio.timeout(LIMIT_S):
        while len(found) < count:
            found += await taker.take(count - len(found))
    return sorted(found, key=lambda one: one.id)


def ask(feed: Feed, uid: str, env: str = "e", payload: Any = None) -> "asyncio.Task[Answer]":
    return asyncio.create_task(feed.ask(uid, f"t/train/e0/{uid}", env, payload, 2))


async def counts(broker: Broker) -> LedgerCounts:
    async with BrokerClient(broker.endpoints.serve) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure.ledger


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


async def test_groups_are_matched_by_their_task_in_any_order(run_dir: Path, broker: Broker) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        asked = [ask(feed, str(number), payload={"n": number}) for number in range(8)]
        tasks = await taken(taker, 8)
        assert [(task.id, task.payload, task.size) for task in tasks] == [
            (f"t/train/e0/{number}~0", {"n": number}, 2) for number in range(8)
        ]
        for number in reversed(range(8)):
            await producer.send(answer(tasks[number], number))
        found = await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
        assert [one.group and int(one.group["tokens"][0][0]) for one in found] == list(range(8))
        told: list[StepDone] = []
        feed.on_step = told.append
        await feed.settle(["0", "3"], ["5"], PolicyVersion(0, 1))
        [step] = told
        assert (step.step, step.groups, step.filtered, step.tokens, step.reward) == (1, 3, 1, 8, 0.5)
        assert (step.staleness_max, [one.env for one in step.scores]) == (0, ["e"])
        ledger = await counts(broker)
        assert (ledger.trained, ledger.filtered, ledger.leased) == (2, 1, 5)
        assert sorted(feed.keys()) == ["1", "2", "4", "6", "7"]


@pytest.mark.usefixtures("broker")
async def test_the_report_of_a_step_has_what_was_filtered_since_the_last(run_dir: Path) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        told: list[StepDone] = []
        feed.on_step = told.append
        asked = [ask(feed, str(number)) for number in range(4)]
        for task in await taken(taker, 4):
            await producer.send(answer(task))
        await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
        await feed.settle((), ["0"], PolicyVersion(0, 0))
        await feed.settle((), ["1"], PolicyVersion(0, 0))
        assert told == []
        await feed.settle(["2"], (), PolicyVersion(0, 1))
        await feed.settle(["3"], (), PolicyVersion(0, 2))
    assert [(one.step, one.groups, one.filtered, one.tokens) for one in told] == [(1, 3, 2, 4), (2, 1, 0, 4)]
    assert [[lane.groups for lane in one.scores] for one in told] == [[3], [1]]
    assert {one.reward for one in told} == {0.5}


async def test_the_same_instance_again_is_a_new_task(run_dir: Path, broker: Broker) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        for attempt in range(2):
            asked = ask(feed, "1")
            [task] = await taken(taker, 1)
            assert task.id == f"t/train/e0/1~{attempt}"
            await producer.send(answer(task, attempt))
            assert (await asyncio.wait_for(asked, LIMIT_S)).group is not None
        await feed.settle(["1"], ())
        assert (await counts(broker)).trained == 2


async def test_a_group_that_the_trainer_cannot_learn_from_is_filtered_with_the_reason(
    run_dir: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    def find_fault(group: Group) -> str:
        return "temperatures: 0.7" if group.task.endswith("/1~0") else ""

    async with joined(run_dir, find_fault=find_fault) as feed, worker(run_dir) as (producer, taker):
        asked = [ask(feed, uid) for uid in "12"]
        for task in await taken(taker, 2):
            await producer.send(answer(task))
        bad, good = await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
        assert (bad.group, bad.missing, bad.detail) == (None, Missing.UNUSABLE, "temperatures: 0.7")
        assert good.group is not None
        assert "reason=temperatures: 0.7" in caplog.text
        await feed.settle(["2"], ["1"], PolicyVersion(0, 1))
        ledger = await counts(broker)
    assert (ledger.trained, ledger.filtered, ledger.leased) == (1, 1, 0)


@pytest.mark.usefixtures("broker")
async def test_what_is_remembered_of_prompts_is_bounded(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "REMEMBERED", 2)
    async with joined(run_dir) as feed:
        for number in range(4):
            await asyncio.wait_for(ask(feed, str(number), env="nobody"), LIMIT_S)
        assert list(feed._attempts) == ["t/train/e0/2", "t/train/e0/3"]


@pytest.mark.usefixtures("broker")
async def test_a_task_that_always_fails_is_an_answer(run_dir: Path) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (_, taker):
        asked = ask(feed, "1")
        for _ in range(2):
            [task] = await taken(taker, 1)
            await taker.hand_back(task.id, "division by zero")
        found = await asyncio.wait_for(asked, LIMIT_S)
        assert (found.missing, found.detail) == (Missing.FAILED, "w: division by zero")


@pytest.mark.usefixtures("broker")
async def test_what_the_broker_refuses_is_an_answer(run_dir: Path) -> None:
    async with joined(run_dir) as feed:
        unknown = await asyncio.wait_for(ask(feed, "1", env="nobody"), LIMIT_S)
        assert unknown.missing is Missing.REFUSED
        assert "nobody" in unknown.detail
        payload = await asyncio.wait_for(ask(feed, "2", payload={"x": object()}), LIMIT_S)
        assert payload.missing is Missing.REFUSED


async def test_a_late_group_is_filtered(run_dir: Path, broker: Broker) -> None:
    async with joined(run_dir, deadline_s=0.5) as feed, worker(run_dir) as (producer, taker):
        asked = ask(feed, "1")
        [task] = await taken(taker, 1)
        assert (await asyncio.wait_for(asked, LIMIT_S)).missing is Missing.DEADLINE
        await producer.send(answer(task))
        await until(lambda: feed.counts.late == 1)
        assert (await counts(broker)).filtered == 1


@pytest.mark.usefixtures("broker")
async def test_a_group_that_comes_while_its_task_is_cancelled_is_late(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(run_dir, deadline_s=0.5) as feed, worker(run_dir) as (producer, taker):
        cancelling = asyncio.Event()

        async def cancel(*_args: Any) -> None:
            cancelling.set()
            await until(lambda: feed.counts.late or feed._kept)

        monkeypatch.setattr(feeds, "GRACE_S", 0.0)
        monkeypatch.setattr(feed.tasks, "cancel", cancel)
        asked = ask(feed, "1")
        [task] = await taken(taker, 1)
        await asyncio.wait_for(cancelling.wait(), LIMIT_S)
        await producer.send(answer(task))
        assert (await asyncio.wait_for(asked, LIMIT_S)).missing is Missing.DEADLINE
        await until(lambda: feed.counts.late or feed._kept)
        assert not feed._kept


async def test_a_deadline_holds_while_the_broker_is_away(run_dir: Path) -> None:
    opened = joined(run_dir, deadline_s=2.0)
    with running_broker(config(), RunLayout(run_dir)):
        feed = await opened.__aenter__()
        asked = ask(feed, "1")
        await until(lambda: any(one.submitted for one in feed._asked.values()))
    found = await asyncio.wait_for(asked, LIMIT_S)
    assert found.missing is Missing.DEADLINE
    await opened.__aexit__(None, None, None)


@pytest.mark.usefixtures("broker")
async def test_an_error_of_the_machine_ends_the_feed_and_is_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):

        def write(_line: SettledBatch) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(feed.trained_log, "write", write)
        asked = ask(feed, "1")
        await taken(taker, 1)
        await producer.send(answer("another/task"))  # filtered at once, which the log tells
        found = await asyncio.wait_for(asked, LIMIT_S)
        assert (found.missing, "No space left" in found.detail) == (Missing.CLOSED, True)
        with pytest.raises(ClosedError, match="No space left"):
            await feed.settle(["1"], ())


@pytest.mark.usefixtures("broker")
async def test_a_group_of_nobody_is_filtered(run_dir: Path) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, _):
        await producer.send(answer("another/task"))
        await producer.send(answer(""))
        await until(lambda: feed.counts.unmatched == 2)


async def test_a_trainer_that_comes_back_gets_its_groups_without_a_rollout(
    run_dir: Path, broker: Broker
) -> None:
    """One was trained after the checkpoint, one was held, one was answered while nobody was there."""
    async with worker(run_dir) as (producer, taker):
        async with joined(run_dir, resume=PolicyVersion(0, 0)) as feed:
            asked = [ask(feed, str(number)) for number in range(3)]
            tasks = await taken(taker, 3)
            for number in range(2):
                await producer.send(answer(tasks[number], number))
                await asyncio.wait_for(asked[number], LIMIT_S)
            await feed.settle(["0"], (), PolicyVersion(0, 1))
        assert (await asked[2]).missing is Missing.CLOSED
        await producer.send(answer(tasks[2], 2))
        async with joined(run_dir, resume=PolicyVersion(1, 0), resumed=True) as feed:
            found = await asyncio.wait_for(
                asyncio.gather(*(ask(feed, str(number)) for number in range(3))), LIMIT_S
            )
            assert [one.group and int(one.group["tokens"][0][0]) for one in found] == [0, 1, 2]
            assert feed.counts.asked_again == 0
            await feed.settle(["0", "1", "2"], (), PolicyVersion(1, 1))
    assert (await counts(broker)).trained == 3


async def test_a_trainer_that_comes_back_gets_each_of_many_steps_again_as_a_lease(
    run_dir: Path, broker: Broker
) -> None:
    """Each step without a checkpoint comes again as a lease of its own, and nothing is asked before they have come."""
    steps = WINDOW_LIMIT + 6
    async with worker(run_dir) as (producer, taker):
        async with joined(run_dir, resume=PolicyVersion(0, 0)) as feed:
            asked = [ask(feed, str(number)) for number in range(steps)]
            for number, task in enumerate(await taken(taker, steps)):
                await producer.send(answer(task, number))
            await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
            for number in range(steps):
                await feed.settle([str(number)], (), PolicyVersion(0, 1 + number))
        key = {"content_key": lambda task_id: task_id.rpartition("~")[0]}
        async with (
            joined(run_dir, resume=PolicyVersion(1, 0), resumed=True, **key) as feed,
            asyncio.timeout(LIMIT_S),
        ):
            for number in range(steps):
                assert (await ask(feed, str(number))).group is not None
                await feed.settle([str(number)], (), PolicyVersion(1, 1 + number))
            assert (feed.counts.late, feed.counts.evicted, feed.counts.asked_again) == (0, 0, 0)
    assert (await counts(broker)).trained == steps


@pytest.mark.usefixtures("broker")
async def test_each_settlement_has_a_line_in_the_log_of_the_run(run_dir: Path) -> None:
    async with worker(run_dir) as (producer, taker):
        async with joined(run_dir, resume=PolicyVersion(0, 0)) as feed:
            asked = [ask(feed, str(number)) for number in range(2)]
            for task in await taken(taker, 2):
                await producer.send(answer(task))
            await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
            await feed.settle(["0"], ["1"], PolicyVersion(0, 1))
        async with joined(run_dir, resume=PolicyVersion(1, 0), resumed=True) as feed:
            await asyncio.wait_for(asyncio.gather(*(ask(feed, uid) for uid in "01")), LIMIT_S)
            await feed.settle(["0", "1"], (), PolicyVersion(1, 1))
    first, resumed, second = read_lines(RunLayout(run_dir).trained, SettledBatch)
    both = ("g-t.train.e0.0~0-0", "g-t.train.e0.1~0-0")
    assert (first.version, first.trained, first.filtered) == (PolicyVersion(0, 1), both[:1], both[1:])
    assert (first.staleness, first.rewards, first.rewound) == ((0,), (0.5, 0.5), False)
    assert (resumed.version, resumed.resumed) == (PolicyVersion(1, 0), True)
    assert (second.version, second.trained, second.rewound) == (PolicyVersion(1, 1), both, True)


async def test_a_line_comes_before_its_settlement(
    run_dir: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trainer that is killed in between has a line too many, which its next life voids, and none too few."""
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        asked = ask(feed, "1")
        [task] = await taken(taker, 1)
        await producer.send(answer(task))
        await asyncio.wait_for(asked, LIMIT_S)

        async def killed(*_args: Any, **_options: Any) -> None:
            raise ClosedError

        monkeypatch.setattr(feed.consumer, "settle", killed)
        with pytest.raises(ClosedError):
            await feed.settle(["1"], (), PolicyVersion(0, 1))
    [line] = read_lines(RunLayout(run_dir).trained, SettledBatch)
    assert line.trained == ("g-t.train.e0.1~0-0",)
    assert (await counts(broker)).trained == 0


@pytest.mark.usefixtures("broker")
async def test_what_ended_in_an_earlier_life_is_asked_anew(run_dir: Path) -> None:
    async with joined(run_dir, deadline_s=0.5) as feed:
        assert (await asyncio.wait_for(ask(feed, "1"), LIMIT_S)).missing is Missing.DEADLINE
    async with (
        joined(run_dir, resume=PolicyVersion(1, 0), resumed=True) as feed,
        worker(run_dir) as (producer, taker),
    ):
        asked = ask(feed, "1", payload="other content")
        [task] = await taken(taker, 1)
        assert task.id == "t/train/e0/1~1"
        await producer.send(answer(task))
        assert (await asyncio.wait_for(asked, LIMIT_S)).group is not None


@pytest.mark.usefixtures("broker")
async def test_a_group_that_the_broker_lost_is_asked_for_again(run_dir: Path) -> None:
    """Another consumer took it: a group that is dropped as stale never comes, either."""
    async with worker(run_dir) as (producer, taker):
        async with joined(run_dir) as feed:
            asked = ask(feed, "1")
            [task] = await taken(taker, 1)
            await producer.send(answer(task))
            await asyncio.wait_for(asked, LIMIT_S)
            await feed.settle(["1"], (), PolicyVersion(0, 1))
            await feed.consumer.commit(PolicyVersion(0, 1))
        async with joined(run_dir, resume=PolicyVersion(1, 1), resumed=True) as feed:
            asked = ask(feed, "1")
            [task] = await taken(taker, 1)
            assert task.id == "t/train/e0/1~1"
            await producer.send(answer(task, 1))
            assert (await asyncio.wait_for(asked, LIMIT_S)).group is not None


@pytest.mark.usefixtures("broker")
async def test_a_queue_that_the_broker_holds_back_is_not_an_empty_one(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        monkeypatch.setattr(feeds, "LOST_S", 0.0)
        pulls = 0

        async def get(_wait_s: float) -> None:
            nonlocal pulls
            feed.consumer._puller.wait = Wait.JOURNAL_SLOW
            pulls += 1
            await asyncio.sleep(0.01)

        with monkeypatch.context() as slow:
            slow.setattr(feed.consumer, "get", get)
            await until(lambda: pulls)
            asked = ask(feed, "1")
            [task] = await taken(taker, 1)
            await producer.send(answer(task))
            await until(
                lambda: feed.counts.asked_again or any(one.answered_at for one in feed._asked.values())
            )
            pulls = 0
            await until(lambda: pulls > 50)
        assert (await asyncio.wait_for(asked, LIMIT_S)).group is not None
        assert feed.counts.asked_again == 0


async def test_groups_that_nobody_has_asked_for_make_room(
    run_dir: Path, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeds, "KEPT_GROUPS", 2)
    async with joined(run_dir) as feed, worker(run_dir) as (producer, _):
        for number in range(4):
            await producer.send(answer(f"t/train/e0/{number}~0", number))
        await until(lambda: feed.counts.evicted == 2)
        for oldest in "01":
            kept = await asyncio.wait_for(ask(feed, oldest), LIMIT_S)
            assert kept.group is not None
            assert kept.group.task == f"t/train/e0/{oldest}~0"
        assert (await counts(broker)).filtered == 2


async def test_a_trainer_holds_slow_groups_in_as_many_leases_as_they_need(
    run_dir: Path, broker: Broker
) -> None:
    """Each is answered alone, taken at once, and none is settled before all are there."""
    number = WINDOW_LIMIT + 8
    async with joined(run_dir) as feed, worker(run_dir) as (producer, taker):
        asked = [ask(feed, str(one)) for one in range(number)]
        for task in await taken(taker, number):
            waiting = [one for one in asked if not one.done()]
            await producer.send(answer(task))
            await asyncio.wait(waiting, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        assert all(one.result().group is not None for one in asked)
        assert (await counts(broker)).leased == number


@pytest.mark.usefixtures("broker")
async def test_a_second_trainer_of_the_name_ends_the_first(run_dir: Path) -> None:
    async with joined(run_dir) as first:
        asked = ask(first, "1")
        async with joined(run_dir):
            assert (await asyncio.wait_for(asked, LIMIT_S)).missing is Missing.CLOSED
            with pytest.raises(ConsumerFencedError):
                await first.settle(["1"], ())
            assert (await first.ask("2", "t/train/e0/2", "e", None, 2)).missing is Missing.CLOSED


@pytest.mark.usefixtures("broker")
async def test_an_evaluation_takes_nothing_from_the_training(run_dir: Path) -> None:
    async with (
        joined(run_dir) as training,
        joined(run_dir, split=Split.EVAL) as evaluating,
        worker(run_dir) as (producer, taker),
        worker(run_dir, "v", Split.EVAL) as (examiner, exam),
    ):
        asked = [ask(training, "1"), asyncio.create_task(evaluating.ask("9", "t/eval/s0/9", "e", None, 2))]
        [task], [question] = await taken(taker, 1), await taken(exam, 1)
        assert (task.id, question.id) == ("t/train/e0/1~0", "t/eval/s0/9~0")
        await examiner.send(answer(question, 9))
        await producer.send(answer(task, 1))
        found = await asyncio.wait_for(asyncio.gather(*asked), LIMIT_S)
        assert [one.group and int(one.group["tokens"][0][0]) for one in found] == [1, 9]
        await evaluating.settle(["9"], ())
        assert (evaluating.keys(), training.keys()) == ([], ["1"])


async def test_a_restarted_broker_is_only_a_pause(run_dir: Path) -> None:
    layout, settings = RunLayout(run_dir), config(durability="os")
    with running_broker(settings, layout):
        opened = joined(run_dir)
        feed = await opened.__aenter__()
        asked = ask(feed, "1")
        await until(lambda: any(one.submitted for one in feed._asked.values()))
    with running_broker(settings, layout):
        async with worker(run_dir) as (producer, taker):
            [task] = await taken(taker, 1)
            await producer.send(answer(task))
            assert (await asyncio.wait_for(asked, LIMIT_S)).group is not None
        await opened.__aexit__(None, None, None)
