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
CROWD: Final = """
import select, socket, sys
count = int(sys.argv[1])
lines = []
while True:
    ended, _, _ = select.select(lines, [], [], 0.05)
    for line in ended:  # the broker gives up who says nothing, and another one comes
        lines.remove(line)
        line.close()
    for _ in range(count - len(lines)):
        line = socket.socket()
        line.setblocking(False)
        line.connect_ex(("broker", int(sys.argv[2])))
        lines.append(line)
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
def test_clients_that_read_no_reply_take_bounded_memory(scene: Scene) -> None:
    """Each asks for groups of 100 kB, and its system takes some megabytes of them."""
    key = scene.site.key(scene.clients, "watcher", Role.MONITOR)
    before = scene.site.broker.memory_bytes()
    deaf = scene.clients.python("deaf", "tests.network.support.intruders", "deaf", ADDRESS, key, answers=True)
    assert heard(deaf) == "asked", deaf.text()
    scene.site.broker.expect(
        lambda: "LatestExampleReply: Resource temporarily unavailable" in scene.site.broker.text(),
        "a reply that found no room",
    )
    scene.site.advance(scene.consumer, groups=4 * BATCH)
    assert scene.site.broker.memory_bytes() - before < GROWTH_BYTES
    assert "all connections cut" not in scene.site.broker.text()
    deaf.kill()
    scene.site.finish(scene.consumer, *scene.producers)


@pytest.mark.extended
def test_a_broker_out_of_descriptors_serves_those_that_it_has(lab: Lab) -> None:
    broker, clients = lab.host("broker", 1), lab.host("clients", 2)
    site = Site(lab, broker, [clients], descriptors=256)
    consumer = site.consume(clients)
    producer = site.produce(clients, "p0", pause_s=0.05)
    site.advance(consumer, groups=BATCH)
    crowd = clients.start("crowd", sys.executable, "-c", CROWD, "400", str(PORTS["serve"]))
    waits_in_log(site.broker, "descriptor limit reached, pausing new connections")
    newcomer = site.produce(clients, "newcomer", BATCH)
    site.advance(consumer, producer, groups=10 * BATCH)
    crowd.kill()
    assert newcomer.wait() == 0, newcomer.text()
    site.finish(consumer, producer)


@pytest.mark.extended
def test_what_a_host_that_vanished_held_is_free_after_its_time(lab: Lab) -> None:
    """Its cable is pulled, so no connection ends; others go on under the same names, with its keys."""
    broker, gone, other = lab.host("broker", 1), lab.host("gone", 2), lab.host("other", 3)
    site = Site(lab, broker, [gone, other], lease_s=5.0, silence_s=2.0)
    holding = site.consume(gone, step_s=1000.0)
    producing = site.produce(gone, "p0", pause_s=0.05)
    site.broker.expect(lambda: site.count().leased == BATCH, "a batch in hand")
    gone.unplug()
    site.broker.expect(lambda: site.count().leased == 0, "the end of the lease", 30.0)
    site.broker.expect(lambda: "waiting" in producing.text(), "what the producer lacks")
    for name in ("trainer-0", "p0"):
        site.carry(name, gone, other)
    consumer = site.consume(other)
    producer = site.produce(other, "p0", pause_s=0.05)
    site.advance(consumer, producer, groups=4 * BATCH)
    for program in (holding, producing):
        program.kill()
    site.finish(consumer, producer)


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
