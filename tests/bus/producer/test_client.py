"""The producer against a scripted broker: credit, loss, fencing, restarts and closing."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import pytest

from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.producer import connection, session
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.producer.session import PACK_GROUPS
from rolloutmq.bus.transport import discovery
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    DrainingError,
    GroupTooLargeError,
    RefusedError,
    SessionFencedError,
    UsageError,
)
from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Ack, Durability, ErrorReply, Registered, RunInfo
from rolloutmq.schemas.wire.requests import DeclareTables, Goodbye, RegisterProducer, Sync

if TYPE_CHECKING:
    from tests.bus.transport.fake_broker import Answer, FakeBroker

MakeGroup = Callable[..., Group]


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broker that is gone is missed soon."""
    monkeypatch.setattr(connection, "PATIENCE_S", 0.5)
    monkeypatch.setattr(connection, "REPEAT_S", 0.1)
    monkeypatch.setattr(discovery, "PROBE_S", 0.3)
    monkeypatch.setattr(discovery, "ATTEMPT_S", 0.3)


def logged(path: Path) -> list[str]:
    return [msgspec.json.decode(line, type=AckedGroup).group_id for line in path.read_bytes().splitlines()]


async def test_groups_arrive_once_and_are_logged(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    log = tmp_path / "acks" / "p.jsonl"
    async with (
        fake.running(),
        Producer.open(
            fake.layout.root, env="e", producer="p", slots=3, group_size=2, split=Split.EVAL, ack_log=log
        ) as p,
    ):
        for index in range(20):
            await p.send(group(f"g-{index}"), await p.acquire())
        assert await p.flush(30)
        assert p.accepted == 20
        assert p.info.total_steps == 7
        assert logged(log) == [f"g-{index}" for index in range(20)]
    assert fake.arrived == list(range(1, 21))
    assert [header.group_id for header in fake.accepted.values()] == logged(log)
    registered = fake.asked_for(RegisterProducer)[0]
    assert (registered.slots, registered.group_size, registered.split) == (3, 2, Split.EVAL)
    assert len(fake.asked_for(DeclareTables)) == 1
    assert fake.asked_for(Goodbye)[-1].produced == 20


async def test_every_table_is_declared_before_its_first_group(fake: "FakeBroker") -> None:
    declared_at: list[int] = []

    def declare(request: DeclareTables) -> "Answer":
        declared_at.append(len(fake.arrived))
        return fake._answer(request)

    fake.answers[DeclareTables] = declare
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        for index in range(4):
            rows = [[1], [2]]
            extra = rows if index % 2 else None
            await p.send(
                Group.build(f"g-{index}", tokens=rows, mask=rows, scores=[0.0, 1.0], advantages=extra)
            )
        assert await p.flush(30)
    assert len(declared_at) == 2
    assert declared_at[1] <= 1


async def test_permits_are_bounded_by_the_start_limit_and_come_in_order(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.start_limit = 2
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        first, second = await p.acquire(), await p.acquire()
        order: list[int] = []

        async def begin(number: int) -> None:
            with await p.acquire():
                order.append(number)

        tasks = [asyncio.create_task(begin(number)) for number in range(3)]
        await asyncio.sleep(0)
        assert not order
        fake.start_limit = 5
        fake.publish()
        await asyncio.gather(*tasks)
        assert order == [0, 1, 2]
        p.abandon(first)
        p.abandon(first)
        await p.send(group("g"), second)
        p.abandon(second)
        assert p.abandoned == 4
        assert p.waits_s > 0
        assert await p.flush(30)
    assert fake.asked_for(Goodbye)[-1].abandoned == 4


async def test_abandoned_permits_are_reported_soon_while_somebody_waits(
    fake: "FakeBroker", monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(session, "SILENCE_S", 60.0)  # what is asked anyway would tell of them, too, but later
    monkeypatch.setattr(session, "ALIVE_S", 60.0)
    fake.start_limit = 1

    def sync(request: Sync) -> Ack:
        fake.start_limit = 1 + request.abandoned
        return fake.ack()

    fake.answers[Sync] = sync
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        for _ in range(3):
            p.abandon(await asyncio.wait_for(p.acquire(), 5))


async def test_cancelled_acquire_leaks_no_permit(fake: "FakeBroker") -> None:
    fake.start_limit = 0
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        waiting = [asyncio.create_task(p.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        waiting[0].cancel()
        # The second is served and cancelled before it runs: its permit goes to the third.
        p._session.credit.start_limit = 1
        p._waiters.serve()
        waiting[1].cancel()
        assert (await waiting[2]).is_open
        assert p._session.credit.begun == p._session.credit.in_hand == 1
        for task in waiting[:2]:
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_send_waits_for_bytes_and_a_cancelled_one_leaves_the_permit(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.byte_limit = encode_group(group("g-0"), 1 << 20).nbytes
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        permits = [await p.acquire() for _ in range(3)]
        await p.send(group("g-0"), permits[0])
        second = asyncio.create_task(p.send(group("g-1"), permits[1]))
        third = asyncio.create_task(p.send(group("g-2"), permits[2]))
        own = asyncio.create_task(p.send(group("g-3")))
        await fake.until(lambda: fake.arrived == [1])
        second.cancel()
        own.cancel()
        for task in (second, own):
            with pytest.raises(asyncio.CancelledError):
                await task
        assert permits[1].is_open
        assert not third.done()
        fake.byte_limit = 10_000
        fake.publish()
        await third
        await p.send(group("g-1"), permits[1])
        assert await p.flush(30)
        assert p._session.credit.begun == 3
    assert [header.group_id for header in fake.accepted.values()] == ["g-0", "g-2", "g-1"]


@asynccontextmanager
async def busy_loop(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[None]:
    """Other tasks take more of every turn of the loop than a producer may."""

    async def take_turns() -> None:
        while True:
            keep()
            await asyncio.sleep(0)

    def keep() -> None:
        time.sleep(connection.TURN_S * 1.5)

    monkeypatch.setattr(connection, "TURN_S", 0.25)
    others = asyncio.create_task(take_turns())
    try:
        yield
    finally:
        others.cancel()


async def test_messages_are_full_however_long_others_keep_the_loop(
    fake: "FakeBroker", group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.arena_bytes = 1 << 20
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g-0"))
        assert await p.flush(30)
        async with busy_loop(monkeypatch):
            for index in range(3 * PACK_GROUPS):
                await p.send(group(f"g-{index + 1}"))
            assert await p.flush(30)
    assert fake.messages == [1, PACK_GROUPS, PACK_GROUPS, PACK_GROUPS]


async def test_a_group_that_no_other_is_under_way_with_leaves_at_once(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    """Before the loop's next turn; the next one waits for that turn, and shares a message."""
    fake.arena_bytes = 1 << 20
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g-0"))
        assert await p.flush(30)
        await asyncio.sleep(0)
        for index in range(1, 4):
            await p.send(group(f"g-{index}"))
        assert [entry.sends for entry in p._session.spool] == [1, 0, 0]
        assert await p.flush(30)
    assert fake.messages == [1, 1, 2]


async def test_what_gets_room_at_once_leaves_in_one_message(
    fake: "FakeBroker", group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.arena_bytes = 1 << 20
    nbytes = encode_group(group("g-0"), 1 << 20).nbytes
    fake.byte_limit = nbytes

    async def send(count: int) -> None:
        for index in range(count):
            await p.send(group(f"g-{index + 1}"))

    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g-0"))
        assert await p.flush(30)
        sending = asyncio.create_task(send(4))
        await asyncio.sleep(0)
        async with busy_loop(monkeypatch):
            fake.byte_limit = 5 * nbytes
            fake.publish()
            await sending
            assert await p.flush(30)
    assert fake.messages == [1, 4]


async def test_too_large_a_group_is_refused_at_once(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.start_limit = 0
    async with fake.running():
        async with Producer.open(fake.layout.root, env="e", producer="p", spool_bytes=100_000) as p:
            with pytest.raises(GroupTooLargeError):
                await p.send(group("g", length=100_000))
        fake.max_group_bytes = 1000
        async with Producer.open(fake.layout.root, env="e", producer="p") as p:
            with pytest.raises(GroupTooLargeError):
                await p.send(group("g", length=1000))


async def test_a_permit_is_good_for_one_group(fake: "FakeBroker", group: MakeGroup) -> None:
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        with await p.acquire() as permit:
            await p.send(group("g-0"), permit)
            with pytest.raises(UsageError):
                await p.send(group("g-1"), permit)
        assert p.abandoned == 0


async def test_lost_groups_are_sent_again_and_only_they(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.lose = {3, 6}
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        for index in range(8):
            await p.send(group(f"g-{index}"))
        assert await p.flush(30)
    assert sorted(fake.arrived) == [1, 2, 3, 3, 4, 5, 6, 6, 7, 8]
    assert len(fake.accepted) == 8


async def test_lost_acks_are_asked_for(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.publishes = False
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g"))
        assert await p.flush(30)
    assert fake.arrived == [1]
    assert fake.asked_for(Sync)


async def test_a_broker_in_another_life_gets_what_is_unacked(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    """It comes back elsewhere and remembers nothing: the unacked groups become the first of a new session."""
    log = tmp_path / "p.jsonl"
    async with fake.running("a"):
        opened = Producer.open(fake.layout.root, env="e", producer="p", ack_log=log)
        p = await opened.__aenter__()
        await p.send(group("g-0"))
        assert await p.flush(30)
        fake.lose, fake.syncs = {2, 3}, False
        await p.send(group("g-1"))
        await p.send(group("g-2"))
        await fake.until(lambda: fake.arrived == [1, 2, 3])
        held = await p.acquire()
    fake.syncs = True
    fake.new_life()
    async with fake.running("b"):
        assert await p.flush(30)
        assert [h.group_id for h in fake.accepted.values()] == ["g-1", "g-2"]
        assert fake.accepted[2].position == sum(h.nbytes for h in fake.accepted.values())
        assert p._session.credit.begun == 3
        await p.send(group("g-3"), held)
        assert await p.flush(30)
        await opened.__aexit__(None, None, None)
    assert logged(log) == ["g-0", "g-1", "g-2", "g-3"]
    assert fake.asked_for(RegisterProducer)[-1].resume_session == 1
    assert fake.asked_for(Goodbye)[-1].produced == 3


async def test_a_forgotten_session_is_opened_anew(fake: "FakeBroker", group: MakeGroup) -> None:
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g-0"))
        assert await p.flush(30)
        fake.session = 0
        await p.send(group("g-1"))
        assert await p.flush(30)
        assert p.session == 2
    assert fake.accepted[1].group_id == "g-1"


async def test_a_fenced_session_says_so_everywhere(fake: "FakeBroker", group: MakeGroup) -> None:
    fake.start_limit = 1
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        permit = await p.acquire()
        waiting = asyncio.create_task(p.acquire())
        await asyncio.sleep(0)
        fake.sessions = fake.session = 2
        fake.publish()
        with pytest.raises(SessionFencedError):
            await waiting
        with pytest.raises(SessionFencedError):
            await p.acquire()
        with pytest.raises(SessionFencedError):
            await p.send(group("g"), permit)
        with pytest.raises(SessionFencedError):
            await p.flush(1)
    assert not fake.asked_for(Goodbye)


async def test_a_refused_producer_raises_at_open(fake: "FakeBroker") -> None:
    fake.answers[RegisterProducer] = lambda _: ErrorReply(code=ErrorCode.INVALID, detail="no")
    async with fake.running():
        with pytest.raises(RefusedError, match="no"):
            async with Producer.open(fake.layout.root, env="e", producer="p"):
                pass


@pytest.mark.parametrize("by", ["broker", "itself"])
async def test_draining_ends_waiting_and_lets_what_is_in_hand_through(
    fake: "FakeBroker", group: MakeGroup, by: str
) -> None:
    fake.start_limit = 1
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        permit = await p.acquire()
        waiting = asyncio.create_task(p.acquire())
        await asyncio.sleep(0)
        if by == "broker":
            fake.draining = True
            fake.publish()
        else:
            p.start_draining()
        with pytest.raises(DrainingError):
            await waiting
        assert p.draining.is_set()
        with pytest.raises(DrainingError):
            await p.acquire()
        await p.send(group("g"), permit)
        assert await p.flush(30)
    assert fake.accepted


async def test_unacked_groups_are_saved_and_resent_under_the_same_session(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    spool, log = tmp_path / "spools" / "p.spool", tmp_path / "p.jsonl"
    options = {"env": "e", "producer": "p", "save_to": spool, "ack_log": log, "drain_s": 0.05}
    async with fake.running():
        fake.lose, fake.syncs = {2, 3}, False
        async with Producer.open(fake.layout.root, **options) as p:  # type: ignore[arg-type]
            for index in range(3):
                await p.send(group(f"g-{index}"))
            await fake.until(lambda: fake.arrived == [1, 2, 3])
        assert spool.exists()
        assert fake.asked_for(Goodbye)[-1].produced == 3
        fake.syncs = True
        async with Producer.open(fake.layout.root, **options) as p:  # type: ignore[arg-type]
            assert not spool.exists()
            assert fake.arrived == [1, 2, 3, 2, 3]
            assert p.session == 2
            await p.send(group("g-3"))
            assert await p.flush(30)
    assert fake.asked_for(RegisterProducer)[1].resume_session == 1
    assert [r.resume_session for r in fake.asked_for(RegisterProducer)] == [0, 1, 0]
    assert logged(log) == ["g-0", "g-1", "g-2", "g-3"]
    assert fake.accepted[1].group_id == "g-3"


async def test_a_damaged_spool_is_kept_aside(fake: "FakeBroker", group: MakeGroup, tmp_path: Path) -> None:
    spool = tmp_path / "p.spool"
    async with fake.running():
        fake.byte_limit = 0
        async with Producer.open(fake.layout.root, env="e", producer="p", save_to=spool, drain_s=0.0) as p:
            p.start_draining()
            await p.send(group("g"), p._session.credit.begin())
        data = bytearray(spool.read_bytes())
        data[-1] ^= 1
        spool.write_bytes(data)
        async with Producer.open(fake.layout.root, env="e", producer="p", save_to=spool):
            pass
        assert not spool.exists()
        assert len(list(tmp_path.glob("p.spool.damaged-*"))) == 1


async def test_a_spool_of_another_producer_is_not_taken(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    spool = tmp_path / "p.spool"
    async with fake.running():
        fake.lose = {1}
        async with Producer.open(fake.layout.root, env="e", producer="p", save_to=spool, drain_s=0.0) as p:
            await p.send(group("g"))
        with pytest.raises(UsageError):
            async with Producer.open(fake.layout.root, env="other", producer="p", save_to=spool):
                pass
        assert spool.exists()


async def test_open_waits_for_a_broker_that_starts_later(fake: "FakeBroker", group: MakeGroup) -> None:
    async def produce() -> None:
        async with Producer.open(fake.layout.root, env="e", producer="p") as p:
            await p.send(group("g"))

    producing = asyncio.create_task(produce())
    await asyncio.sleep(0)
    async with fake.running():
        await producing
    assert fake.accepted


async def test_open_can_be_cancelled_while_there_is_no_broker(run_dir: Path) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.05), Producer.open(run_dir, env="e", producer="p"):
            raise AssertionError


async def test_leaving_fails_those_who_still_wait(fake: "FakeBroker") -> None:
    fake.start_limit = 0
    async with fake.running():
        async with Producer.open(fake.layout.root, env="e", producer="p") as p:
            waiting = asyncio.create_task(p.acquire())
            await asyncio.sleep(0)
        with pytest.raises(ClosedError):
            await waiting
        with pytest.raises(ClosedError):
            await p.acquire()


async def test_leaving_in_the_moment_in_which_the_broker_is_lost_ends(
    fake: "FakeBroker", group: MakeGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.Event()

    async def keep(*_: object) -> None:
        await lost.wait()
        raise BrokerUnavailableError("here", 1.0)

    monkeypatch.setattr(connection.ProducerConnection, "_keep", keep)
    async with (
        asyncio.timeout(30),
        fake.running(),
        Producer.open(fake.layout.root, env="e", producer="p") as p,
    ):
        await p.send(group("g-0"))
        assert await p.flush(30)
        lost.set()
    assert len(fake.asked_for(RegisterProducer)) == 1


async def test_large_frames_and_many_tasks(fake: "FakeBroker", group: MakeGroup) -> None:
    """Groups of frames that are sent without a copy, more than a pipe holds, from many tasks."""
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        async with asyncio.TaskGroup() as tasks:
            for index in range(200):
                tasks.create_task(p.send(group(f"g-{index}", length=20_000)))
        assert await p.flush(30)
    assert len(fake.accepted) == 200
    assert fake.arrived == list(range(1, 201))


async def test_the_broker_may_know_the_session_but_not_its_groups(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    """It offers the old number, having forgotten groups that it acked: the producer asks for another number."""
    async with fake.running("a"):
        opened = Producer.open(fake.layout.root, env="e", producer="p")
        p = await opened.__aenter__()
        await p.send(group("g-0"))
        assert await p.flush(30)
    fake.epoch += 1
    fake.accepted.clear()

    def register(request: RegisterProducer) -> Registered:
        if not request.resume_session:
            fake.session = fake.sessions = 9
        return Registered(ack=fake.ack(), info=RunInfo())

    fake.answers[RegisterProducer] = register
    async with fake.running("b"):
        await p.send(group("g-1"))
        assert await p.flush(30)
        assert p.session == 9
        await opened.__aexit__(None, None, None)
    assert fake.accepted[1].group_id == "g-1"


async def test_leaving_that_is_cancelled_goes_straight_to_saving(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    fake.lose = {1}
    spool = tmp_path / "p.spool"
    sent = asyncio.Event()

    async def produce() -> None:
        async with Producer.open(fake.layout.root, env="e", producer="p", save_to=spool, drain_s=60) as p:
            await p.send(group("g"))
            sent.set()

    async with fake.running():
        producing = asyncio.create_task(produce())
        await sent.wait()
        await fake.until(lambda: fake.arrived == [1])
        producing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await producing
        assert spool.exists()
        assert fake.asked_for(Goodbye)


async def test_a_group_carries_the_whole_version_that_was_known_when_it_began(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.policy = PolicyVersion(3, 40)
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        permit = await p.acquire()
        fake.policy = PolicyVersion(4, 20)
        await p.send(group("g-0"))
        assert await p.flush(30)
        assert (p.policy, p.step, p.durability) == (PolicyVersion(4, 20), 20, Durability.OS)
        await p.send(group("g-1"), permit)
        assert await p.flush(30)
    assert [header.newest for header in fake.accepted.values()] == [PolicyVersion(3, 40)] * 2
    assert permit.step == 40


async def test_a_restarted_broker_is_registered_with_on_the_same_sockets(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    """Others would cost it three handshakes, at the moment at which all its clients come back."""
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        await p.send(group("g-0"))
        assert await p.flush(30)
        sockets = p._connection._sockets
        fake.restart()
        await p.send(group("g-1"))
        assert await p.flush(30)
        await fake.until(lambda: len(fake.asked_for(RegisterProducer)) == 2)
        assert p._connection._sockets is sockets
    assert fake.arrived[-1] == 2


async def test_a_broker_that_remembers_goes_on_with_the_session(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    """Only what it lacks is sent again; what is in hand is finished and sent, also where the limits fell."""
    log = tmp_path / "p.jsonl"
    async with fake.running("a"):
        opened = Producer.open(fake.layout.root, env="e", producer="p", ack_log=log)
        p = await opened.__aenter__()
        fake.publishes = False
        p.abandon(await p.acquire())
        permits = [await p.acquire() for _ in range(2)]
        fake.lose, fake.syncs = {2}, False
        for index in range(3):
            await p.send(group(f"g-{index}"))
        await fake.until(lambda: fake.arrived == [1, 2, 3])
    fake.restart()
    fake.publishes = fake.syncs = True
    fake.start_limit, fake.byte_limit = 4, p._session.spool.position
    async with fake.running("b"):
        assert await p.flush(30)
        assert (p.session, p.accepted) == (1, 3)
        held = [asyncio.create_task(p.send(group(f"h-{index}"), permits[index])) for index in range(2)]
        beginning = asyncio.create_task(p.acquire())
        await asyncio.sleep(0)
        assert not any(task.done() for task in (*held, beginning))
        fake.byte_limit = 1 << 40
        fake.publish()
        await asyncio.gather(*held)
        assert not beginning.done()
        fake.start_limit = 7
        fake.publish()
        p.abandon(await beginning)
        assert await p.flush(30)
        await opened.__aexit__(None, None, None)
    assert fake.arrived == [1, 2, 3, 2, 4, 5]
    assert set(fake.taken.values()) == {1}
    assert logged(log)[-2:] == ["h-0", "h-1"]
    again = fake.asked_for(RegisterProducer)[-1]
    assert (again.resume_session, again.begun, again.abandoned) == (1, 6, 1)
    assert fake.asked_for(Goodbye)[-1].abandoned == 2


async def test_a_broker_that_is_slow_is_waited_for_on_the_same_sockets(
    fake: "FakeBroker", group: MakeGroup, caplog: pytest.LogCaptureFixture
) -> None:
    """Its disk is full: it takes groups in and answers no question that tells of them, but lives."""
    fake.publishes = False
    fake.answers[Sync] = lambda _: None
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        sockets = p._connection._sockets
        for index in range(20):
            await p.send(group(f"g-{index}"))
        await fake.until(lambda: caplog.text.count("broker slow request=Sync") == 2)
        assert fake.arrived == list(range(1, 21))
        assert p._connection._sockets is sockets
        del fake.answers[Sync]
        assert await p.flush(30)
    assert fake.arrived == list(range(1, 21))
    assert len(fake.asked_for(RegisterProducer)) == 1
    assert "broker lost" not in caplog.text


async def test_a_slow_registration_does_not_fence_itself(fake: "FakeBroker", group: MakeGroup) -> None:
    """The broker opens a session for each request, and answers only the last in time."""

    def late(request: RegisterProducer) -> "Answer":
        answer = fake._answer(request)
        return answer if len(fake.asked_for(RegisterProducer)) == 3 else None

    fake.answers[RegisterProducer] = late
    async with fake.running(), Producer.open(fake.layout.root, env="e", producer="p") as p:
        assert p.session == 3
        await p.send(group("g"))
        assert await p.flush(30)


async def test_new_sockets_to_the_same_broker_send_only_what_is_missing(
    fake: "FakeBroker", group: MakeGroup
) -> None:
    fake.publishes = False
    async with fake.running("a"):
        opened = Producer.open(fake.layout.root, env="e", producer="p")
        p = await opened.__aenter__()
        fake.lose, fake.syncs = {3}, False
        for index in range(5):
            await p.send(group(f"g-{index}"))
        await fake.until(lambda: len(fake.arrived) == 5)
    fake.syncs = True
    async with fake.running("b"):
        assert await p.flush(30)
        await opened.__aexit__(None, None, None)
    assert fake.arrived == [1, 2, 3, 4, 5, 3]
    assert len(fake.asked_for(RegisterProducer)) == 1


async def test_a_producer_that_was_fenced_while_the_broker_was_away_does_not_fence_back(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path
) -> None:
    spool = tmp_path / "p.spool"
    async with fake.running("a"):
        opened = Producer.open(fake.layout.root, env="e", producer="p", save_to=spool)
        p = await opened.__aenter__()
        fake.lose, fake.syncs = {1}, False
        await p.send(group("g"))
        await fake.until(lambda: fake.arrived == [1])
    fake.syncs = True
    fake.restart()
    fake._open(0)
    async with fake.running("b"):
        with pytest.raises(SessionFencedError):
            await p.flush(10)
        await opened.__aexit__(None, None, None)
        assert len(fake.asked_for(RegisterProducer)) == 1
    assert not spool.exists()
    assert [path.name for path in tmp_path.glob("p.spool*")] == ["p.spool.session-1"]


@pytest.mark.parametrize("remembers", [True, False])
async def test_a_spool_saved_at_the_drain_deadline_is_resent_after_the_broker_restarted(
    fake: "FakeBroker", group: MakeGroup, tmp_path: Path, caplog: pytest.LogCaptureFixture, remembers: bool
) -> None:
    spool, log = tmp_path / "p.spool", tmp_path / "p.jsonl"
    options = {"env": "e", "producer": "p", "save_to": spool, "ack_log": log, "drain_s": 0.05}
    async with fake.running("a"):
        fake.lose, fake.syncs = {2, 3}, False
        async with Producer.open(fake.layout.root, **options) as p:  # type: ignore[arg-type]
            await p.acquire()
            for index in range(3):
                await p.send(group(f"g-{index}"))
            await fake.until(lambda: fake.arrived == [1, 2, 3])
            async with asyncio.timeout(30):
                while p.accepted < 1:  # noqa: ASYNC110 - only the count tells
                    await asyncio.sleep(0.001)
    assert f"unacked groups saved producer=p groups=2 file={spool}" in caplog.text
    fake.syncs = True
    if remembers:
        fake.restart()
    else:
        fake.new_life()
    async with fake.running("b"), Producer.open(fake.layout.root, **options) as p:  # type: ignore[arg-type]
        assert not spool.exists()
        assert p.accepted == 2
    assert fake.arrived[3:] == ([2, 3] if remembers else [1, 2])
    assert logged(log) == ["g-0", "g-1", "g-2"]
    resumed = fake.asked_for(RegisterProducer)[1]
    assert (resumed.resume_session, resumed.begun, resumed.abandoned) == (1, 4, 1)
