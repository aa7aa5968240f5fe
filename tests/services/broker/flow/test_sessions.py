import pytest
from msgspec.structs import replace
from tests.services.broker.bench import TABLE, Bench, config

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.wire.control import WorkerBeat, WorkerState
from rolloutmq.schemas.wire.envelope import ColumnSpec, ColumnTable, Dtype, ErrorCode, Split
from rolloutmq.schemas.wire.replies import Ok, Registered
from rolloutmq.schemas.wire.requests import DeclareTables, Goodbye, RegisterProducer, Sync
from rolloutmq.services.broker.flow.sessions import IDLE_SESSIONS, TABLES_LIMIT


def goodbye(bench: Bench, name: str, session: int, produced: int = 0) -> None:
    bench.ask(Goodbye(producer=name, session=session, produced=produced), Ok)


@pytest.mark.parametrize("epoch", [1, 1_700_000_000, 1_700_000_000_000, 1_700_000_000_000_000_000])
def test_numbers_grow_and_never_meet_those_of_another_life(epoch: int) -> None:
    first = [Bench(epoch=epoch).producer(str(i)).session for i in range(3)]
    bench = Bench(epoch=epoch)
    numbers = [bench.producer(name).session for name in "abc"]
    later = Bench(epoch=epoch + 1000).producer().session
    assert numbers == sorted(set(numbers))
    assert max(*numbers, *first) < later < 1 << 62


def test_a_new_session_fences_the_one_before() -> None:
    bench = Bench()
    old = bench.producer()
    new = bench.producer()
    assert new.session > old.session
    assert bench.refused(Sync(producer="p", session=old.session)) is ErrorCode.FENCED
    assert bench.refused(DeclareTables(producer="p", session=old.session, tables=())) is ErrorCode.FENCED
    old.send()
    assert bench.status().rejected_by_reason == {"fenced": 1}
    new.send()
    assert bench.pressure().ledger.accepted == 1


def test_a_registration_that_comes_again_opens_no_second_session() -> None:
    bench = Bench()
    request = RegisterProducer(producer="p", env="e", key="k")
    first = bench.ask(request, Registered).ack
    assert bench.ask(request, Registered).ack.session == first.session
    assert bench.ask(replace(request, key="l"), Registered).ack.session > first.session
    assert bench.refused(Sync(producer="p", session=first.session)) is ErrorCode.FENCED


def test_an_unknown_session_is_told_to_register() -> None:
    bench = Bench()
    peer = bench.producer()
    assert bench.refused(Sync(producer="q", session=peer.session)) is ErrorCode.UNKNOWN
    assert bench.refused(Sync(producer="p", session=peer.session + 1)) is ErrorCode.UNKNOWN
    assert bench.refused(Sync(producer="p", session=0)) is ErrorCode.UNKNOWN
    assert bench.refused(Goodbye(producer="q", session=1)) is ErrorCode.UNKNOWN


def test_goodbye_is_idempotent_and_ends_the_session() -> None:
    bench = Bench()
    peer = bench.producer()
    peer.send(2)
    goodbye(bench, "p", peer.session, produced=5)
    goodbye(bench, "p", peer.session, produced=5)
    assert bench.refused(Sync(producer="p", session=peer.session)) is ErrorCode.UNKNOWN
    assert bench.pressure().ledger.lost_before_accept == 3
    assert bench.pressure().lanes[0].producers == 0


def test_a_saved_session_comes_back_under_its_number_and_loses_nothing() -> None:
    bench = Bench()
    peer = bench.producer()
    unsent = [peer.next() for _ in range(2)]
    peer.send()
    before = peer.sync()
    goodbye(bench, "p", peer.session, produced=3)
    other = bench.producer()
    assert other.session != peer.session
    resumed = bench.ask(
        RegisterProducer(producer="p", env="e", group_size=4, resume_session=peer.session), Registered
    ).ack
    assert resumed.session == peer.session
    assert (resumed.cumulative, resumed.gaps) == (0, b"\x02")
    assert resumed.byte_limit >= before.byte_limit
    assert resumed.start_limit >= before.start_limit
    assert bench.refused(Sync(producer="p", session=other.session)) is ErrorCode.FENCED
    bench.ask(DeclareTables(producer="p", session=peer.session, tables=(TABLE,)), Ok)
    for head in unsent:
        peer.deliver(head)
    assert peer.sync().cumulative == 3
    assert bench.pressure().ledger.lost_before_accept == 0


@pytest.mark.parametrize("wrong", ["number", "env", "split", "producer"])
def test_a_session_that_is_not_known_resumes_as_a_fresh_one(wrong: str) -> None:
    bench = Bench(config(e={}, f={}))
    peer = bench.producer()
    request = RegisterProducer(
        producer="q" if wrong == "producer" else "p",
        env="f" if wrong == "env" else "e",
        split=Split.EVAL if wrong == "split" else Split.TRAIN,
        resume_session=99 if wrong == "number" else peer.session,
    )
    assert bench.ask(request, Registered).ack.session > peer.session


def test_only_the_last_sessions_of_a_producer_are_kept() -> None:
    bench = Bench()
    peers = [bench.producer() for _ in range(IDLE_SESSIONS + 3)]
    oldest = len(peers) - 1 - IDLE_SESSIONS
    for peer, kept in ((peers[oldest], True), (peers[oldest - 1], False), (peers[-2], True)):
        request = RegisterProducer(producer="p", env="e", resume_session=peer.session)
        assert (bench.ask(request, Registered).ack.session == peer.session) is kept


def test_a_saved_spool_that_was_accepted_after_all_is_not_taken_in_again() -> None:
    bench = Bench()
    peer = bench.producer()
    heads = [peer.next(), peer.next()]
    for head in heads:
        peer.deliver(head)
    goodbye(bench, "p", peer.session, produced=2)
    bench.producer()
    bench.consumer()
    bench.train(0)
    request = RegisterProducer(producer="p", env="e", resume_session=peer.session)
    ack = bench.ask(request, Registered).ack
    assert (ack.session, ack.cumulative) == (peer.session, 2)
    peer.deliver(heads[0])
    assert bench.pressure().ledger.accepted == 2


def test_tables_of_a_session_are_bounded() -> None:
    bench = Bench()
    peer = bench.producer()
    for start in range(0, TABLES_LIMIT, 64):
        tables = tuple(ColumnTable((ColumnSpec(f"c{i}", Dtype.I32, 0),)) for i in range(start, start + 64))
        request = DeclareTables(producer="p", session=peer.session, tables=tables)
        if start + 64 < TABLES_LIMIT:
            bench.ask(request, Ok)
            bench.ask(request, Ok)
        else:
            assert bench.refused(request) is ErrorCode.LIMIT
    peer.send()
    assert peer.sync().cumulative == 1


def test_a_killed_workers_unaccepted_groups_are_counted_as_lost() -> None:
    bench = Bench()
    beat = WorkerBeat(worker="p", env="e", state=WorkerState.READY, pid=7, produced=3)
    bench.ask(beat, object)
    peer = bench.producer(pid=7)
    peer.send(2)
    bench.ask(WorkerBeat(worker="p", env="e", state=WorkerState.READY, pid=7, produced=8), object)
    assert bench.pressure().ledger.lost_before_accept == 0
    bench.tick(11.0)
    assert bench.pressure().ledger.lost_before_accept == 3
    peer.send()
    assert bench.pressure().ledger.lost_before_accept == 0
    bench.producer(pid=8)
    assert bench.pressure().ledger.lost_before_accept == 2
    for pid in range(9, 20):
        bench.producer(pid=pid)
    assert bench.pressure().ledger.lost_before_accept == 2


def test_a_group_resent_under_a_new_session_is_known_by_its_id() -> None:
    bench = Bench()
    old = bench.producer()
    head = old.next(group_id="same", crc=5)
    old.deliver(head)
    new = bench.producer()
    new.deliver(new.next(group_id="same", crc=5))
    assert new.sync().cumulative == 1
    assert bench.pressure().ledger.accepted == 1
    new.deliver(new.next(group_id="same", crc=6))
    other = bench.producer("q")
    other.deliver(other.next(group_id="same", crc=5))
    assert bench.pressure().ledger.accepted == 2, "the same contents under the same id are the same group"


def test_a_group_that_is_known_by_its_id_gives_leave_to_begin_another() -> None:
    bench = Bench(config(e={"pacing": True}))
    old = bench.producer()
    old.deliver(old.next(group_id="same", crc=5))
    new = bench.producer()
    bench.tick()
    before = new.sync().start_limit
    new.deliver(new.next(group_id="same", crc=5))
    bench.tick()
    assert new.sync().start_limit == before + 1


def test_a_subscription_gets_the_acks_of_its_producer_or_of_all() -> None:
    bench = Bench()
    for name in ("p", "p-1", "q"):
        bench.producer(name)
    sessions = bench.core._state.sessions

    def listening(topic: bytes) -> list[str]:
        return sorted(session.producer for session in sessions.listening(topic))

    assert listening(topics.ack("p")) == ["p"]
    assert listening(topics.ack("nobody")) == []
    assert listening(b"ack.p") == ["p", "p-1"]
    assert listening(b"ack.") == listening(b"") == ["p", "p-1", "q"]
    assert listening(b"ack.\xff/") == listening(b"step") == []
