import random
from collections.abc import Sequence
from typing import Any, get_args

import msgspec
import pytest
from tests.services.broker.bench import TABLE, WALL, Bench, config, header, ids, lasting
from tests.services.broker.flow.test_credits import in_line

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire import requests
from rolloutmq.schemas.wire.control import (
    Disconnect,
    GetStatus,
    LatestExample,
    LatestExampleReply,
    Pressure,
    Requeue,
    Reset,
    SetWorkers,
    Shutdown,
)
from rolloutmq.schemas.wire.envelope import Envelope, ErrorCode, PolicyVersion, Split
from rolloutmq.schemas.wire.joining import JoiningRequest
from rolloutmq.schemas.wire.replies import (
    Ack,
    Batch,
    ErrorReply,
    InfoReply,
    NoBatch,
    Ok,
    Registered,
    RunInfo,
    Wait,
)
from rolloutmq.schemas.wire.requests import (
    Commit,
    ConsumerBeat,
    DeclareTables,
    GetInfo,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Release,
    Request,
    Settle,
    Sync,
)
from rolloutmq.schemas.wire.tasks import AwaitTasks, TakeTasks
from rolloutmq.services.broker.actions import Action, Publish, Reply, Route
from rolloutmq.services.broker.core import BrokerCore

# Acks and events


def acks(bench: Bench, after: float = 0.0) -> list[Ack]:
    actions = bench.tick(after)
    return [a.message for a in actions if isinstance(a, Publish) and isinstance(a.message, Ack)]


def test_a_burst_is_acked_once_at_the_end_of_its_round() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.tick()
    peer.send(10)
    assert bench.core.next_deadline(bench.now) <= bench.now
    (ack,) = acks(bench)
    assert (ack.epoch, ack.session, ack.cumulative) == (1, peer.session, 10)
    assert bench.core.next_deadline(bench.now) > bench.now
    assert acks(bench) == []


def test_acks_are_repeated_while_the_producer_waits_and_cease_before_it_is_given_up() -> None:
    bench, peer = in_line()
    while not any(ack.wait is Wait.GLOBAL_FULL for ack in acks(bench, 0.05)):
        pass
    peer.sync()
    assert sum(len(acks(bench, 0.05)) for _ in range(20)) in {3, 4}
    for _ in range(7):
        bench.tick(1.0)
    assert acks(bench, 0.3) == []
    peer.sync()
    assert sum(len(acks(bench, 0.05)) for _ in range(20)) in {3, 4, 5}
    for _ in range(12):
        bench.tick(1.0)
    assert bench.pressure().lanes[0].granted == 0
    peer.sync()
    assert len(acks(bench, 0.3)) == 1


def test_a_duplicate_is_acked_again() -> None:
    bench = Bench()
    peer = bench.producer()
    head = peer.next()
    for _ in range(3):
        peer.deliver(head)
        assert [ack.cumulative for ack in acks(bench)] == [1]
    assert bench.pressure().ledger.accepted == 1
    assert bench.status().rejected_messages == 0
    assert bench.status().rejected_by_reason == {"duplicate": 2}


def test_state_topics_are_resent_to_who_subscribes() -> None:
    bench = Bench()
    assert bench.core.subscribed(b"") == []
    for name in ("w-1", "w-10"):
        bench.producer(name)
    bench.tick()

    def topics(prefix: bytes) -> list[bytes]:
        return [a.topic for a in bench.core.subscribed(prefix) if isinstance(a, Publish)]

    assert topics(b"pressure") == [b"pressure"]
    assert topics(b"ack.w-1/") == [b"ack.w-1/"]
    assert topics(b"ack.w-1") == [b"ack.w-1/", b"ack.w-10/"]
    assert sorted(topics(b"")) == [b"ack.w-1/", b"ack.w-10/", b"pressure"]
    assert topics(b"telemetry.") == []


def test_pressure_is_numbered_and_regular() -> None:
    bench = Bench()
    actions = [action for _ in range(100) for action in bench.tick(0.01)]
    messages = [action.message for action in actions if isinstance(action, Publish)]
    seen = [message.number for message in messages if isinstance(message, Pressure)]
    assert seen == [1, 2, 3, 4]


def test_the_next_deadline_never_makes_a_shell_spin() -> None:
    bench = Bench(config(broker={"exact_wait_s": 1.0}, e={}))
    bench.producer().send(4, sequences=3)
    bench.consumer()
    bench.wait(0, 10, wait_s=3.0)
    ticks = 0
    until = bench.now + 10.0
    while bench.now < until:
        bench.now = max(bench.now, bench.core.next_deadline(bench.now))
        bench.tick()
        ticks += 1
    assert ticks < 400
    assert len(bench.late) == 1


# Pressure and status


def test_pressure_says_what_is_queued_against_what_is_eaten() -> None:
    bench = Bench()
    peer = bench.producer()
    bench.consumer()
    for step in range(10):
        peer.send(2, step=step)
        bench.train(step)
        bench.now += 1.0
    peer.send(3, step=10)
    bench.wait(10, 16)
    pressure = bench.pressure()
    assert (pressure.queued_sequences, pressure.batch_sequences) == (12, 16)
    assert pressure.rollout_pressure == 0.75
    assert pressure.consumed_per_s == pytest.approx(8.0, rel=0.2)
    assert pressure.produced_per_s == pytest.approx(9.0, rel=0.2)
    assert (pressure.step, pressure.trainer_wait) == (10, "no_batch")
    (lane,) = pressure.lanes
    assert (lane.queued_groups, lane.accepted_groups, lane.trained_groups) == (3, 23, 20)
    bench.now += 4.0
    bench.tick()
    assert bench.pressure().lanes[0].oldest_age_s == 4.0
    assert bench.pressure().waits_s["no_batch"] == pytest.approx(4.0)
    msgspec.json.encode(bench.status())


def test_status_tells_the_run() -> None:
    bench = Bench(RunConfig.model_validate({"run": {"name": "r"}, "trainer": {"steps": 7}}))
    bench.now += 3.0
    bench.tick()
    bench.now += 2.0
    status = bench.status()
    assert (status.run, status.total_steps, status.durability) == ("r", 7, "disk")
    assert status.uptime_s == 2.0
    bench.core.rejected("malformed")
    assert bench.status().rejected_messages == 1


def test_info_and_who_may_set_it() -> None:
    places = Endpoints(ingest="i", serve="s", events="e", publish="p", pid=1, epoch=3)
    core = BrokerCore(config(e={}), epoch=3, endpoints=places)
    bench = Bench()
    bench.core = core
    info = bench.ask(GetInfo(), InfoReply)
    assert (info.epoch, info.ingest, info.events, info.publish) == (3, "i", "e", "p")
    assert (info.info.started, info.info.batch_sequences) == (False, 8)
    told = RunInfo(batch_sequences=32, max_tokens=99, starting_step=4, tracking_project="x")
    bench.consumer(info=told)
    bench.consumer("d", group="eval", info=RunInfo(batch_sequences=5))
    now = bench.ask(GetInfo(), InfoReply).info
    assert (now.batch_sequences, now.max_tokens, now.starting_step) == (32, 99, 4)
    assert (now.started, now.tracking_project, now.run) == (True, "x", "run")
    assert bench.pressure().step == 4
    assert bench.refused(RegisterConsumer(consumer="c", info=RunInfo(run="other"))) is ErrorCode.INVALID


def test_the_latest_example_is_the_newest_group_in_any_state() -> None:
    bench = Bench(config(e={}, f={}))
    assert bench.ask(LatestExample(), LatestExampleReply) == LatestExampleReply()
    bench.producer().send(2)
    bench.producer("q", "f").send(1, frames=2)
    bench.consumer()
    bench.train(0, 12)
    bench.ask(Commit(consumer="c", version=PolicyVersion(0, 1)), Ok)
    (reply,) = bench.send(LatestExample())
    assert isinstance(reply.message, LatestExampleReply)
    assert (reply.message.env, len(reply.frames)) == ("f", 2)
    (reply,) = bench.send(LatestExample(env="e"))
    assert isinstance(reply.message, LatestExampleReply)
    assert reply.message.header is not None
    assert reply.message.header.seq == 2
    assert msgspec.msgpack.decode(reply.message.table, type=type(TABLE)) == TABLE


def test_wanted_workers_are_passed_on() -> None:
    bench = Bench()
    bench.ask(SetWorkers(env="e", count=3), Ok)
    bench.ask(SetWorkers(env="f", count=None), Ok)
    assert bench.pressure().wanted == {"e": 3, "f": None}
    bench.ask(Reset(), Ok)
    assert bench.pressure().wanted == {"e": 3, "f": None}, "autoscaling went on, and started workers"
    bench.restart()
    assert bench.pressure().wanted == {"e": 3, "f": None}


# Disconnect, reset, shutdown


def test_a_disconnected_environment_gives_up_its_place_but_not_its_groups() -> None:
    bench = Bench(config(a={}, b={"min_share": 0.5}))
    bench.producer("pa", "a").send(8)
    bench.producer("pb", "b").send(2)
    bench.ask(Disconnect(env="b"), Ok)
    bench.consumer()
    assert {d.env for d in bench.batch(0, 16).groups} == {"a"}
    assert bench.refused(Disconnect(env="z")) is ErrorCode.UNKNOWN
    bench.consumer()
    assert {d.env for d in bench.batch(0, 40).groups} == {"a", "b"}
    bench.producer("pc", "b")
    assert [lane.min_share for lane in bench.pressure().lanes] == [0.0, 0.5]


def test_reset_forgets_the_run_but_not_the_ledger() -> None:
    bench = Bench()
    peer = bench.producer()
    peer.send(8)
    bench.consumer()
    bench.train(0)
    bench.train(1)
    bench.batch(2)
    bench.consumer("d", group="other")
    bench.wait(5, 64, consumer="d", group="other")
    bench.ask(Reset(), Ok)
    pressure = bench.pressure()
    assert (pressure.ledger.discarded, pressure.ledger.trained, pressure.step) == (4, 4, 0)
    assert pressure.ledger.reasons == {"discarded(reset)": 4}
    assert {record.state for record in bench.dropped} == {"discarded"}
    assert (pressure.lanes, pressure.trainer_wait) == ((), "")
    (answer,) = [r.message for r in bench.late if isinstance(r.message, ErrorReply)]
    assert answer.code is ErrorCode.UNKNOWN
    assert bench.refused(Sync(producer="p", session=peer.session)) is ErrorCode.UNKNOWN
    assert bench.refused(ConsumerBeat(consumer="c")) is ErrorCode.UNKNOWN
    again = bench.producer()
    assert again.session > peer.session
    again.send(2)
    bench.consumer()
    bench.train(0)
    bench.tick()


def test_shutdown_is_only_asked_for() -> None:
    bench = Bench()
    assert not bench.core.shutdown
    bench.ask(Shutdown(), Ok)
    assert bench.core.shutdown


# Another life


def test_a_broker_that_was_killed_comes_back_as_it_was() -> None:
    bench = Bench(config(e={}, f={}))
    e, f = bench.producer(), bench.producer("q", "f")
    sent = [e.send()[0] if i % 2 else f.send()[0] for i in range(8)]
    last = e.next()
    e.deliver(last)
    generation = bench.consumer()
    trained = bench.train(0)
    leased = bench.batch(1, request_id="mine")
    bench.now += 50.0
    assert bench.waiting() == [i for i in [*sent, last.group_id] if i not in trained]

    later = bench.reborn()
    ledger = later.pressure().ledger
    assert (ledger.accepted, ledger.queued, ledger.leased, ledger.trained) == (9, 5, 2, 2)
    assert later.waiting() == bench.waiting()
    assert e.session == later.producer(resume_session=e.session).session
    assert later.consumer(generation=generation) == generation
    assert later.batch(1, request_id="mine") == leased
    later.settle(leased)
    e.bench = later
    e.deliver(last)
    assert later.pressure().ledger.accepted == 9
    assert later.status().rejected_by_reason == {"duplicate": 1}


def test_who_falls_silent_over_a_restart_loses_its_lease() -> None:
    bench = Bench(config(e={}))
    bench.producer().send(2)
    bench.consumer()
    bench.batch(0)
    later = bench.reborn()
    later.tick(9.0)
    assert later.pressure().ledger.leased == 2
    later.tick(2.0)
    assert later.pressure().ledger.queued == 2


def test_a_trainer_that_died_with_the_broker_gets_again_what_its_checkpoint_does_not_cover() -> None:
    bench = Bench(config(e={}))
    sent = bench.producer().send(8)
    bench.consumer(resume=PolicyVersion())
    for step in range(3):
        bench.train(step)

    later = bench.reborn()
    ledger = later.pressure().ledger
    assert (ledger.accepted, ledger.queued, ledger.trained) == (8, 2, 6)
    later.consumer(resume=PolicyVersion(0, 1))
    ledger = later.pressure().ledger
    assert (ledger.queued, ledger.committed, ledger.rewound) == (6, 2, 4)
    for step in range(1, 4):
        batch = later.batch(step, version=PolicyVersion(1, step))
        assert list(ids(batch)) == sent[2 * step : 2 * step + 2]
        assert batch.rewound is (step < 3)
        later.settle(batch, version=PolicyVersion(1, step + 1))


def test_batches_of_a_trainer_without_checkpoints_can_be_let_go() -> None:
    bench = Bench(config(e={}))
    bench.producer().send(4)
    bench.consumer()
    bench.train(0)
    bench.core.forget_unclaimed()
    bench.core.validate()
    assert len([item for item in bench.core.snapshot() if isinstance(item, tuple)]) == 2


def test_a_body_that_is_damaged_is_dead_and_its_neighbours_go_on() -> None:
    bench = Bench(config(e={}))
    sent = bench.producer().send(5)
    bench.consumer()
    leased = bench.batch(0, request_id="mine")
    del bench.journal.bodies[bench.order(sent[0])], bench.journal.bodies[bench.order(sent[3])]
    later = bench.reborn()
    again = later.batch(0, request_id="mine")
    assert ids(leased) == (sent[0], sent[1])
    assert ids(again) == (sent[1], sent[2])
    assert [(record.group_id, record.reason) for record in later.dropped] == [(sent[0], "damaged")]
    later.settle(again)
    assert isinstance(later.pull(1), NoBatch)
    assert later.pressure().ledger.reasons == {"dead(damaged)": 2}
    assert later.pressure().ledger.queued == 1


def test_more_than_the_mark_may_come_back() -> None:
    bench = Bench()
    bench.producer().send(20)
    small = bench.reborn(config(broker={"high_bytes": 1000, "max_group_bytes": 500}, e={}))
    assert not small.core.reading()
    peer = small.producer()
    assert peer.sync().byte_limit == 0
    small.consumer()
    for step in range(9):
        small.settle(small.batch(step, version=PolicyVersion()), version=PolicyVersion())
        small.tick(0.2)
    assert small.core.reading()
    assert peer.sync().byte_limit > 0


# Bad input


def test_nothing_that_a_stranger_sends_changes_anything() -> None:
    bench = Bench(config(e={}, f={}))
    peer = bench.producer()
    good = header(1, 100)
    cases: dict[str, dict[str, Any]] = {
        "unknown_session": {"producer": "nobody"},
        "wrong_run": {"run": "other"},
        "wrong_environment": {"env": "f"},
        "frames": {"frames": [b"", b""]},
    }
    for changed in cases.values():
        peer.deliver(good, **changed)
    bad = {
        "beyond_window": header(5000, 10**7),
        "position": header(1, 99),
        "beyond_credit": header(2, 1 << 40),
        "too_large": header(1, (64 << 20) + 1, nbytes=(64 << 20) + 1),
        "unknown_table": msgspec.structs.replace(good, table="0" * 16),
    }
    for head in bad.values():
        peer.deliver(head)
    reasons = bench.status().rejected_by_reason
    assert reasons == dict.fromkeys([*cases, *bad], 1)
    assert bench.status().rejected_messages == 9
    assert bench.pressure().ledger.accepted == 0
    peer.deliver(good)
    assert bench.pressure().ledger.accepted == 1


def test_one_bad_group_of_a_message_does_not_harm_the_others() -> None:
    bench = Bench()
    peer = bench.producer()
    groups = (header(1, 100), header(9999, 10**7, frames=2), header(2, 200))
    envelope = Envelope(
        version=1, producer="p", session=peer.session, run="run", env="e", split=Split.TRAIN, groups=groups
    )
    bench.ingest(envelope, [b"1", b"2", b"2", b"3"])
    bench.consumer()
    (reply,) = bench.send(Pull(consumer="c", step=0, version=PolicyVersion(), sequences=8, request_id="x"))
    assert reply.frames == (b"1", b"3")


def test_too_many_environments_are_refused() -> None:
    bench = Bench(config())
    replies = [
        bench.core.request((), RegisterProducer(producer=f"p{i}", env=f"e{i}"), 0.0, WALL)[0]
        for i in range(1100)
    ]
    codes = [r.message for r in replies if hasattr(r, "message")]
    assert sum(isinstance(m, Registered) for m in codes) == 1024
    assert isinstance(codes[-1], ErrorReply)
    assert codes[-1].code is ErrorCode.LIMIT


BIG = 1 << 62


def noise(rng: random.Random) -> list[requests.Request]:
    """Requests that decode and mean nothing."""
    name = rng.choice("pqcd")
    number = rng.choice([0, 1, 2, (1 << 20) + 1, BIG])
    version = PolicyVersion(rng.choice([0, BIG]), rng.choice([0, 3, BIG]))
    return [
        RegisterProducer(producer=name, env="e", run=rng.choice(["run", "x"]), resume_session=number),
        DeclareTables(producer=name, session=number, tables=(TABLE,) * rng.randrange(3)),
        Sync(producer=name, session=number, abandoned=number),
        requests.Goodbye(producer=name, session=number, produced=number, abandoned=number),
        RegisterConsumer(
            consumer=name,
            rank=rng.randrange(3),
            world_size=rng.randrange(1, 3),
            resume=rng.choice([None, version]),
            info=RunInfo(batch_sequences=rng.choice([0, 8, BIG]), starting_step=number),
        ),
        Pull(
            consumer=name,
            rank=rng.randrange(2),
            world_size=rng.randrange(1, 3),
            step=number,
            version=version,
            sequences=rng.choice([1, 8, 1 << 24]),
            request_id=rng.choice("ab"),
            wait_s=rng.choice([0.0, 5.0, float("inf")]),
        ),
        requests.Settle(consumer=name, lease=rng.randrange(5), generation=rng.randrange(9), version=version),
        Commit(consumer=name, version=version),
        Release(consumer=name),
        ConsumerBeat(consumer=name, progress=number),
        Disconnect(env=rng.choice("ef")),
    ]


def test_noise_never_raises_and_is_always_answered() -> None:
    rng = random.Random(1)
    bench = Bench()
    for number in range(150):
        request = rng.choice(noise(rng))
        replies = bench.send(request, (b"mine",))
        assert isinstance(request, Pull) or [r.route for r in replies].count((b"mine",)) == 1
        if number % 3 == 0 and (session := bench.core._state.sessions.current("p")):
            peer_of = header(rng.choice([1, 2, 3, BIG]), rng.choice([100, 200, BIG]))
            envelope = Envelope(
                version=1, producer="p", session=session.number, run="run", env="e",
                split=Split.TRAIN, groups=(peer_of,),
            )  # fmt: skip
            bench.ingest(envelope, [b"x"])
        bench.tick(rng.choice([0.0, 0.3, 11.0]))
    msgspec.msgpack.encode(bench.status())


def test_every_kind_of_request_has_its_answer() -> None:
    bench = Bench()
    of_the_shell = set(get_args(JoiningRequest))
    late = {Pull, LatestExample, Requeue, TakeTasks, AwaitTasks} | of_the_shell
    assert set(get_args(requests.Request)) == set(bench.core._handlers) | late


# Replies before the counting


class LoneGroups:
    """A trainer that waits for each group, on a core that answers at once or by actions."""

    def __init__(self, *, at_once: bool) -> None:
        self.bench = Bench(config(batch=4, e={}))
        self.peer = self.bench.producer()
        self.bench.consumer()
        self.at_once = at_once
        self.answers: list[Reply] = []
        self.counted: list[int] = []
        """Groups of the environment that were counted when each reply was made."""
        if at_once:
            self.bench.core.answer_by(self.answer)

    def answer(self, route: Route, message: Any, frames: tuple[Any, ...]) -> None:
        self.answers.append(Reply(route, message, frames))
        lane = self.bench.core._state.lanes.find("e", Split.TRAIN)
        self.counted.append(lane.accepted_groups if lane is not None else 0)

    def request(self, request: Request) -> None:
        self.note(self.bench.send(request, (b"c",)))

    def note(self, actions: Sequence[Action]) -> None:
        replies = [one for one in actions if isinstance(one, Reply)]
        assert not (self.at_once and replies), "a reply left twice"
        self.answers += [Reply(one.route, one.message, one.frames) for one in replies]

    def step(self, step: int, groups: int) -> Batch:
        version = PolicyVersion(0, step)
        self.request(
            Pull(consumer="c", step=step, version=version, sequences=4 * groups, request_id=f"r{step}")
        )
        head = self.peer.next(started_at=1.0, finished_at=2.0 + step)
        more = [self.peer.next() for _ in range(groups - 1)]
        about = Envelope(4, "p", self.peer.session, "default", "e", Split.TRAIN, (head, *more))
        self.note(self.bench.ingest(about, [b"%d" % number for number in range(groups)]))
        batch = self.answers[-1].message
        assert isinstance(batch, Batch), batch
        self.request(
            Settle(
                consumer="c",
                lease=batch.lease,
                generation=batch.generation,
                version=PolicyVersion(0, step + 1),
                trained=ids(batch),
            )
        )
        self.note(self.bench.tick(0.01))
        return batch


def test_a_reply_leaves_before_the_counting_and_changes_nothing_else() -> None:
    early, late = LoneGroups(at_once=True), LoneGroups(at_once=False)
    before = 0
    for step, groups in enumerate([1, 1, 3, 2]):
        assert early.step(step, groups) == late.step(step, groups)
        assert early.counted[-2] == before, "the groups of a reply are counted behind it"
        before += groups
    for one in (early, late):
        one.request(GetStatus())
    assert early.answers == late.answers
    assert lasting(early.bench) == lasting(late.bench)
    assert early.bench.core._state.hops.ungathered == late.bench.core._state.hops.ungathered > 0
    assert early.bench.core._state.produced._buckets == late.bench.core._state.produced._buckets
