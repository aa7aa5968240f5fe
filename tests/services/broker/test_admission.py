import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rolloutmq.schemas.control import Drain, WorkerBeat, WorkerState
from rolloutmq.schemas.delivery import Ack, Disconnect, Goodbye, Ok, Wait
from rolloutmq.schemas.errors import ErrorCode
from rolloutmq.services.broker.admission import OPEN_WINDOW
from tests.services.broker.bench import Bench, Peer, config

HIGH = 10_000


def tight(**broker: int) -> Bench:
    return Bench(config(broker={"high_bytes": HIGH, "max_group_bytes": 2000, **broker}, e={}))


def paced(*, batch: int = 16, slots: int = 99, broker: dict[str, float] | None = None, **envs: int) -> Bench:
    """Environments with pacing and groups of 4; the value is `max_staleness`."""
    given = {name: {"pacing": True, "max_staleness": s} for name, s in (envs or {"e": 1}).items()}
    return Bench(config(broker=broker, batch=batch, **given))


def starts(bench: Bench) -> list[int]:
    return [lane.granted for lane in bench.pressure().lanes]


# Bytes


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 2000), st.sampled_from("sssstgr")), max_size=60))
@settings(max_examples=40, deadline=None)
def test_what_is_granted_queued_and_leased_stays_within_the_mark(
    events: list[tuple[int, int, str]],
) -> None:
    bench = tight()
    names = "abcd"
    peers = [bench.producer(name) for name in names]
    limits = dict.fromkeys(names, 0)
    for index, nbytes, what in events:
        peer = peers[index]
        if what == "s":
            ack = peer.sync()
            assert ack.byte_limit >= limits[peer.name]
            limits[peer.name] = ack.byte_limit
            if peer.position + nbytes <= ack.byte_limit:
                peer.send(nbytes=nbytes)
        elif what == "t":
            bench.tick(0.6)
        elif what == "g":
            bench.ask(Goodbye(producer=peer.name, session=peer.session), Ok)
            peers[index] = bench.producer(peer.name)
            limits[peer.name] = 0
        else:
            bench.now += 11.0
        pressure = bench.pressure()
        assert pressure.queued_bytes + pressure.leased_bytes <= HIGH
    assert "beyond_credit" not in bench.status().rejected_by_reason


def test_a_group_beyond_its_credit_is_refused_and_may_come_again() -> None:
    bench = tight()
    peer = bench.producer()
    limit = peer.sync().byte_limit
    while peer.position + 1500 <= limit:
        peer.send(nbytes=1500)
    head = peer.next(nbytes=1500)
    accepted = bench.pressure().ledger.accepted
    while head.position <= peer.sync().byte_limit:
        peer.deliver(head)
        head, accepted = peer.next(nbytes=1500), accepted + 1
    peer.deliver(head)
    assert bench.status().rejected_by_reason == {"beyond_credit": 1}
    bench.consumer()
    step = 0
    while head.position > peer.sync().byte_limit:
        bench.train(step, 4)
        bench.tick(0.6)
        step += 1
    peer.deliver(head)
    assert bench.pressure().ledger.accepted == accepted + 1


def test_a_group_that_can_never_fit_is_refused() -> None:
    bench = tight()
    peer = bench.producer()
    peer.deliver(peer.next(nbytes=2001))
    assert bench.status().rejected_by_reason == {"too_large": 1}


def test_each_newcomer_gets_a_window_however_many_there_are() -> None:
    bench = tight(max_group_bytes=100)
    peers = [bench.producer(f"p{i}") for i in range(40)]
    assert all(peer.sync().byte_limit >= 100 for peer in peers)
    assert sum(peer.sync().byte_limit for peer in peers) <= HIGH


def test_many_idle_producers_do_not_hold_back_one_with_a_large_group() -> None:
    bench = tight()
    peers = [bench.producer(f"p{i}") for i in range(50)]
    large = peers[-1]
    for _ in range(400):
        for peer in peers:
            ack = peer.sync()
        if ack.byte_limit >= 2000:
            break
        bench.tick(0.3)
    large.send(nbytes=2000)
    assert bench.pressure().ledger.accepted == 1


def test_the_grants_of_the_dead_come_back_and_the_revived_lose_nothing() -> None:
    bench = tight()
    peer = bench.producer()
    told = peer.sync()
    bench.tick(10.5)
    assert bench.core._state.admission.granted_bytes == 0
    assert starts(bench) == [0]
    peer.send(nbytes=1000)
    again = peer.sync()
    assert bench.pressure().ledger.accepted == 1
    assert (again.byte_limit >= told.byte_limit, again.start_limit >= told.start_limit) == (True, True)


def test_a_producer_that_drains_gets_room_that_others_do_not() -> None:
    bench = tight()
    busy, leaving = bench.producer("busy"), bench.producer("leaving")
    while busy.position + 500 <= busy.sync().byte_limit:
        busy.send(nbytes=500)
        bench.tick(0.05)
    stuck = leaving.sync().byte_limit
    bench.ask(Drain(worker="leaving"), Ok)
    while leaving.position + 250 <= leaving.sync().byte_limit:
        leaving.send(nbytes=250)
        bench.tick(0.05)
    assert leaving.position > stuck
    assert leaving.position >= 2000


def test_credit_that_is_missing_has_a_reason() -> None:
    bench = tight()
    peer = bench.producer()
    while peer.position + 400 <= peer.sync().byte_limit:
        peer.send(nbytes=400)
        bench.tick(0.2)
    bench.tick(1.0)
    bench.tick(1.0)
    bench.tick(1.0)
    assert peer.sync().wait in {Wait.GLOBAL_FULL, Wait.NO_CREDIT, Wait.NONE}
    assert not bench.core.reading() or bench.pressure().queued_bytes < HIGH


def test_the_mark_in_groups_stops_the_reading() -> None:
    bench = Bench(config(broker={"high_groups": 4}, batch=8, e={}))
    peer = bench.producer()
    assert peer.sync().start_limit == 4
    peer.send(4)
    assert not bench.core.reading()
    assert peer.sync().start_limit == 4
    bench.tick(1.1)
    assert peer.sync().wait is Wait.GLOBAL_FULL
    bench.consumer()
    bench.train(0)
    bench.tick()
    assert bench.core.reading()
    assert peer.sync().start_limit == 6


# Rollouts


@pytest.mark.parametrize(("staleness", "expected"), [(0, 4), (1, 8), (4, 20)])
def test_pacing_bounds_what_lies_between_grant_and_settlement(staleness: int, expected: int) -> None:
    bench = paced(e=staleness)
    peer = bench.producer(slots=99)
    assert peer.sync().start_limit == expected
    peer.send(4)
    assert peer.sync().start_limit == expected
    bench.consumer()
    batch = bench.batch(0, 16)
    bench.tick()
    assert peer.sync().start_limit == expected
    bench.settle(batch)
    bench.tick()
    assert peer.sync().start_limit == expected + 4
    assert peer.sync().wait is Wait.STALE_GUARD


def test_pacing_binds_staleness_exactly() -> None:
    """Rollouts start as soon as they may and arrive in order: the bound is reached and not exceeded."""
    for staleness in (0, 1, 3):
        bench = paced(e=staleness)
        peer = bench.producer(slots=99)
        bench.consumer()
        begun: list[int] = []
        step = 0
        for _ in range(12):
            ack = peer.sync()
            begun += [step] * (ack.start_limit - len(begun))
            for _ in range(4):
                peer.send(step=begun[peer.seq])
            bench.train(step, 16)
            step += 1
            bench.tick()
        assert bench.pressure().staleness_max == staleness
        assert bench.pressure().ledger.expired == 0


def test_without_pacing_only_the_marks_bind() -> None:
    bench = Bench()
    peer = bench.producer()
    assert peer.sync().start_limit == OPEN_WINDOW
    peer.send(200)
    assert peer.sync().start_limit > OPEN_WINDOW


def test_producers_share_a_lane_evenly_within_their_slots() -> None:
    bench = paced(e=4)
    peers = [bench.producer(name, slots=slots) for name, slots in (("a", 2), ("b", 99), ("c", 99))]
    bench.tick(1.1)
    assert [peer.sync().start_limit for peer in peers] == [2, 18, 0]
    for _ in range(3):
        peers[1].send(4)
        bench.consumer()
        bench.train(0, 16)
        bench.tick()
    limits = [peer.sync().start_limit for peer in peers]
    assert limits == [2, 12 + 9, 9], "b delivered 12; what is outstanding is level"


def test_a_rollout_that_was_given_up_is_granted_again() -> None:
    bench = paced(e=0)
    peer = bench.producer(slots=99)
    assert peer.sync().start_limit == 4
    assert peer.sync(abandoned=1).start_limit == 5
    assert peer.sync(abandoned=1).start_limit == 5
    assert peer.sync(abandoned=1 << 62).start_limit == 9


def test_grants_of_the_gone_go_to_the_others() -> None:
    bench = paced(e=0)
    first = bench.producer("a", slots=99)
    second = bench.producer("b", slots=99)
    assert (first.sync().start_limit, second.sync().start_limit) == (4, 0)
    bench.ask(Goodbye(producer="a", session=first.session), Ok)
    assert second.sync().start_limit == 4
    third = bench.producer("c", slots=99)
    for _ in range(12):
        bench.tick(1.0)
        third.sync()
    assert third.sync().start_limit == 4


def test_environments_share_by_weight_and_a_silent_one_gives_way() -> None:
    bench = Bench(
        config(
            broker={"silent_env_s": 5.0, "silence_s": 60.0},
            batch=16,
            a={"pacing": True, "max_staleness": 0, "weight": 3.0},
            b={"pacing": True, "max_staleness": 0, "weight": 1.0},
        )
    )
    bench.producer("pa", "a", slots=99)
    slow = bench.producer("pb", "b", slots=99)
    assert starts(bench) == [4, 1]
    bench.ask(Disconnect(env="a"), Ok)
    bench.tick()
    assert starts(bench) == [4, 4]
    assert slow.sync().start_limit == 4


def test_one_live_environment_can_always_fill_a_batch() -> None:
    """The other one is silent: its share of the budget must not leave the trainer waiting for ever."""
    bench = paced(broker={"silent_env_s": 5.0, "silence_s": 60.0}, a=0, b=0)
    bench.producer("pb", "b", slots=99)
    live = bench.producer("pa", "a", slots=99)
    bench.consumer()
    live.send(live.sync().start_limit)
    assert bench.pressure().queued_sequences == 8
    for _ in range(8):
        bench.tick(1.0)
        live.send(live.sync().start_limit - live.seq)
    bench.batch(0, 16)


def test_groups_smaller_than_announced_do_not_starve_the_trainer() -> None:
    bench = paced(e=0)
    peer = bench.producer(slots=99)
    bench.consumer()
    for _ in range(20):
        peer.send(peer.sync().start_limit - peer.seq, sequences=1)
        bench.tick()
    bench.batch(0, 16)


def test_draining_freezes_what_may_begin() -> None:
    bench = paced(e=0)
    peer = bench.producer(slots=99, pid=5)
    other = bench.producer("q", slots=99)
    before = peer.sync().start_limit
    bench.ask(WorkerBeat(worker="p", env="e", state=WorkerState.DRAINING, pid=5), object)
    peer.send(before)
    bench.consumer()
    bench.train(0, 16)
    bench.tick()
    ack = peer.sync()
    assert (ack.draining, ack.start_limit) == (True, before)
    assert other.sync().start_limit == 4


def test_weights_that_are_no_numbers_are_refused() -> None:
    from rolloutmq.schemas.delivery import RegisterProducer

    bench = Bench(config())
    for weight in (float("nan"), float("inf")):
        request = RegisterProducer(producer="p", env="new", weight=weight)
        assert bench.refused(request) is ErrorCode.INVALID
    peer = bench.producer("p", "new", weight=0.0, min_share=0.5, slots=1 << 20)
    assert isinstance(peer, Peer)
    assert isinstance(peer.sync(), Ack)
