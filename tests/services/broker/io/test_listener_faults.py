"""Hostile peers at the listener: the others go on, memory is bounded, and nothing is lost."""

import random
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest
import zmq
from tests.bus.transport.listening import over_tcp
from tests.faults.support.borders import LIMIT_S, MIB, broker_process, run_config, traffic, wait_for

from benchmarks.harness.listening import free_listen
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.keys.bundle import CurveKeys, load_keys, save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory, key_pair
from rolloutmq.bus.transport.remote import Remote
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.requests import GetInfo

GROWTH_BYTES = 64 * MIB


@pytest.fixture
def keys(tmp_path: Path) -> KeyDirectory:
    made = KeyDirectory.create(tmp_path / "keys")
    save_bundle(tmp_path / "boss.key", made.new("boss", Role.ADMIN))
    return made


def config(keys: KeyDirectory, listen: str = "tcp://127.0.0.1:0") -> RunConfig:
    return run_config(listen=listen, keys=str(keys.path))


def boss(keys: KeyDirectory, serve: str) -> Remote:
    return Remote(serve, keys.path.parent / "boss.key")


@contextmanager
def connections(addresses: tuple[str, ...], count: int) -> Iterator[list[socket.socket]]:
    """Open so many TCP connections, one after the other address."""
    with ExitStack() as stack:
        found = []
        for number in range(count):
            host, _, port = addresses[number % len(addresses)].removeprefix("tcp://").rpartition(":")
            found.append(stack.enter_context(socket.create_connection((host, int(port)), LIMIT_S)))
        yield found


def test_a_thousand_silent_clients(run_dir: Path, keys: KeyDirectory) -> None:
    """They say nothing: the others go on, by both doors, and they are cut off."""
    hurry = "from rolloutmq.bus.transport import sockets; sockets.TCP_HANDSHAKE_MS = 2000\n"
    with (
        broker_process(RunLayout(run_dir), config(keys), hurry) as broker,
        traffic(boss(keys, broker.endpoints.listen[0])) as far,
        broker.growth_below(GROWTH_BYTES),
        connections(broker.endpoints.listen, 1000) as silent,
    ):
        far.advance(20)
        with Producer.blocking(run_dir, env="e", producer="near", group_size=2):
            pass
        for one in silent:
            one.settimeout(LIMIT_S)
            while one.recv(4096):  # its greeting, and then the end
                pass
        far.advance(4)


@pytest.mark.parametrize("garbage", ["noise", "greeting", "hello"])
def test_garbage_on_every_port(run_dir: Path, keys: KeyDirectory, garbage: str) -> None:
    noise = random.Random(7)
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE".ljust(23, b"\0") + bytes(32)
    said: dict[str, Callable[[], bytes]] = {
        "noise": lambda: noise.randbytes(2000),
        "greeting": lambda: b"\xff\x00\x00\x00\x00\x00\x00\x00\x01\x7f\x03\x00CURVE" + noise.randbytes(200),
        "hello": lambda: greeting[:64] + b"\x04\xc8\x05HELLO" + noise.randbytes(194),
    }
    with (
        broker_process(RunLayout(run_dir), config(keys)) as broker,
        traffic(boss(keys, broker.endpoints.listen[0])) as far,
        broker.growth_below(GROWTH_BYTES),
    ):
        for _ in range(10):
            with connections(broker.endpoints.listen, 20) as talkers:
                for talker in talkers:
                    try:
                        talker.sendall(said[garbage]())
                    except OSError:
                        continue
        far.advance(20)


def test_a_flood_of_handshakes_strands_nobody(run_dir: Path, keys: KeyDirectory) -> None:
    """Strangers shake hands without end; local peers go on at once, and a newcomer with a key comes in."""
    with (
        broker_process(RunLayout(run_dir), config(keys)) as broker,
        traffic(broker.endpoints.serve) as near,
        flood(keys, broker.endpoints.listen[0]),
    ):
        near.advance(40)
        with BlockingClient(
            broker.endpoints.listen[0], keys=load_keys(keys.path.parent / "boss.key")
        ) as newcomer:
            newcomer.request(GetInfo(), 3 * LIMIT_S)
        near.advance(4)


@contextmanager
def flood(keys: KeyDirectory, serve: str) -> Iterator[None]:
    """Try to enter with unknown keys, again and again, while the block lasts."""
    over = threading.Event()
    server = keys.server().public

    def knock() -> None:
        context = sockets.make_context()
        while not over.is_set():
            tried = [
                sockets.client_dealer(context, serve, CurveKeys("x", *key_pair(), server)) for _ in range(8)
            ]
            over.wait(0.05)
            for one in tried:
                one.close(0)
        context.term()

    thread = threading.Thread(target=knock)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def test_a_slow_reader_of_events_costs_others_nothing(run_dir: Path, keys: KeyDirectory) -> None:
    admin = load_keys(keys.path.parent / "boss.key")
    with (
        broker_process(RunLayout(run_dir), config(keys)) as broker,
        zmq.Context() as context,
        traffic(boss(keys, broker.endpoints.listen[0])) as far,
        broker.growth_below(GROWTH_BYTES),
    ):
        deaf = [
            sockets.subscriber(context, over_tcp(broker.endpoints).events, [b""], admin) for _ in range(20)
        ]
        far.advance(200)
        for one in deaf:
            one.close(0)


FEW = 400


def test_out_of_descriptors_the_journal_and_this_host_go_on(run_dir: Path, keys: KeyDirectory) -> None:
    """Silent strangers take what the listener may take, not the last: local clients still come in."""
    limit = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({FEW}, {FEW}))\n"
    with broker_process(RunLayout(run_dir), config(keys), limit) as broker, ExitStack() as stack:
        near = stack.enter_context(traffic(broker.endpoints.serve))
        strangers: list[socket.socket] = []
        host, _, port = broker.endpoints.listen[0].removeprefix("tcp://").rpartition(":")
        for _ in range(FEW):
            one = stack.enter_context(socket.socket())
            one.setblocking(False)
            one.connect_ex((host, int(port)))
            strangers.append(one)
        used = psutil.Process(broker.process.pid)
        wait_for(lambda: used.num_fds() > (FEW - 100) * 3 // 4 - 30, LIMIT_S)
        near.advance(200)  # segments of the journal need descriptors
        with BlockingClient(broker.endpoints.serve) as late:
            late.request(GetInfo(), LIMIT_S)
        assert used.num_fds() < FEW - 60
        for one in strangers:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            one.close()
        with BlockingClient(
            broker.endpoints.listen[0], keys=load_keys(keys.path.parent / "boss.key")
        ) as newcomer:
            newcomer.request(GetInfo(), LIMIT_S)


def test_a_killed_broker_comes_back_and_nothing_is_lost(run_dir: Path, keys: KeyDirectory) -> None:
    """At the same address: producer and trainer of another host go on by themselves."""
    listen = free_listen()
    layout, settings = RunLayout(run_dir), config(keys, listen)
    with ExitStack() as stack:
        with broker_process(layout, settings):
            far = stack.enter_context(traffic(boss(keys, listen)))
            far.advance(20)
        with broker_process(layout, settings) as broker:
            far.advance(20)
            assert broker.endpoints.listen[0] == listen
            stack.close()
