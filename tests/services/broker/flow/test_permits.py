from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.services.broker.bench import Bench, Peer, config

from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.wire.control import (
    Disconnect,
    JournalStatus,
    SetValues,
    ValuesSet,
    WorkerBeat,
    WorkerState,
)
from rolloutmq.schemas.wire.envelope import ErrorCode, Split
from rolloutmq.schemas.wire.replies import Ack, Batch, Ok, Registered, Wait
from rolloutmq.schemas.wire.requests import Goodbye, RegisterProducer
from rolloutmq.services.broker.flow import permits
from rolloutmq.services.broker.flow.credit_windows import OPEN_WINDOW
from rolloutmq.services.broker.flow.sessions import ProducerSession


def paced(*, batch: int = 16, broker: dict[str, float] | None = None, **envs: int) -> Bench:
    """Configure environments with pacing and groups of 4; the value is `max_staleness`."""
    given = {name: {"pacing": True, "max_staleness": s} for name, s in (envs or {"e": 1}).items()}
    return Bench(config(broker=broker, batch=batch, **given))


def starts(bench: Bench) -> list[int]:
    return [lane.granted for lane in bench.pressure().lanes]


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
        for step in range(12):
            ack = peer.sync()
            begun += [step] * (ack.start_limit - len(begun))
            for _ in range(4):
                peer.send(step=begun[peer.seq])
            bench.train(step, 16)
            bench.tick()
        assert bench.pressure().staleness_max == staleness
        assert bench.pressure().ledger.expired == 0


@pytest.mark.parametrize(("enabled", "wait"), [(True, Wait.NONE), (False, Wait.STALE_GUARD)])
def test_the_evaluation_of_a_held_out_environment_waits_for_no_step(enabled: bool, wait: Wait) -> None:
    """A trainer that pulls such an environment itself is paced as before."""
    tree = config(batch=16, e={}, exam={"pacing": True, "split": "eval", "max_staleness": 0}).model_dump()
    tree["trainer"]["enabled"] = enabled
    bench = Bench(RunConfig.model_validate({**tree, "evaluation": {"enabled": enabled}}))
    peer = bench.producer(env="exam", split=Split.EVAL, slots=99)
    assert (peer.sync().wait, bench.pressure().lanes[0].wait) == (wait, wait.value.replace("none", ""))
    assert (peer.sync().start_limit > 16) is enabled


def test_without_pacing_only_the_marks_bind() -> None:
    bench = Bench()
    peer = bench.producer()
    assert peer.sync().start_limit == OPEN_WINDOW
    peer.send(200)
    assert peer.sync().start_limit > OPEN_WINDOW


def test_without_pacing_a_window_is_filled_when_half_of_it_is_used() -> None:
    bench = Bench()
    peer = bench.producer()
    assert starts(bench) == [OPEN_WINDOW]
    peer.send(OPEN_WINDOW // 2 - 1)
    assert starts(bench) == [OPEN_WINDOW // 2 + 1]
    peer.send()
    assert starts(bench) == [OPEN_WINDOW]


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


@pytest.mark.parametrize("pacing", [False, True])
def test_each_of_many_producers_has_permits_at_once_and_the_others_follow(
    pacing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "MANY", 3)
    bench = Bench(config(batch=64, e={"pacing": pacing, "max_staleness": 4}))
    asked = [RegisterProducer(producer=f"p-{number}", env="e", group_size=4, slots=2) for number in range(6)]
    granted = [bench.ask(request, Registered).ack.start_limit for request in asked]
    assert min(granted) >= 2, "with the answer"
    bench.tick(1.1)
    assert bench.pressure().lanes[0].granted == sum(granted)


def test_of_many_producers_those_that_come_late_get_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permits, "MANY", 3)
    bench = paced(e=0)  # 4 rollouts
    peers = []
    for number in range(6):
        peers.append(bench.producer(f"p-{number}", slots=1))
        assert starts(bench) == [min(4, number + 1)], "without a tick"
    bench.tick(1.1)
    acks = [peer.sync() for peer in peers]
    assert [(ack.start_limit, ack.wait) for ack in acks[4:]] == 2 * [(0, Wait.STALE_GUARD)]


@pytest.mark.parametrize("pacing", [False, True])
def test_of_many_producers_one_that_fails_always_does_not_keep_the_permits(
    pacing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permits, "MANY", 3)
    marks = {} if pacing else {"high_groups": 4}
    bench = Bench(config(broker=marks, batch=16, e={"pacing": pacing, "max_staleness": 0}))
    broken = [bench.producer(f"broken-{number}", slots=2) for number in range(2)]
    sound = [bench.producer(f"sound-{number}", slots=2) for number in range(2)]
    bench.tick()
    for count in range(1, 20):
        for peer in broken:
            peer.sync(abandoned=min(count, peer.sync().start_limit))
        bench.tick()
    assert min(peer.sync().start_limit for peer in sound) >= 1


def test_of_many_producers_the_others_soon_have_the_permits_of_one_that_pauses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(permits, "MANY", 2)
    bench = paced(e=0)
    first, second = (bench.producer(name, slots=4) for name in ("p", "q"))
    bench.tick()
    assert [peer.sync().start_limit for peer in (first, second)] == [4, 0]
    first.sync(paused=True)
    assert bench.core.next_deadline(bench.now) <= bench.now, "in this round"
    bench.tick(0.0)
    assert second.sync().start_limit == 4


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
    bench.tick()
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
    """The other one is silent: its share must not make the trainer wait for ever."""
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


def test_the_others_get_the_permits_of_a_producer_that_pauses() -> None:
    """A worker behind a firewall kept the permits of its lane, and the others starved."""
    bench = paced(e=0)
    first = bench.producer(slots=99)
    assert first.sync().start_limit == 4
    second = bench.producer("q", slots=99)
    assert second.sync().start_limit == 0
    ack = first.sync(begun=1, paused=True)
    assert (ack.start_limit, ack.wait) == (1, Wait.NONE), "the rollout in hand keeps its permit"
    assert second.sync().start_limit == 3
    first.send()
    second.send(3)
    bench.consumer()
    bench.train(0, 16)
    bench.tick()
    assert (first.sync(begun=1, paused=True).start_limit, second.sync().start_limit) == (1, 7)
    second.send(4, step=1)
    assert first.sync(begun=1).start_limit == 1
    bench.train(1, 16)
    bench.tick()
    assert first.sync(begun=1).start_limit > 1, "it goes on"


def test_a_producer_that_pauses_counts_what_it_abandoned_before_its_limit_falls() -> None:
    """Else its limit would be below what it has begun for ever, and it would never start again."""
    bench = paced(e=0)
    peer = bench.producer(slots=99)
    assert peer.sync().start_limit == 4
    assert peer.sync(4, begun=4, paused=True).start_limit == 4
    assert starts(bench) == [0]
    assert peer.sync(4, begun=4).start_limit == 8


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
    bench = Bench(config())
    for weight in (float("nan"), float("inf")):
        request = RegisterProducer(producer="p", env="new", weight=weight)
        assert bench.refused(request) is ErrorCode.INVALID
    peer = bench.producer("p", "new", weight=0.0, min_share=0.5, slots=1 << 20)
    assert isinstance(peer, Peer)
    assert isinstance(peer.sync(), Ack)


PEERS = {"p": ("a", 9), "q": ("b", 2), "r": ("b", 2)}
"""Environment and slots of each producer."""


def _never(session: ProducerSession) -> bool:
    del session
    return False


class Pair:
    """The same traffic at a broker that knows when an arrival frees no permit, and at one that paces at each."""

    def __init__(self) -> None:
        self.both = [paced(batch=12, a=0, b=2), paced(batch=12, a=0, b=2)]
        self.both[1].core._state.permits._frees_none = _never  # type: ignore[method-assign]
        self.peers: list[dict[str, Peer]] = [{}, {}]
        self.abandoned = self.changes = 0
        self.step = [0, 0]
        for bench in self.both:
            bench.shadowed = False
            bench.consumer()
        for name in PEERS:
            self.register(name)
        self.tick()

    def register(self, name: str = "r") -> None:
        env, slots = PEERS[name]
        for bench, peers in zip(self.both, self.peers, strict=True):
            peers[name] = bench.producer(name, env, slots=slots)

    def send(self, name: str, groups: int, sequences: int, *, known: bool) -> None:
        same: dict[str, Any] = {"group_id": "same", "crc": 1} if known else {}
        for bench, peers in zip(self.both, self.peers, strict=True):
            session = bench.core._state.sessions.current(name)
            assert session is not None
            peers[name].send(min(groups, session.starts_out), sequences=sequences, **same)

    def train(self) -> None:
        for index, bench in enumerate(self.both):
            got = bench.pull(self.step[index], 12)
            if isinstance(got, Batch):
                bench.settle(got)
                self.step[index] += 1

    def abandon(self) -> None:
        self.abandoned += 1
        for peers in self.peers:
            peers["q"].sync(self.abandoned)

    def pause(self) -> None:
        for peers in self.peers:
            peers["q"].sync(self.abandoned, paused=True)
            peers["q"].sync(self.abandoned)

    def change_staleness(self) -> None:
        self.changes += 1
        for bench in self.both:
            bench.ask(SetValues(values={"env.a.max_staleness": self.changes % 3}), ValuesSet)

    def stall(self) -> None:
        for bench in self.both:
            bench.core.journaled(JournalStatus(health="slow"), bench.now)
            bench.core.journaled(JournalStatus(health="ok"), bench.now)

    def tick(self) -> None:
        for bench in self.both:
            bench.tick()

    def grant_all(self) -> None:
        """Let the time of `pace_all` come: then the reasons of the waits are the same, too."""
        for bench in self.both:
            bench.tick(0.05)
        self.compare("wait")

    def compare(self, *names: str) -> None:
        one, other = (
            [
                [
                    session.producer,
                    session.start_limit,
                    session.lane.granted,
                    *(getattr(session, n) for n in names),
                ]
                for session in bench.core._state.sessions
            ]
            for bench in self.both
        )
        assert one == other


SEND = st.tuples(st.sampled_from([*PEERS]), st.integers(1, 5), st.sampled_from([4, 4, 4, 2]), st.booleans())
ACT = st.sampled_from(
    [Pair.train, Pair.train, Pair.abandon, Pair.register, Pair.pause, Pair.change_staleness, Pair.stall, Pair.tick,
     Pair.grant_all]
)  # fmt: skip


@given(st.lists(st.one_of(SEND, ACT), max_size=40))
@settings(max_examples=100, deadline=None)
def test_no_permit_that_an_arrival_frees_is_granted_later(acts: list[Any]) -> None:
    pair = Pair()
    for act in acts:
        if isinstance(act, tuple):
            name, groups, sequences, known = act
            pair.send(name, groups, sequences, known=known)
        else:
            act(pair)
        pair.compare()
    pair.grant_all()


def test_a_lane_with_all_its_permits_is_not_paced_for_each_arrival() -> None:
    bench = paced(e=0)
    peer = bench.producer(slots=99)
    bench.tick(0.05)
    peer.send(3)
    assert not bench.core._state.permits_due
    peer.send(sequences=2)
    assert bench.core._state.permits_due, "a smaller group frees a permit"
