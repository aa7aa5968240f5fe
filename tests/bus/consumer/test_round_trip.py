"""Producer and consumer with the real broker between them."""

import asyncio
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from benchmarks.harness.listening import free_listen
from rolloutmq.bus.consumer import connection
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.producer import connection as uplink
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport import discovery
from rolloutmq.bus.transport.discovery import serve_address
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import (
    ConsumerFencedError,
    DrainingError,
    LeaseLostError,
    SessionFencedError,
    UnackedError,
)
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, LedgerCounts, StatusReply
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, ConsumerRegistered, Durability, RunInfo
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer
from rolloutmq.services.broker.server import running_broker

MakeGroup = Callable[..., Group]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon."""
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.5)
    for module in (uplink, connection):
        monkeypatch.setattr(module, "PATIENCE_S", 0.5)
        monkeypatch.setattr(module, "REPEAT_S", 0.1)


def config(*, pacing: bool = False, max_staleness: int = 4, **broker: int | str) -> RunConfig:
    env = EnvironmentConfig(entry="a:B", group_size=2, pacing=pacing, max_staleness=max_staleness)
    return RunConfig(
        environment={"e": env},
        broker=BrokerConfig(**broker),
        trainer=TrainerConfig(batch_sequences=8),
    )


def stamped(group: Group, version: PolicyVersion) -> Group:
    return Group(
        group.group_id, group.columns, version, version, sequences=group.sequences, tokens=group.tokens
    )


async def test_groups_come_back_bit_for_bit_and_views_survive_the_batch(run_dir: Path) -> None:
    rng = np.random.default_rng(0)
    made = {}
    for index, length in enumerate((1, 50, 300_000, 7)):
        made[f"g-{index}"] = Group.build(
            f"g-{index}",
            tokens=rng.integers(0, 99, (2, length), np.int32),
            mask=rng.integers(0, 2, (2, length)).astype(bool),
            scores=rng.random(2),
            inference_logprobs=-rng.random((2, length)),
            messages=[{"role": "user", "content": "é" * length}, None],
            started_at=1.5,
            finished_at=2.5,
            task=f"t-{index}",
        )
    with running_broker(config(), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", producer="p", group_size=2) as p,
            Consumer.open(run_dir, sequences=8, info=RunInfo(total_steps=9)) as c,
        ):
            for group in made.values():
                await p.send(group)
            batch = await c.pull(1, PolicyVersion())
            await batch.ack()
    assert [group.group_id for group in batch.groups] == list(made)
    for group in batch.groups:
        sent = made[group.group_id]
        assert encode_group(group, 1 << 30).crc == encode_group(sent, 1 << 30).crc
        assert (group.started_at, group.finished_at, group.task, group.env) == (1.5, 2.5, sent.task, "e")


@pytest.mark.parametrize(
    ("transport", "ahead"), [("ipc", False), ("ipc", True), ("tcp", False)], ids=["ipc", "ahead", "tcp"]
)
async def test_a_broker_that_ends_in_order_loses_nothing(
    run_dir: Path, group: MakeGroup, tmp_path: Path, transport: str, ahead: bool
) -> None:
    """It restarts twice in the middle: what it had accepted is trained after, what it had not is sent again."""
    log, layout, total = tmp_path / "acks.jsonl", RunLayout(run_dir), 60
    address = free_listen() if transport == "tcp" else ""
    settings = config(listen=address, insecure=bool(address))
    where = address or run_dir
    trained: Counter[str] = Counter()

    async def produce() -> None:
        async with Producer.open(where, env="e", producer="p", group_size=2, ack_log=log) as p:
            for index in range(total):
                await p.send(stamped(group(f"g-{index}"), PolicyVersion(0, p.step)))
            assert await p.flush(20)

    async def train(steps: int) -> None:
        while len(trained) < steps * 4:
            batch = await c.pull(c.version.step + 1, c.version)
            try:
                await batch.ack(PolicyVersion(0, c.version.step))
            except LeaseLostError:
                continue
            trained.update(g.group_id for g in batch.groups)

    with running_broker(settings, layout):
        opened = Consumer.open(where, sequences=8, ahead=ahead)
        c = await opened.__aenter__()
        producing = asyncio.create_task(produce())
        await train(3)
    with running_broker(settings, layout):
        await train(7)
    with running_broker(settings, layout):
        async with asyncio.timeout(20):
            await train(total // 4)
            await producing
        await opened.__aexit__(None, None, None)
    acked = {msgspec.json.decode(line, type=AckedGroup).group_id for line in log.read_bytes().splitlines()}
    assert acked == {f"g-{index}" for index in range(total)}
    assert trained.keys() == acked


async def test_a_broker_that_comes_back_with_its_journal_is_only_a_pause(
    run_dir: Path, group: MakeGroup, tmp_path: Path
) -> None:
    """Session, lease and what was saved while it was away go on; only the epoch is another."""
    spool, layout, settings = tmp_path / "q.spool", RunLayout(run_dir), config(durability="os")
    saving = partial(Producer.open, run_dir, env="e", producer="q", group_size=2, save_to=spool)
    async with AsyncExitStack() as stack:
        with running_broker(settings, layout):
            p = await stack.enter_async_context(Producer.open(run_dir, env="e", producer="p", group_size=2))
            c = await stack.enter_async_context(Consumer.open(run_dir, sequences=8))
            leaving = saving(drain_s=0.0)
            q = await leaving.__aenter__()
            permit = await q.acquire()
            for index in range(4):
                await p.send(group(f"g-{index}"))
            batch = await c.pull(1, PolicyVersion())
            session, epoch = p.session, c.epoch
        await q.send(group("saved"), permit)
        await leaving.__aexit__(None, None, None)
        assert spool.exists()
        with running_broker(settings, layout):
            await batch.ack()
            await p.send(group("g-4"))
            assert await p.flush(30)
            assert (p.session, p.durability) == (session, Durability.OS)
            assert c.epoch > epoch
            async with saving() as q:
                assert (q.accepted, spool.exists()) == (1, False)
            await stack.aclose()


@pytest.mark.parametrize("durability", list(Durability))
async def test_what_is_pulled_ahead_is_trained_once_or_given_back(
    run_dir: Path, group: MakeGroup, durability: Durability
) -> None:
    with running_broker(config(durability=durability.value), RunLayout(run_dir)) as broker:
        async with Producer.open(run_dir, env="e", producer="p", group_size=2) as p:
            for index in range(20):
                await p.send(group(f"g-{index}"))
            assert await p.flush(30)
        seen: list[str] = []
        async with Consumer.open(run_dir, sequences=8, ahead=True) as c:
            async for batch in c:
                seen += [each.group_id for each in batch.groups]
                await batch.ack()
                if batch.step == 3:
                    break
        async with Consumer.open(run_dir, sequences=8, consumer="next", resume=c.version) as c:
            batch = await c.pull(4, c.version)
            seen += [each.group_id for each in batch.groups]
            assert {each.deliveries for each in batch.deliveries} == {2}
            await batch.ack()
            async with asyncio.timeout(30):
                batch = await c.pull(5, c.version)
            seen += [each.group_id for each in batch.groups]
            await batch.ack()
    assert seen == [f"g-{index}" for index in range(20)]
    broker.core.validate()


async def test_a_trainer_that_starts_again_goes_on_where_the_run_is(run_dir: Path, group: MakeGroup) -> None:
    """It has no checkpoint and is started unchanged; no group is too stale for it."""
    lives, steps = 3, 8
    with running_broker(config(max_staleness=2), RunLayout(run_dir)) as broker:
        async with Producer.open(run_dir, env="e", producer="p", group_size=2) as p:
            for life in range(lives):
                async with Consumer.open(run_dir, sequences=8) as c:
                    assert c.version == PolicyVersion(0, steps * life)
                    for step in range(steps):
                        for index in range(4):
                            await p.send(stamped(group(f"g-{life}-{step}-{index}"), PolicyVersion(0, p.step)))
                        batch = await anext(c)
                        assert max(batch.staleness()) <= 1
                        await batch.ack()
        ledger = await counts(broker.endpoints.serve)
    assert (ledger.trained, ledger.expired) == (4 * lives * steps, 0)


async def test_a_pull_behind_the_run_costs_no_group(run_dir: Path, group: MakeGroup) -> None:
    """A trainer of its own that numbers its steps anew gets groups of a newer policy."""
    with running_broker(config(), RunLayout(run_dir)) as broker:
        async with (
            Producer.open(run_dir, env="e", producer="p", group_size=2) as p,
            Consumer.open(run_dir, sequences=8) as c,
        ):
            for index in range(8):
                await p.send(stamped(group(f"g-{index}"), PolicyVersion(0, 54)))
            batch = await c.pull(1, PolicyVersion())
            assert batch.staleness() == (0, 0, 0, 0)
            await batch.ack()
        ledger = await counts(broker.endpoints.serve)
    assert ledger.expired == 0


async def test_each_trainer_goes_on_where_it_was(run_dir: Path, group: MakeGroup) -> None:
    """The group of consumers tells the trainers of one run apart."""
    with running_broker(config(max_staleness=50), RunLayout(run_dir)):
        async with Producer.open(run_dir, env="e", producer="p", group_size=2) as p:
            for index in range(4 * 6):
                await p.send(group(f"g-{index}"))
            for name, steps in (("a", 3), ("b", 1)):
                async with Consumer.open(run_dir, sequences=8, consumer=name, group=name) as c:
                    for _ in range(steps):
                        await (await anext(c)).ack()
            for name, step in (("a", 3), ("b", 4)):
                async with Consumer.open(run_dir, sequences=8, consumer=name, group=name) as c:
                    assert c.version == PolicyVersion(0, step)


async def test_a_broker_that_forgot_all_learns_the_policy_from_a_pull(
    run_dir: Path, group: MakeGroup
) -> None:
    """At durability `memory`: producers sample from the policy of the trainer that waits, and nothing expires."""
    layout, settings = RunLayout(run_dir), config(max_staleness=2, durability="memory")
    async with AsyncExitStack() as stack:
        with running_broker(settings, layout):
            p = await stack.enter_async_context(Producer.open(run_dir, env="e", producer="p", group_size=2))
            resume = PolicyVersion(0, 19)
            c = await stack.enter_async_context(Consumer.open(run_dir, sequences=8, resume=resume))
            for index in range(4):
                await p.send(stamped(group(f"a-{index}"), resume))
            await (await anext(c)).ack(PolicyVersion(0, 20))
        layout.saved.unlink(missing_ok=True)
        with running_broker(settings, layout) as broker:
            pulling = asyncio.create_task(anext(c))
            async with asyncio.timeout(20):
                while p.step < 20:  # noqa: ASYNC110 - an ack is no event
                    await asyncio.sleep(0.02)
            for index in range(4):
                await p.send(stamped(group(f"b-{index}"), PolicyVersion(0, p.step)))
            batch = await pulling
            await batch.ack()
            assert max(batch.staleness()) == 0
            assert (await counts(broker.endpoints.serve)).expired == 0
            await stack.aclose()


async def counts(serve: str) -> LedgerCounts:
    async with BrokerClient(serve) as client:
        status = await client.request(GetStatus())
    assert isinstance(status, StatusReply)
    return status.pressure.ledger


async def test_pacing_lets_no_more_rollouts_begin_than_can_be_trained_in_time(
    run_dir: Path, group: MakeGroup
) -> None:
    staleness: list[int] = []
    with running_broker(config(pacing=True, max_staleness=1), RunLayout(run_dir)):
        async with (
            Consumer.open(run_dir, sequences=8) as c,
            Producer.open(run_dir, env="e", producer="p", group_size=2, slots=4) as p,
        ):

            async def roll_out(slot: int) -> None:
                for index in range(1000):
                    with await p.acquire() as permit:
                        began = stamped(group(f"g-{slot}-{index}"), PolicyVersion(0, c.version.step))
                        await p.send(began, permit)

            slots = [asyncio.create_task(roll_out(slot)) for slot in range(4)]
            async with asyncio.timeout(15):
                for _ in range(10):
                    batch = await c.pull(c.version.step + 1, c.version)
                    staleness += batch.staleness()
                    await batch.ack()
            p.start_draining()
            ends = await asyncio.gather(*slots, return_exceptions=True)
            assert all(isinstance(end, DrainingError) for end in ends)
    assert max(staleness) <= 1


async def test_ranks_get_disjoint_parts_of_one_step(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", producer="p", group_size=2) as p,
            Consumer.open(run_dir, sequences=8, consumer="r0", rank=0, world_size=2) as one,
            Consumer.open(run_dir, sequences=8, consumer="r1", rank=1, world_size=2) as two,
        ):
            for index in range(4):
                await p.send(group(f"g-{index}"))
            parts = await asyncio.gather(*(c.pull(1, PolicyVersion()) for c in (one, two)))
            await asyncio.gather(*(part.ack() for part in parts))
    names = [group.group_id for part in parts for group in part.groups]
    assert sorted(names) == ["g-0", "g-1", "g-2", "g-3"]
    assert parts[0].lease == parts[1].lease


async def test_a_rank_restarted_alone_rejoins_the_others(run_dir: Path, group: MakeGroup) -> None:
    """Rank 1 ends three times between its pull and its settlement; rank 0 goes back each time it is told so."""
    trained: dict[int, list[tuple[int, str]]] = {0: [], 1: []}
    lives = 3

    def opened(rank: int) -> AbstractAsyncContextManager[Consumer]:
        return Consumer.open(run_dir, sequences=8, consumer=f"r{rank}", rank=rank, world_size=2)

    async def steady() -> None:
        async with opened(0) as consumer:
            while consumer.version.step < 4:
                try:
                    batch = await anext(consumer)
                    await batch.ack()
                except LeaseLostError:
                    trained[0] = [each for each in trained[0] if each[0] <= consumer.version.step]
                else:
                    trained[0] += [(batch.step, group.group_id) for group in batch.groups]
            with pytest.raises(TimeoutError):  # until the other has settled too
                await asyncio.wait_for(consumer.pull(5, consumer.version), 3.0)

    async def restarted() -> None:
        for life in range(1, lives + 2):
            async with opened(1) as consumer:
                while consumer.version.step < 4:
                    batch = await anext(consumer)
                    if batch.step == life <= lives:
                        break
                    await batch.ack()
                    trained[1] += [(batch.step, group.group_id) for group in batch.groups]

    with running_broker(config(max_staleness=9), RunLayout(run_dir)) as broker:
        async with Producer.open(run_dir, env="e", producer="p", group_size=2) as p:
            for index in range(16):
                await p.send(group(f"g-{index}"))
            await asyncio.wait_for(asyncio.gather(steady(), restarted()), 60)
        ledger = await counts(broker.endpoints.serve)
    assert (ledger.trained, ledger.dead, ledger.queued) == (16, 0, 0)
    assert sorted(name for _, name in trained[0] + trained[1]) == sorted(f"g-{index}" for index in range(16))


@pytest.mark.parametrize("size", [{"sequences": 4}, {"tokens": 28}])
async def test_ranks_go_on_together_when_a_group_goes_alone(
    run_dir: Path, group: MakeGroup, size: dict[str, Any]
) -> None:
    """The first step is one group that is above what was asked: one rank has it, the other an empty part."""
    parts: dict[int, list[tuple[int, list[str], bool]]] = {0: [], 1: []}

    async def learn(rank: int) -> None:
        async with Consumer.open(run_dir, consumer=f"r{rank}", rank=rank, world_size=2, **size) as consumer:
            async for batch in consumer:
                parts[rank].append((batch.step, [group.group_id for group in batch.groups], batch.over))
                await batch.ack()
                if batch.step == 2:
                    return

    with running_broker(config(), RunLayout(run_dir)):
        async with Producer.open(run_dir, env="e", producer="p", group_size=2) as p:
            await p.send(group("large", n=6, length=10))
            for index in range(2):
                await p.send(group(f"g-{index}", n=2, length=7))
            await asyncio.wait_for(asyncio.gather(learn(0), learn(1)), 30)
    assert [step for step, _, _ in parts[0]] == [step for step, _, _ in parts[1]] == [1, 2]
    first, second = zip(*parts.values(), strict=True)
    assert sorted(names for _, names, _ in first) == [[], ["large"]]
    assert all(over for _, _, over in first)
    assert sorted(names for _, names, _ in second) == [["g-0"], ["g-1"]]
    assert not any(over for _, _, over in second)


async def test_a_second_producer_of_the_name_fences_the_first(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        with pytest.raises(UnackedError, match="is fenced by a newer session") as lost:  # noqa: PT012 - leaving raises
            async with Producer.open(run_dir, env="e", producer="p", group_size=2) as first:
                await first.send(group("g-0"))
                assert await first.flush(30)
                async with Producer.open(run_dir, env="e", producer="p", group_size=2) as second:
                    assert second.session > first.session
                    with pytest.raises(SessionFencedError):
                        await asyncio.wait_for(_send_until_fenced(first, group), 10)
                    await second.send(group("g-1"))
                    assert await second.flush(30)
        assert lost.value.group_ids == ("late",)


async def _send_until_fenced(producer: Producer, group: MakeGroup) -> None:
    await producer.send(group("late"))
    await producer.flush()


async def test_a_saved_spool_is_accepted_once_by_the_same_broker(
    run_dir: Path, group: MakeGroup, tmp_path: Path
) -> None:
    spool, log = tmp_path / "p.spool", tmp_path / "acks.jsonl"
    settings = config(high_bytes=2048, max_group_bytes=1024)
    with running_broker(settings, RunLayout(run_dir)):
        async with Producer.open(
            run_dir, env="e", producer="p", group_size=2, save_to=spool, ack_log=log, drain_s=0.5
        ) as p:
            permits = [await p.acquire() for _ in range(8)]
            p.start_draining()
            for index, permit in enumerate(permits):
                await p.send(group(f"g-{index}"), permit)
        left = len(permits) - p.accepted
        assert spool.exists() == (left > 0)
        async with Consumer.open(run_dir, sequences=8) as c:
            trained: Counter[str] = Counter()
            producing = asyncio.create_task(_resume(run_dir, spool, log))
            async with asyncio.timeout(15):
                async for batch in c:
                    trained.update(g.group_id for g in batch.groups)
                    await batch.ack(PolicyVersion(0, c.version.step))
                    await c.commit(c.version)
                    if len(trained) == 8:
                        break
            await producing
    assert trained == Counter([f"g-{index}" for index in range(8)])
    assert not spool.exists()
    assert left > 0


async def _resume(run_dir: Path, spool: Path, log: Path) -> None:
    async with Producer.open(run_dir, env="e", producer="p", group_size=2, save_to=spool, ack_log=log) as p:
        assert p.unacked == 0


async def test_a_group_that_tells_no_version_has_the_one_known_when_it_began(run_dir: Path) -> None:
    def untold(number: int) -> Group:
        return Group.build(f"g-{number}", tokens=[[1], [2]], mask=[[1], [1]], scores=[0.0, 1.0])

    with running_broker(config(), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", producer="e-0", group_size=2) as producer,
            Consumer.open(run_dir, sequences=2) as consumer,
        ):
            for number in range(6):
                while producer.step < number:  # noqa: ASYNC110 - the next ack tells it, there is no event for it
                    await asyncio.sleep(0.01)
                await producer.send(untold(number))
                batch = await consumer.pull(number + 1, consumer.version)
                assert batch.groups[0].oldest.step == number
                await batch.ack()


async def test_a_displaced_consumer_is_told_and_cannot_take_or_release_batches(
    run_dir: Path, group: MakeGroup
) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with AsyncExitStack() as stack:
            producer = await stack.enter_async_context(Producer.open(run_dir, env="e", group_size=2))
            await producer.send(group("g-0"))
            first = Consumer.open(run_dir, sequences=2, consumer="c")
            displaced = await first.__aenter__()
            second = await stack.enter_async_context(Consumer.open(run_dir, sequences=2, consumer="c"))
            batch = await second.pull(1, second.version)
            with pytest.raises(ConsumerFencedError, match="consumer c: another process registered"):
                await displaced.pull(1, displaced.version)
            await first.__aexit__(None, None, None)
            assert (await batch.ack()).step == 1


async def test_a_repeated_registration_is_the_same_life(run_dir: Path, group: MakeGroup) -> None:
    with running_broker(config(), RunLayout(run_dir)):
        async with (
            Producer.open(run_dir, env="e", group_size=2) as producer,
            BrokerClient((await serve_address(run_dir))[0]) as client,
        ):

            async def register(key: str) -> int:
                reply = await client.request(RegisterConsumer(consumer="c", key=key))
                assert isinstance(reply, ConsumerRegistered)
                return reply.generation

            one = await register("a")
            await producer.send(group("g-0"))
            asked = Pull(
                consumer="c", step=1, version=PolicyVersion(), sequences=2, request_id="r", generation=one
            )
            batch = await client.request(asked)
            assert isinstance(batch, Batch)
            assert await register("a") == one, "its lease stays"
            again = await client.request(asked)
            assert isinstance(again, Batch)
            assert (again.lease, again.generation) == (batch.lease, batch.generation)
            other = await register("b")
            assert other > one
            assert await register("") > other, "a client without a key begins a new life each time"
            with pytest.raises(ConsumerFencedError):
                await client.request(asked)
