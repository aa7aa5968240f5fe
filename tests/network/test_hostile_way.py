"""Lost packets, changed bytes, strangers and clients that read nothing: no loss, bounded memory, others unharmed."""

import sys
from typing import Final

import pytest
from tests.network.support.hosts import CannotNetworkError, Lab, Program
from tests.network.support.peers import BATCH
from tests.network.support.relay import Relay, lose_packets
from tests.network.support.site import ADDRESS, PORTS, Scene, Site, waits_in_log

from rolloutmq.schemas.network.keys import Role

MIB: Final = 1 << 20
GROWTH_BYTES: Final = 192 * MIB
"""More memory than that of the groups and of the connections in a test."""
STRANGERS: Final = 1000
SILENT: Final = """
import resource, socket, sys
count = int(sys.argv[1])
hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
lines = [socket.create_connection(("broker", int(port)), 30) for port in sys.argv[2:] for _ in range(count)]
print("connected", flush=True)
sys.stdin.read()
"""
DEAF: Final = """
import sys, zmq
from pathlib import Path
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.remote import remote
found = resolve_blocking(remote(sys.argv[1], sys.argv[2]))
context = sockets.make_context()
deaf = [sockets.subscriber(context, found.events, [b""], keys_of(found)) for _ in range(20)]
deaf[0].poll()
print("subscribed", flush=True)
sys.stdin.read()
"""


def heard(program: Program) -> str:
    assert program.process.stdout is not None
    return program.process.stdout.readline().decode().strip()


@pytest.mark.extended
def test_one_packet_in_a_hundred_is_lost(lab: Lab) -> None:
    broker, clients = lab.host("broker", 1), lab.host("clients", 2)
    try:
        for host in (broker, clients):
            lose_packets(host, 100)
    except CannotNetworkError as error:
        pytest.skip(f"this kernel drops no packets at random: {error}")
    site = Site(lab, broker, [clients])
    consumer = site.consume(clients)
    producers = [site.produce(clients, name, 300) for name in ("p0", "p1")]
    site.advance(consumer, groups=8 * BATCH)
    site.finish(consumer, *producers)


@pytest.mark.extended
def test_changed_bytes_end_the_connection_and_reach_nobody(scene: Scene) -> None:
    scene.relay.set(corrupt_every=2 * MIB)

    def changed() -> bool:
        return scene.relay.stats().changed >= 10

    scene.site.broker.expect(changed, "ten changed bytes")
    scene.relay.set(corrupt_every=0)
    scene.site.advance(scene.consumer, groups=BATCH)
    scene.site.finish(scene.consumer, *scene.producers)  # every group was whole, see `peers.consume`


@pytest.mark.extended
def test_clients_that_say_nothing_take_little_memory_and_no_place(scene: Scene) -> None:
    before = scene.site.broker.memory_bytes()
    stranger = scene.clients.start(
        "silent", sys.executable, "-c", SILENT, str(STRANGERS), str(PORTS["serve"]), answers=True
    )
    assert heard(stranger) == "connected", stranger.text()
    scene.site.advance(scene.consumer, groups=BATCH)
    newcomer = scene.site.produce(scene.clients, "newcomer", BATCH)
    assert newcomer.wait() == 0, newcomer.text()
    assert scene.site.broker.memory_bytes() - before < GROWTH_BYTES
    stranger.kill()
    scene.site.finish(scene.consumer, *scene.producers)


@pytest.mark.extended
def test_a_subscriber_that_reads_nothing_takes_bounded_memory(scene: Scene) -> None:
    key = scene.site.key(scene.clients, "watcher", Role.MONITOR)
    deaf = scene.clients.start("deaf", sys.executable, "-c", DEAF, ADDRESS, key, answers=True)
    assert heard(deaf) == "subscribed", deaf.text()
    before = scene.site.broker.memory_bytes()
    scene.site.advance(scene.consumer, groups=20 * BATCH)
    assert scene.site.broker.memory_bytes() - before < GROWTH_BYTES
    deaf.kill()
    scene.site.finish(scene.consumer, *scene.producers)


@pytest.mark.extended
def test_a_revoked_key_gets_no_group_in_and_is_told_in_a_log(scene: Scene) -> None:
    scene.site.key(scene.clients, "gone", Role.WORKER)
    scene.site.keys.revoke("gone")
    gone = scene.site.produce(scene.clients, "gone", BATCH)
    waits_in_log(gone, "waiting for the broker|refused|revoked")
    scene.site.broker.expect(lambda: "gone was revoked" in scene.site.broker.text(), "a line about the key")
    scene.site.advance(scene.consumer, groups=BATCH)
    gone.kill()
    assert not any(name.startswith("gone-") for line in scene.site.lines() for name in line.ids)
    scene.site.finish(scene.consumer, *scene.producers)


def test_a_relay_is_the_only_way(lab: Lab) -> None:
    """Without it, a client at the other switch reaches no broker, so the faults of these tests meet all bytes."""
    site = Site(lab, lab.host("broker", 1), [clients := lab.host("clients", 2, "wan")])
    producer = site.produce(clients, "p", BATCH)
    waits_in_log(producer, "waiting for the broker")
    site.relay = Relay(lab, site.host, *PORTS.values())
    assert producer.wait() == 0, producer.text()
    assert site.count().accepted == BATCH
