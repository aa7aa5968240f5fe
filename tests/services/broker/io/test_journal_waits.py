"""A trainer that waits for the disk: its batch and its settlement are reported once the journal has written them."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tests.services.broker.bench import Bench
from tests.trainer.support.toy import some_group

from rolloutmq import Consumer, PolicyVersion, Producer
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.control import GetStatus, Pressure, StatusReply
from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.schemas.wire.replies import Wait
from rolloutmq.schemas.wire.requests import Commit, Pull, Settle
from rolloutmq.services.broker.actions import Reply
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.server import running_broker

LIMIT_S = 60.0


class SlowDisk:
    """Syncs of the journal wait while it is shut."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.open.set()
        sync = Disk.fdatasync

        def wait(disk: Disk, fd: int) -> None:
            assert self.open.wait(LIMIT_S)
            sync(disk, fd)

        monkeypatch.setattr(Disk, "fdatasync", wait)


def pressure(client: BlockingClient) -> Pressure:
    reply = client.request(GetStatus(), LIMIT_S)
    assert isinstance(reply, StatusReply)
    return reply.pressure


def waits_for(client: BlockingClient, wait: str) -> Pressure:
    """Wait until the trainer waits for that reason; empty for none."""
    until = time.monotonic() + LIMIT_S
    while (found := pressure(client)).trainer_wait != wait:
        assert time.monotonic() < until, found.trainer_wait
        time.sleep(0.02)
    return found


def test_a_trainer_that_waits_for_the_disk_is_told_and_counted(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk, config = SlowDisk(monkeypatch), RunConfig.model_validate({"broker": {"durability": "disk"}})
    with (
        running_broker(config, RunLayout(run_dir)),
        BlockingClient(resolve_blocking(run_dir, LIMIT_S).serve) as client,
        ThreadPoolExecutor(1) as trainer,
        Consumer.blocking(run_dir, sequences=4) as consumer,
        Producer.blocking(run_dir, env="toy", group_size=4) as producer,
    ):
        producer.send(some_group("g", [0.0, 1.0, 0.5, 0.25]))
        assert producer.flush(LIMIT_S)
        disk.open.clear()
        try:
            pulled = trainer.submit(next, iter(consumer))
            before = waits_for(client, Wait.JOURNAL_SLOW).trainer_waits_s[Wait.JOURNAL_SLOW]
            disk.open.set()
            batch = pulled.result(LIMIT_S)
            after = waits_for(client, "").trainer_waits_s[Wait.JOURNAL_SLOW]
            assert after > before > 0
            disk.open.clear()
            settled = trainer.submit(batch.ack)
            assert waits_for(client, Wait.JOURNAL_SLOW).trainer_waits_s[Wait.JOURNAL_SLOW] > after
        finally:
            disk.open.set()
        settled.result(LIMIT_S)
        assert not waits_for(client, "").starved_s  # more groups would have ended none of these waits


@pytest.mark.parametrize("split", list(Split))
def test_only_replies_that_a_trainer_waits_for_count(split: Split) -> None:
    bench = Bench()
    producer = bench.producer(split=split)
    producer.send(2)
    generation = bench.consumer()
    route = (b"r",)

    def awaited(request: Pull | Settle | Commit) -> bool:
        (reply,) = (one for one in bench.send(request, route) if isinstance(one, Reply))
        assert reply.durable
        return reply.awaited

    pull = Pull(
        consumer="c", request_id="r1", step=0, version=PolicyVersion(), sequences=8, wait_s=0.0, split=split
    )
    trains = split is Split.TRAIN
    assert awaited(pull) == trains
    batch = bench.batch(request_id="r1", split=split)
    trained = tuple(one.header.group_id for one in batch.groups)
    settle = Settle(
        consumer="c", lease=batch.lease, generation=generation, version=PolicyVersion(0, 1), trained=trained
    )
    assert awaited(settle) == trains
    assert awaited(Commit(consumer="c", version=PolicyVersion(0, 1))) == trains
