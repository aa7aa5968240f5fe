"""Waiters for credit: immediate and delayed calls lose no permit, group or memory."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.bus.encoding.codec import prepare_group
from rolloutmq.bus.producer.credit import Permit
from rolloutmq.bus.producer.send_inbox import SendInbox, SentGroup
from rolloutmq.bus.producer.session import SessionState
from rolloutmq.bus.producer.spool import Spool
from rolloutmq.bus.producer.waiters import CreditWaiters
from rolloutmq.bus.shm.arena import Arena
from rolloutmq.schemas.errors import ClosedError, DrainingError, UsageError, WaitTimeoutError
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Ack
from rolloutmq.schemas.wire.requests import RegisterProducer

MakeGroup = Callable[..., Group]
T = TypeVar("T")
LIMIT = 1 << 20
FAR = 1 << 40


class Entrance:
    """A gate with its session, and a broker that is only acks."""

    def __init__(self) -> None:
        self.session = SessionState(RegisterProducer(producer="p", env="e"), Spool(LIMIT))
        self.gate = CreditWaiters(self.session)
        self.session.registered(self._ack(0, 0, PolicyVersion()), 0.0)
        self.session.offer(Arena(LIMIT))

    def _ack(self, groups: int, nbytes: int, policy: PolicyVersion) -> Ack:
        return Ack(
            epoch=1,
            session=1,
            cumulative=0,
            byte_limit=nbytes,
            start_limit=groups,
            policy=policy,
            arena=True,
        )

    def grant(self, groups: int = FAR, nbytes: int = FAR, step: int = 0) -> None:
        """Grant credit without serving the waiters."""
        self.session.acked(self._ack(groups, nbytes, PolicyVersion(1, step)), 0.0)

    async def send(self, group: Group, permit: Permit | None = None) -> None:
        """Do as `Producer.send` does, without a connection."""
        laid = self.session.lay(group, LIMIT)
        try:
            if not self.gate.admit(group, laid, permit):
                await self.gate.hand_over(group, laid, permit)
        except BaseException:
            laid.cancel()
            raise

    @property
    def names(self) -> list[str]:
        return [entry.header.group_id for entry in self.session.spool]

    @property
    def used_bytes(self) -> int:
        """What lies in the arena."""
        assert self.session.arena is not None
        return self.session.arena.slots.used_bytes

    @property
    def begun(self) -> int:
        return self.session.credit.begun

    def close(self) -> None:
        self.session.offer(None, "closed")


@contextmanager
def opened() -> Iterator[Entrance]:
    one = Entrance()
    try:
        yield one
    finally:
        one.close()


@pytest.fixture
def entrance() -> Iterator[Entrance]:
    with opened() as one:
        yield one


@asynccontextmanager
async def waiting(*work: Coroutine[Any, Any, T]) -> AsyncIterator[list["asyncio.Task[T]"]]:
    """Begin some calls and let them come to where they wait; end what still waits."""
    tasks = [asyncio.create_task(one) for one in work]
    await settled()
    yield tasks
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def settled() -> None:
    """Let everybody do what can be done now."""
    for _ in range(5):
        await asyncio.sleep(0)


async def test_what_need_not_wait_is_in_at_once(entrance: Entrance, group: MakeGroup) -> None:
    entrance.grant(groups=2)
    sending = entrance.send(group("g-0"))
    with pytest.raises(StopIteration):
        sending.send(None)  # it never gave the loop its turn
    permit = await entrance.gate.acquire()
    await entrance.send(group("g-1"), permit)
    assert entrance.names == ["g-0", "g-1"]
    assert not permit.is_open
    assert (entrance.begun, entrance.session.credit.in_hand, entrance.gate.waits_s) == (2, 0, 0.0)
    assert not await entrance.gate.flushed(0.0)


async def test_a_wait_is_counted_while_it_lasts(entrance: Entrance) -> None:
    waiting = [asyncio.ensure_future(entrance.gate.acquire()) for _ in range(2)]
    await settled()
    first = entrance.gate.waits_s
    await asyncio.sleep(0.01)
    second = entrance.gate.waits_s
    assert second - first >= 2 * 0.01
    for one in waiting:
        one.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    over = entrance.gate.waits_s
    await asyncio.sleep(0.01)
    assert entrance.gate.waits_s == over >= second


@pytest.mark.parametrize("waits", [False, True], ids=["at once", "after waiting"])
async def test_a_group_tells_of_the_policy_when_its_rollout_began(
    entrance: Entrance, group: MakeGroup, *, waits: bool
) -> None:
    entrance.grant(groups=3, step=4)
    permit = await entrance.gate.acquire()
    entrance.grant(groups=3, nbytes=0 if waits else FAR, step=5)
    async with waiting(entrance.send(group("older"), permit), entrance.send(group("newer"))):
        assert entrance.names == ([] if waits else ["older", "newer"])
        entrance.grant(groups=3, step=6)
        entrance.gate.serve()
    steps = {entry.header.group_id: entry.header.oldest.step for entry in entrance.session.spool}
    assert steps == {"older": 4, "newer": 5}


async def test_who_comes_later_overtakes_nobody_who_waits_for_room(
    entrance: Entrance, group: MakeGroup
) -> None:
    entrance.grant(groups=3, nbytes=0)
    permit = await entrance.gate.acquire()
    async with waiting(entrance.send(group("first"))):
        entrance.grant(groups=3)
        assert not comes_in(entrance, group("late"))
        assert not comes_in(entrance, group("late"), permit)
        entrance.gate.serve()
        assert comes_in(entrance, group("late"), permit)
        assert comes_in(entrance, group("later"))
    assert entrance.names == ["first", "late", "later"]


async def test_who_comes_later_overtakes_nobody_who_waits_for_a_permit(
    entrance: Entrance, group: MakeGroup
) -> None:
    entrance.grant(groups=0)
    async with waiting(entrance.gate.acquire()) as (begin,):
        entrance.grant(groups=1)
        assert not comes_in(entrance, group("late"))
        entrance.gate.serve()
        assert (await begin).is_open
        entrance.grant(groups=2)
        assert comes_in(entrance, group("late"))


def comes_in(entrance: Entrance, group: Group, permit: Permit | None = None) -> bool:
    """Whether a group comes in without waiting."""
    laid = entrance.session.lay(group, LIMIT)
    admitted = entrance.gate.admit(group, laid, permit)
    if not admitted:
        laid.cancel()
    return admitted


@pytest.mark.parametrize("holds", [False, True], ids=["no permit", "a permit"])
async def test_a_group_that_cannot_be_numbered_leaves_all_as_it_was(
    entrance: Entrance, group: MakeGroup, monkeypatch: pytest.MonkeyPatch, *, holds: bool
) -> None:
    entrance.grant(groups=1)
    permit = await entrance.gate.acquire() if holds else None

    def add(*_: object) -> None:
        raise ValueError("odd")

    monkeypatch.setattr(entrance.session.spool, "add", add)
    with pytest.raises(ValueError, match="odd"):
        await entrance.send(group("g"), permit)
    assert (entrance.begun, entrance.session.credit.in_hand) == (int(holds), int(holds))
    assert entrance.used_bytes == 0
    assert await entrance.gate.flushed(0.0)


async def test_nothing_goes_in_without_leave(entrance: Entrance, group: MakeGroup) -> None:
    entrance.grant()
    permit = await entrance.gate.acquire()
    ended = await entrance.gate.acquire()
    entrance.session.credit.abandon(ended)
    with pytest.raises(UsageError):
        await entrance.send(group("g"), ended)
    entrance.session.draining = True
    with pytest.raises(DrainingError):
        await entrance.send(group("g"))
    entrance.gate.shut(None)
    for leave in (None, permit):
        with pytest.raises(ClosedError):
            await entrance.send(group("g"), leave)
    assert entrance.names == []
    assert entrance.used_bytes == 0


STEPS = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["send", "begin", "bring"]), st.integers(1, 400)),
        st.tuples(st.sampled_from(["cancel", "cancel served"]), st.integers(0, 20)),
        st.tuples(st.just("permits"), st.integers(1, 4)),
        st.tuples(st.just("room"), st.integers(1, 8_000)),
    ),
    max_size=40,
)


@settings(max_examples=150, deadline=None)
@given(STEPS)
def test_whoever_is_not_cancelled_comes_in_once_and_in_turn(steps: list[tuple[str, int]]) -> None:
    with opened() as entrance:
        asyncio.run(_play(entrance, steps))


async def _play(entrance: Entrance, steps: list[tuple[str, int]]) -> None:
    sending: dict[str, asyncio.Task[None]] = {}
    permits: list[Permit] = []
    begun: list[Permit] = []
    groups, nbytes = 0, 0
    for number, (what, amount) in enumerate(steps):
        if what == "begin" and (permit := entrance.gate.take()):
            permits.append(permit)
            begun.append(permit)
        elif what == "send" or (what == "bring" and permits):
            row = [[1] * amount]
            made = Group.build(f"{what}-{number}", tokens=row, mask=row, scores=[0.0])
            given = permits.pop(0) if what == "bring" else None
            sending[made.group_id] = asyncio.create_task(entrance.send(made, given))
        elif what in {"permits", "room", "cancel served"}:
            groups += amount if what == "permits" else what == "cancel served"
            nbytes += amount if what == "room" else 0
            entrance.grant(groups, nbytes)
            entrance.gate.serve()
        if what.startswith("cancel") and sending:
            list(sending.values())[amount % len(sending)].cancel()
        await settled()
    entrance.grant()
    entrance.gate.serve()
    await asyncio.wait_for(asyncio.gather(*sending.values(), return_exceptions=True), 10)
    came = set(entrance.names)
    assert {name for name, task in sending.items() if not task.cancelled()} <= came
    for how in ("send", "bring"):
        in_turn = [name for name in sending if name in came and name.startswith(how)]
        assert [name for name in entrance.names if name.startswith(how)] == in_turn
    assert len(entrance.names) == len(came)
    credit = entrance.session.credit
    assert credit.in_hand == sum(permit.is_open for permit in begun)
    assert credit.begun == len(came) + credit.in_hand
    sizes = [-(-entry.header.nbytes // 64) * 64 for entry in entrance.session.spool]
    assert entrance.used_bytes == sum(sizes)
    assert not entrance.gate.waiting


async def test_a_group_that_was_taken_in_is_expected_though_its_sender_was_cancelled(
    entrance: Entrance, group: MakeGroup
) -> None:
    one = group("one")
    entrance.grant(nbytes=0)
    ack = entrance.gate.expect(one.group_id)
    async with waiting(entrance.send(one)) as (sending,):
        entrance.grant()
        entrance.gate.serve()
        assert len(entrance.session.spool) == 1
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert entrance.gate.handed_over(one.group_id) is ack
    entrance.gate.acked([one.group_id])
    assert ack.done()


async def test_a_group_that_was_not_taken_in_is_expected_no_longer(
    entrance: Entrance, group: MakeGroup
) -> None:
    one = group("one")
    ack = entrance.gate.expect(one.group_id)
    async with waiting(entrance.send(one)) as (sending,):
        sending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await sending
    assert entrance.gate.handed_over(one.group_id) is None
    entrance.gate.acked([one.group_id])
    assert not ack.done()


async def test_a_waiter_that_got_credit_before_its_limit_is_not_late(
    entrance: Entrance, group: MakeGroup
) -> None:
    """Else a group would be in the spool although `send` raised, and the caller would send it twice."""
    laid = entrance.session.lay(group("g"), LIMIT)
    async with waiting(entrance.gate.hand_over(group("g"), laid, None, 0.01)) as (sending,):
        time.sleep(0.02)  # noqa: ASYNC251 - the limit is over, and the loop has not seen that yet
        entrance.grant(groups=1)
        entrance.gate.serve()
        await sending
    assert entrance.names == ["g"]


async def test_a_late_waiter_leaves_its_permit_to_the_next(entrance: Entrance, group: MakeGroup) -> None:
    entrance.grant(groups=1, nbytes=0)
    laid = entrance.session.lay(group("g"), LIMIT)
    with pytest.raises(WaitTimeoutError, match="send: not done"):
        await entrance.gate.hand_over(group("g"), laid, None, 0.01)
    laid.cancel()
    assert (entrance.names, entrance.begun, entrance.used_bytes) == ([], 0, 0)
    assert (await entrance.gate.acquire(0.01)).is_open
    with pytest.raises(WaitTimeoutError, match="acquire: not done"):
        await entrance.gate.acquire(0.01)


async def test_a_group_of_the_inbox_is_stuck_only_once_it_was_refused(
    entrance: Entrance, group: MakeGroup
) -> None:
    gate = entrance.gate

    def take(sent: SentGroup, force: bool) -> bool:
        if not force and not gate.may_take_now(sent.prepared.nbytes):
            return False
        gate.take_in(sent.group, entrance.session.lay(sent.prepared, LIMIT))
        return True

    gate.inbox = SendInbox(lambda *_: True, take, lambda _: None)
    one = group("g")
    assert gate.inbox.offer(one, prepare_group(one))
    assert gate.stuck_s() == 0.0, "the loop has not looked yet"
    gate.serve()
    assert 0.0 < gate.stuck_s() < 60.0, "not the age of the machine"
    entrance.grant(groups=1)
    gate.serve()
    assert (entrance.names, gate.stuck_s(), gate.inbox_groups) == (["g"], 0.0, 0)
