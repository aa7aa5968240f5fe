"""Clients of other hosts: by the broker's listener, with keys, beside those of this host."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import topics
from rolloutmq.bus.encoding.codec import decode_event, encode_envelope, encode_group
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of, load_keys, save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.remote import Remote, remote
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import BrokerUnavailableError, KeyRefusedError, MissingError, RefusedError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.control import Drain, GetStatus, Reset, SetValues, Shutdown, StatusReply
from rolloutmq.schemas.wire.envelope import (
    PROTOCOL_VERSION,
    ArenaRef,
    Envelope,
    ErrorCode,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.joining import KeyUse, NetworkStatus
from rolloutmq.schemas.wire.replies import Registered, Reply
from rolloutmq.schemas.wire.requests import (
    DeclareTables,
    GetInfo,
    Goodbye,
    RegisterConsumer,
    RegisterProducer,
    Request,
    Settle,
    Sync,
)
from rolloutmq.services.broker.server import Broker, running_broker

LIMIT_S = 20.0


def group(name: str) -> Group:
    return Group.build(name, tokens=[[1, 2], [1, 3]], mask=[[0, 1], [0, 1]], scores=[0.0, 1.0])


def wait_for(happened: Callable[[], bool]) -> None:
    """Wait until something has happened."""
    until = time.monotonic() + LIMIT_S
    while not happened():
        assert time.monotonic() < until


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


def request(net: Net, serve: str, key: str, message: Request) -> Reply:
    """Send one request with a key."""
    with BlockingClient(serve, keys=load_keys(net.root / f"{key}.key")) as client:
        return client.request(message, LIMIT_S)


@pytest.mark.parametrize(
    ("role", "message", "told"),
    [
        (Role.WORKER, Shutdown(), "key k (role worker) may not end the broker; use a key of role admin"),
        (Role.WORKER, Drain(worker="w"), "may not drain workers"),
        (Role.WORKER, GetStatus(), "may not read the status; use a key of role admin or monitor"),
        (Role.TRAINER, Reset(), "may not reset the run"),
        (Role.TRAINER, RegisterProducer(producer="p", env="e"), "may not register a producer"),
        (Role.MONITOR, SetValues(values={"broker.lease_s": 1}), "may not change settings"),
        (Role.ENGINE, RegisterConsumer(consumer="c"), "may not register a consumer"),
    ],
)
def test_a_role_may_not_do_more(net: Net, role: Role, message: Request, told: str) -> None:
    net.key("k", role)
    net.key("boss", Role.ADMIN)
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        with pytest.raises(RefusedError) as caught:
            request(net, serve, "k", message)
        assert caught.value.code is ErrorCode.FORBIDDEN
        assert told in str(caught.value)
        status = request(net, serve, "boss", GetStatus())
        assert isinstance(status, StatusReply)
        assert status.rejected_by_reason == {"serve: forbidden": 1}


def test_a_session_of_another_key_takes_nothing(net: Net) -> None:
    """Its number is guessed right: requests and groups with another key change nothing."""
    mine, thief, trainer = (
        net.key(name, role) for name, role in (("w", Role.WORKER), ("x", Role.WORKER), ("t", Role.TRAINER))
    )
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        with Producer.blocking(remote(serve, mine), env="e", producer="p", group_size=2) as producer:
            producer.send(group("g-0"))
            assert producer.flush(LIMIT_S)
            session = producer._object._session.number
            for message in (
                Goodbye(producer="p", session=session),
                Sync(producer="p", session=session),
                RegisterProducer(producer="p", env="e"),
                DeclareTables(producer="p", session=session, tables=()),
            ):
                with pytest.raises(RefusedError, match="producer: belongs to another key") as caught:
                    request(net, serve, "x", message)
                assert caught.value.code is ErrorCode.FORBIDDEN
            with pytest.raises(RefusedError, match="belongs to another key"):
                Producer.blocking(remote(serve, thief), env="e", producer="p", group_size=2).__enter__()
            _forged(broker, thief, session)
            producer.send(group("g-1"))
            assert producer.flush(LIMIT_S)
        with Consumer.blocking(remote(serve, trainer), sequences=4) as consumer:
            batch = consumer.pull(1, consumer.version, LIMIT_S)
            assert batch is not None
            assert [one.group_id for one in batch.groups] == ["g-0", "g-1"]
            net.key("t2", Role.TRAINER)
            settled = Settle(
                consumer="trainer-0", lease=1, generation=1, version=consumer.version, trained=("g-0", "g-1")
            )
            with pytest.raises(RefusedError, match="consumer: belongs to another key"):
                request(net, serve, "t2", settled)
            batch.ack()


def _forged(broker: Broker, key: Path, session: int) -> None:
    """Send a group under the name and session of another key; wait until it is refused."""
    with zmq.Context() as context:
        push = sockets.producer_push(context, broker.endpoints.listen[1], load_keys(key))
        encoded = encode_group(group("forged"), 1 << 20)
        header = GroupHeader(
            seq=2, position=1 << 20, group_id="forged", table=encoded.table.id, frames=1, nbytes=4, crc=1,
            sequences=2, tokens=4, oldest=PolicyVersion(), newest=PolicyVersion(), started_at=0.0, finished_at=0.0,
            rewards=RewardSummary(),
        )  # fmt: skip
        envelope = Envelope(PROTOCOL_VERSION, "p", session, "default", "e", Split.TRAIN, (header,))
        push.send_multipart([encode_envelope(envelope), b"body"])
        until = time.monotonic() + LIMIT_S
        with BlockingClient(broker.endpoints.serve) as client:
            while True:
                status = client.request(GetStatus(), LIMIT_S)
                assert isinstance(status, StatusReply)
                if status.rejected_by_reason.get("ingest: forbidden") or time.monotonic() > until:
                    break
        push.close(0)
    assert status.rejected_by_reason["ingest: forbidden"] == 1


def test_owners_survive_the_broker(net: Net) -> None:
    net.key("w", Role.WORKER)
    net.key("x", Role.WORKER)
    with net.broker() as broker:
        request(net, broker.endpoints.listen[0], "w", RegisterProducer(producer="p", env="e"))
    with net.broker() as broker:
        with pytest.raises(RefusedError, match="belongs to another key"):
            request(net, broker.endpoints.listen[0], "x", RegisterProducer(producer="p", env="e"))
        net.keys.revoke("w")
        wait_for(lambda: _registers(net, broker, "x"))


def _registers(net: Net, broker: Broker, key: str) -> bool:
    try:
        request(net, broker.endpoints.listen[0], key, RegisterProducer(producer="p", env="e"))
    except RefusedError:
        return False
    return True


def test_a_peer_of_another_host_offers_no_shared_memory(net: Net) -> None:
    """It could name memory of any process of the broker's host."""
    net.key("w", Role.WORKER)
    arena = ArenaRef(pid=os.getpid(), fd=0, ino=1, nbytes=1 << 20)
    with net.broker() as broker:
        reply = request(
            net, broker.endpoints.listen[0], "w", RegisterProducer(producer="p", env="e", arena=arena)
        )
        assert isinstance(reply, Registered)
        assert not reply.ack.arena
        with BlockingClient(broker.endpoints.serve) as client:
            status = client.request(GetStatus(), LIMIT_S)
        assert isinstance(status, StatusReply)
        assert not any(reason.startswith("arena") for reason in status.rejected_by_reason)


def test_a_role_hears_its_topics_and_no_other(net: Net) -> None:
    for name, role in (("w", Role.WORKER), ("m", Role.MONITOR)):
        net.key(name, role)
    with net.broker(pressure_interval_s=0.05) as broker:
        events = broker.endpoints.listen[2]
        with (
            BlockingSubscriber(events, [b""], keys=load_keys(net.root / "w.key")) as greedy,
            BlockingSubscriber(events, [topics.PRESSURE], keys=load_keys(net.root / "w.key")) as modest,
            BlockingSubscriber(events, [b""], keys=load_keys(net.root / "m.key")) as monitor,
            BlockingSubscriber(broker.endpoints.events, [b""]) as local,
        ):
            for one in (modest, monitor, local):
                assert one.poll(LIMIT_S) is not None
                assert one.poll(LIMIT_S) is not None
            assert greedy.poll(0.2) is None


def test_a_revocation_ends_living_use(net: Net) -> None:
    """Requests, groups and subscriptions of living connections; another key of the same host goes on."""
    lost, good = net.key("lost", Role.WORKER), net.key("good", Role.WORKER)
    net.key("ear", Role.MONITOR)
    with net.broker(pressure_interval_s=0.05) as broker:
        serve, _, events, _ = broker.endpoints.listen
        with (
            Producer.blocking(remote(serve, good), env="e", producer="good", group_size=2) as other,
            BlockingClient(serve, keys=load_keys(lost)) as client,
            BlockingSubscriber(events, [topics.PRESSURE], keys=load_keys(lost)) as heard,
            BlockingSubscriber(events, [topics.PRESSURE], keys=load_keys(net.root / "ear.key")) as ear,
        ):
            client.request(GetInfo(), LIMIT_S)
            assert heard.poll(LIMIT_S) is not None
            assert ear.poll(LIMIT_S) is not None
            net.keys.revoke("lost")
            wait_for(lambda: heard.poll(0.5) is None)
            with pytest.raises(
                KeyRefusedError, match=r"key lost was refused by tcp://.*: revoked or unknown"
            ):
                client.request(GetInfo(), 3.0)
            other.send(group("g"))
            assert other.flush(LIMIT_S)
            assert ear.poll(LIMIT_S) is not None


def test_the_status_tells_the_use_and_the_refusals_of_each_key(net: Net) -> None:
    worker, watch = net.key("w", Role.WORKER), net.key("m", Role.MONITOR)
    with net.broker() as broker:
        serve = broker.endpoints.listen[0]
        with (
            BlockingClient(serve, keys=load_keys(worker)) as client,
            BlockingClient(serve, keys=load_keys(watch)) as monitor,
            BlockingSubscriber(
                broker.endpoints.listen[2], [topics.telemetry("network", "")], keys=load_keys(watch)
            ) as events,
        ):
            for _ in range(3):
                with pytest.raises(RefusedError):
                    client.request(Drain(worker="x"), LIMIT_S)

            def uses() -> dict[str, KeyUse]:
                reply = monitor.request(GetStatus(), LIMIT_S)
                assert isinstance(reply, StatusReply)
                found = reply.network
                return {one.name: one for one in found.keys} if found is not None else {}

            wait_for(lambda: {"w", "m"} <= uses().keys())
            told = uses()
            assert told["w"].role == "worker"
            assert told["w"].hosts == ("127.0.0.1",)
            assert told["w"].refused == {"drain workers": 3}
            assert told["m"].refused == {}
            event = events.poll(LIMIT_S)
            assert event is not None
            assert event[0] == b"telemetry.network.run"
            decoded = decode_event(event[1])
            assert isinstance(decoded, NetworkStatus)
            assert (decoded.listen, decoded.insecure, decoded.known_keys) == (serve, False, 2)
