"""A whole broker on real sockets: groups are delivered, strangers do no harm, an orderly end loses nothing."""

import errno
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
import pytest
import zmq
from tests.bus.transport.listening import INSECURE, over_tcp
from tests.services.broker.journal.handmade import flip
from tests.services.broker.journal.other_versions import OTHERS, as_version, listing

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.encoding import codec, topics
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import read_lives, write_json
from rolloutmq.bus.transport import endpoint, sockets
from rolloutmq.bus.transport.pubsub import BlockingSubscriber
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import (
    AddressInUseError,
    BrokerUnavailableError,
    ConfigError,
    JournalFailedError,
    RecordVersionError,
    RefusedError,
    UnusablePathError,
)
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.process import PERMANENT_FAILURE, Role
from rolloutmq.schemas.wire.control import GetStatus, Pressure, Requeue, Requeued, Shutdown, StatusReply
from rolloutmq.schemas.wire.envelope import PROTOCOL_VERSION, Envelope, PolicyVersion, Split
from rolloutmq.schemas.wire.replies import (
    Ack,
    Batch,
    ConsumerRegistered,
    Durability,
    InfoReply,
    Ok,
    Registered,
    Reply,
    Settled,
)
from rolloutmq.schemas.wire.requests import (
    DeclareTables,
    GetInfo,
    Pull,
    RegisterConsumer,
    RegisterProducer,
    Settle,
    Sync,
)
from rolloutmq.services.broker.core import BrokerCore
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.format.records import FILE_HEADER_BYTES, RECORD_MAGIC, VERSION
from rolloutmq.services.broker.server import Broker, running_broker
from rolloutmq.services.process.identity import identify

LIMIT_S = 60.0
_R = TypeVar("_R")


def _config(**broker: object) -> RunConfig:
    return RunConfig(
        broker=BrokerConfig.model_validate(broker),
        environment={"sort3": EnvironmentConfig(entry="m:C", group_size=2)},
        trainer=TrainerConfig(batch_sequences=4),
    )


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    return RunLayout(run_dir)


class Peer:
    """A producer and a consumer by hand: raw sockets and the codec."""

    def __init__(self, endpoints: Endpoints, context: sockets.Context) -> None:
        self.client = BlockingClient(endpoints.serve, context)
        self.push = sockets.producer_push(context, endpoints.ingest)
        assert self.push.poll(5000, zmq.POLLOUT)
        self.session = 0
        self.position = 0
        self.declared: set[str] = set()

    def close(self) -> None:
        self.client.close()
        self.push.close()

    def register(self) -> None:
        reply = _is(Registered, self.client.request(RegisterProducer(producer="p", env="sort3")))
        self.session = reply.ack.session

    def send(self, seq: int, group: Group) -> None:
        """Push one group of the session."""
        encoded = codec.encode_group(group, 1 << 26)
        if encoded.table.id not in self.declared:
            declared = DeclareTables(producer="p", session=self.session, tables=(encoded.table,))
            self.client.request(declared)
            self.declared.add(encoded.table.id)
        self.position += encoded.nbytes
        header = codec.header_of(group, encoded, seq=seq, position=self.position)
        envelope = Envelope(PROTOCOL_VERSION, "p", self.session, "default", "sort3", Split.TRAIN, (header,))
        self.push.send_multipart([codec.encode_envelope(envelope), *encoded.frames])

    def pull(self, step: int, sequences: int) -> tuple[Batch, list[Group]]:
        registered = self.client.request(RegisterConsumer(consumer="t"))
        assert isinstance(registered, ConsumerRegistered)
        pull = Pull(
            consumer="t",
            step=step,
            version=PolicyVersion(),
            sequences=sequences,
            request_id=f"step-{step}",
            wait_s=LIMIT_S,
        )
        reply, frames = self.client.request_frames(pull, timeout_s=2 * LIMIT_S)
        batch = _is(Batch, reply)
        tables = {table.id: table for table in codec.decode_tables(batch.tables)}
        groups = []
        for delivery in batch.groups:
            own, frames = frames[: delivery.header.frames], frames[delivery.header.frames :]
            groups.append(codec.decode_group(delivery.header, tables[delivery.header.table], own))
        assert frames == []
        return batch, groups

    def status(self) -> StatusReply:
        return _is(StatusReply, self.client.request(GetStatus()))

    def wait_accepted(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while self.status().pressure.ledger.accepted < count:
            assert time.monotonic() < until

    def wait_durable(self, count: int) -> None:
        until = time.monotonic() + LIMIT_S
        while _is(Ack, self.client.request(Sync(producer="p", session=self.session))).cumulative < count:
            assert time.monotonic() < until


@contextmanager
def peer(endpoints: Endpoints) -> Iterator[Peer]:
    context = sockets.make_context()
    made = Peer(endpoints, context)
    try:
        yield made
    finally:
        made.close()
        context.term()


def _is(kind: type[_R], reply: Reply) -> _R:
    assert isinstance(reply, kind), reply
    return reply


def _group(number: int, length: int = 5) -> Group:
    tokens = [[number] * length, [number + 1] * (length + 1)]
    return Group.build(
        f"g-{number}",
        tokens=tokens,
        mask=[[True] * len(row) for row in tokens],
        scores=[0.0, 1.0],
        messages=[{"role": "user", "content": "3 1 2"}],
    )


def _stopped(broker: Broker) -> BrokerCore:
    broker.stop()
    broker.core.validate()
    return broker.core


def test_group_travels_from_push_to_settlement(layout: RunLayout) -> None:
    sent = [_group(1), _group(2, length=200_000)]
    with running_broker(_config(), layout) as broker, peer(broker.endpoints) as it:
        it.register()
        for seq, group in enumerate(sent, 1):
            it.send(seq, group)
        batch, groups = it.pull(0, 4)
        assert [group.group_id for group in groups] == ["g-1", "g-2"]
        for group, original in zip(groups, sent, strict=True):
            for name, column in original.columns.items():
                if name != "messages":
                    assert (group.columns[name].values == column.values).all()
            assert group["messages"] == original["messages"]
        settle = Settle(
            consumer="t",
            lease=batch.lease,
            generation=batch.generation,
            version=PolicyVersion(0, 1),
            trained=("g-1", "g-2"),
        )
        assert isinstance(it.client.request(settle), Settled)
        assert it.status().pressure.ledger.trained == 2
        _stopped(broker)


def test_endpoints_are_said_while_it_lives_and_no_longer(layout: RunLayout) -> None:
    with running_broker(_config(), layout) as broker:
        assert endpoint.read_endpoints(layout.root) == broker.endpoints
        assert broker.endpoints.pid == os.getpid()
        with BlockingClient(broker.endpoints.serve) as client:
            info = _is(InfoReply, client.request(GetInfo()))
        assert (info.epoch, info.ingest) == (broker.endpoints.epoch, broker.endpoints.ingest)
        first = broker.endpoints.epoch
    assert endpoint.read_endpoints(layout.root) is None
    assert [path.name for path in layout.sockets.iterdir()] == ["lock"]
    with running_broker(_config(), layout) as broker:
        assert broker.endpoints.epoch > first


def test_a_broker_without_a_launcher_records_its_lives(layout: RunLayout) -> None:
    for number in (1, 2):
        with running_broker(_config(), layout):
            assert len(read_lives(layout)) == number
            assert read_lives(layout)[-1].ended is None
        assert all(life.ended is not None for life in read_lives(layout))


def test_a_broker_of_a_launcher_leaves_the_lives_to_it(layout: RunLayout) -> None:
    write_json(layout.owner, identify("up", Role.LAUNCHER, os.getpid(), "token"))
    with running_broker(_config(), layout):
        assert read_lives(layout) == ()


def test_second_broker_in_the_run_directory_is_refused(layout: RunLayout) -> None:
    with running_broker(_config(), layout) as broker:
        with (
            pytest.raises(AddressInUseError, match=str(os.getpid())),
            running_broker(_config(), layout),
        ):
            pass
        with BlockingClient(broker.endpoints.serve) as client:
            assert isinstance(client.request(GetInfo()), InfoReply)


def test_second_broker_on_the_journal_is_refused_though_the_lock_file_was_deleted(layout: RunLayout) -> None:
    with running_broker(_config(durability="disk"), layout) as broker:
        (layout.sockets / "lock").unlink()
        with (
            pytest.raises(AddressInUseError, match="stop that run with"),
            running_broker(_config(durability="disk"), layout),
        ):
            raise AssertionError("two brokers on one journal")
        assert [path.name for path in layout.journal.glob("events-*")] == ["events-00000001.rmq"]
        with BlockingClient(broker.endpoints.serve) as client:
            assert isinstance(client.request(GetInfo()), InfoReply)


@pytest.mark.parametrize("name", ["journal", "dropped.jsonl", "endpoints.json", "sockets/lock"])
def test_a_run_directory_that_cannot_be_used_is_named(layout: RunLayout, name: str) -> None:
    """A file in the place of a directory, and the other way round: root may do everything else."""
    if name == "journal":
        layout.journal.touch()
    else:
        (layout.root / name / "in the way").mkdir(parents=True)
    with (
        pytest.raises(UnusablePathError, match=rf"run directory {layout.root}: cannot be used \(.*; make it"),
        running_broker(_config(durability="disk"), layout),
    ):
        raise AssertionError("it is ready")


def test_run_directory_of_any_length_will_do(run_dir: Path) -> None:
    layout = RunLayout(run_dir / ("d" * 120))
    layout.root.mkdir()
    with (
        running_broker(_config(), layout) as broker,
        BlockingClient(broker.endpoints.serve) as client,
    ):
        assert isinstance(client.request(GetInfo()), InfoReply)


def test_subscriber_gets_the_state_at_once(layout: RunLayout) -> None:
    with running_broker(_config(pressure_interval_s=0.05), layout) as broker:
        for _ in range(2):
            with BlockingSubscriber(broker.endpoints.events, [topics.PRESSURE]) as subscriber:
                event = subscriber.poll(LIMIT_S)
            assert event is not None
            assert isinstance(codec.decode_event(event[1]), Pressure)


def test_garbage_on_every_socket_leaves_it_serving(layout: RunLayout) -> None:
    bomb = b"\x91" * 4000 + b"\xc0"
    with running_broker(_config(), layout) as broker, peer(broker.endpoints) as it:
        for frames in ([b"x"], [b"x"] * 300, [bomb, b"x"], [bytes(5000), b""], [b""]):
            it.push.send_multipart(frames)
        context = sockets.make_context()
        for kind, address in (
            (zmq.DEALER, broker.endpoints.serve),
            (zmq.PUB, broker.endpoints.publish),
            (zmq.SUB, broker.endpoints.events),
            (zmq.REQ, broker.endpoints.ingest),  # the wrong kind of peer is refused by the library
        ):
            stranger = context.socket(kind)
            stranger.linger = 0
            stranger.connect(address)
            if kind == zmq.SUB:
                stranger.subscribe(bytes(900))
            elif kind != zmq.REQ:
                for frames in ([b"x"], [b"telemetry.x", b"\xc1"], [b"", b""], [b"x"] * 300):
                    stranger.send_multipart(frames)
            stranger.close(linger=100)
        context.term()
        it.register()
        it.send(1, _group(1))
        it.wait_accepted(1)
        status = it.status()
        assert status.rejected_by_reason["ingest: malformed"] >= 2
        assert status.rejected_by_reason["ingest: limit"] >= 2
        assert status.rejected_messages >= 5
        _stopped(broker)


def test_strangers_on_tcp_leave_it_serving(layout: RunLayout) -> None:
    with running_broker(_config(**INSECURE), layout) as broker, peer(over_tcp(broker.endpoints)) as it:
        for address in broker.endpoints.listen[:2]:
            host, port = address.removeprefix("tcp://").split(":")
            for garbage in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, os.urandom(5000), b""):
                with socket.create_connection((host, int(port))) as stranger:
                    stranger.sendall(garbage)
        it.register()
        it.send(1, _group(1))
        it.wait_accepted(1)


@pytest.mark.parametrize("durability", list(Durability))
def test_orderly_end_keeps_what_is_not_trained(layout: RunLayout, durability: Durability) -> None:
    config = _config(durability=durability)
    with running_broker(config, layout) as broker, peer(broker.endpoints) as it:
        it.register()
        for number in (1, 2, 3):
            it.send(number, _group(number))
        it.wait_accepted(3)
        batch, _ = it.pull(0, 2)
        assert len(batch.groups) == 1  # leased and not settled: kept with the others
        _stopped(broker)
    assert layout.saved.exists() is (durability is Durability.MEMORY)
    with running_broker(config, layout) as broker, peer(broker.endpoints) as it:
        assert not layout.saved.exists()
        _, groups = it.pull(0, 6)
        assert [group.group_id for group in groups] == ["g-1", "g-2", "g-3"]
        assert groups[1]["tokens"][0].tolist() == [2] * 5
        _stopped(broker)


def test_end_with_nothing_left_leaves_no_groups(layout: RunLayout) -> None:
    with running_broker(_config(durability="memory"), layout):
        pass
    assert not layout.saved.exists()
    with running_broker(_config(), layout):
        pass
    assert [path.name for path in layout.journal.glob("groups-*")] == []


@pytest.mark.parametrize(("first", "then"), [("memory", "disk"), ("disk", "memory")])
def test_a_run_keeps_its_kind_of_durability(layout: RunLayout, first: str, then: str) -> None:
    with running_broker(_config(durability=first), layout) as broker, peer(broker.endpoints) as it:
        it.register()
        it.send(1, _group(1))
        it.wait_accepted(1)
        _stopped(broker)
    with (
        pytest.raises(ConfigError, match=r"broker\.durability"),
        running_broker(_config(durability=then), layout),
    ):
        pass


@pytest.mark.parametrize("durability", [Durability.OS, Durability.DISK])
def test_a_disk_that_fails_ends_the_broker_and_nothing_is_acked(
    layout: RunLayout, durability: Durability, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> int:
        raise OSError(errno.EIO, "Input/output error")

    def send() -> None:
        with running_broker(_config(durability=durability), layout) as broker, peer(broker.endpoints) as it:
            it.register()
            it.send(1, _group(1))
            it.wait_durable(1)
            monkeypatch.setattr(Disk, "pwritev", broken)
            it.send(2, _group(2))
            assert broker.join(LIMIT_S)

    with pytest.raises(JournalFailedError):
        send()
    monkeypatch.undo()
    with running_broker(_config(durability=durability), layout) as broker, peer(broker.endpoints) as it:
        _, groups = it.pull(0, 2)
        assert [group.group_id for group in groups] == ["g-1"]
        _stopped(broker)


def test_a_journal_that_fails_at_the_very_end_is_told(layout: RunLayout) -> None:
    def deleted() -> None:
        with (
            running_broker(_config(durability=Durability.DISK), layout) as broker,
            peer(broker.endpoints) as it,
        ):
            it.register()
            it.send(1, _group(1))
            it.wait_durable(1)
            layout.journal.rename(layout.root / "gone")  # at once: the journal makes files meanwhile

    with pytest.raises(JournalFailedError):
        deleted()


def test_broker_that_was_killed_comes_back_to_its_ports(layout: RunLayout) -> None:
    with running_broker(_config(**INSECURE), layout) as broker:
        previous = broker.endpoints
        written = layout.endpoints.read_bytes()
    layout.endpoints.write_bytes(written)  # a killed one would not have removed it
    with running_broker(_config(**INSECURE), layout) as broker:
        assert broker.endpoints.listen == previous.listen
        assert broker.endpoints.epoch > previous.epoch
        written = layout.endpoints.read_bytes()
    layout.endpoints.write_bytes(written)
    with (
        socket.create_server(("127.0.0.1", int(previous.listen[0].rpartition(":")[2]))),
        running_broker(_config(**INSECURE), layout) as broker,
    ):
        assert broker.endpoints.listen[0] != previous.listen[0]


def test_host_that_is_not_here_is_named(layout: RunLayout) -> None:
    config = _config(listen="tcp://192.0.2.7:0", insecure=True)
    with (
        pytest.raises(ConfigError, match=r"broker\.listen.*192\.0\.2\.7"),
        running_broker(config, layout),
    ):
        pass


def test_defect_of_the_core_ends_the_broker_with_its_error(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> list[object]:
        raise ZeroDivisionError("a defect")

    def ask() -> None:
        with (
            running_broker(_config(), layout, lambda: ended.append(True)) as broker,
            BlockingClient(broker.endpoints.serve) as client,
        ):
            with pytest.raises(BrokerUnavailableError):
                client.request(GetInfo(), timeout_s=0.2)
            assert broker.join(LIMIT_S)

    ended: list[bool] = []
    monkeypatch.setattr(BrokerCore, "request", failing)
    with pytest.raises(ZeroDivisionError):
        ask()
    assert ended == [True]
    assert endpoint.read_endpoints(layout.root) is None


@pytest.mark.parametrize("end", ["SIGTERM", "SIGINT", "Shutdown"])
def test_process_ends_in_order(layout: RunLayout, end: str) -> None:
    write_json(layout.config, _config(durability="memory"))
    program = (
        "import sys; from pathlib import Path; from rolloutmq.services.broker.server import main;"
        f"sys.exit(main(Path({str(layout.root)!r})))"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE) as process:
        found = endpoint.resolve_blocking(layout.root, LIMIT_S)
        assert found.pid == process.pid
        with peer(found) as it:
            it.register()
            it.send(1, _group(1))
            it.wait_accepted(1)
            if end == "Shutdown":
                assert it.client.request(Shutdown()) == Ok()
            else:
                process.send_signal(signal.Signals[end])
        assert process.wait(LIMIT_S) == 0
        assert process.stderr is not None
        log = process.stderr.read().decode()
    assert "saved groups=1" in log
    assert not layout.endpoints.exists()
    assert layout.saved.exists()


def test_process_without_a_run_says_what_is_missing(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path; from rolloutmq.services.broker.server import main;"
        f"sys.exit(main(Path({str(tmp_path)!r})))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == 1
    assert b"config.json is missing" in ended.stderr


def _lived(layout: RunLayout, durability: str, count: int = 2) -> None:
    """Let a broker live in the run directory, which leaves so many groups."""
    write_json(layout.config, _config(durability=durability))
    with running_broker(_config(durability=durability), layout) as broker, peer(broker.endpoints) as it:
        it.register()
        for number in range(1, count + 1):
            it.send(number, _group(number))
        it.wait_accepted(count)


def _records(layout: RunLayout) -> dict[str, tuple[int, int, bytes]]:
    """Return every file and directory of the run."""
    return listing(layout.root)


@pytest.mark.parametrize("version", OTHERS)
@pytest.mark.parametrize("durability", list(Durability))
def test_records_of_another_version_are_refused_and_left_as_they_are(
    layout: RunLayout, durability: Durability, version: int
) -> None:
    _lived(layout, durability.value)
    spare = layout.journal / "spare-00000001.rmq"
    if durability is not Durability.MEMORY:
        spare.write_bytes(next(layout.journal.glob("groups-*")).read_bytes())
        flip(next(layout.journal.glob("groups-*")), FILE_HEADER_BYTES + 80)  # would be kept aside as damaged
    ours = {path: path.read_bytes() for path in layout.root.rglob("*.rmq")}
    theirs = [as_version(path, version) for path in ours]
    before = _records(layout)
    program = (
        "import sys; from pathlib import Path; from rolloutmq.services.broker.server import main;"
        f"sys.exit(main(Path({str(layout.root)!r})))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert ended.returncode == PERMANENT_FAILURE
    (*_, last) = ended.stderr.splitlines()
    assert last.startswith(f"error: {layout.root}")
    assert f"got version {version}, this one reads version {VERSION}" in last
    assert "start in another run directory" in last
    assert "damaged" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert _records(layout) == before
    for path in theirs:
        path.unlink()
    for path, data in ours.items():
        path.write_bytes(data)
    with running_broker(_config(durability=durability.value), layout) as broker:
        assert _stopped(broker).held_groups == 2
    assert not spare.exists()


@pytest.mark.parametrize("version", OTHERS)
def test_a_dead_letter_of_another_version_is_refused_before_a_journal_is_begun(
    layout: RunLayout, version: int
) -> None:
    _lived(layout, "memory")
    layout.dead.mkdir()
    letter = layout.dead / "000000000001.rmq"
    layout.saved.rename(letter)
    as_version(letter, version)
    before = _records(layout)
    with pytest.raises(RecordVersionError, match=f"got version {version}"), running_broker(_config(), layout):
        raise AssertionError("it is not ready")
    assert _records(layout) == before
    assert not layout.journal.exists()


@pytest.mark.parametrize("version", OTHERS)
def test_a_dead_letter_of_another_version_beside_a_living_broker_is_refused_by_its_name(
    layout: RunLayout, version: int
) -> None:
    _lived(layout, "memory")
    data = layout.saved.read_bytes()
    with (
        running_broker(_config(durability="memory"), layout) as broker,
        BlockingClient(broker.endpoints.serve) as client,
    ):
        layout.dead.mkdir()
        letter = layout.dead / "000000000001.rmq"
        letter.write_bytes(data)
        as_version(letter, version)
        every = client.request(Requeue())
        assert isinstance(every, Requeued)
        assert (every.requeued, list(every.refused)) == ((), [letter.name])
        assert f"got version {version}" in every.refused[letter.name]
        one = client.request(Requeue(groups=("g",)))
        assert isinstance(one, Requeued)
        assert one.refused == {"g": "there is no dead group of this id"}
        letter.unlink()


def test_a_flipped_version_in_the_middle_is_damage(
    layout: RunLayout, caplog: pytest.LogCaptureFixture
) -> None:
    _lived(layout, "disk", count=3)
    (segment,) = layout.journal.glob("groups-*")
    data = segment.read_bytes()
    flip(segment, data.rindex(RECORD_MAGIC, 0, data.index(_group(2).group_id.encode())) + 4)
    with running_broker(_config(durability="disk"), layout) as broker, peer(broker.endpoints) as it:
        _, groups = it.pull(1, 4)
        assert [group.group_id for group in groups] == [_group(1).group_id, _group(3).group_id]
    assert len(list((layout.journal / "quarantine").iterdir())) == 1
    assert "another version" not in caplog.text


def _previous(message: object) -> bytes:
    """Encode as protocol version 1 did, whose registrations named no version."""
    said = msgspec.msgpack.decode(msgspec.msgpack.encode(message))
    if isinstance(said, dict) and said.get("kind") in {"register_producer", "register_consumer"}:
        assert said.pop("protocol") == PROTOCOL_VERSION
    return msgspec.msgpack.encode(said)


@pytest.mark.parametrize(
    "client",
    [
        partial(Producer.blocking, env="sort3", producer="p"),
        partial(Consumer.blocking, consumer="t", sequences=2),
    ],
    ids=["producer", "consumer"],
)
def test_a_client_of_the_former_protocol_is_told_both_versions(
    layout: RunLayout, monkeypatch: pytest.MonkeyPatch, client: Callable[..., AbstractContextManager[object]]
) -> None:
    with running_broker(_config(durability="memory"), layout) as broker:
        monkeypatch.setattr(codec, "encode", _previous)
        said = rf"refused \(version\).*got 1, this side speaks {PROTOCOL_VERSION}\)"
        with pytest.raises(RefusedError, match=said), client(layout.root):
            raise AssertionError("it is not let in")
        monkeypatch.undo()
        with client(layout.root):
            assert broker.error is None
