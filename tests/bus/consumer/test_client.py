"""The consumer against a scripted broker: leases, undecodable groups, restarts, iteration."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
import pytest
from tests.bus.transport.fake_broker import V0, V1, answers, leased

from rolloutmq.bus.consumer import connection
from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.transport import discovery
from rolloutmq.schemas.errors import (
    ConsumerFencedError,
    EndOfReplayError,
    LeaseLostError,
    RefusedError,
    UsageError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, ErrorReply, NoBatch, Rejected, RunInfo, Settled, Wait
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    GetInfo,
    Pull,
    RegisterConsumer,
    Release,
    Settle,
    TrainerPause,
)

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import Answer, FakeBroker

MakeGroup = Callable[..., Group]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heartbeats come often, and a broker that is gone is missed soon."""
    monkeypatch.setattr(connection, "BEAT_S", 0.1)
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)
    monkeypatch.setattr(discovery, "PROBE_S", 0.3)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.3)


async def test_a_batch_is_pulled_decoded_and_settled(fake: "FakeBroker", group: MakeGroup) -> None:
    old = msgspec.structs.replace(V0, step=7)
    groups = [
        Group.build("a", tokens=[[1, 2], []], mask=[[0, 1], []], scores=[0.0, 1.0], oldest=old, newest=V0),
        group("b", n=3),
    ]
    moments = {"e": Moments(3, 24.0, 0.5, 6.0, 0.0, 1.0)}
    fake.answers[Pull] = answers(leased(groups, short=True, over=True, rewound=True, moments=moments))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=5, info=RunInfo(run="r")) as c:
        batch = await c.pull(11, V0)
        assert [g.group_id for g in batch.groups] == ["a", "b"]
        assert [row.tolist() for row in batch.groups[0]["tokens"]] == [[1, 2], []]
        assert batch.groups[0].env == "e"
        assert (batch.step, batch.lease) == (11, 1)
        assert (batch.short, batch.over, batch.rewound) == (True, True, True)
        assert batch.moments == moments
        assert (batch.sequences, batch.tokens) == (5, 14)
        assert batch.staleness() == (3, 10)
        assert batch.staleness(V1) == (4, 11)
        await batch.ack()
        await c.commit(V1)
    pull = fake.asked_for(Pull)[0]
    assert (pull.sequences, pull.run, pull.version, pull.step) == (5, "r", V0, 11)
    settle = fake.asked_for(Settle)[0]
    assert (settle.lease, settle.generation, settle.version) == (1, 4, V1)
    assert (settle.trained, settle.filtered, settle.rejected) == (("a", "b"), (), ())
    assert fake.asked_for(Commit)[0].version == V1
    assert fake.asked_for(RegisterConsumer)[0].info.batch_sequences == 5
    assert fake.asked_for(Release)


async def test_a_bare_number_is_no_version(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    with pytest.raises(UsageError, match=r"resume: must be a PolicyVersion \(got 5\)"):
        async with Consumer.open(fake.layout.root, sequences=5, resume=5):  # type: ignore[arg-type]
            raise AssertionError("opened")
    async with fake.running(), Consumer.open(fake.layout.root, sequences=5) as c:
        batch = await c.pull(11, V0)
        with pytest.raises(UsageError, match=r"settle\.version: must be a PolicyVersion \(got 5\)"):
            await batch.ack(5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"commit\.version: must be a PolicyVersion \(got 5\)"):
            await c.commit(5)  # type: ignore[arg-type]
        with pytest.raises(UsageError, match=r"commit\.version: must be a PolicyVersion \(got None\)"):
            await c.commit(None, timeout_s=20)  # type: ignore[arg-type]
        await batch.ack()
    assert not fake.asked_for(Commit)


async def test_a_version_may_count_in_integers_of_numpy(fake: "FakeBroker", group: MakeGroup) -> None:
    """The step of a loop over an array was a bare TypeError."""
    fake.answers[Pull] = answers(leased([group("a")]))
    zero, one = PolicyVersion(0, np.int64(0)), PolicyVersion(0, np.int64(1))  # type: ignore[arg-type]
    opening = Consumer.open(fake.layout.root, sequences=5, resume=zero)
    async with fake.running(), opening as c:
        batch = await c.pull(1, c.version)
        for wrong in ("1", 1.0, -1, 1 << 63):
            with pytest.raises(UsageError, match=r"settle\.version: must have integers from 0 \(got PolicyV"):
                await batch.ack(PolicyVersion(0, wrong))  # type: ignore[arg-type]
        await batch.ack(one)
        await c.commit(one)
    assert fake.asked_for(RegisterConsumer)[0].resume == PolicyVersion(0, 0)
    assert [fake.asked_for(kind)[0].version for kind in (Settle, Commit)] == [PolicyVersion(0, 1)] * 2


async def test_the_lists_of_a_settlement_complement_each_other(fake: "FakeBroker", group: MakeGroup) -> None:
    groups = [group(name) for name in "abcd"]
    fake.answers[Pull] = answers(leased(groups, spoil=("c",)), leased(groups[:1]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        assert [g.group_id for g in batch.groups] == ["a", "b", "d"]
        assert [d.header.group_id for d in batch.deliveries] == ["a", "b", "d"]
        await c.settle(batch, filtered=["a"], rejected=[Rejected(group_id="d", reason="empty")])
        assert c.version == V1
        batch = await c.pull(12, V1)
        await c.settle(batch, filtered=["a"])
        assert c.version == V1
    first, second = fake.asked_for(Settle)
    assert first.trained == ("b",)
    assert [r.group_id for r in first.rejected] == ["c", "d"]
    assert "checksum" in first.rejected[0].reason
    assert second.trained == ()
    assert second.version == V1


async def test_a_settlement_that_the_wire_cannot_carry_is_refused_and_may_be_corrected(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group(name) for name in "ab"]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(1, V0)
        for reason in ("lone\ud800", "x" * 513):
            with pytest.raises(UsageError, match=r"^rejected: "):
                await c.settle(batch, rejected=[Rejected(group_id="a", reason=reason)])
        with pytest.raises(UsageError, match=r"^trained: must be text that UTF-8 can encode"):
            await c.settle(batch, trained=["a\ud800"])
        await c.settle(batch, rejected=[Rejected(group_id="a", reason="lone")])
    (told,) = fake.asked_for(Settle)
    assert [one.reason for one in told.rejected] == ["lone"]


async def test_a_batch_without_a_whole_group_is_settled_and_pulled_again(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(
        leased([group("a"), group("b")], spoil=("a", "b")), leased([group("c")], lease=2)
    )
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        assert [g.group_id for g in batch.groups] == ["c"]
    settle = fake.asked_for(Settle)[0]
    assert (settle.version, settle.trained) == (V0, ())
    assert [r.group_id for r in settle.rejected] == ["a", "b"]
    ids = [pull.request_id for pull in fake.asked_for(Pull)]
    assert len(set(ids)) == 2


async def test_a_reply_that_lies_about_its_frames_gives_rejections(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    full = leased([group("a"), group("b")])
    assert isinstance(full, tuple)
    reply, frames = full
    assert isinstance(reply, Batch)
    fake.answers[Pull] = answers((reply, frames[:1]), (msgspec.structs.replace(reply, tables=()), frames))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, world_size=2) as c:
        batch = await c.pull(11, V0)
        assert [g.group_id for g in batch.groups] == ["a"]
        assert [r.group_id for r in batch.rejected] == ["b"]
        batch = await c.pull(11, V0)
        assert not batch.groups
        assert len(batch.rejected) == 2


@pytest.mark.parametrize(
    ("ranks", "filtered", "after"),
    [(2, [], V1), (2, ["a"], V0), (1, ["a"], V0)],
    ids=["empty", "some", "one"],
)
async def test_a_rank_that_has_nothing_to_learn_from_steps_on_if_the_others_may_have(
    fake: "FakeBroker", group: MakeGroup, ranks: int, filtered: list[str], after: PolicyVersion
) -> None:
    fake.answers[Pull] = answers(leased([group(name) for name in filtered]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, world_size=ranks) as c:
        await c.settle(await c.pull(11, V0), filtered=filtered)
        assert c.version == after
    assert fake.asked_for(Settle)[0].version == after


async def test_views_of_a_batch_that_is_pulled_ahead_are_refused(fake: "FakeBroker") -> None:
    """Its lease may be lost before it is returned: a trainer got the groups that the producer wrote there next."""
    async with fake.running():
        with pytest.raises(UsageError, match=r"^views: .* \(got ahead=True\)"):
            async with Consumer.open(fake.layout.root, sequences=8, ahead=True, views=True):
                pass


@pytest.mark.parametrize(("sequences", "tokens"), [(0, 0), (8, 8), (0, -1), (8, -8)])
async def test_a_step_is_named_in_sequences_or_in_tokens_and_not_both(
    fake: "FakeBroker", sequences: int, tokens: int
) -> None:
    async with fake.running():
        with pytest.raises(UsageError, match="give exactly one of them"):
            async with Consumer.open(fake.layout.root, sequences=sequences, tokens=tokens):
                pass
    assert not any(isinstance(asked, RegisterConsumer) for asked in fake.asked)


async def test_a_step_may_be_a_budget_of_tokens(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    async with fake.running(), Consumer.open(fake.layout.root, tokens=1 << 20) as c:
        assert (await c.pull(11, V0)).groups
    (pull,) = [asked for asked in fake.asked if isinstance(asked, Pull)]
    assert (pull.sequences, pull.tokens) == (0, 1 << 20)


async def test_the_end_of_a_replay_ends_the_iteration_and_is_raised_by_a_pull(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    end = NoBatch(wait=Wait.END_OF_REPLAY, queued_sequences=0)
    fake.answers[Pull] = answers(leased([group("a")]), end, end)
    fake.answers[Settle] = lambda asked: Settled(step=asked.version.step)
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        async for batch in c:
            await batch.ack()
        assert c.version.step == 1
        with pytest.raises(EndOfReplayError):
            await c.pull(2, c.version)


async def test_a_pull_is_repeated_with_the_same_id_until_there_is_a_batch(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    nothing = NoBatch(wait=Wait.NO_EXACT_FIT, queued_sequences=3)
    fake.answers[Pull] = answers(nothing, nothing, leased([group("a")]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        assert (await c.pull(11, V0)).groups
        waits = [c.wait]
        assert await c.pull(12, V0, wait_s=0.06) is None
        assert [*waits, c.wait] == [Wait.NO_EXACT_FIT, Wait.MIN_SHARE]
    ids = [pull.request_id for pull in fake.asked_for(Pull)]
    assert len(set(ids[:3])) == 1
    assert ids[3] != ids[2]


async def test_a_lost_lease_is_said(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    fake.answers[Settle] = lambda _: ErrorReply(code=ErrorCode.LEASE_LOST, detail="silence")
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        with pytest.raises(LeaseLostError, match="silence"):
            await batch.ack()
        assert c.version.step == 0


async def test_a_loss_that_is_told_twice_takes_nothing_back_that_all_have_settled(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    lost = ErrorReply(code=ErrorCode.LEASE_LOST, detail="silence")
    fake.answers[Pull] = answers(
        leased([group("a")], step=1),
        leased([group("b")], lease=2, step=2),
        lost,
        leased([group("b")], lease=3, step=2),
    )
    settled = iter((Settled(step=1, provisional=True), lost, Settled(step=2)))
    fake.answers[Settle] = lambda _: next(settled)
    async with (
        fake.running(),
        Consumer.open(fake.layout.root, sequences=8, rank=0, world_size=2, resume=PolicyVersion()) as c,
    ):
        await (await c.pull(1, c.version)).ack()
        after = c.version
        with pytest.raises(LeaseLostError):
            await (await c.pull(2, after)).ack()
        with pytest.raises(LeaseLostError):
            await c.pull(2, c.version)
        assert c.version == after
        await (await c.pull(2, c.version)).ack()
        assert c.version.step == 2


async def test_a_provisional_settlement_that_was_lost_is_taken_back(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(
        leased([group("a")], step=1), ErrorReply(code=ErrorCode.LEASE_LOST, detail="silence")
    )
    fake.answers[Settle] = lambda _: Settled(step=1, provisional=True)
    async with (
        fake.running(),
        Consumer.open(fake.layout.root, sequences=8, rank=0, world_size=2, resume=PolicyVersion()) as c,
    ):
        before = c.version
        await (await c.pull(1, before)).ack()
        with pytest.raises(LeaseLostError):
            await c.pull(2, c.version)
        assert c.version == before


async def test_a_broker_in_another_life_voids_the_lease_and_gives_the_next_batch(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]), leased([group("b")], lease=1))
    async with fake.running("a"):
        opened = Consumer.open(fake.layout.root, sequences=8, resume=V0)
        c = await opened.__aenter__()
        batch = await c.pull(11, V0)
    fake.new_life()
    async with fake.running("b"):
        with pytest.raises(LeaseLostError):
            await batch.ack()
        assert not fake.asked_for(Settle)
        batch = await c.pull(11, V0)
        await batch.ack()
        await opened.__aexit__(None, None, None)
    assert [r.resume for r in fake.asked_for(RegisterConsumer)] == [V0, None]
    assert fake.asked_for(Settle)[0].trained == ("b",)


async def test_a_broker_that_remembers_keeps_the_lease(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    async with fake.running("a"):
        opened = Consumer.open(fake.layout.root, sequences=8, resume=V0)
        c = await opened.__aenter__()
        batch = await c.pull(11, V0)
    fake.restart()
    async with fake.running("b"):
        await batch.ack()
        assert (c.epoch, c._link.life) == (2, 1)
        await opened.__aexit__(None, None, None)
    first, again = fake.asked_for(RegisterConsumer)
    assert (first.generation, first.resume, again.generation, again.resume) == (0, V0, 1, None)
    assert fake.asked_for(Settle)[0].trained == ("a",)


async def test_a_restart_in_place_is_noticed_by_the_heartbeat(fake: "FakeBroker") -> None:
    """It is back before anybody misses it: what it was asked is asked again, not waited for."""
    fake.answers[Pull] = lambda _: None
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        pulling = asyncio.create_task(c.pull(11, V0, wait_s=0.0))
        await fake.until(lambda: bool(fake.asked_for(Pull)))
        del fake.answers[Pull]
        fake.restart()
        assert await pulling is None
        assert c.epoch == 2
    assert len({pull.request_id for pull in fake.asked_for(Pull)}) == 1


async def test_a_settlement_whose_reply_died_with_the_broker_is_repeated(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    fake.answers[Settle] = lambda _: None
    async with fake.running("a"):
        opened = Consumer.open(fake.layout.root, sequences=8)
        c = await opened.__aenter__()
        batch = await c.pull(11, V0)
        settling = asyncio.create_task(c.settle(batch, filtered=["a"]))
        await fake.until(lambda: bool(fake.asked_for(Settle)))
    fake.restart()
    fake.answers[Settle] = lambda _: Settled(step=11)
    async with fake.running("b"):
        assert (await settling).step == 11
        await opened.__aexit__(None, None, None)
    assert len(set(map(msgspec.msgpack.encode, fake.asked_for(Settle)))) == 1


async def test_resume_is_said_until_a_broker_has_answered(fake: "FakeBroker") -> None:
    fake.answers[RegisterConsumer] = lambda _: None
    async with fake.running("a"):
        opened = Consumer.open(fake.layout.root, sequences=8, resume=V0)
        opening = asyncio.create_task(opened.__aenter__())
        await fake.until(lambda: bool(fake.asked_for(RegisterConsumer)))
    fake.restart()
    del fake.answers[RegisterConsumer]
    async with fake.running("b"):
        c = await opening
        fake.restart()
        await fake.until(lambda: c.epoch == 3)
        await opened.__aexit__(None, None, None)
    resumes = [r.resume for r in fake.asked_for(RegisterConsumer)]
    assert set(resumes[:-1]) == {V0}
    assert resumes[-1] is None


async def test_a_slow_settlement_ends_well_and_heartbeats_go_on(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """The disk is full: what tells of a change is answered late, and the broker lives."""
    fake.answers[Pull] = answers(leased([group("a")]))
    fake.answers[Settle] = lambda _: None
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        settling = asyncio.create_task(batch.ack())
        await fake.until(lambda: caplog.text.count("broker slow request=Settle") == 2)
        beats = len(fake.asked_for(ConsumerBeat))
        await fake.until(lambda: len(fake.asked_for(ConsumerBeat)) >= beats + 2)
        # Waiting for a slow broker counts as progress, or the lease would be lost by it.
        assert fake.asked_for(ConsumerBeat)[-1].progress > fake.asked_for(ConsumerBeat)[0].progress
        fake.answers[Settle] = lambda _: Settled(step=11)
        assert (await settling).step == 11
    assert len(fake.asked_for(RegisterConsumer)) == 1
    assert "broker lost" not in caplog.text


async def test_heartbeats_go_on_while_the_broker_answers_nothing_at_all(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        for kind in (Settle, ConsumerBeat, GetInfo):
            fake.answers[kind] = lambda _: None
        settling = asyncio.create_task(batch.ack())
        await fake.until(lambda: len(fake.asked_for(GetInfo)) > 5)
        beats = len(fake.asked_for(ConsumerBeat))
        await fake.until(lambda: len(fake.asked_for(ConsumerBeat)) >= beats + 5)
        assert not settling.done()
        fake.answers.clear()
        await settling
    assert len(fake.asked_for(RegisterConsumer)) == 1


async def test_a_heartbeat_that_finds_itself_unknown_registers_again(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]), leased([group("b")], lease=2))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        batch = await c.pull(11, V0)
        fake.generations.clear()
        await fake.until(lambda: len(fake.asked_for(RegisterConsumer)) == 2)
        with pytest.raises(LeaseLostError):
            await batch.ack()
        assert (await c.pull(11, V0)).groups[0].group_id == "b"


async def test_heartbeats_go_on_while_a_pull_waits_and_carry_progress(fake: "FakeBroker") -> None:
    fake.answers[Pull] = lambda _: None
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        pulling = asyncio.create_task(c.pull(11, V0))
        await fake.until(lambda: bool(fake.asked_for(ConsumerBeat)))
        c.progress()
        await fake.until(lambda: len(fake.asked_for(ConsumerBeat)) == 2)
        pulling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await pulling
    first, second = fake.asked_for(ConsumerBeat)[:2]
    assert second.progress > first.progress > 0


async def test_heartbeats_and_the_goodbye_tell_other_waits(fake: "FakeBroker") -> None:
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        c.waited(TrainerPause.EVALUATION, 1.5)
        await fake.until(lambda: any(beat.waits_s for beat in fake.asked_for(ConsumerBeat)))
        fake.restart()  # it has not counted them, and the life before has
        await fake.until(lambda: bool(beats := fake.asked_for(ConsumerBeat)) and not beats[-1].waits_s)
        c.waited(TrainerPause.EVALUATION, 0.5)
        with pytest.raises(UsageError, match="seconds: must be finite"):
            c.waited(TrainerPause.EVALUATION, float("nan"))
        with pytest.raises(UsageError, match="reason: must be a TrainerPause"):
            c.waited("evaluation", 1.0)  # type: ignore[arg-type]
    (release,) = fake.asked_for(Release)
    assert release.waits_s == {TrainerPause.EVALUATION: 0.5}


async def test_iteration_goes_step_by_step_and_wants_each_settled(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(
        leased([group("a")], lease=1, step=11),
        leased([group("b")], lease=2, step=12),
        leased([group("c")], lease=3, step=12),
    )
    seen = []
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, resume=V0) as c:
        async for batch in c:
            seen.append(batch.groups[0].group_id)
            if seen[-1] == "c":
                break
            if seen[-1] == "b":
                await c.settle(batch, filtered=["b"])
            else:
                await batch.ack()
        with pytest.raises(UsageError, match="not settled"):
            await anext(c)
    assert seen == ["a", "b", "c"]
    assert [(p.step, p.version.step) for p in fake.asked_for(Pull)] == [(11, 10), (12, 11), (12, 11)]


async def test_a_refused_consumer_raises_at_open_and_a_refused_pull_at_once(fake: "FakeBroker") -> None:
    refused = ErrorReply(code=ErrorCode.CONFLICT, detail="world size")
    async with fake.running():
        fake.answers[Pull] = lambda _: refused
        async with Consumer.open(fake.layout.root, sequences=8) as c:
            with pytest.raises(RefusedError, match="world size"):
                await c.pull(1, V0)
        fake.answers[RegisterConsumer] = lambda _: refused
        with pytest.raises(RefusedError):
            async with Consumer.open(fake.layout.root, sequences=8):
                pass


async def test_open_can_be_cancelled_while_there_is_no_broker(run_dir: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), Consumer.open(run_dir, sequences=8):
            raise AssertionError


async def test_a_consumer_whose_name_was_taken_over_says_so_everywhere_and_releases_nothing(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.answers[Pull] = answers(leased([group("a")]))
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8, consumer="p") as c:
        batch = await c.pull(11, V0)
        fake.answers[Settle] = lambda _: ErrorReply(code=ErrorCode.LEASE_LOST, detail="registered again")
        for kind in (Pull, ConsumerBeat, Release):
            fake.answers[kind] = lambda _: ErrorReply(code=ErrorCode.FENCED, detail="p")
        for call in (batch.ack, lambda: c.pull(12, V0), lambda: c.commit(V0)):
            with pytest.raises(
                ConsumerFencedError,
                match=r"consumer p: another process .* end one of the two; ranks of one trainer need a `rank`",
            ):
                await call()
        assert {beat.generation for beat in fake.asked_for(ConsumerBeat)} == {1}
    assert len(fake.asked_for(RegisterConsumer)) == 1
    assert not fake.asked_for(Release), "it would release the lease of the other process"


async def test_a_slow_registration_is_one_registration(fake: "FakeBroker") -> None:
    asked = 0

    def slow(request: RegisterConsumer) -> "Answer":
        nonlocal asked
        asked += 1
        return fake._answer(request) if asked > 8 else (fake._answer(request), None)[1]

    fake.answers[RegisterConsumer] = slow
    async with fake.running(), Consumer.open(fake.layout.root, sequences=8) as c:
        assert (fake.lives, c._link.life) == (1, 1)
    keys = {request.key for request in fake.asked_for(RegisterConsumer)}
    assert len(keys) == 1
    assert keys != {""}
