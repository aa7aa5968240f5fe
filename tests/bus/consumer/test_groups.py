"""The group consumer with the real broker: any mix of groups, losses, restarts, and a resumed trainer."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from rolloutmq.bus.consumer import connection
from rolloutmq.bus.consumer.groups import GroupConsumer, HeldGroup
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport import discovery
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConsumerFencedError, RefusedError, UsageError, WaitTimeoutError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Rejected, Wait
from rolloutmq.services.broker.journal.inspect.ledger_model import Problem
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify
from rolloutmq.services.broker.server import running_broker

MakeGroup = Callable[..., Group]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon."""
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.5)
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)


def config(**broker: int | str | float) -> RunConfig:
    env = EnvironmentConfig(entry="a:B", group_size=2, pacing=False, stale="pass")
    return RunConfig(environment={"e": env}, broker=BrokerConfig(**broker))


async def send(run_dir: Path, groups: Iterable[Group]) -> None:
    async with Producer.open(run_dir, env="e", producer="p", group_size=2) as producer:
        for group in groups:
            await producer.send(group)
        assert await producer.flush(20)


def problems(layout: RunLayout) -> list[Problem]:
    return verify(layout.journal, layout.dead, Witness).problems


async def counts(address: str) -> LedgerCounts:
    async with BrokerClient(address) as client:
        reply = await client.request(GetStatus())
    assert isinstance(reply, StatusReply)
    return reply.pressure.ledger


async def test_groups_are_settled_in_any_mix(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)) as broker:
        await send(run_dir, [group(f"g-{index}") for index in range(8)])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=3, window=3) as consumer:
            held = [await consumer.get(timeout_s=20)]
            assert consumer.ready == 2, "the rest of the first lease"
            held += [await consumer.get(timeout_s=20) for _ in range(7)]
            assert [one.group_id for one in held] == [f"g-{index}" for index in range(8)]
            assert [row.tolist() for row in held[0].group["tokens"]] == [
                row.tolist() for row in group("g-0")["tokens"]
            ]
            settled = await consumer.settle(
                [held[7], "g-1"], filtered=held[3:5], rejected=[Rejected(group_id="g-2", reason="bad")]
            )
            assert (settled.lost, consumer.version) == ((), PolicyVersion(0, 1))
            assert await consumer.get(0.0) is None
            ledger = await counts(broker.endpoints.serve)
            assert (ledger.leased, ledger.trained, ledger.filtered, ledger.dead) == (3, 2, 2, 1)
            await consumer.settle(filtered=[held[0]])
            assert consumer.version == PolicyVersion(0, 1), "no step was taken"
            await consumer.commit(consumer.version)
        ledger = await counts(broker.endpoints.serve)
        assert (ledger.queued, ledger.committed) == (2, 2), "what it held went back"


async def test_a_full_window_says_that_something_must_be_settled(
    run_dir: Path, group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        await send(run_dir, [group(f"g-{index}") for index in range(3)])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=1, window=2) as consumer:
            first = await consumer.get(timeout_s=20)
            await consumer.get(timeout_s=20)
            assert await consumer.get(2.5) is None
            assert consumer.wait is Wait.UNSETTLED
            assert "reason=unsettled" in caplog.text
            waits = asyncio.create_task(consumer.get(timeout_s=20))
            await asyncio.sleep(0)
            await consumer.settle([first])
            assert (await waits).group_id == "g-2"


async def test_a_cancelled_get_loses_no_group(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=1, window=1) as consumer:
            with pytest.raises(WaitTimeoutError):
                await consumer.get(timeout_s=0.3)
            await send(run_dir, [group("g")])
            assert (await consumer.get(timeout_s=20)).group_id == "g"


async def test_a_broker_with_its_journal_is_only_a_pause(run_dir: Path, group: MakeGroup) -> None:
    layout, settings = RunLayout(run_dir), config(durability="os")
    async with AsyncExitStack() as stack:
        with running_broker(settings, layout):
            opened = GroupConsumer.open(run_dir, batch_sequences=4, groups=2)
            consumer = await stack.enter_async_context(opened)
            await send(run_dir, [group(f"g-{index}") for index in range(4)])
            held = [await consumer.get(timeout_s=20) for _ in range(4)]
            await consumer.settle(held[3:])
        with running_broker(settings, layout) as broker:
            assert (await consumer.settle(held[:2], timeout_s=20)).lost == ()
            assert (await counts(broker.endpoints.serve)).trained == 3
            await stack.aclose()
    assert problems(layout) == []


async def test_what_was_trained_on_too_late_is_not_returned_again(run_dir: Path, group: MakeGroup) -> None:
    """The leases were lost: the groups come again, and the trained ones are settled in silence."""
    with running_broker(config(), RunLayout(run_dir)) as broker:
        await send(run_dir, [group(f"g-{index}") for index in range(6)])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=2) as consumer:
            held = [await consumer.get(timeout_s=20) for _ in range(3)]
            first = next(iter(broker.core._state.leases))
            broker.core._state.transitions.lose(first, 0.0, failed=True, why="played")
            settled = await consumer.settle(held[:1], timeout_s=20)
            assert settled.lost == (held[0].group_id,)
            seen = {held[2].group_id}
            while (got := await consumer.get(1.0)) is not None:
                seen.add(got.group_id)
            assert held[0].group_id not in seen
            assert held[1].group_id not in seen, "it is still held"
            assert (await consumer.settle(held[1:2])).lost == ()
            assert (await counts(broker.endpoints.serve)).trained == 2


async def test_what_is_in_the_hand_is_not_returned_again(run_dir: Path, group: MakeGroup) -> None:
    """Its lease was lost and it came again. The trainer goes on with what it holds."""
    with running_broker(config(), RunLayout(run_dir)) as broker:
        await send(run_dir, [group("a"), group("b")])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=2) as consumer:
            a, b = [await consumer.get(timeout_s=20) for _ in range(2)]
            first = next(iter(broker.core._state.leases))
            broker.core._state.transitions.lose(first, 0.0, failed=True, why="played")
            assert await consumer.get(1.0) is None
            assert (await consumer.settle([b, a])).lost == ()
            assert (await counts(broker.endpoints.serve)).trained == 2


async def test_a_group_that_came_twice_is_returned_once(run_dir: Path, group: MakeGroup) -> None:
    """It was held when it came again, and settled before the consumer came to its second copy."""
    with running_broker(config(), RunLayout(run_dir)) as broker:
        await send(run_dir, [group(name) for name in "abc"])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=3) as consumer:
            a = await consumer.get(timeout_s=20)
            b = await consumer.get(timeout_s=20)
            first = next(iter(broker.core._state.leases))
            broker.core._state.transitions.lose(first, 0.0, failed=True, why="played")
            assert (await consumer.get(timeout_s=20)).group_id == "c", "it is there, and its lease was lost"
            assert await consumer.get(0.5) is None
            assert (await consumer.settle([a, b, "c"])).lost == ()
            assert await consumer.get(0.5) is None
            assert (await counts(broker.endpoints.serve)).trained == 3


async def test_settling_while_getting_returns_no_settled_group(run_dir: Path, group: MakeGroup) -> None:
    """Leases are lost again and again, and one task gets while another settles: each group is trained on once."""
    names = [f"g-{index}" for index in range(60)]
    trained: Counter[str] = Counter()
    with running_broker(config(max_deliveries=1000), RunLayout(run_dir)) as broker:
        await send(run_dir, [group(name) for name in names])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=3, window=4) as consumer:
            buffer: list[HeldGroup] = []

            async def fill() -> None:
                while True:
                    buffer.append(await consumer.get())

            filling, rng = asyncio.create_task(fill()), random.Random(1)
            async with asyncio.timeout(20):
                while (await counts(broker.endpoints.serve)).trained < len(names):
                    rng.shuffle(buffer)
                    mix, buffer[:] = buffer[:2], buffer[2:]
                    await consumer.settle(mix)
                    trained.update(one.group_id for one in mix)
                    leases = list(broker.core._state.leases)
                    if leases and rng.random() < 0.5:
                        lost = rng.choice(leases)
                        broker.core._state.transitions.lose(lost, 0.0, failed=True, why="played")
            filling.cancel()
            await asyncio.wait({filling})
    assert trained == dict.fromkeys(names, 1)


async def test_a_trainer_that_hangs_loses_its_leases(run_dir: Path, group: MakeGroup) -> None:
    """Also with groups that wait to be returned: it holds others, and does nothing with them."""
    with running_broker(config(lease_s=1.0), RunLayout(run_dir)):
        await send(run_dir, [group("a"), group("b")])
        async with GroupConsumer.open(run_dir, batch_sequences=4, groups=2) as consumer:
            assert not consumer._link.idle()
            a = await consumer.get(timeout_s=20)
            assert consumer._ready
            assert not consumer._link.idle()
            async with GroupConsumer.open(run_dir, batch_sequences=4, consumer="next") as other:
                assert (await other.get(timeout_s=20)).group_id == "a", "the broker took it back"
            assert (await consumer.settle([a])).lost == ("a",)


async def test_a_resumed_trainer_gets_its_mixes_again(run_dir: Path, group: MakeGroup) -> None:
    layout, rng = RunLayout(run_dir), random.Random(3)
    names = [f"g-{index}" for index in range(24)]
    with running_broker(config(durability="os"), layout) as broker:
        await send(run_dir, [group(name) for name in names])
        mixes: list[list[str]] = []
        async with GroupConsumer.open(run_dir, batch_sequences=8, groups=5) as consumer:
            held = [(await consumer.get(timeout_s=20)).group_id for _ in names]
            rng.shuffle(held)
            for start in range(0, 16, 4):
                mixes.append(held[start : start + 4])
                await consumer.settle(mixes[-1])
                if start == 4:
                    await consumer.commit(consumer.version)
                    checkpoint = consumer.version
        async with GroupConsumer.open(run_dir, batch_sequences=8, groups=5, resume=checkpoint) as consumer:
            again = [await consumer.get(timeout_s=20) for _ in range(16)]
            assert [one.rewound for one in again] == [True] * 8 + [False] * 8
            assert {one.group_id for one in again[:4]} == set(mixes[2])
            assert {one.group_id for one in again[4:8]} == set(mixes[3])
            await consumer.settle(again)
            await consumer.commit(consumer.version)
        ledger = await counts(broker.endpoints.serve)
    assert (ledger.committed, ledger.accepted) == (24, 24)
    assert problems(layout) == []


def test_without_an_event_loop(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        asyncio.run(send(run_dir, [group("a"), group("b")]))
        with GroupConsumer.blocking(run_dir, batch_sequences=4) as consumer:
            for held in consumer:
                consumer.settle([held])
                if held.group_id == "b":
                    break
            assert consumer.version == PolicyVersion(0, 2)
            assert consumer.get(0.0) is None
            consumer.commit(consumer.version)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"batch_sequences": 0}, "batch_sequences: must be a number from 1"),
        ({"window": 65}, "window: must be a number from 1 to 64 (got 65)"),
        ({"window": True}, "window: must be a number from 1 to 64 (got True)"),
        ({"groups": 2000}, "groups: must be a number from 1 to 1024 (got 2000)"),
        ({"split": 7}, "split: must be Split.TRAIN"),
    ],
)
async def test_arguments_out_of_range_are_refused(run_dir: Path, given: dict[str, int], message: str) -> None:
    with pytest.raises(UsageError) as refusal:
        async with GroupConsumer.open(run_dir, **{"batch_sequences": 4, **given}):  # type: ignore[arg-type]
            pass
    assert message in str(refusal.value)


async def test_a_call_against_the_rules_is_refused(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        await send(run_dir, [group("a"), group("b")])
        async with GroupConsumer.open(run_dir, batch_sequences=4) as consumer:
            a, b = [await consumer.get(timeout_s=20) for _ in range(2)]
            with pytest.raises(RefusedError, match="named more than once"):
                await consumer.settle([a], filtered=[a])
            await consumer.settle([a])
            with pytest.raises(RefusedError, match="must not be behind"):
                await consumer.settle([b], version=PolicyVersion(0, 0))
            with pytest.raises(UsageError, match=r"commit\.version: must be a PolicyVersion \(got None\)"):
                await consumer.commit(None, timeout_s=20)  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="group a: is not held"):
                await consumer.settle(["a"])
            with pytest.raises(UsageError, match="group unknown: is not held"):
                await consumer.settle(filtered=["unknown"])
            with pytest.raises(UsageError, match=r"group \\ud800: is not held"):
                await consumer.settle(filtered=["\ud800"])
            for reason, problem in (("lone\ud800", "must be text that UTF-8"), ("x" * 513, "length <= 512")):
                with pytest.raises(UsageError, match=f"reason: .*{problem}"):
                    await consumer.settle(rejected=[Rejected(group_id="b", reason=reason)])
            async with GroupConsumer.open(run_dir, batch_sequences=4) as other:
                with pytest.raises(ConsumerFencedError):
                    await consumer.settle([b])
                assert (await other.get(timeout_s=20)).group_id == "b"


async def test_steps_without_a_group_are_counted_and_logged(
    run_dir: Path, group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """A trainer may take steps whose groups were all lost; a wrong step would make every queued group too stale."""
    with running_broker(config(), RunLayout(run_dir)) as broker:
        await send(run_dir, [group("a"), group("b"), group("c")])
        async with GroupConsumer.open(run_dir, batch_sequences=4) as consumer:
            a, b, c = [await consumer.get(timeout_s=20) for _ in range(3)]
            await consumer.settle([a])
            assert "steps were taken without a group" not in caplog.text
            await consumer.settle([b], version=PolicyVersion(0, 4))
            assert "skipped=2" in caplog.text
            await consumer.settle([c])
            assert consumer.version == PolicyVersion(0, 5)
            await consumer.commit(PolicyVersion(0, 7))  # of steps whose leases were lost
        assert (await counts(broker.endpoints.serve)).committed == 3


async def test_a_resume_before_the_last_commit_is_told(
    run_dir: Path, group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        await send(run_dir, [group("a"), group("b")])
        async with GroupConsumer.open(run_dir, batch_sequences=4) as consumer:
            for _ in range(2):
                await consumer.settle([await consumer.get(timeout_s=20)])
            await consumer.commit(consumer.version)
        caplog.clear()
        async with GroupConsumer.open(run_dir, batch_sequences=4, resume=PolicyVersion(0, 1)):
            assert "the groups of 1 later steps were deleted" in caplog.text


async def test_no_broker_is_a_time_out(run_dir: Path) -> None:
    with pytest.raises(WaitTimeoutError):
        async with GroupConsumer.open(run_dir, batch_sequences=4, timeout_s=0.2):
            pass
