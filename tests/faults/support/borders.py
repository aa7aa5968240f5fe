"""Shared parts of the border tests: a broker under attack, good peers beside it, and handmade peers."""

import socket
import struct
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec
import psutil
import zmq

from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.encoding import codec
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport import endpoint, sockets
from rolloutmq.bus.transport.endpoint import Where
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.environment import EnvironmentConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.config.trainer import TrainerConfig
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.files import Endpoints, RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.control import GetStatus, StatusReply
from rolloutmq.schemas.wire.envelope import PROTOCOL_VERSION, Envelope, GroupHeader, Split
from rolloutmq.schemas.wire.replies import Registered
from rolloutmq.schemas.wire.requests import DeclareTables, RegisterProducer, Request

LIMIT_S: Final = 60.0
GIVE_UP_S: Final = 2.0
"""How long good traffic may take to end after a test has failed."""
MIB: Final = 1 << 20
PROGRAM: Final = """
import sys
from pathlib import Path
from rolloutmq.services.broker.server import main
sys.exit(main(Path({root!r})))
"""
ENV: Final = "sort3"
_T = TypeVar("_T")


def run_config(**broker: object) -> RunConfig:
    """Return the configuration of a run whose producers only the marks hold back."""
    return RunConfig(
        broker=BrokerConfig.model_validate(broker),
        environment={ENV: EnvironmentConfig(entry="m:C", group_size=2, pacing=False, stale="pass")},
        trainer=TrainerConfig(batch_sequences=2),
    )


def small_group(name: str, **columns: Any) -> Group:
    """Return a group of two short sequences."""
    tokens = [[1, 2, 3], [4, 5, 6, 7]]
    return Group.build(
        name, tokens=tokens, mask=[[True] * len(row) for row in tokens], scores=[0.0, 1.0], **columns
    )


def wait_for(condition: Callable[[], bool], timeout_s: float = LIMIT_S) -> None:
    """Wait for something that another thread or process does; AssertionError if it does not in time."""
    until = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < until, "it did not happen in time"
        time.sleep(0.005)


def expect(kind: type[_T], reply: object) -> _T:
    """Return the reply, which must be of that kind."""
    assert isinstance(reply, kind), reply
    return reply


class BrokerProcess:
    """A broker in a process of its own, and its memory as the kernel reports it."""

    def __init__(self, process: "subprocess.Popen[bytes]", endpoints: Endpoints) -> None:
        self.process = process
        self.endpoints = endpoints

    @property
    def rss(self) -> int:
        """Resident bytes now."""
        return int(psutil.Process(self.process.pid).memory_info().rss)

    @property
    def descriptors(self) -> int:
        """Open descriptors now."""
        return int(psutil.Process(self.process.pid).num_fds())

    def status(self) -> StatusReply:
        return status_of(self.endpoints)

    def rejections(self) -> Counter[str]:
        """Return the rejected messages so far, by reason."""
        return Counter(self.status().rejected_by_reason)

    def wait_rejected(self, reasons: Mapping[str, int], since: Mapping[str, int]) -> None:
        """Wait until so many more messages were rejected, for those reasons and for no other."""
        wanted, got = Counter(reasons) + Counter(since), Counter(since)
        until = time.monotonic() + LIMIT_S
        while got != wanted and time.monotonic() < until:
            got = self.rejections()
        assert got == wanted, f"missing {wanted - got}, beyond {got - wanted}"

    @contextmanager
    def growth_below(self, nbytes: int) -> Iterator[None]:
        """Fail if the broker's memory ever grows by that much in the block, however briefly."""
        Path(f"/proc/{self.process.pid}/clear_refs").write_text("5")  # the peak begins anew
        before = self.rss
        yield
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        peak = int(status.partition("VmHWM:")[2].split()[0]) * 1024
        assert peak - before < nbytes, f"the broker grew by {(peak - before) / MIB:.0f} MiB"


def status_of(endpoints: Endpoints) -> StatusReply:
    """Ask a broker for its status."""
    with BlockingClient(endpoints.serve) as client:
        return expect(StatusReply, client.request(GetStatus()))


@contextmanager
def broker_process(layout: RunLayout, config: RunConfig, prelude: str = "") -> Iterator[BrokerProcess]:
    """Run a broker in a child; it must live until the block ends, and then end in order."""
    write_json(layout.config, config)
    program = prelude + PROGRAM.format(root=str(layout.root))
    log = layout.root / "broker.log"
    with log.open("ab") as out, subprocess.Popen([sys.executable, "-c", program], stderr=out) as process:
        try:
            found = endpoint.resolve_blocking(layout.root, LIMIT_S)
            assert found.pid == process.pid
            yield BrokerProcess(process, found)
            assert process.poll() is None, log.read_text()
            process.terminate()
            assert process.wait(LIMIT_S) == 0, log.read_text()
        finally:
            if process.poll() is not None and process.returncode:
                sys.stderr.write(log.read_text())
            process.kill()


class Traffic:
    """A good producer and a good consumer, in threads of their own.

    Attributes:
        sent: Ids of the groups the producer handed over.
        trained: Ids of the groups of all settled batches, including those of other producers.
        rejected: Ids of the groups that did not decode.
    """

    PREFIX: Final = "good-"
    AHEAD: Final = 16
    """Groups under way at most, so that the good peers leave the machine to the bad ones."""
    PACE_S: Final = 0.004

    def __init__(self, where: Where) -> None:
        self.sent: list[str] = []
        self.trained: list[str] = []
        self.rejected: list[str] = []
        self.error: BaseException | None = None
        self._where = where
        self._stop = threading.Event()
        self._flushed = threading.Event()
        self._threads = [
            threading.Thread(target=self._guarded, args=(work,), name=work.__name__, daemon=True)
            for work in (self._produce, self._consume)
        ]

    @property
    def own(self) -> list[str]:
        """Ids of its own trained groups."""
        return [name for name in self.trained if name.startswith(self.PREFIX)]

    def advance(self, groups: int = 20) -> None:
        """Wait until so many more of its groups were trained."""
        goal = len(self.own) + groups
        wait_for(lambda: self.error is not None or len(self.own) >= goal)
        assert self.error is None, repr(self.error)

    def wait_trained(self, name: str) -> None:
        """Wait until that group was trained, while its own groups go on being trained."""
        wait_for(lambda: self.error is not None or name in self.trained)
        self.advance(4)

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def end(self) -> None:
        """Finish the groups under way, and end."""
        self.stop(2 * LIMIT_S)
        assert self.error is None, repr(self.error)
        assert sorted(self.own) == sorted(self.sent), "a group was lost, or came twice"

    def stop(self, timeout_s: float) -> None:
        """Ask both to end, and wait for that long."""
        self._stop.set()
        for thread in self._threads:
            thread.join(timeout_s)

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - it comes out of `advance` and `end`
            self.error = error
            self._flushed.set()

    def _produce(self) -> None:
        with Producer.blocking(self._where, env=ENV, producer="good", group_size=2) as producer:
            while not self._stop.wait(self.PACE_S) and self.error is None:
                if len(self.sent) - len(self.own) < self.AHEAD:
                    name = f"{self.PREFIX}{len(self.sent)}"
                    producer.send(small_group(name))
                    self.sent.append(name)
            assert producer.flush(LIMIT_S)
        self._flushed.set()

    def _consume(self) -> None:
        with Consumer.blocking(self._where, sequences=2) as consumer:
            until = float("inf")
            while not (self._flushed.is_set() and len(self.own) >= len(self.sent)):
                self._train(consumer)
                if self._flushed.is_set():
                    until = min(until, time.monotonic() + LIMIT_S)
                assert time.monotonic() < until, "what was acked never came"

    def _train(self, consumer: BlockingConsumer) -> None:
        version = consumer.version
        batch = consumer.pull(version.step + 1, version, 0.5)
        if batch is None:
            return
        try:
            batch.ack()
        except LeaseLostError:
            return
        self.trained += [group.group_id for group in batch.groups]
        self.rejected += [bad.group_id for bad in batch.rejected]


@contextmanager
def traffic(where: Where) -> Iterator[Traffic]:
    """Run good traffic beside the block; every one of its groups must reach the consumer once."""
    it = Traffic(where)
    it.start()
    try:
        it.advance(4)
        yield it
        it.advance(4)
    except BaseException:
        it.stop(GIVE_UP_S)
        raise
    it.end()


class Forger:
    """A handmade producer that can send anything: raw sockets and the codec."""

    def __init__(self, endpoints: Endpoints, name: str = "mallory") -> None:
        self.name = name
        self.context = sockets.make_context()
        self.client = BlockingClient(endpoints.serve, self.context)
        self.push = sockets.producer_push(self.context, endpoints.ingest)
        assert self.push.poll(5000, zmq.POLLOUT)
        self.session = 0
        self.seq = 0
        self.position = 0

    def close(self) -> None:
        self.client.close()
        self.push.close()
        self.context.term()

    def ask(self, request: Request) -> object:
        return self.client.request(request)

    def register(self) -> int:
        """Open a session and declare the table of a small group; return its number."""
        asked = RegisterProducer(producer=self.name, env=ENV, group_size=2)
        self.session = expect(Registered, self.ask(asked)).ack.session
        table = codec.encode_group(small_group("g"), MIB).table
        self.ask(DeclareTables(producer=self.name, session=self.session, tables=(table,)))
        self.seq = self.position = 0
        return self.session

    def next(self, group: Group, **header: Any) -> tuple[GroupHeader, codec.EncodedGroup]:
        """Number a group as the next of the session, or as the header says."""
        encoded = codec.encode_group(group, 1 << 27)
        made = codec.header_of(group, encoded, seq=self.seq + 1, position=self.position + encoded.nbytes)
        return msgspec.structs.replace(made, **header), encoded

    def message(self, header: GroupHeader, frames: Sequence[Any], **envelope: Any) -> list[Any]:
        """Encode one message; keywords replace fields of its envelope."""
        about = Envelope(PROTOCOL_VERSION, self.name, self.session, "default", ENV, Split.TRAIN, (header,))
        return [codec.encode_envelope(msgspec.structs.replace(about, **envelope)), *frames]

    def send_next(self, group: Group) -> None:
        """Send a valid group."""
        header, encoded = self.next(group)
        self.push.send_multipart(self.message(header, encoded.frames))
        self.seq, self.position = header.seq, header.position


@contextmanager
def forger(endpoints: Endpoints, name: str = "mallory") -> Iterator[Forger]:
    """Connect a handmade producer."""
    made = Forger(endpoints, name)
    try:
        yield made
    finally:
        made.close()


class Wire:
    """One handmade ZMTP connection, for messages no socket of the library would send."""

    MORE: Final = 0x01
    LONG: Final = 0x02
    _READY: Final = b"\x05READY\x0bSocket-Type"

    def __init__(self, address: str, kind: bytes) -> None:
        self.socket = connected(address)
        self.socket.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
        self._receive(64)
        ready = self._READY + struct.pack(">I", len(kind)) + kind
        self.socket.sendall(bytes([4, len(ready)]) + ready)
        self._receive(self._receive(2)[1])

    def close(self) -> None:
        self.socket.close()

    def announce(self, nbytes: int, *, more: bool = False) -> None:
        """Send the header of a frame of that size."""
        self.socket.sendall(bytes([self.LONG | more]) + struct.pack(">Q", nbytes))

    def send(self, frame: bytes, *, more: bool) -> None:
        """Send one frame whole."""
        self.announce(len(frame), more=more)
        self.socket.sendall(frame)

    def was_cut(self, timeout_s: float = LIMIT_S) -> bool:
        """Return whether the other end closes the connection in time."""
        return was_cut(self.socket, timeout_s)

    def _receive(self, nbytes: int) -> bytes:
        got = b""
        while len(got) < nbytes:
            part = self.socket.recv(nbytes - len(got))
            assert part, "the broker hung up on a greeting"
            got += part
        return got


def connected(address: str) -> socket.socket:
    """Connect a plain socket to an address of the bus."""
    kind, _, place = address.partition("://")
    if kind == "ipc":
        made = socket.socket(socket.AF_UNIX)
        made.settimeout(LIMIT_S)
        made.connect(place)
        return made
    host, _, port = place.rpartition(":")
    return socket.create_connection((host, int(port)), LIMIT_S)


def was_cut(peer: socket.socket, timeout_s: float) -> bool:
    """Return whether the other end of a plain socket closes it in time; read until then."""
    peer.settimeout(timeout_s)
    try:
        while peer.recv(1 << 16):
            pass
    except TimeoutError:
        return False
    except ConnectionError:
        return True
    return True


class Proxy:
    """Forwards the bytes of one unix socket, and can cut its connections."""

    def __init__(self, path: Path, target: str) -> None:
        self.address = f"ipc://{path}"
        self._target = target
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(16)
        self._ends: list[socket.socket] = []
        self._lock = threading.Lock()
        self._down = False
        self._threads: list[threading.Thread] = []
        self._spawn(self._accept)

    def cut(self) -> None:
        """Cut every connection, and new ones until `mend`."""
        with self._lock:
            self._down = True
            for end in self._ends:
                _hang_up(end)

    def mend(self) -> None:
        """Allow connections again."""
        with self._lock:
            self._down = False

    def close(self) -> None:
        """End the proxy and cut every connection."""
        self.cut()
        _hang_up(self._listener)
        for thread in self._threads:
            thread.join(LIMIT_S)
        for end in (*self._ends, self._listener):
            end.close()

    def _spawn(self, work: Callable[..., None], *args: Any) -> None:
        thread = threading.Thread(target=work, args=args, name="proxy")
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            with self._lock:
                self._ends.append(near)
                if self._down:
                    _hang_up(near)
                    continue
                far = connected(self._target)
                far.settimeout(None)
                self._ends.append(far)
            self._spawn(self._pump, near, far)
            self._spawn(self._pump, far, near)

    def _pump(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                sink.sendall(data)
        _hang_up(source)
        _hang_up(sink)


def _hang_up(end: socket.socket) -> None:
    with suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)


@contextmanager
def proxy(path: Path, target: str) -> Iterator[Proxy]:
    """Run a proxy in front of an ipc address."""
    made = Proxy(path, target)
    try:
        yield made
    finally:
        made.close()
