import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.bench import Bench, Peer, config

from rolloutmq.bus.encoding import topics
from rolloutmq.schemas.wire.control import Drain, SetValues, ValuesSet
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Ack, Batch, Ok, Wait
from rolloutmq.schemas.wire.requests import Goodbye, Release
from rolloutmq.services.broker.batches.consumers import POLL_S
from rolloutmq.services.broker.core import GRANT_S
from rolloutmq.services.broker.flow import credits
from rolloutmq.services.broker.flow.credit_windows import MUCH_LARGER, WINDOW_BYTES
from rolloutmq.services.broker.flow.credits import IDLE_S

HIGH = 10_000


def tight(**broker: int) -> Bench:
    return Bench(config(broker={"high_bytes": HIGH, "max_group_bytes": 2000, **broker}, e={}))


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


@pytest.mark.parametrize("wait_s", [0.0, 0.3, 60.0])
def test_a_trainer_that_polls_gets_the_batch_that_needs_the_reserve_as_one_that_waits(wait_s: float) -> None:
    """Nine groups of 1,000 bytes are a batch; 7,500 bytes are the limit unless the trainer is starved."""
    bench = tight()
    peer = bench.producer(slots=99)
    bench.consumer()
    for _ in range(60):
        answers = bench.wait(0, 36, wait_s=wait_s)
        if any(isinstance(reply.message, Batch) for reply in (*answers, *bench.late)):
            break
        if peer.position + 1000 <= peer.sync().byte_limit:
            peer.send(nbytes=1000)
        bench.tick(0.6)
    else:
        pytest.fail(f"no batch: {bench.pressure()}")
    assert bench.pressure().leased_bytes == 9000


def test_the_reserve_is_kept_again_when_nobody_asks_for_a_batch_any_more() -> None:
    bench = tight()
    peer = bench.producer(slots=99)
    bench.consumer()
    assert not isinstance(bench.pull(0, 36), Batch)
    for _ in range(40):
        bench.tick(POLL_S / 4)
        bench.send_beat()
        if peer.position + 1000 <= peer.sync().byte_limit and bench.now > 100.0 + POLL_S:
            peer.send(nbytes=1000)
    assert bench.pressure().queued_bytes == 7000


@pytest.mark.parametrize("leaves", [False, True])
def test_a_trainer_that_got_its_batch_or_left_is_not_hungry(leaves: bool) -> None:
    bench = tight()
    peer = bench.producer(slots=99)
    bench.consumer()
    assert not isinstance(bench.pull(0, 8), Batch)
    assert bench.core._state.consumers.any_unserved
    if leaves:
        bench.ask(Release(consumer="c"), Ok)
    else:
        peer.send(2)
        bench.settle(bench.batch(0, 8))
    assert not bench.core._state.consumers.any_unserved


def test_evaluation_has_room_while_the_queue_is_full_and_the_trainer_waits_for_it() -> None:
    bench = tight()
    training = bench.producer(slots=99)
    for _ in range(40):
        bench.tick(0.6)
        if training.position + 1000 <= training.sync().byte_limit:
            training.send(nbytes=1000)
    full = bench.pressure().queued_bytes
    bench.tick(0.6)
    assert training.position + 1000 > training.sync().byte_limit
    evaluating = bench.producer("v", split=Split.EVAL, slots=4)
    bench.consumer("x", group="evaluator")
    for step in range(9):
        bench.tick(0.6)
        evaluating.sync()
        assert evaluating.position + 1000 <= evaluating.sync().byte_limit, "the reserve is for it, too"
        evaluating.send(nbytes=1000)
        bench.settle(bench.batch(step, 1, split=Split.EVAL, consumer="x", group="evaluator"), consumer="x")
    assert bench.pressure().queued_bytes == full


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
    peers = [bench.producer(f"p{i}") for i in range(30)]
    assert all(peer.sync().byte_limit >= 100 for peer in peers)
    assert sum(peer.sync().byte_limit for peer in peers) <= HIGH


def test_the_first_ones_do_not_keep_what_is_due_to_the_later_ones() -> None:
    bench = Bench()
    peers = [bench.producer(f"p{i}") for i in range(64)]
    for peer in peers:
        peer.send(nbytes=1 << 20)
    assert bench.status().rejected_messages == 0
    assert bench.pressure().ledger.accepted == 64


def test_many_idle_producers_do_not_hold_back_one_with_a_large_group() -> None:
    bench = tight()
    peers = [bench.producer(f"p{i}") for i in range(50)]
    large = peers[-1]
    for _ in range(400):
        if large.sync().byte_limit >= 2000:
            break
        bench.tick(0.3)
        for peer in peers if bench.now % 3 < 0.3 else ():
            peer.sync()
    large.send(nbytes=2000)
    assert bench.pressure().ledger.accepted == 1


def test_room_that_idle_producers_hold_goes_round() -> None:
    bench = tight()
    bench.consumer()
    peers = [bench.producer(f"p{i}") for i in range(8)]
    for step, peer in enumerate(peers):
        while peer.position + 1500 > peer.sync().byte_limit:
            bench.tick(0.1)
        peer.send(nbytes=1500, step=step)
        bench.send_beat()
        bench.train(step, 4)
    bench.tick(0.2)
    began = bench.now
    while any(peer.sync().byte_limit < peer.position + 1500 for peer in peers):
        bench.tick(0.1)
        assert bench.now < began + 3.0


def test_the_grants_of_the_dead_come_back_and_the_revived_lose_nothing() -> None:
    bench = tight()
    peer = bench.producer()
    told = peer.sync()
    bench.tick(10.5)
    assert bench.core._state.credits.granted_bytes == 0
    assert bench.pressure().lanes[0].granted == 0
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


def marked(*, mark: int = 2000, **broker: int) -> Bench:
    """Configure environment `e` with a mark of its own, and `f` without."""
    given = {"high_bytes": HIGH, "max_group_bytes": 1000, **broker}
    return Bench(config(broker=given, e={"high_bytes": mark, "stale": "pass"}, f={"stale": "pass"}))


def push(peer: Peer, nbytes: int, patience_s: float = 3.0) -> bool:
    """Deliver one more group as a client does, and resend it if it is refused; False if it does not get in."""
    head = peer.next(nbytes=nbytes)
    until = peer.bench.now + patience_s
    while peer.bench.now < until:
        if head.position <= peer.sync().byte_limit:
            peer.deliver(head)
            if peer.sync().cumulative >= head.seq:
                return True
        peer.bench.tick(0.3)
    peer.seq, peer.position = peer.seq - 1, peer.position - nbytes
    return False


def fill(peer: Peer, nbytes: int = 200) -> None:
    """Send until no group gets in any more."""
    while push(peer, nbytes):
        pass


def test_a_full_lane_holds_its_own_producers_and_nobody_else() -> None:
    bench = marked()
    full, other = bench.producer("p", "e"), bench.producer("q", "f")
    fill(full)
    late = bench.producer("late", "e")
    lane, free = bench.pressure().lanes
    assert lane.queued_bytes == lane.high_bytes == 2000
    assert (full.sync().wait, lane.wait, lane.waiting) == (Wait.LANE_FULL, "lane_full", 2)
    assert (late.sync().byte_limit, late.sync().start_limit) == (0, 0), "neither credit nor permits"
    assert bench.core.reading()
    assert (other.sync().wait, free.wait) == (Wait.NONE, "")
    before = other.sync().start_limit
    other.send(before // 2 + 1, nbytes=2)
    assert bench.status().rejected_messages == 0
    assert other.sync().start_limit > before


def test_a_lane_gets_credit_again_as_its_groups_are_settled() -> None:
    bench = marked()
    peer = bench.producer("p", "e")
    fill(peer)
    sent = peer.seq
    bench.consumer()
    bench.train(0)
    fill(peer)
    assert peer.seq == sent + 2
    assert bench.pressure().lanes[0].queued_bytes == 2000


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 700), st.sampled_from("ssstcr")), max_size=60))
@settings(max_examples=40, deadline=None)
def test_what_a_lane_holds_stays_within_its_mark_and_the_trainer_never_waits_for_ever(
    events: list[tuple[int, int, str]],
) -> None:
    bench = marked()
    bench.shadowed = False
    bench.consumer()
    peers = [bench.producer(f"p{i}", "ef"[i % 2]) for i in range(4)]
    step = 0
    for index, nbytes, what in events:
        peer = peers[index]
        if what == "s" and peer.position + nbytes <= peer.sync().byte_limit:
            peer.send(nbytes=nbytes)
        elif what == "t":
            bench.tick(0.6)
        elif what == "c" and isinstance(batch := bench.pull(step), Batch):
            bench.settle(batch)
            step += 1
        elif what == "r":
            bench.now += 11.0
            bench.consumer()
        assert bench.pressure().lanes[0].held_bytes <= 2000
    bench.consumer()
    for _ in range(200):
        if isinstance(batch := bench.pull(step), Batch):
            break
        bench.tick(0.3)
        for peer in peers:
            if peer.position + 700 <= peer.sync().byte_limit:
                peer.send(nbytes=700)
    else:
        raise AssertionError("no batch comes together")


def test_many_producers_of_a_marked_lane_take_turns_with_large_groups() -> None:
    bench = marked(mark=2000)
    peers = [bench.producer(f"p{i}", "e") for i in range(30)]
    bench.consumer()
    step = 0
    for number in range(60):
        assert push(peers[number % 30], 1000 if number % 3 else 300, patience_s=60.0)
        bench.send_beat()
        if isinstance(batch := bench.pull(step), Batch):
            bench.settle(batch)
            step += 1


@pytest.mark.parametrize("mark", [2000, 0])
def test_a_drain_out_of_a_full_lane_and_a_full_broker_ends(mark: int) -> None:
    """No trainer pulls and every producer pushes; the draining one still empties its whole spool."""
    bench = marked(mark=mark)
    leaving = bench.producer("leaving", "e")
    others = [bench.producer("p", "e"), bench.producer("q", "f")]
    for peer in (*others, leaving):
        fill(peer)
    held = bench.pressure().queued_bytes
    assert not push(leaving, 120)
    bench.ask(Drain(worker="leaving"), Ok)
    for _ in range(20):
        assert push(leaving, 120)
    assert bench.pressure().queued_bytes == held + 2400 <= HIGH
    bench.ask(Goodbye(producer="leaving", session=leaving.session), Ok)


def test_a_lowered_mark_of_a_lane_takes_grants_back_and_drops_nothing() -> None:
    bench = marked(mark=0)
    peers = [bench.producer(f"p{i}", "e") for i in range(3)]
    for peer in peers:
        peer.send(3, nbytes=300)
    bench.ask(SetValues(values={"env.e.high_bytes": 1500}), ValuesSet)
    lane = bench.pressure().lanes[0]
    assert (lane.queued_bytes, bench.pressure().granted_bytes) == (2700, 0)
    bench.consumer()
    for step in range(4):
        bench.train(step)
    fill(peers[0], 300)
    assert bench.pressure().lanes[0].queued_bytes == 1500


def test_what_one_producer_has_under_way_is_a_window_however_alone_it_is() -> None:
    bench = Bench(config(broker={"high_bytes": 1 << 40}, e={}, f={}))
    flood, quiet = bench.producer("flood", "e"), bench.producer("quiet", "f")
    nbytes = WINDOW_BYTES // 16
    assert flood.sync().byte_limit == WINDOW_BYTES
    flood.send(16, nbytes=nbytes)
    assert flood.sync().byte_limit <= flood.position + WINDOW_BYTES
    quiet.send()
    bench.published.clear()
    bench.tick()
    acks = {published.topic for published in bench.published if isinstance(published.message, Ack)}
    assert acks == {topics.ack("flood"), topics.ack("quiet")}, "both in the same round"


def in_line() -> tuple[Bench, Peer]:
    """Return a producer of small groups that has used its credit and is queued; its window is five groups."""
    bench = Bench(config(broker={"high_bytes": HIGH, "max_group_bytes": 500}, e={}))
    bench.shadowed = False
    peer = bench.producer()
    peer.send(nbytes=100)
    while peer.position + 100 <= peer.sync().byte_limit:
        peer.send(nbytes=100)
        bench.tick(GRANT_S)
    assert peer.sync().byte_limit == peer.position
    return bench, peer


def test_what_is_settled_goes_to_the_line_at_once_if_it_is_worth_an_ack() -> None:
    bench, peer = in_line()
    bench.consumer()
    bench.train(0)
    bench.tick()
    assert peer.sync().byte_limit == peer.position, "two groups are not worth one"
    bench.tick(GRANT_S)
    assert peer.sync().byte_limit == peer.position + 200, "in time all is given"
    peer.send(2, nbytes=100)
    bench.train(1)
    bench.train(2)
    bench.tick()
    assert peer.sync().byte_limit == peer.position + 400


def test_who_was_topped_up_does_not_hold_back_the_others_besides() -> None:
    """The spare is reserved for one stalled producer; while one has it, it is not reserved a second time."""
    bench = Bench(config(broker={"high_bytes": HIGH, "max_group_bytes": 3000}, e={}))
    stalled, busy = bench.producer("stalled"), bench.producer("busy")
    bench.tick(0.6)
    while bench.pressure().granted_bytes < 3000 + 1000:
        bench.tick(GRANT_S)
    assert stalled.sync().byte_limit == 3000
    before = busy.seq
    for _ in range(8):
        assert busy.position + 300 <= busy.sync().byte_limit
        busy.send(nbytes=300)
    assert busy.seq == before + 8


def test_one_that_is_stalled_gets_a_little_more_before_it_gets_all() -> None:
    """An announced limit never falls: idle producers with the largest limit could all push in later."""
    bench = Bench(config(broker={"high_bytes": 40_000, "max_group_bytes": 20_000}, e={}))
    bench.shadowed = False
    bench.consumer()
    peers = [bench.producer(f"p{i}") for i in range(20)]
    for peer in peers:
        peer.send(nbytes=100)
    bench.batch()
    early = _limits_after(15, peers[10:])
    assert max(early) == 100 + MUCH_LARGER * 100
    assert max(_limits_after(20, peers[10:])) == 100 + 20_000, "in the end it may send any group"


def test_one_whose_window_is_larger_than_a_little_more_gets_all_at_once() -> None:
    """Its next group exceeds its window, so the size of earlier groups would not help it."""
    large = 20 << 20
    bench = Bench(config(broker={"high_bytes": 128 << 20, "max_group_bytes": large}, e={}))
    bench.consumer()
    bench.producer("p").send(nbytes=100)
    new = bench.producer("q")
    assert MUCH_LARGER * 100 < WINDOW_BYTES
    assert max(_limits_after(3, [new])) >= large


def _limits_after(turns: int, peers: list[Peer]) -> list[int]:
    for _ in range(turns):
        peers[0].bench.send_beat()
        peers[0].bench.tick(1.1)
        limits = [peer.sync().byte_limit for peer in peers]
    return limits


def test_permits_of_a_producer_that_was_silent_are_no_way_past_the_mark_in_groups() -> None:
    bench = Bench(config(broker={"high_groups": 4, "silence_s": 10.0}, batch=8, e={}))
    silent = bench.producer("p")
    bench.tick(11.0)
    bench.producer("q").send(4)
    silent.sync()
    late = [silent.next() for _ in range(4)]
    for head in late:
        silent.deliver(head)
    assert bench.pressure().queued_groups == 4
    assert silent.sync().cumulative == 0
    bench.consumer()
    bench.train(0)
    for head in late[:2]:
        silent.deliver(head)
    assert silent.sync().cumulative == 2


@pytest.mark.parametrize(("many", "idle_s"), [(4, 16.0), (64, IDLE_S)])
def test_among_many_a_producer_is_idle_after_several_of_its_usual_pauses(
    many: int, idle_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, its group was refused for want of room, and came again, as those of all others."""
    monkeypatch.setattr(credits, "MANY", many)
    bench = tight()
    bench.consumer()
    peers = [bench.producer(f"p-{number}") for number in range(8)]
    for step in range(6):
        for peer in peers:
            bench.tick(0.5)
            peer.send(nbytes=100, step=step)
        bench.send_beat()
        bench.train(step, 32)
    assert bench.core._state.credits._idle_s == pytest.approx(idle_s, rel=0.3)


def test_who_was_refused_for_want_of_room_is_told_so_until_there_is_some() -> None:
    bench = tight()
    bench.consumer()
    idle, busy = (bench.producer(name) for name in ("idle", "busy"))
    idle.send(nbytes=1000)
    for _ in range(20):
        while busy.position + 1000 <= busy.sync().byte_limit:
            busy.send(nbytes=1000)
        bench.tick(0.6)
    session = bench.core._state.sessions.current("idle")
    assert session is not None
    while not bench.status().rejected_by_reason:
        session.promised_bytes = session.window.nbytes + 2000  # promised once, and reclaimed
        idle.send(nbytes=2000)
    assert bench.status().rejected_by_reason == {"no_room": 1}
    bench.tick(GRANT_S)
    assert idle.sync().wait is Wait.GLOBAL_FULL
    bench.train(0, 16)
    bench.tick(GRANT_S)
    bench.tick(GRANT_S)
    assert idle.sync().wait is Wait.NONE
