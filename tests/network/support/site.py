"""A broker on one host, its clients on others, and the account of every group at the end."""

import re
from collections import Counter
from pathlib import Path
from typing import Any, Final

import msgspec
from tests.faults.support.processes import SEQUENCES, acked, wait_until
from tests.network.support.hosts import Host, Lab, Program
from tests.network.support.peers import BATCH, Consume, Door, Line, Produce, settled
from tests.network.support.relay import Relay

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.endpoint import read_endpoints
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.files import AckedGroup, RunLayout
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.control import LedgerCounts
from rolloutmq.services.broker.journal.inspect.verify import Witness, verify

PEERS: Final = "tests.network.support.peers"
PORT: Final = 7760
PORTS: Final = {name: PORT + number for number, name in enumerate(("serve", "ingest", "events", "publish"))}
ADDRESS: Final = f"tcp://broker:{PORT}"
LOST: Final = r"broker lost|waiting for the broker"
PACE_S: Final = 0.05
LIFE: Final = 1_000_000
"""Numbers of the groups of one life of a producer."""
PRODUCERS: Final = ("p0", "p1")
"""Producers of a scene."""
LEAVE: Final = "/tmp/leave"
OVER: Final = "/tmp/over"
RUN: Final = "/tmp/run"
"""The run directory, as each host sees it."""


def config(entry: str = "a:B", **broker: Any) -> RunConfig:
    """Return a run without a staleness bound and engine, whose broker other hosts reach with keys."""
    env = EnvironmentConfig(entry=entry, group_size=SEQUENCES, pacing=False, stale="pass")
    section = {"listen": f"tcp://0.0.0.0:{PORT}", "keys": "keys", **broker}
    return RunConfig(
        base_dir=Path("/tmp"),
        environment={"e": env},
        inference=InferenceConfig(kind="none"),
        broker=BrokerConfig.model_validate(section),
        trainer=TrainerConfig(batch_sequences=BATCH * SEQUENCES),
    )


class Site:
    """The broker of a run and its clients, each with a key of its own.

    Clients know the name of the broker's host and their key, and nothing else.

    Args:
        lab: The lab.
        broker: Host of the broker.
        clients: Hosts of the clients.
        relay: The only way between them, if there is one.
        descriptors: Most descriptors of the broker; 0 for those of this process.
        about: See `config`.
    """

    def __init__(
        self,
        lab: Lab,
        broker: Host,
        clients: list[Host],
        relay: Relay | None = None,
        *,
        descriptors: int = 0,
        **about: Any,
    ) -> None:
        self.lab, self.host, self.clients, self.relay = lab, broker, clients, relay
        self.layout = RunLayout(broker.tmp / "run")
        self.layout.root.mkdir(mode=0o700)
        self.keys = KeyDirectory.create(broker.tmp / "keys")
        self.configure(**about)
        limited = ("sh", "-c", f'ulimit -n {descriptors} && exec "$@"', "sh")
        self._command = (*(limited if descriptors else ()), "rolloutmq", "broker", "--run-dir", RUN)
        self.broker = self._started()
        self._lives: Counter[str] = Counter()
        self._logs: list[Path] = []
        self._acks: list[Path] = []

    def configure(self, **about: Any) -> None:
        """Write the configuration of the broker's next life."""
        write_json(self.layout.config, config(**about))

    def _started(self) -> Program:
        before = read_endpoints(self.layout.root)
        broker = self.host.start("broker", *self._command)

        def ready() -> bool:
            found = read_endpoints(self.layout.root)
            return found is not None and (before is None or found.epoch != before.epoch)

        broker.expect(ready, "the broker")
        if self.relay is not None:
            self.relay.listen(*PORTS.values())
        return broker

    def kill_broker(self) -> None:
        """Kill the broker and start another life."""
        self.broker.kill()
        self.broker = self._started()

    def move_broker(self, address: str = "", **about: Any) -> None:
        """Start another life of the broker at another address of its host, or with another configuration."""
        assert self.broker.end() == 0, self.broker.text()
        if address:
            self.host.move_to(address)
        if about:
            self.configure(**about)
        self.broker = self._started()

    def new_key(self, host: Host, name: str, role: Role) -> None:
        """Give a client whose key was revoked one of another name in its place."""
        save_bundle(host.tmp / f"{name}.new", self.keys.new(f"{name}-again", role))
        (host.tmp / f"{name}.new").replace(host.tmp / f"{name}.key")

    def key(self, host: Host, name: str, role: Role) -> str:
        """Return the file of a key on a host, a new one if it has none of that name."""
        place = host.tmp / f"{name}.key"
        if not place.exists():
            save_bundle(place, self.keys.new(name, role))
        return f"/tmp/{place.name}"

    def carry(self, name: str, host: Host, other: Host) -> None:
        """Copy the file of a key to another host."""
        data = (host.tmp / f"{name}.key").read_bytes()
        write_private(other.tmp / f"{name}.key", data)

    def door(self, host: Host, name: str, role: Role) -> Door:
        """Return how a client finds the broker."""
        if host is self.host:
            return Door(run_dir=RUN)
        return Door(address=ADDRESS, key=self.key(host, name, role))

    def produce(self, host: Host, name: str, groups: int = 0, **about: Any) -> Program:
        """Start a life of a producer, which sends so many groups, or goes on until `finish`."""
        acks = host.tmp / f"{name}.acks"
        if acks not in self._acks:
            self._acks.append(acks)
        first = LIFE * self._lives[name]
        self._lives[name] += 1
        told = Produce(
            self.door(host, name, Role.WORKER), name, f"/tmp/{acks.name}", LEAVE, first, groups, **about
        )
        return host.python(name, PEERS, "produce", msgspec.json.encode(told).decode())

    def consume(self, host: Host, **about: Any) -> Program:
        """Start the consumer, which trains until `finish`."""
        log = host.tmp / "trained.log"
        if log not in self._logs:
            self._logs.append(log)
        told = Consume(self.door(host, "trainer-0", Role.TRAINER), f"/tmp/{log.name}", OVER, **about)
        return host.python("trainer", PEERS, "consume", msgspec.json.encode(told).decode())

    def acks(self) -> dict[str, AckedGroup]:
        """Return every acked group; fail if one was acked twice."""
        lines = [line for log in self._acks for line in acked(log)]
        found = {line.group_id: line for line in lines}
        assert len(found) == len(lines), "a group was acked twice"
        return found

    def lines(self) -> list[Line]:
        """Return the logs of the consumers; a killed one may leave a torn line."""
        found = [log.read_bytes().split(b"\n")[:-1] for log in self._logs if log.exists()]
        return [msgspec.json.decode(line, type=Line) for lines in found for line in lines]

    def trained(self) -> int:
        """Return how many groups were settled so far."""
        return settled(self.lines()).total()

    def advance(self, *programs: Program, groups: int = 4 * BATCH) -> None:
        """Wait until so many more groups are trained; fail if one of these programs ends before."""
        goal = self.trained() + groups

        def met() -> bool:
            assert all(program.living() for program in programs), [program.text() for program in programs]
            return self.trained() >= goal

        self.broker.expect(met, f"{groups} more groups")

    def count(self) -> LedgerCounts:
        """Return the ledger of the broker."""
        told = msgspec.json.encode(Door(run_dir=RUN)).decode()
        return msgspec.json.decode(self.host.call("python", "-m", PEERS, "ledger", told), type=LedgerCounts)

    def status(self) -> str:
        """Return what `rolloutmq status` prints on the broker's host."""
        return self.host.call("rolloutmq", "status", RUN)

    def finish(self, consumer: Program, *producers: Program) -> None:
        """Let the producers end, fill up the last batch, end the consumer, and account for every group."""
        for client in self.clients:
            (client.tmp / Path(LEAVE).name).touch()
        for producer in producers:
            assert producer.wait() == 0, producer.text()
        missing = -self.count().queued % BATCH
        # A batch that is leased is whole, so that only the queue may need more groups.
        if missing:
            filler = self.produce(self.host, "filler", missing)
            assert filler.wait() == 0, filler.text()
        for client in self.clients:
            (client.tmp / Path(OVER).name).touch()
        assert consumer.wait() == 0, consumer.text()
        self.check()

    def check(self) -> None:
        """Check that each acked group was trained once, by the logs, the ledger and the journal."""
        counts = self.count()
        lines, acks = self.lines(), self.acks()
        done = settled(lines)
        assert not [line for line in lines if line.what == "damaged"]
        assert set(done.values()) <= {1}, "a group was trained twice"
        # A killed trainer may have settled its last batch, and not lived to write that down.
        open_ids = Counter(name for line in lines if line.what == "pulled" for name in line.ids) - done
        assert acks.keys() <= done.keys() | open_ids.keys(), "an acked group was lost"
        assert counts.queued == counts.leased == 0, counts
        assert counts.accepted == counts.trained + counts.committed, counts
        assert done.total() <= counts.accepted <= len(done.keys() | open_ids.keys())
        assert self.broker.end() == 0, self.broker.text()
        witness = Witness(acked=tuple(acks.values()), trained=(done,))
        verdict = verify(self.layout.journal, self.layout.dead, lambda: witness)
        assert verdict.problems == []
        assert verdict.accepted == counts.accepted


class Scene:
    """A broker behind a relay, two producers and a trainer on another host."""

    def __init__(self, lab: Lab) -> None:
        self.broker, self.clients = lab.host("broker", 1), lab.host("clients", 2, "wan")
        self.relay = Relay(lab, self.broker)
        self.site = Site(lab, self.broker, [self.clients], self.relay)
        self.consumer = self.site.consume(self.clients)
        self.producers: list[Program] = []
        self.produce()

    def produce(self) -> None:
        """Start the producers."""
        self.producers += [self.site.produce(self.clients, name, pause_s=PACE_S) for name in PRODUCERS]

    @property
    def programs(self) -> list[Program]:
        return [self.consumer, *self.producers]

    def flows(self) -> None:
        """Wait until a group of every producer is acked and a batch is trained: every connection is in use."""

        def met() -> bool:
            return set(PRODUCERS) == {name.rpartition("-")[0] for name in self.site.acks()}

        self.site.broker.expect(met, "an acked group of each producer")
        self.site.advance(self.consumer, groups=BATCH)

    def told(self) -> None:
        """Wait until every client has told that it lacks the broker."""
        for program in self.programs:
            waits_in_log(program, LOST)


def waits_in_log(program: Program, pattern: str) -> None:
    """Wait until a program has logged a line for what it waits for."""
    program.expect(lambda: re.search(pattern, program.text()), f"a line like {pattern!r} in the log")


def forwarded_more(relay: Relay, nbytes: int) -> None:
    """Wait until a relay has forwarded so many more bytes."""
    goal = relay.stats().forwarded + nbytes
    wait_until(lambda: relay.stats().forwarded >= goal, f"{nbytes} more bytes over the relay")
