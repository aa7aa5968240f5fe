"""The bridge with the real broker and a store in memory: outcomes, settlement, other lives; without verl."""

import asyncio
import logging
import math
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.trainer.integrations.verl.support import Stage, config, workers

from rolloutmq.bus.consumer import connection
from rolloutmq.bus.transport import discovery
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.errors import ClosedError, ConfigError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply
from rolloutmq.schemas.wire.replies import RunInfo
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.trainer.integrations.task_feed import feed as feeds
from rolloutmq.trainer.integrations.verl import bridge as bridges
from rolloutmq.trainer.integrations.verl.bridge import Bridge, BusOptions
from rolloutmq.trainer.integrations.verl.prompts import Prompt

LIMIT_S = 60.0
SIZE = 4
WRONG: dict[str, tuple[Any, ...]] = {
    "deadline_s": ("abc", "60", None, math.nan, math.inf, True),
    "timeout_s": (-1, "abc", None),
    "name": (5, "", None, "a/b"),
    "environments": ("math", ["math"]),
}


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


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Broker]:
    with running_broker(config(max_deliveries=2, durability="os"), RunLayout(run_dir)) as running:
        yield running


class Memory:
    """A store: tags and fields of each key, by partition."""

    def __init__(self) -> None:
        self.tags: dict[str, dict[str, dict[str, Any]]] = {"train": {}, "val": {}}
        self.fields: dict[str, dict[str, Mapping[str, Any]]] = {"train": {}, "val": {}}
        self.fails: set[str] = set()
        self.closed = False

    def put(
        self,
        partition: str,
        keys: Sequence[str],
        tags: Sequence[Mapping[str, Any]],
        fields: Sequence[Mapping[str, Any]] | None = None,
    ) -> None:
        if self.closed:
            raise ClosedError("closed")
        for place, key in enumerate(keys):
            if key in self.fails:
                raise RuntimeError(f"{key} is not stored")
            self.tags[partition].setdefault(key, {}).update(tags[place])
            if fields is not None:
                self.fields[partition][key] = fields[place]

    def status(self, partition: str = "train") -> dict[str, str]:
        """Return the status of each prompt."""
        return {key: tag["status"] for key, tag in dict(self.tags[partition]).items() if "_" not in key}


@asynccontextmanager
async def bridged(run_dir: Path, **options: Any) -> AsyncIterator[tuple[Bridge, Memory]]:
    given: dict[str, Any] = {
        "where": str(run_dir),
        "environment": "mine",
        "timeout_s": LIMIT_S,
        "deadline_s": 30.0,
    }
    store = Memory()
    made = Bridge(
        BusOptions(**given | options), store, RunInfo(batch_sequences=8), str(run_dir / "checkpoints")
    )
    try:
        yield made, store
    finally:
        await asyncio.to_thread(made.close)


def prompts(step: int, *rows: int, life: int = 0, validates: bool = False) -> list[Prompt]:
    return [
        Prompt(
            f"{row}.{life}", {"uid": f"{row}.{life}", "extra_info": {"index": row}}, SIZE, step, {}, validates
        )
        for row in rows
    ]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not condition():  # noqa: ASYNC110 - nothing tells of it
            await asyncio.sleep(0.02)


async def submitted(bridge: Bridge, store: Memory, asked: list[Prompt]) -> dict[str, str]:
    """Submit prompts, wait until all have ended, and return their status."""
    await asyncio.to_thread(bridge.submit, asked)
    uids = {one.uid for one in asked}

    def over() -> bool:
        found = store.status(asked[0].partition)
        return all(found.get(uid) in {"finished", "failure"} for uid in uids)

    await until(over)
    found = store.status(asked[0].partition)
    return {uid: found[uid] for uid in sorted(uids)}


def kept(found: LedgerCounts) -> tuple[int, int, int, int]:
    """Return the groups that were trained on, filtered, held, and in the queue."""
    return found.trained + found.committed, found.filtered, found.leased, found.queued


async def counts(broker: Broker) -> LedgerCounts:
    async with BrokerClient(broker.endpoints.serve) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure.ledger


async def test_groups_arrive_as_trajectories_and_are_settled_with_their_step(
    run_dir: Path, broker: Broker
) -> None:
    async with bridged(run_dir) as (bridge, store), workers(Stage(run_dir)):
        assert set((await submitted(bridge, store, prompts(1, 0, 1, 2))).values()) == {"finished"}
        assert sorted(store.fields["train"]) == [
            f"{row}.0_{place}_0" for row in range(3) for place in range(SIZE)
        ]
        assert (await counts(broker)).trained == 0, "nothing is settled before a step has used it"
        bridge.use(1, ["0.0", "1.0"])
        await asyncio.to_thread(bridge.finish, 0)
        assert (await counts(broker)).trained == 0, "the step is not over"
        await asyncio.to_thread(bridge.finish, 1)
        await asyncio.to_thread(bridge.drop, {"2.0"})
        await asyncio.to_thread(bridge.commit, 1)
        found = await counts(broker)
    assert kept(found) == (2, 1, 0, 0)


async def test_dead_late_short_and_lost_tasks_fail_their_prompt_alone(run_dir: Path, broker: Broker) -> None:
    stage = Stage(run_dir, {1: "dead", 2: "late", 3: "short", 4: "lost", 5: "silent"})
    async with bridged(run_dir, deadline_s=3.0) as (bridge, store), workers(stage):
        found = await submitted(bridge, store, prompts(1, *range(7)))
        assert found == {
            "0.0": "finished", "1.0": "failure", "2.0": "failure", "3.0": "failure", "4.0": "finished",
            "5.0": "failure", "6.0": "finished",
        }  # fmt: skip
        assert [key for key in sorted(store.fields["train"]) if key.startswith("3.0")] == [
            f"3.0_{place}_0" for place in range(SIZE - 1)
        ]
        assert not [key for key in store.fields["train"] if key[:3] in {"1.0", "2.0", "5.0"}]
        metrics = bridge.metrics()
        assert (metrics["bus/groups_failed_total"], metrics["bus/groups_short_total"]) == (1.0, 1.0)
        assert metrics["bus/groups_deadline_total"] == 2.0
        assert not any(bridge.metrics().values()), "each is counted once"
        await until(lambda: 2 in stage.answered)
        bridge.use(1, ["0.0", "4.0", "6.0"])
        await asyncio.to_thread(bridge.finish, 1)
        await asyncio.to_thread(bridge.drop, {"1.0", "2.0", "3.0", "5.0"})

        async def settled() -> LedgerCounts:
            found = await counts(broker)
            async with asyncio.timeout(LIMIT_S):
                while found.filtered < 2:
                    await asyncio.sleep(0.05)
                    found = await counts(broker)
            return found

        ledger = await settled()
    assert kept(ledger) == (3, 2, 0, 0), "late and short"


async def test_a_group_of_another_temperature_fails_its_prompt(run_dir: Path, broker: Broker) -> None:
    """verl scores all tokens at its own: the ratios would be wrong without an error."""
    async with bridged(run_dir) as (bridge, store), workers(Stage(run_dir, {1: "warm"})):
        assert await submitted(bridge, store, prompts(1, 0, 1)) == {"0.0": "finished", "1.0": "failure"}
        assert bridge.metrics()["bus/groups_unusable_total"] == 1.0
        await asyncio.to_thread(bridge.drop, {"1.0"})
        assert (await counts(broker)).filtered == 1


async def test_a_store_that_fails_fails_the_prompt_and_nothing_is_raised(
    run_dir: Path, broker: Broker
) -> None:
    async with bridged(run_dir) as (bridge, store), workers(Stage(run_dir)):
        store.fails = {"1.0_0_0"}
        assert await submitted(bridge, store, prompts(1, 0, 1)) == {"0.0": "finished", "1.0": "failure"}
        await asyncio.to_thread(bridge.drop, {"1.0"})
        assert (await counts(broker)).filtered == 1


async def test_an_answer_after_the_end_of_the_training_is_left_to_the_next(
    run_dir: Path, broker: Broker, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "rolloutmq.trainer.integrations.verl.bridge")
    async with bridged(run_dir) as (bridge, store):
        await asyncio.to_thread(bridge.submit, prompts(1, 3))
        await until(lambda: store.status().get("3.0") == "running")
        store.closed = True
        async with workers(Stage(run_dir)):
            await until(lambda: "answer after the end uid=3.0" in caplog.text)
    assert store.status() == {"3.0": "running"}
    assert "Traceback" not in caplog.text
    assert (await counts(broker)).queued == 1


async def test_another_life_gets_the_groups_again_under_its_own_uids(run_dir: Path, broker: Broker) -> None:
    """Step 1 is in a checkpoint, step 2 is settled, step 3 was put and not used. Nothing is sampled twice."""
    stage = Stage(run_dir)
    async with workers(stage):
        async with bridged(run_dir) as (bridge, store):
            await submitted(bridge, store, prompts(1, 0, 1))
            bridge.use(1, ["0.0", "1.0"])
            await asyncio.to_thread(bridge.finish, 1)
            await asyncio.to_thread(bridge.commit, 1)
            await submitted(bridge, store, prompts(2, 2, 3))
            bridge.use(2, ["2.0", "3.0"])
            await asyncio.to_thread(bridge.finish, 2)
            await submitted(bridge, store, prompts(3, 4, 5))
        async with bridged(run_dir) as (bridge, store):
            await submitted(bridge, store, prompts(2, 2, 3, life=1))
            bridge.use(2, ["2.1", "3.1"])
            await asyncio.to_thread(bridge.finish, 2)
            await submitted(bridge, store, prompts(3, 4, 5, life=1))
            bridge.use(3, ["4.1", "5.1"])
            await asyncio.to_thread(bridge.finish, 3)
            found = await counts(broker)
    assert sorted(stage.answered) == list(range(6))
    assert kept(found) == (6, 0, 0, 0)


async def test_a_task_of_an_earlier_life_answers_the_prompt_that_is_asked_again(
    run_dir: Path, broker: Broker
) -> None:
    async with bridged(run_dir) as (bridge, store):
        await submitted_alone(bridge, store, prompts(1, 0, 1))
    stage = Stage(run_dir)
    async with bridged(run_dir) as (bridge, store):
        await submitted_alone(bridge, store, prompts(1, 0, 1, life=1))
        async with workers(stage, 1):
            await until(lambda: set(store.status().values()) == {"finished"})
            bridge.use(1, ["0.1", "1.1"])
            await asyncio.to_thread(bridge.finish, 1)

            async def quiet() -> LedgerCounts:
                async with asyncio.timeout(LIMIT_S):
                    while (found := await counts(broker)).leased or found.queued:  # noqa: ASYNC110
                        await asyncio.sleep(0.05)
                return found

            found = await quiet()
    assert found.trained == 2
    assert found.filtered == len(stage.answered) - 2, (
        "a task that a worker already had is answered, and filtered"
    )


async def submitted_alone(bridge: Bridge, store: Memory, asked: list[Prompt]) -> None:
    """Submit prompts, and wait until the broker has their tasks."""
    await asyncio.to_thread(bridge.submit, asked)
    tasks = bridge.connection.training._asked
    await until(lambda: len(tasks) == len(asked))
    await until(lambda: all(one.submitted for one in tasks.values()))
    assert set(store.status().values()) == {"running"}


@pytest.mark.usefixtures("broker")
async def test_a_validation_has_a_connection_of_its_own(run_dir: Path) -> None:
    stage = Stage(run_dir)
    async with bridged(run_dir) as (bridge, store), workers(stage):
        assert set((await submitted(bridge, store, prompts(0, 0, 1, validates=True))).values()) == {
            "finished"
        }
        assert store.status("train") == {}
        assert not bridge.connection.joined, "the training is joined with its first prompt"
        assert set((await submitted(bridge, store, prompts(1, 0, 1))).values()) == {"finished"}
        assert stage.answered == [0, 1] or stage.answered == [1, 0]


async def test_no_broker_is_an_error_at_the_start_alone(run_dir: Path) -> None:
    async with bridged(run_dir, timeout_s=0.3) as (bridge, _):
        with pytest.raises(WaitTimeoutError, match=str(run_dir)):
            await asyncio.to_thread(bridge.submit, prompts(1, 0))


async def test_nothing_is_settled_or_committed_before_the_bus_is_joined(run_dir: Path) -> None:
    async with bridged(run_dir) as (bridge, _):
        bridge.use(1, ["a"])
        bridge.finish(1)
        bridge.drop({"a"})
        bridge.commit(1)


@pytest.mark.parametrize(
    ("given", "key"),
    [
        ({}, "bus.where"),
        ({"where": "r", "environment": "e", "wher": 1}, "bus.wher"),
        ({"where": "r"}, "bus.environment"),
        ({"where": "r", "environment": "e", "name": "a b"}, "bus.name"),
        ({"where": "r", "environment": "e", "deadline_s": 0}, "bus.deadline_s"),
        ("runs/mine", "bus"),
        (["runs/mine"], "bus"),
        *(({"where": where, "environment": "e"}, "bus.where") for where in (5, "", None)),
        *(({"where": "r", "environment": named}, "bus.environment") for named in (5, None, ["e"])),
        *(
            ({"where": "r", "environment": "e", key: value}, f"bus.{key}")
            for key, values in WRONG.items()
            for value in values
        ),
        ({"where": "r", "environments": {"gsm8k": 5}}, "bus.environments.gsm8k"),
    ],
)
def test_a_wrong_setting_is_named(given: Any, key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: "):
        BusOptions.of(given)


def test_settings_may_be_left_empty() -> None:
    assert BusOptions.of({"where": "r", "environment": "e", "environments": None}).environments == {}


@pytest.mark.parametrize(
    ("options", "key"),
    [
        ({"environment": "mind"}, "bus.environment"),
        ({"environments": {"gsm8k": "mind"}}, "bus.environments.gsm8k"),
        ({"environment": "", "environments": {"other": "mine"}}, "bus.environments.mind"),
    ],
)
@pytest.mark.parametrize("validates", [False, True])
@pytest.mark.usefixtures("broker")
async def test_an_environment_that_the_run_lacks_ends_the_training_at_its_start(
    run_dir: Path, options: dict[str, Any], key: str, *, validates: bool
) -> None:
    fields = {"uid": "0", "data_source": "mind", "extra_info": {"index": 0}}
    asked = [Prompt("0", fields, SIZE, 1, {}, validates)]
    async with bridged(run_dir, **options) as (bridge, store):
        with pytest.raises(ConfigError, match=rf"^{re.escape(key)}: must be one of mine \(got mind\)"):
            await asyncio.to_thread(bridge.submit, asked)
        assert not bridge.connection.joined
        assert store.status() == {}
    assert not RunLayout(run_dir).checkpoints.exists(), "no life of the trainer has begun"


def test_data_sources_have_environments() -> None:
    options = BusOptions.of({"where": "r", "environment": "e", "environments": {"openai/gsm8k": "math"}})
    assert options.environment_of(Prompt("u", {"data_source": "openai/gsm8k"}, 1, 1)) == "math"
    assert options.environment_of(Prompt("u", {}, 1, 1)) == "e"


def test_a_replay_buffer_without_our_manager_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bridges, "_open", [])
    with pytest.raises(UsageError, match="agent_loop_manager_class"):
        bridges.current()
