"""Faults of the way between a broker and its clients on other hosts: every group is trained once.

Clients have the settings that users have. Whatever lasts is told in their logs.
"""

from typing import Final

import pytest
from tests.network.support.peers import BATCH
from tests.network.support.site import PORTS, Scene, waits_in_log


def cut(scene: Scene) -> None:
    """Reset all connections, again and again."""
    for _ in range(5):
        scene.relay.cut()
        scene.site.advance(scene.consumer, groups=BATCH)


def half_open(scene: Scene) -> None:
    scene.relay.half_open()
    scene.told()


def groups_half_open(scene: Scene) -> None:
    """A middlebox forgets the connections of the groups alone: the broker still answers requests."""
    scene.relay.half_open(PORTS["ingest"])
    for producer in scene.producers:
        waits_in_log(producer, "no group reaches")


def events_half_open(scene: Scene) -> None:
    """The same for the events: acks do not arrive, and the producers send nothing to find that out by."""
    accepted = scene.relay.stats().accepted
    scene.relay.half_open(PORTS["events"])
    scene.site.broker.expect(lambda: scene.relay.stats().accepted > accepted, "another connection")


def stalled(scene: Scene) -> None:
    """Nothing passes for longer than the broker waits for a sign of life; then everything does, old and new."""
    scene.relay.set(stalled=True)
    scene.told()
    scene.site.broker.expect(lambda: "silent" in scene.site.status(), "a silent trainer in the status")
    scene.relay.set(stalled=False)


def delayed(scene: Scene) -> None:
    scene.relay.set(delay_s=0.2)
    scene.site.advance(scene.consumer)


def unplugged(scene: Scene) -> None:
    """The cable is pulled: no packet passes, and no connection ends."""
    scene.broker.unplug()
    scene.told()
    scene.broker.plug_in()


def broker_killed(scene: Scene) -> None:
    for _ in range(3):
        scene.site.kill_broker()
        scene.site.advance(scene.consumer, groups=BATCH)


def moved(scene: Scene) -> None:
    """The broker comes back at another address."""
    scene.site.move_broker("10.77.0.77")


def clients_killed(scene: Scene) -> None:
    """Every client dies at once, and others go on under their names."""
    for program in scene.programs:
        program.kill()
    scene.producers.clear()
    scene.consumer = scene.site.consume(scene.clients)
    scene.produce()


FAULTS: Final = {
    fault.__name__: fault
    for fault in (
        cut,
        half_open,
        groups_half_open,
        events_half_open,
        stalled,
        delayed,
        unplugged,
        broker_killed,
        moved,
        clients_killed,
    )
}
SHORT: Final = ("cut", "half_open")


@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.extended) for name in FAULTS]
)
def test_each_group_is_trained_once(scene: Scene, name: str) -> None:
    FAULTS[name](scene)
    scene.site.advance(scene.consumer, groups=BATCH)
    scene.site.finish(scene.consumer, *scene.producers)
