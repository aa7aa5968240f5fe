"""The heartbeat of a worker goes on with the key that replaces a revoked one, and takes only its own orders."""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import zmq

from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.request_client import BrokerClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.control import Drain, GetStatus, StatusReply, WorkerBeat, WorkerState
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.process.identity import start_of
from rolloutmq.services.worker.heartbeat import Heartbeat, is_for_this_process

LIMIT_S = 30.0
STATE = WorkerBeat(worker="e-0", env="e", state=WorkerState.READY, pid=os.getpid())


def far_directory(root: Path, broker: Endpoints, key: Path) -> RunLayout:
    """Return the directory of another host, with the way to the broker."""
    layout = RunLayout(root / "far")
    layout.root.mkdir(mode=0o700)
    serve, ingest, events, publish = broker.listen
    way = Endpoints(
        serve=serve,
        ingest=ingest,
        events=events,
        publish=publish,
        pid=broker.pid,
        epoch=broker.epoch,
        key=str(key),
    )
    write_json(layout.endpoints, way)
    return layout


async def hears(client: BrokerClient, met: Callable[[StatusReply], bool]) -> None:
    """Wait until the broker's status meets a condition."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            status = await client.request(GetStatus(), LIMIT_S)
            assert isinstance(status, StatusReply)
            if met(status):
                return
            await asyncio.sleep(0.05)


async def test_it_goes_on_with_the_key_that_replaces_a_revoked_one(tmp_path: Path) -> None:
    keys, file, fresh = KeyDirectory.create(tmp_path / "keys"), tmp_path / "own.key", tmp_path / "new.key"
    save_bundle(file, keys.new("w-1", Role.WORKER))
    broker = {"listen": "tcp://127.0.0.1:0", "keys": "keys"}
    config = RunConfig.model_validate({"base_dir": str(tmp_path), "broker": broker})
    produced = [0]

    def beat() -> WorkerBeat:
        return WorkerBeat(
            worker="e-far.0", env="e", state=WorkerState.READY, pid=os.getpid(), produced=produced[0]
        )

    run = RunLayout(tmp_path / "run")
    run.root.mkdir()
    with running_broker(config, run) as served:
        layout = far_directory(tmp_path, served.endpoints, file)
        running = asyncio.create_task(Heartbeat(layout, "e-far.0", beat, print).run())
        try:
            async with BrokerClient(served.endpoints.serve) as near:
                await hears(near, lambda status: bool(status.pressure.workers))
                keys.revoke("w-1")
                await hears(near, lambda status: status.pressure.workers[0].silent_s > 2.0)
                file.unlink()  # between the files there is none
                save_bundle(fresh, keys.new("w-2", Role.WORKER))
                fresh.rename(file)
                produced[0] = 7
                await hears(near, lambda status: status.pressure.workers[0].produced == 7)
        finally:
            running.cancel()
            await asyncio.wait({running})
    assert running.cancelled()


async def test_a_drain_of_an_earlier_process_of_the_name_is_not_its_own(tmp_path: Path) -> None:
    """The broker repeats an order until its process confirms it, which a killed one never does."""
    ours, theirs = os.getpid(), os.getpid() + 1
    with zmq.Context() as context, context.socket(zmq.XPUB) as events, context.socket(zmq.ROUTER) as serve:
        ports = [one.bind_to_random_port("tcp://127.0.0.1") for one in (events, serve)]
        address = [f"tcp://127.0.0.1:{port}" for port in ports]
        layout = RunLayout(tmp_path)
        way = Endpoints(
            serve=address[1], ingest=address[1], events=address[0], publish=address[1], pid=0, epoch=1
        )
        write_json(layout.endpoints, way)
        told: list[str] = []
        done = asyncio.Event()

        def on_drain(reason: str) -> None:
            told.append(reason)
            if reason == "own":
                done.set()

        heartbeat = Heartbeat(layout, "e-0", lambda: STATE, on_drain)
        running = asyncio.create_task(heartbeat.run())
        try:
            assert await asyncio.to_thread(events.poll, int(LIMIT_S * 1000))
            events.recv()
            for pid, reason in ((theirs, "earlier"), (ours, "own")):
                drain = Drain(worker="e-0", reason=reason, pid=pid)
                events.send_multipart([topics.control("e-0"), codec.encode(drain)])
            async with asyncio.timeout(LIMIT_S):
                await done.wait()
        finally:
            running.cancel()
            await asyncio.wait({running})
    assert told == ["own"]


def test_an_order_for_an_earlier_process_of_the_same_pid_is_not_followed() -> None:
    pid, start = os.getpid(), start_of(os.getpid())
    assert start > 0
    followed = {
        (0, 0): True,
        (pid, 0): True,
        (pid, start): True,
        (pid, start + 1): False,
        (pid + 1, start): False,
    }
    for (one, started), is_meant in followed.items():
        assert is_for_this_process(Drain(worker="e-far.0", pid=one, started=started)) is is_meant
