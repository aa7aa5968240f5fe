"""Live settings: all or none, in force at once, kept by a restart, and no group is dropped."""

import pytest
from tests.services.broker.bench import Bench, config

from rolloutmq.schemas.config.orchestrator import OrchestratorConfig
from rolloutmq.schemas.wire.control import Reset, Setting, SettingStatus, SetValues, ValueRefused, ValuesSet
from rolloutmq.schemas.wire.replies import Batch, NoBatch, Ok, Wait
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.stored_group import BodyMemory


def change(bench: Bench, **values: Setting) -> dict[str, Setting]:
    """Set values; `e__weight` is `env.e.weight`, `broker__lease_s` is `broker.lease_s`."""
    keys = {_key(name): value for name, value in values.items()}
    return bench.ask(SetValues(values=keys), ValuesSet).values


def refused(bench: Bench, **values: Setting) -> ValueRefused:
    return bench.ask(SetValues(values={_key(name): value for name, value in values.items()}), ValueRefused)


def _key(name: str) -> str:
    section, _, field = name.partition("__")
    return f"broker.{field}" if section == "broker" else f"env.{section}.{field}"


def changes(bench: Bench) -> dict[str, tuple[Setting, Setting]]:
    return {one.key: (one.configured, one.now) for one in bench.status().changed}


def test_several_values_change_at_once_and_status_tells_what_differs() -> None:
    bench = Bench(config(e={}, f={}))
    assert change(bench, e__weight=2, f__min_share=0.25, broker__lease_s=60) == {
        "environment.e.weight": 2.0,
        "environment.f.min_share": 0.25,
        "broker.lease_s": 60.0,
    }
    assert changes(bench) == {
        "environment.e.weight": (1.0, 2.0),
        "environment.f.min_share": (0.0, 0.25),
        "broker.lease_s": (120.0, 60.0),
    }
    change(bench, e__weight=1)
    assert "environment.e.weight" not in changes(bench)


def test_bounds_of_workers_are_told_to_the_orchestrator_also_after_a_restart() -> None:
    settings = config(e={}).model_copy(update={"orchestrator": OrchestratorConfig()})
    bench = Bench(settings)
    assert bench.pressure().settings == {}
    keys: dict[str, Setting] = {"env.e.max_workers": 9, "orchestrator.max_processes": 12}
    bench.ask(SetValues(values={**keys, "env.e.weight": 2}), ValuesSet)
    told = {"environment.e.max_workers": 9, "orchestrator.max_processes": 12}
    assert bench.pressure().settings == told
    bench.ask(SetValues(values={"env.e.min_workers": 10}), ValueRefused)
    bench.restart()
    assert bench.pressure().settings == told


def test_one_bad_value_of_several_changes_nothing() -> None:
    bench = Bench(config(e={}))
    bench.producer()
    refusal = refused(bench, e__weight=2, e__min_share=7)
    assert refusal.key == "environment.e.min_share"
    assert "less than or equal to 1 (got 7)" in refusal.reason
    assert changes(bench) == {}
    assert bench.pressure().lanes[0].weight == 1.0


def test_a_restart_keeps_what_was_changed_by_fact_and_by_snapshot() -> None:
    bench = Bench(config(e={}, f={}))
    bench.producer()
    change(bench, e__weight=2, e__stale="pass", broker__high_groups=50)
    change(bench, e__weight=3)
    before = changes(bench)
    for _ in range(2):  # the first life reads events, the second one a snapshot
        bench.restart()
        assert changes(bench) == before
        assert bench.pressure().lanes[0].weight == 3.0
        assert bench.pressure().high_groups == 50


def test_what_was_changed_wins_over_a_configuration_that_was_changed_since() -> None:
    bench = Bench(config(e={}))
    change(bench, e__weight=2, e__min_share=0.5)
    later = bench.reborn(config(e={"weight": 5.0}))
    assert later.status().changed[0] == SettingStatus(key="environment.e.weight", configured=5.0, now=2.0)


def test_what_a_producer_tells_gives_way_to_what_was_set_and_only_to_that() -> None:
    bench = Bench(config(e={}))
    bench.producer("p", "brought", weight=4.0, min_share=0.1)
    change(bench, brought__weight=2)
    bench.producer("q", "brought", weight=7.0, min_share=0.2)
    for _ in range(3):
        lane = next(lane for lane in bench.pressure().lanes if lane.env == "brought")
        assert (lane.weight, lane.min_share) == (2.0, 0.2)
        bench.restart()


def test_a_reset_keeps_the_settings() -> None:
    bench = Bench(config(e={}))
    bench.producer()
    change(bench, e__weight=2)
    bench.ask(Reset(), Ok)
    bench.producer()
    assert bench.pressure().lanes[0].weight == 2.0


def test_weights_are_in_force_with_the_next_batch() -> None:
    bench = Bench(config(batch=16, e={"stale": "pass"}, f={"stale": "pass"}))
    e, f = bench.producer("p", "e"), bench.producer("q", "f")
    e.send(40)
    f.send(40)
    bench.consumer()

    def of_e(step: int) -> int:
        batch = bench.batch(step, 16)
        bench.settle(batch)
        return sum(group.env == "e" for group in batch.groups)

    assert [of_e(step) for step in range(2)] == [2, 2]
    change(bench, e__weight=3)
    assert [of_e(step) for step in range(2, 6)] == [3, 3, 3, 3]


def test_a_larger_bound_of_staleness_lets_rollouts_begin_at_once() -> None:
    bench = Bench(config(batch=16, e={"pacing": True, "max_staleness": 0}))
    peer = bench.producer(slots=99)
    assert peer.sync().start_limit == 4
    change(bench, e__max_staleness=2)
    assert peer.sync().start_limit == 12
    change(bench, e__max_staleness=0)
    assert peer.sync().start_limit == 12, "announced limits never fall"
    change(bench, e__pacing=False)
    bench.tick()
    assert peer.sync().start_limit > 12


def test_stale_groups_are_passed_on_from_now_on_and_the_order_follows() -> None:
    bench = Bench(config(e={"max_staleness": 0}))
    peer = bench.producer()
    peer.send(2, step=5)
    peer.send(2, step=0)
    bench.consumer()
    change(bench, e__stale="pass")
    first = bench.batch(5)
    assert [group.header.oldest.step for group in first.groups] == [5, 5], "as they came"
    bench.settle(first)
    second = bench.batch(6)
    assert bench.pressure().ledger.expired == 0
    bench.settle(second)
    peer.send(2, step=0)
    change(bench, e__stale="drop")
    assert isinstance(bench.pull(7), NoBatch)
    assert bench.pressure().ledger.expired == 2


def test_a_shorter_wait_answers_the_pull_that_waits() -> None:
    bench = Bench(config(broker={"exact_wait_s": 500.0}, e={}))
    bench.producer().send(4, sequences=3)
    bench.consumer()
    assert bench.wait(0, 10) == []
    bench.now += 2.0
    replies = bench.send(SetValues(values={"broker.exact_wait_s": 1.0}), (b"set",))
    assert {type(reply.message) for reply in replies} == {Batch, ValuesSet}


@pytest.mark.parametrize("mark", ["broker__high_bytes", "e__high_bytes"])
def test_a_mark_below_what_is_held_drops_nothing(mark: str) -> None:
    bench = Bench(config(broker={"high_bytes": 10_000, "max_group_bytes": 1000}, e={"stale": "pass"}))
    peer = bench.producer()
    peer.send(40)
    limit = peer.sync().byte_limit
    change(bench, **{mark: 1000})
    assert bench.pressure().ledger.queued == 40
    assert bench.pressure().granted_bytes == 0
    assert peer.sync().byte_limit == limit, "announced limits never fall"
    head = peer.next()
    peer.deliver(head)
    assert bench.status().rejected_by_reason == {"no_room": 1}
    bench.tick(2.0)
    assert peer.sync().wait is (Wait.LANE_FULL if mark == "e__high_bytes" else Wait.GLOBAL_FULL)
    bench.consumer()
    for step in range(18):
        bench.train(step)
        bench.tick(0.6)
    peer.deliver(head)
    assert bench.pressure().ledger.queued == 5
    assert bench.core.reading()


def test_a_mark_that_cannot_hold_what_is_known_of_the_groups_is_refused() -> None:
    bench = Bench(config(broker={"high_bytes": 10_000, "max_group_bytes": 3000}, e={}))
    bench.producer().send(2, nbytes=2000)
    assert "must hold its part of a batch, 4000 bytes" in refused(bench, e__high_bytes=3000).reason
    assert (
        "must hold the largest group that producers may send, 3000"
        in refused(bench, broker__high_bytes=2000).reason
    )
    change(bench, e__high_bytes=4000)


def test_memory_is_given_back_at_once() -> None:
    ram = BodyMemory(1 << 20)
    core = BrokerCore(config(e={}), epoch=1, ram=ram)
    core.request((b"r",), SetValues(values={"broker.ram_bytes": 1000}), 0.0, 0.0)
    assert ram.budget_bytes == 1000


def test_bounds_of_time_are_in_force_at_once() -> None:
    bench = Bench(config(e={}))
    peer = bench.producer()
    peer.send(4)
    bench.consumer()
    bench.batch(0)
    change(bench, broker__lease_s=5, broker__silence_s=100)
    bench.tick(6.0)
    assert bench.pressure().ledger.leased == 0, "no progress for longer than the lease"
    assert bench.pressure().lanes[0].producers == 1
    change(bench, broker__silence_s=2)
    bench.tick(1.1)
    assert bench.pressure().lanes[0].producers == 0
