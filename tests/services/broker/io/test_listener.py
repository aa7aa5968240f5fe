"""Clients of other hosts: by the broker's listener, with keys, beside those of this host."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of, load_keys, save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.remote import Remote, remote
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, MissingError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.broker.server import Broker, running_broker

LIMIT_S = 20.0


def group(name: str) -> Group:
    return Group.build(name, tokens=[[1, 2], [1, 3]], mask=[[0, 1], [0, 1]], scores=[0.0, 1.0])


class Net:
    """A key directory, and a run whose broker listens with it."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.keys = KeyDirectory.create(root / "keys")
        self.layout = RunLayout(root / "run")
        self.layout.root.mkdir()

    def key(self, name: str, role: Role) -> Path:
        """Make a key; return the file of its client."""
        file = self.root / f"{name}.key"
        save_bundle(file, self.keys.new(name, role))
        return file

    @contextmanager
    def broker(self, **broker: object) -> Iterator[Broker]:
        """Run the broker."""
        section = {"listen": "tcp://127.0.0.1:0", "keys": "keys", **broker}
        config = RunConfig.model_validate({"base_dir": str(self.root), "broker": section})
        with running_broker(config, self.layout) as broker_:
            yield broker_


@pytest.fixture
def net(tmp_path: Path) -> Net:
    return Net(tmp_path)


def test_both_doors_at_once(net: Net) -> None:
    """A worker of another host and one of this host, and a trainer of another host: all groups of both."""
    worker, trainer = net.key("w", Role.WORKER), net.key("t", Role.TRAINER)
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        with (
            Producer.blocking(remote(serve, worker), env="e", producer="far", group_size=2) as far,
            Producer.blocking(net.layout.root, env="e", producer="near", group_size=2) as near,
            Consumer.blocking(remote(serve, trainer), sequences=8) as consumer,
        ):
            for number in range(2):
                far.send(group(f"far-{number}"))
                near.send(group(f"near-{number}"))
            batch = consumer.pull(1, consumer.version, LIMIT_S)
            assert batch is not None
            assert {one.group_id for one in batch.groups} == {"far-0", "far-1", "near-0", "near-1"}
            batch.ack()
            assert far.flush(LIMIT_S)
            assert far.as_frames == {"not_offered": 2}
            assert near.as_frames == {}


def test_addresses_are_those_of_the_host_that_was_dialed(net: Net) -> None:
    worker = net.key("w", Role.WORKER)
    with net.broker() as broker:
        port = broker.endpoints.listen[0].rpartition(":")[2]
        found = resolve_blocking(remote(f"tcp://localhost:{port}", worker), LIMIT_S)
        ports = [address.rpartition(":")[2] for address in broker.endpoints.listen]
        assert [found.serve, found.ingest, found.events, found.publish] == [
            f"tcp://localhost:{port}" for port in ports
        ]
        keys = keys_of(found)
        assert keys is not None
        assert keys.name == "w"


def test_who_has_no_key_of_the_broker_does_not_enter(net: Net, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    stranger = Net(tmp_path / "other").key("w", Role.ADMIN)
    good = net.key("w", Role.WORKER)
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        for keys in (None, load_keys(stranger)):
            with (
                BlockingClient(serve, keys=keys) as client,
                pytest.raises(BrokerUnavailableError),
            ):
                client.request(GetInfo(), 0.5)
        resolve_blocking(remote(serve, good), LIMIT_S)


def test_an_unknown_key_of_the_right_server_is_refused_and_counted(net: Net) -> None:
    gone, good = net.key("gone", Role.ADMIN), net.key("w", Role.WORKER)
    net.keys.revoke("gone")
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        with pytest.raises(BrokerUnavailableError):
            resolve_blocking(Remote(serve, gone), 0.5)
        resolve_blocking(Remote(serve, good), LIMIT_S)
        with BlockingClient(broker.endpoints.serve) as client:
            status = client.request(GetStatus(), LIMIT_S)
        assert isinstance(status, StatusReply)
        assert status.rejected_by_reason["listen: key gone was revoked"] >= 1


def test_the_socket_of_this_host_asks_for_no_key(net: Net) -> None:
    with net.broker() as broker:
        assert broker.endpoints.serve.startswith("ipc://")
        assert resolve_blocking(net.layout.root, LIMIT_S).key == ""
        with BlockingClient(broker.endpoints.serve) as client:
            client.request(GetInfo(), LIMIT_S)


def test_without_its_keys_the_broker_does_not_start(net: Net) -> None:
    net.keys.path.rename(net.root / "elsewhere")
    with pytest.raises(MissingError, match=r"keys is missing: make keys with"), net.broker():
        pass
    assert not net.layout.endpoints.exists()


def test_ports_are_kept_over_a_kill(net: Net) -> None:
    with net.broker() as broker:
        before = broker.endpoints
        written = net.layout.endpoints.read_bytes()
    net.layout.endpoints.write_bytes(written)  # a killed one would not have removed it
    with net.broker() as broker:
        assert broker.endpoints.listen == before.listen
