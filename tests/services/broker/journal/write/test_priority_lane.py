"""The priority lane: which events take it, the state after a restart, and that no reply is sent too early."""

import random
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule
from tests.services.broker.bench import WALL, Bench, MemoryJournal, Peer, ids
from tests.services.broker.bench import config as run_config
from tests.services.broker.journal.journals import (
    DEADLINE_S,
    CrashingDisk,
    Driven,
    FailingDisk,
    config,
    group,
    path_of,
)
from tests.services.broker.test_core_machine import BATCH, Machine

from rolloutmq.schemas.wire.envelope import PolicyVersion, Split
from rolloutmq.schemas.wire.replies import Ack, Batch, Settled
from rolloutmq.schemas.wire.requests import Pull, Settle
from rolloutmq.services.broker.actions import Action, Publish, Reply
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.io.deferred_replies import DeferredReplies
from rolloutmq.services.broker.journal.event_buffer import Entry
from rolloutmq.services.broker.journal.format.events import (
    Committed,
    Dropped,
    Event,
    Forgot,
    Leased,
    Lost,
    Produced,
    Pulled,
    Settles,
    Told,
)
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory, StoredGroup
from rolloutmq.services.broker.journal.write.priority_lane import PriorityLane

M = TypeVar("M")
ZERO = PolicyVersion(0, 0)
PULLED = Pulled(1, 0, "c", "r")
SETTLES = Settles(Settle(consumer="c", lease=1, generation=1, version=ZERO))


def leased(*orders: int) -> Leased:
    return Leased(1, 1, "train", Split.TRAIN, 0, ZERO, 8, (orders[:1], orders[1:]))


# Events that take the lane


def after(*batches: list[Entry], done: int = 0) -> PriorityLane:
    """Return the lane after batches of groups, of which so many are durable."""
    lane = PriorityLane()
    for number, entries in enumerate(batches, 1):
        lane.note(entries, number)
    lane.finished(done)
    return lane


@pytest.mark.parametrize(
    "events",
    [
        [leased(1, 2), PULLED],
        [SETTLES, Forgot("train", 1), leased(2)],
        [Dropped(2, "expired", "stale"), leased(1)],
        [Committed("train", ZERO)],
    ],
)
def test_what_names_no_new_group_passes_new_groups(events: list[Entry]) -> None:
    assert after([group(1), group(2)], [group(3), Produced(9, 3, 0)], done=1).fits(events)


@pytest.mark.parametrize("events", [[leased(1, 3)], [Dropped(3, "dead", "damaged"), PULLED]])
def test_what_names_a_group_waits_for_it(events: list[Entry]) -> None:
    new: list[list[Entry]] = [[group(1), group(2)], [group(3)]]
    assert not after(*new, done=1).fits(events)
    assert after(*new, done=2).fits(events)


@pytest.mark.parametrize("entry", [Lost(1, True, "why"), group(3)])
def test_a_call_goes_ahead_as_a_whole_or_not_at_all(entry: Entry) -> None:
    assert not after().fits([PULLED, entry])


@pytest.mark.parametrize("loud", [PULLED, leased(1), Lost(1, True, "why")])
def test_nothing_passes_what_may_be_about_the_same(loud: Event) -> None:
    batches: list[list[Entry]] = [[group(1)], [loud], [group(2)]]
    assert not after(*batches, done=1).fits([SETTLES])
    assert not after(*batches, done=1).open
    assert after(*batches, done=2).fits([SETTLES])


# The state after a restart


class Reordered(MemoryJournal):
    """A journal in which events overtake batches of groups. It reads back the final state on disk."""

    def __init__(self) -> None:
        super().__init__()
        self.passed = 0
        self.lag = 2
        """So many batches are not durable."""
        self._lane = PriorityLane()
        self._batches: deque[tuple[int, list[Event]]] = deque()
        self._number = 0

    def write(self, entries: Iterable[StoredGroup | Event]) -> None:
        found = list(entries)
        if not found:
            return
        if self._lane.fits(found):
            super().write(found)
            self.passed += bool(self._batches)
            return
        self._number += 1
        self._lane.note(found, self._number)
        written, self.events = self.events, []
        super().write(found)
        self._batches.append((self._number, self.events))
        self.events = written
        self.finish(self.lag)

    def finish(self, left: int) -> None:
        """Make all but the last batches durable."""
        while len(self._batches) > left:
            number, events = self._batches.popleft()
            self.events += events
            self._lane.finished(number)

    def read(self) -> list[Any]:
        self.finish(0)
        return super().read()

    def peek(self) -> "Reordered":
        """Return a copy that can be read back without making anything durable here."""
        copy = Reordered()
        copy.events = [*self.events, *(event for _, events in self._batches for event in events)]
        copy.bodies = self.bodies
        return copy


class ReorderedBench(Bench):
    journal: Reordered

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.journal = Reordered()

    def compare(self, later: Bench) -> None:
        """Do nothing: `look` compares."""

    def look(self) -> None:
        """Assert that the state read back now equals the core's."""
        own, self.journal = self.journal, self.journal.peek()
        try:
            super().compare(self.reborn())
        finally:
            self.journal = own


class ReorderedMachine(Machine):
    """The machine of the core with a priority lane and any number of batches under way."""

    bench: ReorderedBench
    passed = 0

    @initialize()
    def begin(self) -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("tests.services.broker.test_core_machine.Bench", ReorderedBench)
            super().begin()

    @rule(lag=st.integers(0, 5))
    def change_pace(self, lag: int) -> None:
        self.bench.journal.lag = lag
        self.bench.journal.finish(lag)

    @rule(rounds=st.integers(1, 4))
    def train_behind(self, rounds: int) -> None:
        """Send more groups than are trained."""
        for _ in range(rounds):
            self.fill()
            if self.batch is not None:
                self.settle(["t"] * BATCH)
            self.fill()
            self.pull()
            self.commit()

    def fill(self) -> None:
        for producer in self.producers:
            producer.sync()
            while producer.may_begin() and len(producer.spool) < 6:
                producer.produce(50, 1 + producer.begun % 4)
        self.deliver_all()

    @rule()
    def look(self) -> None:
        self.bench.look()

    def teardown(self) -> None:
        if hasattr(self, "bench"):
            self.look()
            ReorderedMachine.passed += self.bench.journal.passed
        super().teardown()


def test_a_restart_makes_the_same_of_facts_that_went_ahead() -> None:
    ReorderedMachine.TestCase.settings = settings(
        max_examples=25,
        stateful_step_count=40,
        derandomize=True,
        deadline=None,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    ReorderedMachine.TestCase("runTest").runTest()
    assert ReorderedMachine.passed > 50


# Replies and their time


class Gate(FailingDisk):
    """A disk on which each sync of groups waits for the test."""

    def __init__(self) -> None:
        super().__init__()
        self.through = threading.Semaphore(0)
        self.waits = threading.Event()
        self.begun = 1 << 30
        self.plan["fdatasync"] = self._wait

    def _wait(self, fd: int) -> None:
        if "groups" in path_of(fd) and len(self.calls) > self.begun:
            self.waits.set()
            self.through.acquire()


def test_what_goes_ahead_waits_for_one_batch_of_groups_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.BATCH_BYTES", 10_000)
    disk = Gate()
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.write(group(1), group(2))
    disk.begun = len(disk.calls)
    for number in range(3, 8):
        run.append(group(number, 10_000))
    run.journal.advance(time.monotonic(), urgent=True)
    run.append(Dropped(1, "expired", "stale"))
    told = run.journal.priority_ticket
    disk.through.release()
    run.until(lambda: run.journal.priority_done == told)
    assert run.journal.done < told - 3
    disk.through.release(10)
    run.settle()
    run.journal.close()
    again = Driven(tmp_path, config())
    assert [event.order for event in again.found.events if isinstance(event, Dropped)] == [1]
    assert again.found.damage == []
    again.journal.close()


def test_what_goes_ahead_waits_for_one_group_of_a_batch_that_is_written(tmp_path: Path) -> None:
    disk = FailingDisk()
    run = Driven(tmp_path, config(segment_bytes=32 << 20), disk).start()
    run.write(group(1))
    writing, through = threading.Event(), threading.Semaphore(0)

    def wait(fd: int) -> None:
        if "groups" in path_of(fd):
            writing.set()
            through.acquire()

    disk.plan["pwritev"] = wait
    for number in range(2, 5):
        run.append(group(number, 3 << 20))
    run.journal.advance(time.monotonic(), urgent=True)
    assert writing.wait(DEADLINE_S)
    run.append(Dropped(1, "expired", "stale"))
    told = run.journal.priority_ticket
    through.release()
    run.until(lambda: run.journal.priority_done == told)
    assert run.journal.done < told
    through.release(10)
    run.settle()
    run.journal.close()
    again = Driven(tmp_path, config())
    assert [getattr(event, "order", 0) for event in again.found.events][-4:] == [1, 2, 3, 4]
    again.journal.close()


def test_calls_that_go_ahead_while_a_batch_is_written_are_one_commit(tmp_path: Path) -> None:
    disk = Gate()
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.write(group(1), group(2))
    before, disk.begun = run.journal.status().commits, len(disk.calls)
    run.append(group(3))
    run.journal.advance(time.monotonic(), urgent=True)
    assert disk.waits.wait(DEADLINE_S)
    for order in (1, 2):
        run.append(Dropped(order, "expired", "stale"))
        run.journal.advance(time.monotonic(), urgent=True)
    disk.through.release(10)
    run.settle()
    assert run.journal.status().commits == before + 2
    run.journal.close()


@pytest.mark.parametrize("rotates", [False, True])
def test_what_goes_ahead_comes_before_what_was_appended_behind_it(tmp_path: Path, rotates: bool) -> None:
    """Both come while the commit thread syncs an earlier event: neither waits when it begins.

    A snapshot has what went ahead: behind it a restart would read that again.
    """
    disk, armed = FailingDisk(), threading.Event()
    began, through = threading.Event(), threading.Event()
    run = Driven(tmp_path, config(), disk).start()
    run.write(group(1), group(2))

    def wait(fd: int) -> None:
        if armed.is_set() and "groups" not in path_of(fd):
            armed.clear()
            began.set()
            assert through.wait(DEADLINE_S)

    disk.plan["fdatasync"] = wait
    armed.set()
    run.append(Dropped(1, "expired", "stale"))
    run.journal.advance(time.monotonic(), urgent=True)
    assert began.wait(DEADLINE_S)
    run.append(Dropped(2, "expired", "stale"))
    assert run.journal.priority_ticket == run.journal.ticket, "it goes ahead"
    if rotates:
        run.journal.rotate([])
    else:
        run.append(Told("w", "", told=True))
    run.journal.advance(time.monotonic(), urgent=True)
    through.set()
    run.settle()
    run.journal.close()
    events = [event for event in Driven(tmp_path, config()).found.events if isinstance(event, Dropped | Told)]
    assert [type(event) for event in events] == ([] if rotates else [Dropped, Dropped, Told])


def test_what_went_ahead_is_in_the_log_before_a_new_one_begins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those events are in the snapshot, so the new log must not repeat them; later events must be in it."""
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.BATCH_BYTES", 1)
    disk = Gate()
    run = Driven(tmp_path, config(segment_bytes=1 << 20), disk).start()
    run.write(group(1))
    disk.begun = len(disk.calls)

    def add(*entries: Entry) -> None:
        run.append(*entries)
        run.journal.advance(time.monotonic(), urgent=True)

    add(group(2))
    add(Forgot("first", 1))
    run.append(Forgot("second", 1))
    run.journal.rotate([])
    assert not run.journal.priority_open
    add(Forgot("third", 1))
    disk.through.release(10)
    until = time.monotonic() + DEADLINE_S
    while not (tmp_path / "events-00000002.rmq").exists():  # without a look at what is done
        assert time.monotonic() < until
    run.settle()
    run.journal.close()
    again = Driven(tmp_path, config())
    assert [event.group for event in again.found.events if isinstance(event, Forgot)] == ["third"]
    again.journal.close()


class JournaledBench(Bench):
    """A core with a real journal, whose clients get durable replies only."""

    def __init__(self, directory: Path, disk: CrashingDisk) -> None:
        super().__init__(run_config(e={"stale": "pass"}))
        self.shadowed = False
        self.core = BrokerCore(self.settings, epoch=1, ram=BodyMemory(1 << 30))
        self.woken = threading.Event()
        self.disk = opened(directory, disk, self.woken)
        self.disk.start(self.core.snapshot())
        self.held = DeferredReplies()
        self.replies: list[Action] = []
        self.passed = 0
        """Replies that left before groups that came before them."""

    def _done(self, actions: list[Action]) -> list[Action]:
        self.disk.append(self.core.events())
        for action in actions:
            if action.durable:
                self.held.defer(self.disk, action)
        self.collect()
        return super()._done(actions)

    def collect(self) -> None:
        self.disk.advance(time.monotonic(), urgent=self.held.urgent)
        for action in self.held.release(self.disk.done, self.disk.priority_done):
            self.replies.append(action)
            self.passed += isinstance(action, Reply) and self.disk.done < self.disk.ticket

    def wait_for_reply(self, kind: type[M], count: int) -> M:
        """Wait until so many messages of a kind were sent; return the last one."""
        while len(found := [message for message in self._messages() if isinstance(message, kind)]) < count:
            self.woken.wait(5)
            self.woken.clear()
            self.collect()
        return found[-1]

    def _messages(self) -> list[Any]:
        return [action.message for action in self.replies if isinstance(action, Reply)]


def opened(directory: Path, disk: CrashingDisk | None, woken: threading.Event) -> Journal:
    journal = Journal(directory, config(segment_bytes=1 << 18), BodyMemory(1 << 30), woken.set, disk)
    journal.recover()
    return journal


def test_a_power_cut_at_any_instant_takes_nothing_back_that_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rolloutmq.services.broker.journal.journal.BATCH_BYTES", 500)
    cuts: list[tuple[Path, list[Action]]] = []

    def instant(disk: CrashingDisk) -> None:
        if bench is not None:
            target, told = tmp_path / f"cut-{len(cuts)}", list(bench.replies)
            disk.power_cut(target)
            cuts.append((target, told))

    bench: JournaledBench | None = None
    bench = JournaledBench(tmp_path / "journal", CrashingDisk(tmp_path / "journal", instant))
    work(bench, bench.producer(), random.Random(5))
    bench.disk.close()
    assert bench.passed > 5
    assert len(cuts) > 60
    for target, told in cuts:
        look_at(target, told)
        shutil.rmtree(target)


def work(bench: JournaledBench, producer: Peer, rng: random.Random) -> None:
    """Send groups all the time, sometimes just the missing ones, while a trainer acts on its replies."""
    bench.consumer()
    queued = 0
    for step in range(14):
        version = PolicyVersion(0, step)
        pull = Pull(consumer="c", step=step, sequences=8, version=version, request_id=f"r{step}", wait_s=9.0)
        queued += send(producer, max(2 - queued, rng.randrange(4)))
        bench.send(pull, (b"t", b"%d" % step))
        queued += send(producer, rng.randrange(3)) - 2
        batch = bench.wait_for_reply(Batch, step + 1)
        queued += send(producer, rng.randrange(3))
        settle = Settle(
            consumer="c",
            lease=batch.lease,
            generation=batch.generation,
            version=PolicyVersion(0, step + 1),
            trained=ids(batch),
        )
        bench.send(settle)
        bench.wait_for_reply(Settled, step + 1)


def send(producer: Peer, groups: int) -> int:
    """Send groups, and let their acks become due."""
    producer.send(groups)
    producer.bench.tick(0.3)
    return groups


def look_at(directory: Path, told: list[Action]) -> None:
    """Check the journal after a restart against the replies that clients got."""
    journal = opened(directory, None, threading.Event())
    found = journal.recover()
    core = BrokerCore(run_config(e={}), epoch=2)
    assert core.restore(found.events, found, 0.0, WALL) == []
    core.validate()
    state = core._state
    settled = -1
    for action in told:
        match action:
            case Reply(message=Batch(lease=number) as batch):
                assert state.leases.last_number >= number
                if (lease := state.leases.numbered(number)) is not None:
                    assert tuple(group.header.group_id for group in lease.groups) == ids(batch)
            case Reply(message=Settled(step=step)):
                settled = step
            case Publish(message=Ack() as ack) | Reply(message=Ack() as ack):
                session = state.sessions.numbered(ack.session)
                assert session is not None
                assert session.window.cumulative >= ack.cumulative
    assert {ended.step for _, ended in state.leases.ended()} >= set(range(settled + 1))
    assert all(group.body.load() for group in state.groups)
    journal.close()
