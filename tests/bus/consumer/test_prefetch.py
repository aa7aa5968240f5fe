"""The prefetch against a scripted broker: the owner of the batch, and batches given back."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
from tests.bus.transport.fake_broker import V0, V1, answers, leased

from rolloutmq.bus.consumer import connection
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.schemas.errors import EndOfReplayError, LeaseLostError, RefusedError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import ErrorReply, NoBatch, Settled, Wait
from rolloutmq.schemas.wire.requests import ConsumerBeat, Pull, Release, Settle

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import FakeBroker

MakeGroup = Callable[..., Group]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come often, and requests are repeated soon."""
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)


def requests(fake: "FakeBroker") -> list[str]:
    """What a consumer asked for, in its order."""
    return [type(each).__name__ for each in fake.asked if isinstance(each, Pull | Settle | Release)]


async def test_the_next_batch_is_asked_for_with_the_settlement_and_once(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]), leased([group("b")], lease=2, step=12))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        batch = await c.pull(11, V0)
        await batch.ack()
        await fake.until(lambda: len(fake.asked_for(Pull)) == 2)
        assert requests(fake) == ["Pull", "Settle", "Pull"]
        batch = await c.pull(12, V1)
        assert (batch.groups[0].group_id, batch.step, batch.version) == ("b", 12, V1)
        assert requests(fake) == ["Pull", "Settle", "Pull"]
    first, second = fake.asked_for(Pull)
    assert (second.step, second.version, second.wait_s) == (12, V1, 0.0)
    assert first.request_id != second.request_id


async def test_where_there_is_none_yet_the_next_pull_asks_as_usual(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    nothing = NoBatch(wait=Wait.NO_BATCH, queued_sequences=0)
    fake.answers[Pull] = answers(leased([group("a")]), nothing, leased([group("b")], lease=2, step=12))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        await (await c.pull(11, V0)).ack()
        assert (await c.pull(12, V1)).groups[0].group_id == "b"
    assert [pull.wait_s > 0 for pull in fake.asked_for(Pull)] == [True, False, True]
    assert requests(fake)[-1] == "Release"


async def test_iteration_takes_what_was_asked_for_ahead(fake: "FakeBroker", group: MakeGroup) -> None:
    made = [leased([group(name)], lease=n, step=10 + n) for n, name in enumerate("abc", 1)]
    fake.answers[Pull] = answers(*made)
    seen = []
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, resume=V0, ahead=True) as c:
        async for batch in c:
            seen.append(batch.groups[0].group_id)
            await batch.ack()
            if seen[-1] == "b":
                break
    assert seen == ["a", "b"]
    assert [pull.step for pull in fake.asked_for(Pull)] in ([11, 12, 13], [11, 12])
    assert requests(fake)[-1] == "Release"


async def test_another_step_gives_back_what_was_asked_for(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(
        leased([group("a")]), leased([group("b")], lease=2, step=12), leased([group("b")], lease=3, step=20)
    )
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        await (await c.pull(11, V0)).ack()
        assert (await c.pull(20, V1)).step == 20
        assert requests(fake) == ["Pull", "Settle", "Pull", "Release", "Pull"]


async def test_a_lost_lease_gives_back_what_was_asked_for_with_it(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(
        leased([group("a")]), leased([group("b")], lease=2, step=12), leased([group("a")], lease=3)
    )
    fake.answers[Settle] = lambda _: ErrorReply(code=ErrorCode.LEASE_LOST, detail="silence")
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        batch = await c.pull(11, V0)
        with pytest.raises(LeaseLostError, match="silence"):
            await batch.ack()
        assert requests(fake) == ["Pull", "Settle", "Pull", "Release"]
        assert (await c.pull(11, V0)).lease == 3


async def test_settling_again_gives_nothing_back(fake: "FakeBroker", group: MakeGroup) -> None:
    """A settlement that was cancelled may not have arrived: the lease must stay."""
    fake.answers[Pull] = answers(leased([group("a")]), leased([group("b")], lease=2, step=12))
    fake.answers[Settle] = lambda _: None
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        batch = await c.pull(11, V0)
        settling = asyncio.create_task(batch.ack())
        await fake.until(lambda: len(fake.asked_for(Settle)) == 1)
        settling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await settling
        fake.answers[Settle] = lambda _: Settled(step=11)
        await batch.ack()
        assert (await c.pull(12, V1)).groups[0].group_id == "b"
        assert not fake.asked_for(Release)


async def test_a_refused_settlement_keeps_the_lease(fake: "FakeBroker", group: MakeGroup) -> None:
    nothing = NoBatch(wait=Wait.LEASED_ELSEWHERE, queued_sequences=0)
    fake.answers[Pull] = answers(leased([group("a")]), nothing)
    fake.answers[Settle] = lambda _: ErrorReply(code=ErrorCode.INVALID, detail="lists")
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        batch = await c.pull(11, V0)
        with pytest.raises(RefusedError):
            await c.settle(batch, trained=["z"])
        fake.answers[Settle] = lambda _: Settled(step=11)
        await batch.ack()
        assert not fake.asked_for(Release)


async def test_who_does_not_come_for_it_shows_progress_all_the_same(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    """Nobody works at it, so nobody hangs: its groups must not be taken for those that make trainers hang."""
    fake.answers[Pull] = answers(leased([group("a")]), leased([group("b")], lease=2, step=12))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        await (await c.pull(11, V0)).ack()
        await fake.until(lambda: len(fake.asked_for(Pull)) == 2)
        past = len(fake.asked_for(ConsumerBeat))
        await fake.until(lambda: len(fake.asked_for(ConsumerBeat)) >= past + 3)
        second, third = fake.asked_for(ConsumerBeat)[-2:]
        assert third.progress > second.progress
        await c.pull(12, V1)
        past = len(fake.asked_for(ConsumerBeat))
        await fake.until(lambda: len(fake.asked_for(ConsumerBeat)) >= past + 3)
        second, third = fake.asked_for(ConsumerBeat)[-2:]
        assert third.progress == second.progress


async def test_the_end_of_a_replay_is_raised_by_the_pull_that_wants_it(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    over = NoBatch(wait=Wait.END_OF_REPLAY, queued_sequences=0)
    fake.answers[Pull] = answers(leased([group("a")]), over)
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        await (await c.pull(11, V0)).ack()
        with pytest.raises(EndOfReplayError):
            await c.pull(12, V1)


async def test_what_nobody_comes_for_ends_with_the_consumer(fake: "FakeBroker", group: MakeGroup) -> None:
    """Whatever its pull raised."""
    refused = ErrorReply(code=ErrorCode.CONFLICT, detail="other numbers")
    fake.answers[Pull] = answers(leased([group("a")]), (refused, []))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, ahead=True) as c:
        await (await c.pull(11, V0)).ack()
        await fake.until(lambda: len(fake.asked_for(Pull)) == 2)
    assert requests(fake) == ["Pull", "Settle", "Pull", "Release"]
