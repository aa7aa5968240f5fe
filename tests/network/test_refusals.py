"""Who may not: keys that are wrong, missing or revoked, and keys of another role. Each is told, and changes nothing."""

from typing import Final

import pytest
from tests.network.support.hosts import Lab, Program
from tests.network.support.intruders import FORGED, ORDERS
from tests.network.support.peers import BATCH
from tests.network.support.site import ADDRESS, Scene, Site, waits_in_log

from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.network.keys import Role

pytestmark = pytest.mark.extended

INTRUDERS: Final = "tests.network.support.intruders"
CODE: Final = "/tmp/code"
COMMANDS: Final = {
    Role.WORKER: ("worker", "e", "--code", CODE),
    Role.TRAINER: ("trainer",),
    Role.MONITOR: ("status",),
}


def test_a_key_that_opens_nothing_is_told(lab: Lab) -> None:
    """Worker, trainer and monitor, each with a key of another run, without one, and with a revoked one."""
    site = Site(lab, lab.host("broker", 1), [clients := lab.host("clients", 2)])
    (clients.tmp / "code").mkdir()
    others = KeyDirectory.create(clients.tmp / "others")
    lasting: list[tuple[Program, str]] = []
    ending: list[tuple[Program, str]] = []
    for role, words in COMMANDS.items():
        wrong, gone = f"{role.value}-1", f"{role.value}-2"
        save_bundle(clients.tmp / f"{wrong}.key", others.new(wrong, role))
        save_bundle(clients.tmp / f"{gone}.key", site.keys.new(gone, role))
        site.keys.revoke(gone)
        for name, reason in (
            (wrong, f"key {wrong}: it is the broker of other keys, or no broker"),
            (gone, f"key {gone} was refused by {ADDRESS}: revoked or unknown"),
            ("", f"{ADDRESS} ended the handshake: it asks for a key"),
        ):
            key = ("--key", f"/tmp/{name}.key") if name else ()
            here = () if role is Role.MONITOR else ("--run-dir", f"/tmp/{role.value}{name}")
            command = ("rolloutmq", *words, "--connect", ADDRESS, *key, *here)
            program = clients.start(f"{role.value}{name}", *command)
            (ending if role is Role.MONITOR else lasting).append((program, reason))
    for program, reason in ending:
        assert program.wait() == 1
        assert reason in program.text()
    for program, reason in lasting:
        waits_in_log(program, reason)
        assert program.living(), f"it must wait for a better key: {program.text()}"
        assert program.end() == 0, program.text()


def test_a_revoked_key_loses_nothing_and_goes_on_with_another(scene: Scene) -> None:
    """Worker, trainer and monitor of another host are connected when their keys are revoked."""
    site, clients = scene.site, scene.clients
    first, second = scene.producers
    watcher = site.key(clients, "watcher", Role.MONITOR)
    top = clients.start("top", "rolloutmq", "top", "--json", "--connect", ADDRESS, "--key", watcher)
    waits_in_log(top, '"step"')
    for name in ("watcher", "p0", "trainer-0"):
        site.keys.revoke(name)
    waits_in_log(top, "key watcher was refused by .*: revoked or unknown")
    waits_in_log(first, "key p0 was refused by .*: revoked or unknown")
    waits_in_log(scene.consumer, "key trainer-0 was refused by .*: revoked or unknown")
    site.broker.expect(lambda: "keys revoked names=" in site.broker.text(), "a line about the keys")
    acked = len(site.acks())
    site.broker.expect(lambda: len(site.acks()) > acked, "groups of the other worker")
    assert second.living()
    for name, role in (("p0", Role.WORKER), ("trainer-0", Role.TRAINER)):
        site.new_key(clients, name, role)
    site.advance(scene.consumer, groups=BATCH)
    top.kill()
    site.finish(scene.consumer, *scene.producers)


def test_no_key_does_the_work_of_another_role(scene: Scene) -> None:
    """The broker itself refuses, whatever the client sends."""
    site, clients = scene.site, scene.clients
    before = site.count().accepted
    for name, role in (("w9", Role.WORKER), ("m9", Role.MONITOR)):
        key = site.key(clients, name, role)
        asking = clients.python(name, INTRUDERS, "orders", ADDRESS, key)
        assert asking.wait() == 0, asking.text()
        lines = asking.text().splitlines()
        assert [line.split()[:2] for line in lines] == [
            [type(order).__name__, "forbidden"] for order in ORDERS
        ]
        foreign = [line for line in lines if "may not" not in line]
        assert all(f"key {name} (role {role.value}) may not" in line for line in lines if line not in foreign)
        # A worker's key may register a producer, but not the one of another key.
        wanted = ["belongs to another key (got p0 with key w9)"] if role is Role.WORKER else []
        assert [line for line, part in zip(foreign, wanted, strict=True) if part not in line] == []
    pushing = clients.python("pushing", INTRUDERS, "groups", ADDRESS, site.key(clients, "m9", Role.MONITOR))
    site.broker.expect(lambda: f"ingest: forbidden {FORGED}" in site.status(), "refused groups")
    assert site.count().accepted > before, "others go on"
    assert "draining" not in site.status()
    pushing.kill()
    scene.site.finish(scene.consumer, *scene.producers)
    assert not any(name.startswith("forged") for line in site.lines() for name in line.ids)
