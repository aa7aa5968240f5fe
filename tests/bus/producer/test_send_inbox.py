"""The inbox of a blocking producer: one turn of the loop for many groups, and none of them lost on the way."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from rolloutmq.bus.encoding.codec import prepare_group
from rolloutmq.bus.producer.client import BlockingProducer, Producer
from rolloutmq.bus.producer.send_inbox import INBOX_BYTES, INBOX_GROUPS, SendInbox, SentGroup
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import (
    ClosedError,
    DrainingError,
    GroupTooLargeError,
    InvalidGroupError,
    RefusedError,
    UnackedError,
    UsageError,
)
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.services.broker.server import running_broker

MakeGroup = Callable[..., Group]
LIMIT_S = 60.0


class Loop:
    """A loop that runs what was posted when it is told to, and credit for so many groups."""

    def __init__(self, credit: int = 1_000_000) -> None:
        self.posted: list[Callable[[], None]] = []
        self.taken: list[str] = []
        self.credit = credit
        self.inbox = SendInbox(lambda groups, _: groups <= self.credit, self.take, self.posted.append)

    def take(self, sent: SentGroup, force: bool) -> bool:
        assert sent.prepared.nbytes == prepare_group(sent.group).nbytes
        if not self.credit and not force:
            return False
        self.credit -= 1
        self.taken.append(sent.group.group_id)
        return True

    def turn(self) -> None:
        posted = self.posted[:]
        del self.posted[: len(posted)]
        for function in posted:
            function()


def test_one_turn_takes_all_groups_in_order(group: MakeGroup) -> None:
    loop = Loop()
    for index in range(5):
        one = group(f"g-{index}")
        assert loop.inbox.offer(one, prepare_group(one))
    assert (len(loop.inbox), len(loop.posted), loop.taken) == (5, 1, [])
    loop.turn()
    assert loop.taken == [f"g-{index}" for index in range(5)]
    assert len(loop.inbox) == 0
    assert loop.inbox.offer(one, prepare_group(one))
    assert len(loop.posted) == 1, "it is posted again behind an emptied inbox"


def test_what_has_to_wait_is_refused_and_nothing_is_posted(group: MakeGroup) -> None:
    one = group("g")
    prepared = prepare_group(one)
    loop = Loop(credit=0)
    assert not loop.inbox.offer(one, prepared)
    loop.credit = 1
    many = np.zeros(INBOX_BYTES, np.int32)
    large = Group.build("large", tokens=[many], mask=[many == 0], scores=[1.0])
    assert not loop.inbox.offer(large, prepare_group(large))
    loop.inbox.seal()
    assert not loop.inbox.offer(one, prepared)
    assert (loop.posted, len(loop.inbox)) == ([], 0)


def test_it_is_bounded_by_groups_bytes_and_credit(group: MakeGroup) -> None:
    one = group("g")
    prepared = prepare_group(one)
    middle = np.zeros(INBOX_BYTES // 40, np.int32)
    fat = Group.build("fat", tokens=[middle], mask=[middle == 0], scores=[1.0])
    for loop, sent, most in ((Loop(), one, INBOX_GROUPS), (Loop(credit=3), one, 3), (Loop(), fat, 8)):
        prepared = prepare_group(sent)
        assert [loop.inbox.offer(sent, prepared) for _ in range(most + 2)] == [True] * most + [False] * 2
        loop.turn()
        assert len(loop.taken) == most


def test_a_group_without_credit_stays_until_there_is_some_or_the_end(group: MakeGroup) -> None:
    loop = Loop(credit=3)
    for index in range(3):
        one = group(f"g-{index}")
        assert loop.inbox.offer(one, prepare_group(one))
    loop.credit = 1  # another call took the rest
    loop.turn()
    assert (loop.taken, len(loop.inbox)) == (["g-0"], 2)
    loop.credit = 1
    loop.inbox.pour()
    assert (loop.taken, len(loop.inbox)) == (["g-0", "g-1"], 1)
    loop.inbox.pour_all()
    assert (loop.taken, len(loop.inbox)) == (["g-0", "g-1", "g-2"], 0)


def test_an_ended_loop_is_told_and_holds_nothing(group: MakeGroup) -> None:
    def ended(_: Callable[[], None]) -> None:
        raise ClosedError

    inbox = SendInbox(lambda *_: True, lambda *_: True, ended)
    one = group("g")
    with pytest.raises(ClosedError):
        inbox.offer(one, prepare_group(one))
    assert len(inbox) == 0
    assert not inbox.offer(one, prepare_group(one))


@pytest.mark.parametrize("last", [True, False])
def test_a_group_sent_at_the_very_end_is_taken_or_refused(group: MakeGroup, last: bool) -> None:
    """The loop pours for the last time just before or just after the group arrives."""
    taken: list[str] = []
    one = group("g")

    def end(_: Callable[[], None]) -> None:
        if last:
            inbox.seal()
        else:
            inbox._sealed = True

    def take(sent: SentGroup, _: bool) -> bool:
        taken.append(sent.group.group_id)
        return True

    inbox = SendInbox(lambda *_: True, take, end)
    if last:
        assert inbox.offer(one, prepare_group(one))
    else:
        with pytest.raises(ClosedError):
            inbox.offer(one, prepare_group(one))
    assert (taken, len(inbox)) == (["g"] if last else [], 0)


def test_threads_that_send_while_the_loop_takes_lose_nothing(group: MakeGroup) -> None:
    loop, over = Loop(), threading.Event()

    def turns() -> None:
        while not over.is_set():
            loop.turn()
        loop.turn()

    def send(thread: int) -> list[str]:
        names = [f"{thread}-{index}" for index in range(500)]
        for name in names:
            prepared = prepare_group(one := group(name))
            while not loop.inbox.offer(one, prepared):
                pass
        return names

    with ThreadPoolExecutor(5) as pool:
        turning = pool.submit(turns)
        sent = [name for names in pool.map(send, range(4)) for name in names]
        over.set()
        turning.result()
    assert sorted(loop.taken) == sorted(sent)


@pytest.fixture
def broker(run_dir: Path) -> Iterator[Path]:
    config = RunConfig(environment={"e": EnvironmentConfig(entry="a:B", group_size=2, pacing=False)})
    with running_broker(config, RunLayout(run_dir)):
        yield run_dir


@contextmanager
def halted(producer: BlockingProducer) -> Iterator[None]:
    """Keep the producer's loop busy during the block."""
    go_on, halts = threading.Event(), threading.Event()

    def halt() -> None:
        halts.set()
        go_on.wait(LIMIT_S)

    producer._post(halt)
    assert halts.wait(LIMIT_S)
    try:
        yield
    finally:
        go_on.set()


def test_send_does_not_wait_for_the_loop(broker: Path, group: MakeGroup) -> None:
    with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
        p.send(group("first"))
        assert p.flush(LIMIT_S)
        with halted(p):
            for index in range(5):
                p.send(group(f"g-{index}"))
            assert p.unacked == 5
            with pytest.raises(InvalidGroupError):
                p.send("no group")  # type: ignore[arg-type]
            with pytest.raises(UsageError, match="timeout_s"):
                p.send(group("late"), timeout_s=-1)
        assert p.flush(LIMIT_S)
        assert (p.accepted, p.unacked) == (6, 0)


def test_a_group_that_can_never_be_sent_is_refused_at_once(broker: Path, group: MakeGroup) -> None:
    with Producer.blocking(broker, env="e", producer="p", group_size=2, spool_bytes=100) as p:
        with pytest.raises(GroupTooLargeError):
            p.send(group("large"))
        assert p.unacked == 0


def test_leaving_delivers_what_the_loop_has_not_taken(broker: Path, group: MakeGroup) -> None:
    with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
        producer = p._object
        p.send(group("first"))
        assert p.flush(LIMIT_S)
        with halted(p):
            for index in range(5):
                p.send(group(f"g-{index}"))
            assert len(p._inbox) == 5, "the loop took them"
    assert producer.accepted == 6


def test_a_drain_in_between_costs_no_group(broker: Path, group: MakeGroup) -> None:
    with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
        p.send(group("first"))
        assert p.flush(LIMIT_S)
        with halted(p):
            p._post(p._object.start_draining)
            p.send(group("second"))
        assert p.flush(LIMIT_S)
        assert p.accepted == 2
        with pytest.raises(DrainingError):
            p.send(group("late"))


def test_a_failure_in_between_is_told_with_the_group(broker: Path, group: MakeGroup) -> None:
    failure = RefusedError(ErrorCode.FENCED, "another took over")
    told = ""
    try:
        with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
            producer = p._object
            p.send(group("first"))
            assert p.flush(LIMIT_S)
            with halted(p):
                p._post(lambda: producer._waiters.shut(failure))
                p.send(group("second"))
            with pytest.raises(RefusedError, match="another took over"):
                p.flush(LIMIT_S)
            with pytest.raises(RefusedError, match="another took over"):
                p.send(group("third"))
    except (UnackedError, RefusedError) as error:
        told = str(error)
    assert ("second" in told) is (producer.accepted == 1), "its ack may still come before the end"
    assert "third" not in told


def test_a_group_that_the_loop_cannot_take_fails_every_later_call(
    broker: Path, group: MakeGroup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: object) -> None:
        raise MemoryError("no more")

    with Producer.blocking(broker, env="e", producer="p", group_size=2) as p:
        monkeypatch.setattr(p._object._session, "lay", broken)
        p.send(group("g"))
        with pytest.raises(MemoryError, match="no more"):
            p.flush(LIMIT_S)
    assert "group lost producer=p group=g error=no more" in caplog.text


def test_a_signal_handler_may_send_in_the_middle_of_a_send(broker: Path, group: MakeGroup) -> None:
    sent = 0

    def handle(*_: object) -> None:
        nonlocal sent
        sent += 1
        p.send(group(f"handler-{sent}"))

    before = signal.signal(signal.SIGUSR1, handle)
    try:
        with Producer.blocking(broker, env="e", producer="p", group_size=2, slots=64) as p:
            threads = [threading.Timer(0.002 * k, os.kill, (os.getpid(), signal.SIGUSR1)) for k in range(60)]
            for thread in threads:
                thread.start()
            count = 0
            while any(thread.is_alive() for thread in threads):
                p.send(group(f"main-{count}"))
                count += 1
            for thread in threads:
                thread.join()
            assert p.flush(LIMIT_S)
            assert p.accepted == count + sent
    finally:
        signal.signal(signal.SIGUSR1, before)
