"""Workers that joined from another host, without the command that started them."""

from typing import Final

import pytest
from tests.launch.commands.remote.hosts import ENVIRONMENT
from tests.network.support.cluster import pid_of
from tests.network.support.hosts import Host, Lab, Program
from tests.network.support.peers import BATCH
from tests.network.support.site import ADDRESS, PORT, Site, waits_in_log

from rolloutmq.schemas.network.keys import Role

pytestmark = pytest.mark.extended

WORKER: Final = "e-far.0"
OTHER_PORT: Final = PORT + 100
ENTRY: Final = "env.py:Own"


class Joined:
    """A broker, its trainer, and a worker of another host whose holder was killed."""

    def __init__(self, lab: Lab) -> None:
        self.clients: Host = lab.host("clients", 2)
        self.site = Site(lab, lab.host("broker", 1), [self.clients], entry=ENTRY)
        code = self.clients.tmp / "code"
        code.mkdir()
        (code / "env.py").write_text(ENVIRONMENT)
        holder = self.hold()
        self.consumer = self.site.consume(self.clients)
        self.site.advance(self.consumer, holder, groups=BATCH)
        holder.kill()
        self.pid = pid_of(self.clients, "worker", WORKER)
        assert self.pid

    def hold(self, *further: str) -> Program:
        """Start a command that holds the worker."""
        way = ["--connect", ADDRESS, *(word for one in further for word in ("--connect", one))]
        key = self.site.key(self.clients, "w", Role.WORKER)
        code = ("--code", "/tmp/code", "--name", "far")
        return self.clients.start("hold", "rolloutmq", "worker", "e", *way, "--key", key, *code)

    def trained(self) -> int:
        return self.site.count().trained


def test_they_follow_a_broker_to_another_address_of_its_name(lab: Lab) -> None:
    joined = Joined(lab)
    joined.site.move_broker("10.77.0.77")
    joined.site.advance(joined.consumer, groups=2 * BATCH)
    assert pid_of(joined.clients, "worker", WORKER) == joined.pid
    end(joined, joined.hold())


def test_they_follow_a_broker_to_another_port_with_their_next_holder(lab: Lab) -> None:
    joined = Joined(lab)
    joined.site.move_broker(entry=ENTRY, listen=f"tcp://0.0.0.0:{OTHER_PORT}")
    holder = joined.hold(f"tcp://broker:{OTHER_PORT}")
    waits_in_log(holder, f"adopted name={WORKER}")
    before = joined.site.count().accepted
    joined.site.broker.expect(lambda: joined.site.count().accepted > before, "groups at the other port")
    assert pid_of(joined.clients, "worker", WORKER) == joined.pid
    end(joined, holder)


def end(joined: Joined, holder: Program) -> None:
    """Let the next holder end the worker in order, and account for every group."""
    waits_in_log(holder, f"adopted name={WORKER}")
    assert holder.end() == 0, holder.text()
    assert pid_of(joined.clients, "worker", WORKER) == 0
    joined.consumer.kill()
    counts = joined.site.count()
    assert counts.accepted == counts.queued + counts.leased + counts.trained + counts.committed, counts
    assert joined.site.broker.end() == 0, joined.site.broker.text()
    joined.site.host.call("rolloutmq", "ledger", "verify", "/tmp/run")
