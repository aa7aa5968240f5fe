"""The wall clock jumps by an hour: no decision of the broker changes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.faults.support.borders import ENV, LIMIT_S, expect, run_config, small_group, status_of, traffic

from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.wire.control import Pressure
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.replies import Batch, ConsumerRegistered
from rolloutmq.schemas.wire.requests import Pull, RegisterConsumer, Settle
from rolloutmq.services.broker.server import running_broker

HOUR_S = 3600.0


class WallClock:
    """The wall clock of this process, which a test can set."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.offset_s = 0.0
        true, true_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: true() + self.offset_s)
        monkeypatch.setattr(time, "time_ns", lambda: true_ns() + int(self.offset_s * 1e9))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> WallClock:
    return WallClock(monkeypatch)


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


@contextmanager
def _listening(endpoints: Endpoints) -> Iterator[BlockingSubscriber]:
    with BlockingSubscriber(endpoints.events, [topics.PRESSURE]) as subscriber:
        yield subscriber


def _pressures(subscriber: BlockingSubscriber, count: int) -> list[Pressure]:
    found = []
    for _ in range(count):
        event = subscriber.poll(LIMIT_S)
        assert event is not None
        found.append(expect(Pressure, codec.decode_event(event[1])))
    return found


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_lease_and_sessions_outlive_a_jump(layout: RunLayout, clock: WallClock, jump_s: float) -> None:
    """Neither a lease nor a session ends because of the clock."""
    config = run_config(lease_s=30.0, silence_s=30.0, pressure_interval_s=0.02, ack_interval_s=0.02)
    with (
        running_broker(config, layout) as broker,
        Producer.blocking(broker.endpoints.serve, env=ENV, producer="p", group_size=2) as producer,
        Consumer.blocking(broker.endpoints.serve, sequences=2) as consumer,
        _listening(broker.endpoints) as subscriber,
    ):
        producer.send(small_group("before"))
        batch = consumer.pull(1, consumer.version)
        before = status_of(broker.endpoints)
        clock.offset_s = jump_s
        seen = _pressures(subscriber, 20)
        numbers = [pressure.number for pressure in seen]
        assert sorted(numbers) == numbers
        producer.send(small_group("after"))
        assert producer.flush(LIMIT_S)
        batch.ack()
        assert [group.group_id for group in consumer.pull(2, consumer.version).groups] == ["after"]
        after = status_of(broker.endpoints)
    lane = after.pressure.lanes[0]
    assert (lane.producers, after.pressure.ledger.expired, after.pressure.ledger.dead) == (1, 0, 0)
    assert 0.0 <= after.uptime_s - before.uptime_s < LIMIT_S
    assert 0.0 <= lane.oldest_age_s < LIMIT_S
    assert all(0.0 <= waited < 4 * LIMIT_S for waited in after.pressure.waits_s.values())
    assert abs(after.pressure.at - before.pressure.at - jump_s) < LIMIT_S, (
        "the clock that people see did move"
    )


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_lease_ends_in_its_time_all_the_same(layout: RunLayout, clock: WallClock, jump_s: float) -> None:
    """A clock that goes back delays no expiry, and one that goes forward causes none."""
    with (
        running_broker(run_config(lease_s=0.4), layout) as broker,
        Producer.blocking(broker.endpoints.serve, env=ENV, producer="p", group_size=2) as producer,
        BlockingClient(broker.endpoints.serve) as hung,
        Consumer.blocking(broker.endpoints.serve, sequences=2, consumer="other", group="other") as other,
    ):
        producer.send(small_group("g"))
        began = time.monotonic()
        lease = _leased(hung)
        clock.offset_s = jump_s
        batch = other.pull(1, other.version)
        assert 0.4 <= time.monotonic() - began < LIMIT_S
        assert [delivery.deliveries for delivery in batch.deliveries] == [2]
        with pytest.raises(LeaseLostError):
            hung.request(_settle(lease))
        batch.ack()


def _leased(client: BlockingClient) -> Batch:
    """Lease the next group, and show no progress from then on."""
    expect(ConsumerRegistered, client.request(RegisterConsumer(consumer="hung")))
    pull = Pull(consumer="hung", step=1, version=PolicyVersion(), sequences=2, request_id="1", wait_s=LIMIT_S)
    return expect(Batch, client.request(pull, 2 * LIMIT_S, 2 * LIMIT_S))


def _settle(lease: Batch) -> Settle:
    return Settle(
        consumer="hung",
        lease=lease.lease,
        generation=lease.generation,
        version=PolicyVersion(0, 1),
        trained=("g",),
    )


@pytest.mark.parametrize("jump_s", [HOUR_S, -HOUR_S])
def test_restart_after_a_jump_loses_nothing(layout: RunLayout, clock: WallClock, jump_s: float) -> None:
    """Epochs grow even if the clock went back, and groups stay queued, whatever their age by the clock."""
    names = [f"g-{number}" for number in range(4)]
    with running_broker(run_config(), layout) as broker:
        first = broker.endpoints.epoch
        with Producer.blocking(broker.endpoints.serve, env=ENV, producer="p", group_size=2) as producer:
            for name in names:
                producer.send(small_group(name))
    clock.offset_s = jump_s
    with (
        running_broker(run_config(), layout) as broker,
        Consumer.blocking(broker.endpoints.serve, sequences=2) as consumer,
    ):
        assert broker.endpoints.epoch > first
        assert [_trained(consumer) for _ in names] == names
        ledger = status_of(broker.endpoints).pressure.ledger
        assert (ledger.trained, ledger.expired) == (len(names), 0)


def _trained(consumer: BlockingConsumer) -> str:
    batch = next(consumer)
    batch.ack()
    return batch.groups[0].group_id


def test_traffic_goes_on_while_the_clock_jumps_about(layout: RunLayout, clock: WallClock) -> None:
    with running_broker(run_config(), layout) as broker, traffic(broker.endpoints.serve) as good:
        for jump_s in (HOUR_S, -HOUR_S, 24 * HOUR_S, -24 * HOUR_S, 0.0):
            clock.offset_s = jump_s
            good.advance()
        assert status_of(broker.endpoints).rejected_messages == 0
