"""Tasks in the core: delivery, completion, and restarts.

After every step the bench compares the state with that of a broker killed and restarted.
"""

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from tests.services.broker.bench import Bench, Peer, config, right

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import Drain, Reset
from rolloutmq.schemas.wire.envelope import ErrorCode, Split
from rolloutmq.schemas.wire.replies import Ok
from rolloutmq.schemas.wire.requests import Goodbye
from rolloutmq.schemas.wire.tasks import (
    AwaitTasks,
    CancelTasks,
    HandBack,
    NewTask,
    SubmitTasks,
    TakenTasks,
    TakeTasks,
    TaskCounts,
    TasksFull,
    TaskState,
    TaskStates,
    TaskStatus,
)
from rolloutmq.services.broker.actions import Reply
from rolloutmq.services.broker.journal.format.events import GroupState
from rolloutmq.services.broker.journal.stored_group import GroupBody


def task(name: str, **given: Any) -> NewTask:
    return NewTask(id=name, env=given.pop("env", "e"), payload=msgspec.msgpack.encode(name), **given)


def submit(bench: Bench, *tasks: NewTask) -> list[TaskState]:
    return [found.state for found in bench.ask(SubmitTasks(tasks=tasks), TaskStates).tasks]


class Taker:
    """A worker that takes tasks by one slot."""

    def __init__(self, peer: Peer, slot: int = 0) -> None:
        self.peer = peer
        self.slot = slot
        self.number = 0

    def request(self, count: int = 1, *, again: bool = False, **given: Any) -> TakeTasks:
        self.number += not again
        return TakeTasks(
            producer=self.peer.name,
            session=self.peer.session,
            slot=self.slot,
            number=self.number,
            count=count,
            **given,
        )

    def take(self, count: int = 1, **given: Any) -> list[str]:
        return [found.id for found in self.peer.bench.ask(self.request(count, **given), TakenTasks).tasks]

    def wait(self, route: bytes = b"take", **given: Any) -> list[TakenTasks]:
        """Take and wait for a long time; return the immediate replies."""
        replies = self.peer.bench.send(self.request(wait_s=8.0, **given), (route,))
        return [reply.message for reply in replies if isinstance(reply.message, TakenTasks)]

    def answer(self, name: str, **given: Any) -> str:
        """Send the group of a task; returns its id."""
        head = replace(self.peer.next(**given), task=name)
        self.peer.deliver(head)
        return head.group_id

    def hand_back(self, name: str, reason: str = "no good", *, tried: bool = True) -> None:
        request = HandBack(
            producer=self.peer.name, session=self.peer.session, id=name, reason=reason, tried=tried
        )
        self.peer.bench.ask(request, Ok)


def look(bench: Bench, name: str) -> TaskStatus:
    return bench.ask(AwaitTasks(ids=(name,)), TaskStates).tasks[0]


def counts(bench: Bench) -> TaskCounts:
    return bench.pressure().tasks


def test_a_group_that_names_a_task_settles_it() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    assert submit(bench, task("a")) == [TaskState.QUEUED]
    assert worker.take() == ["a"]
    assert look(bench, "a") == TaskStatus(id="a", state=TaskState.LEASED, worker="p", deliveries=1)
    group = worker.answer("a")
    done = look(bench, "a")
    assert (done.state, done.group_id, done.worker) == (TaskState.DONE, group, "p")
    assert (done.sequences, done.rewards) == (4, right(1, 4))
    bench.restart()
    assert look(bench, "a") == done
    assert counts(bench) == TaskCounts(done=1)


def test_higher_priority_goes_first_then_the_oldest() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a"), task("b", priority=-1), task("c", priority=5), task("d"), task("e", priority=5))
    bench.restart()
    worker.peer.sync()
    assert [*worker.take(2), *worker.take(1), *worker.take(9)] == ["c", "e", "a", "d", "b"]
    worker.hand_back("d")
    submit(bench, task("f"))
    assert worker.take(2) == ["d", "f"]


def test_a_worker_gets_only_tasks_of_its_environment_and_split() -> None:
    bench = Bench(config(e={}, other={}))
    own, other = Taker(bench.producer("p")), Taker(bench.producer("q", "other"))
    evaluating = Taker(bench.producer("v", split=Split.EVAL))
    submit(bench, task("o", env="other"), task("v", split=Split.EVAL), task("e"))
    assert own.take(9) == ["e"]
    assert other.take(9) == ["o"]
    assert evaluating.take(9) == ["v"]
    own.answer("o")  # of another environment: it settles nothing
    assert look(bench, "o").state is TaskState.LEASED
    assert counts(bench).unmatched == 1


def test_submitting_again_changes_nothing_and_other_content_is_refused() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a", deadline_s=60.0))
    worker.take()
    assert submit(bench, task("a", deadline_s=60.0)) == [TaskState.LEASED]
    bench.restart()
    worker.peer.sync()
    assert bench.refused(SubmitTasks(tasks=(task("b"), task("a", priority=1)))) is ErrorCode.CONFLICT
    assert look(bench, "b").state is TaskState.UNKNOWN
    worker.answer("a")
    assert submit(bench, task("a", deadline_s=60.0)) == [TaskState.DONE]
    assert bench.refused(SubmitTasks(tasks=(task("a"),))) is ErrorCode.CONFLICT
    assert bench.refused(SubmitTasks(tasks=(task("c"), task("c", size=2)))) is ErrorCode.CONFLICT


def test_the_same_take_again_gets_the_same_tasks() -> None:
    bench = Bench()
    worker, second = Taker(peer := bench.producer()), Taker(peer, slot=1)
    submit(bench, *map(task, "abcd"))
    assert worker.take(2) == worker.take(2, again=True) == ["a", "b"]
    assert second.take() == ["c"]
    worker.answer("a")
    bench.restart()
    peer.sync()
    assert worker.take(2, again=True) == ["b"]
    worker.answer("b")
    assert worker.take(2, again=True) == []
    assert worker.take(2) == ["d"]
    worker.number -= 1
    assert worker.take(1, again=True) == []  # an old request that comes late gets nothing more


def test_a_take_waits_for_a_task_and_is_answered_in_turn() -> None:
    bench = Bench()
    one, two = Taker(bench.producer("p")), Taker(bench.producer("q"))
    assert (one.wait(b"one"), two.wait(b"two")) == ([], [])
    submit(bench, task("a"))
    (reply,) = bench.late
    assert (reply.route, [t.id for t in reply.message.tasks]) == ((b"one",), ["a"])  # type: ignore[union-attr]
    bench.late.clear()
    one.hand_back("a")
    assert [reply.route for reply in bench.late] == [(b"two",)]
    bench.late.clear()
    one.wait(b"one")
    bench.tick(7.0)
    assert bench.late == []
    bench.tick(1.5)
    assert [(reply.route, reply.message) for reply in bench.late] == [((b"one",), TakenTasks())]


def test_who_was_told_to_drain_gets_nothing_more() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    worker.wait(b"waiting")
    bench.ask(Drain(worker="p"), Ok)
    submit(bench, task("a"))
    assert [reply.message for reply in bench.late] == [TakenTasks()]
    assert worker.take() == []
    assert look(bench, "a").state is TaskState.QUEUED


def test_who_stops_waiting_asks_again_for_none() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    worker.wait(b"waiting")
    assert worker.take(0, again=True) == []
    assert [reply.route for reply in bench.late] == [(b"waiting",)]
    submit(bench, task("a"))
    assert look(bench, "a").state is TaskState.QUEUED
    worker.take()
    assert worker.take(0, again=True) == ["a"]
    worker.hand_back("a", tried=False)
    assert look(bench, "a").deliveries == 0


def test_a_task_that_keeps_failing_is_failed_with_the_last_reason() -> None:
    bench = Bench(config(broker={"max_deliveries": 2}, e={}))
    worker = Taker(bench.producer())
    submit(bench, task("a"))
    worker.take()
    worker.hand_back("a", "boom")
    assert (look(bench, "a").state, look(bench, "a").reason) == (TaskState.QUEUED, "p: boom")
    worker.take()
    worker.hand_back("a", "bang")
    worker.hand_back("a", "said twice")
    assert look(bench, "a") == TaskStatus(
        id="a", state=TaskState.FAILED, worker="p", deliveries=2, reason="p: bang"
    )
    assert worker.take() == []


def goodbye(bench: Bench, peer: Peer) -> str:
    bench.ask(Goodbye(producer="p", session=peer.session), Ok)
    return "p closed its session"


def fence(bench: Bench, _peer: Peer) -> str:
    bench.producer("p")
    return "p was fenced by a newer session"


def fall_silent(bench: Bench, _peer: Peer) -> str:
    bench.tick(11.0)
    return "p fell silent"


def be_slow(bench: Bench, peer: Peer) -> str:
    for _ in range(6):
        bench.tick(5.0)
        peer.sync()
    bench.tick(1.0)
    return "p did not answer within 20 s"


def die_with_the_broker(bench: Bench, _peer: Peer) -> str:
    bench.restart()
    bench.tick(9.0)
    assert look(bench, "a").state is TaskState.LEASED
    bench.tick(2.0)
    return "p fell silent"


@pytest.mark.parametrize("loss", [goodbye, fence, fall_silent, be_slow, die_with_the_broker])
def test_a_lost_lease_gives_the_task_back(loss: Any) -> None:
    bench = Bench()
    worker = Taker(bench.producer("p"))
    submit(bench, task("a"))
    worker.take(lease_s=20.0)
    why = loss(bench, worker.peer)
    assert (look(bench, "a").state, look(bench, "a").reason) == (TaskState.QUEUED, why)
    other = Taker(bench.producer("other"))
    assert other.take() == ["a"]
    assert look(bench, "a").deliveries == 2


def test_a_producer_that_registers_again_as_itself_keeps_its_tasks() -> None:
    bench = Bench()
    worker = Taker(bench.producer("p"))
    submit(bench, task("a"))
    worker.take()
    bench.restart()
    assert bench.producer("p", resume_session=worker.peer.session).session == worker.peer.session
    assert look(bench, "a").state is TaskState.LEASED


def test_a_queued_task_expires_at_its_deadline() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a", deadline_s=5.0), task("b", deadline_s=50.0))
    bench.now += 5.0  # no tick came in between
    worker.peer.sync()
    assert worker.take() == ["b"]
    found = look(bench, "a")
    assert (found.state, found.reason) == (TaskState.EXPIRED, "its deadline of 5 s passed in the queue")
    submit(bench, task("c", deadline_s=1.0))
    bench.tick(1.0)
    assert look(bench, "c").state is TaskState.EXPIRED


def test_a_late_group_is_accepted_and_counted_as_late() -> None:
    bench = Bench()
    bench.consumer()
    worker = Taker(bench.producer())
    submit(bench, task("a", deadline_s=5.0), task("b"), task("c"))
    worker.take(3)
    bench.tick(5.0)
    assert look(bench, "a").reason == "its deadline of 5 s passed while p had it"
    bench.ask(CancelTasks(ids=("b",), reason="enough"), TaskStates)
    late = [worker.answer("a"), worker.answer("b")]
    assert counts(bench) == TaskCounts(expired=1, cancelled=1, late=2, leased=1)
    found = look(bench, "a")
    assert (found.state, found.group_id) == (TaskState.EXPIRED, late[0])
    bench.restart()
    assert bench.train(0) == late
    assert counts(bench).late == 2


def test_the_deadline_goes_on_over_a_restart() -> None:
    bench = Bench()
    submit(bench, task("a", deadline_s=5.0))
    bench.restart()
    bench.tick(5.0)
    assert look(bench, "a").state is TaskState.EXPIRED


def test_the_deadline_of_a_task_is_not_that_of_one_that_had_its_name() -> None:
    bench = Bench(config(broker={"remembered_tasks": 1}, e={}))
    for early in (task("a", deadline_s=5.0), task("b")):
        submit(bench, early)
        bench.ask(CancelTasks(ids=(early.id,)), TaskStates)
    submit(bench, task("a", deadline_s=60.0))
    bench.tick(5.0)
    assert look(bench, "a").state is TaskState.QUEUED
    bench.tick(55.0)
    assert look(bench, "a").state is TaskState.EXPIRED


def test_a_second_group_of_a_task_is_counted_and_changes_nothing() -> None:
    bench = Bench()
    one, two = Taker(bench.producer("p")), Taker(bench.producer("q"))
    submit(bench, task("a"))
    one.take()
    one.hand_back("a")
    two.take()
    first = one.answer("a")  # it had given it back, and found an answer after all
    two.answer("a")
    two.answer("a", group_id=first)  # the first one again is no second one
    assert (look(bench, "a").group_id, look(bench, "a").worker) == (first, "p")
    assert counts(bench) == TaskCounts(done=1, extra=1)


def test_a_group_of_a_task_that_is_not_known_is_accepted() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    worker.answer("never heard of")
    assert bench.pressure().ledger.accepted == 1
    assert counts(bench) == TaskCounts(unmatched=1)


def test_a_cancelled_task_is_not_handed_out() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a"), task("b"))
    states = bench.ask(CancelTasks(ids=("a", "x"), reason="enough"), TaskStates).tasks
    assert [(s.state, s.reason) for s in states] == [(TaskState.CANCELLED, "enough"), (TaskState.UNKNOWN, "")]
    assert worker.take(9) == ["b"]
    worker.answer("b")
    bench.ask(CancelTasks(ids=("b",)), TaskStates)
    assert look(bench, "b").state is TaskState.DONE


def test_who_asks_is_answered_when_enough_are_over() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, *map(task, "abc"))
    for route, enough in ((b"one", 1), (b"two", 2), (b"all", 0)):
        bench.send(AwaitTasks(ids=("a", "b", "c"), enough=enough, wait_s=30.0), (route,))
    worker.take(9)
    answered = []
    for name in "abc":
        worker.answer(name)
        answered += [reply.route[0] for reply in bench.late]
        bench.late.clear()
    assert answered == [b"one", b"two", b"all"]
    submit(bench, task("d"))
    bench.send(AwaitTasks(ids=("d",), wait_s=30.0), (b"never",))
    bench.tick(31.0)
    (reply,) = bench.late
    assert isinstance(reply.message, TaskStates)
    assert reply.message.tasks[0].state is TaskState.QUEUED
    assert reply.durable


def test_too_many_open_tasks_are_refused_with_a_time_to_come_again() -> None:
    bench = Bench(config(broker={"max_tasks": 3, "task_bytes": 100}, e={}))
    worker = Taker(bench.producer())
    submit(bench, task("a"), task("b"))
    full = bench.ask(SubmitTasks(tasks=(task("c"), task("d"))), TasksFull)
    assert full.retry_s == 5.0
    assert look(bench, "c").state is TaskState.UNKNOWN
    assert submit(bench, task("a"), task("b"), task("c")) == [TaskState.QUEUED] * 3
    worker.take(9)
    for name in "abc":
        worker.answer(name)
    big = NewTask(id="big", env="e", payload=bytes(101))
    full = bench.ask(SubmitTasks(tasks=(big,)), TasksFull)
    assert full.retry_s < 5.0  # as fast as tasks have ended lately
    assert submit(bench, task("d")) == [TaskState.QUEUED]


def test_what_is_over_is_remembered_up_to_a_limit_and_without_its_payload() -> None:
    bench = Bench(config(broker={"remembered_tasks": 2}, e={}))
    worker = Taker(bench.producer())
    submit(bench, *map(task, "abcd"))
    worker.take(9)
    for name in "bac":
        worker.answer(name)
    bench.restart()
    assert [look(bench, name).state for name in "abc"] == [TaskState.DONE, TaskState.UNKNOWN, TaskState.DONE]
    worker.peer.sync()
    worker.answer("d")
    assert look(bench, "a").state is TaskState.UNKNOWN
    assert counts(bench).done == 4


def test_the_heaps_do_not_grow_with_what_has_left_them() -> None:
    bench = Bench()
    bench.shadowed = False
    Taker(bench.producer())
    submit(bench, task("top", priority=9, deadline_s=1.0))
    for number in range(500):
        submit(bench, task(f"t{number}", deadline_s=1e6))
        bench.ask(CancelTasks(ids=(f"t{number}",)), TaskStates)
    bench.now += 0.1
    bench.tick()
    tasks = bench.core._state.tasks
    assert len(tasks._deadlines) < 100
    assert sum(map(len, tasks._queues.values())) < 100


@pytest.mark.parametrize(
    ("bad", "code"),
    [
        (task("a", env="nobody"), ErrorCode.UNKNOWN),
        (task("a", split=Split.EVAL), ErrorCode.INVALID),
        (task("a", size=9), ErrorCode.INVALID),
        (task("a", deadline_s=float("nan")), ErrorCode.INVALID),
    ],
)
def test_a_task_that_could_never_be_answered_is_refused(bad: NewTask, code: ErrorCode) -> None:
    bench = Bench()
    assert bench.refused(SubmitTasks(tasks=(task("good"), bad))) is code
    assert look(bench, "good").state is TaskState.UNKNOWN


def test_a_repeated_take_is_answered_when_the_first_one_would_be() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    assert worker.wait() == []
    bench.now += 5.0
    assert worker.wait(again=True) == []
    bench.now += 3.1
    assert [reply.message for reply in bench.tick() if isinstance(reply, Reply)] == [TakenTasks()]


def test_a_repeated_question_is_answered_when_the_first_one_would_be() -> None:
    bench = Bench()
    submit(bench, task("a"))
    asked = AwaitTasks(ids=("a",), wait_s=8.0)
    bench.send(asked, (b"ask",))
    bench.now += 5.0
    bench.send(asked, (b"ask",))
    bench.now += 3.1
    assert [type(reply.message) for reply in bench.tick() if isinstance(reply, Reply)] == [TaskStates]


def test_tasks_of_an_evaluation_are_accepted_before_a_worker_is_there() -> None:
    settings = RunConfig.model_validate(
        {
            "environment": {"e": {"entry": "a:B"}, "f": {"entry": "a:B"}},
            "evaluation": {"enabled": True, "environments": ["e"]},
        }
    )
    bench = Bench(settings)
    assert submit(bench, task("a", split=Split.EVAL)) == [TaskState.QUEUED]
    assert bench.refused(SubmitTasks(tasks=(task("b", env="f", split=Split.EVAL),))) is ErrorCode.INVALID


def test_only_a_live_session_may_take() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a"))
    stranger = TakeTasks(producer="x", session=1, number=1)
    assert bench.refused(stranger) is ErrorCode.UNKNOWN
    fenced = worker.request()
    bench.producer()
    assert bench.refused(fenced) is ErrorCode.FENCED
    assert bench.refused(HandBack(producer="p", session=fenced.session, id="a")) is ErrorCode.FENCED
    bad = replace(Taker(bench.producer()).request(), wait_s=float("nan"))
    assert bench.refused(bad) is ErrorCode.INVALID


def test_a_task_of_another_session_cannot_be_handed_back() -> None:
    bench = Bench()
    one, two = Taker(bench.producer("p")), Taker(bench.producer("q"))
    submit(bench, task("a"))
    one.take()
    two.hand_back("a")
    assert look(bench, "a").worker == "p"
    assert look(bench, "a").state is TaskState.LEASED


def test_a_reset_cancels_what_is_open() -> None:
    bench = Bench()
    worker = Taker(bench.producer())
    submit(bench, task("a"), task("b"))
    worker.take()
    bench.ask(Reset(), Ok)
    assert [look(bench, name).state for name in "ab"] == [TaskState.CANCELLED] * 2
    bench.restart()
    assert look(bench, "a").reason == "the run was reset"


def test_a_requeued_group_does_not_answer_its_task_again() -> None:
    bench = Bench(config(broker={"remembered_tasks": 1}, e={}))
    worker = Taker(bench.producer())
    submit(bench, task("a"), task("b"))
    worker.take(2)
    worker.answer("a")
    (group,) = bench.core._state.groups
    worker.answer("b")  # now the first one is forgotten
    bench.core._state.dropper.drop([group], GroupState.DEAD, "rejected", 0.0)
    group.body = GroupBody((b"",), group.header.nbytes)
    bench.core.requeue((b"r",), [group], {}, bench.now, 0.0)
    assert bench.pressure().queued_groups == 2
    assert counts(bench) == TaskCounts(done=2)


@pytest.mark.parametrize("seed", range(6))
def test_whatever_happens_every_task_is_in_one_place_and_a_restart_keeps_it_there(seed: int) -> None:
    """Random steps; the bench compares with a restart after each, until there are too many events."""
    rng = random.Random(seed)
    bench = Bench(config(broker={"max_deliveries": 2, "high_groups": 1000}, e={}))
    workers = [Taker(bench.producer(name)) for name in "pq"]
    names: list[str] = []
    groups = 0
    for step in range(90):
        worker = rng.choice(workers)
        name = rng.choice(names) if names else ""
        match rng.randrange(9):
            case 0 | 1:
                names.append(f"t{step}")
                new = task(names[-1], priority=rng.randrange(3), deadline_s=rng.choice([0.0, 0.0, 8.0]))
                submit(bench, new)
            case 2 | 3:
                worker.take(rng.randrange(1, 4), lease_s=rng.choice([3.0, 60.0]))
            case 4 | 5 if name:
                worker.answer(name)
                groups += 1
            case 6 if name:
                worker.hand_back(name)
            case 7 if name and rng.random() < 0.3:
                bench.ask(CancelTasks(ids=(name,)), TaskStates)
            case _:
                for each in workers:
                    each.peer.sync()
                bench.tick(rng.choice([0.1, 2.0]))
                if rng.random() < 0.2:
                    bench.restart()
                    for each in workers:
                        each.peer.sync()
        found = counts(bench)
        over = found.done + found.failed + found.expired + found.cancelled
        assert found.queued + found.leased + over == len(names)
        assert found.done + found.late + found.extra + found.unmatched == groups
        for name in names:
            stands = look(bench, name)
            assert stands.deliveries <= 2
            assert (stands.state is not TaskState.DONE) or stands.group_id
    assert groups > 5
