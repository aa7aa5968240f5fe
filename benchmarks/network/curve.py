"""End-to-end groups per second by keyed TCP: beside a bare relay that decrypts and encrypts, and beside plain TCP.

All processes are on this host and speak over loopback, so ciphers, not cards, are measured. The relay is `zmq.proxy`
between two CURVE sockets in the fastest mode of `broker.proxy`, with as many I/O threads as the broker's listener has:
one. It moves the wire bytes of our groups, made beforehand, and stores, checks and acks nothing.

A second relay shows what remains for any broker in Python whose consumer asks for batches: it is a loop that receives
and sends frames, and its consumer asks for the next batch once it has one, as a trainer does. The groups of a batch are
one message, so nothing of it is used before all is decrypted.

    python -m benchmarks.network.curve ROLE DIRECTORY SHAPE MODE KIND ...    one process of a round of the relay
"""

import contextlib
import sys
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Final, Literal

import msgspec
import zmq
from msgspec.structs import replace

from benchmarks.broker import proxy, throughput
from benchmarks.broker.proxy import ENVELOPE, Mode, fastest
from benchmarks.harness import stage, workload
from benchmarks.harness.row import Row, compare
from benchmarks.harness.workload import Shape
from rolloutmq.bus.rundir import write_json
from rolloutmq.bus.transport.bindings import LISTENING
from rolloutmq.bus.transport.keys.bundle import save_bundle
from rolloutmq.bus.transport.keys.directory import KeyDirectory, key_pair
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.network.keys import Role

LASTS_S: Final = 3.0
LOOK_EACH: Final = 4
"""Pulls between two looks at the clock."""
BATCHES_AHEAD: Final = 4
SMALL: Final = Shape.of_bytes(16_000)
MIDDLE: Final = Shape.of_bytes(134_000)
GOAL: Final = 0.9


def rows() -> Iterator[Row]:
    """Groups of 134 kB, which have a goal, and of 16 kB."""
    for shape, goal in ((MIDDLE, GOAL), (SMALL, None)):
        yield compare(
            "groups/s end to end by keyed TCP, memory",
            str(shape),
            partial(rate, shape, "keys"),
            partial(relay_rate, shape),
            "a bare CURVE relay, which decrypts and encrypts",
            goal,
        )
        yield compare(
            "groups/s end to end by keyed TCP, memory",
            str(shape),
            partial(rate, shape, "keys"),
            partial(relay_rate, shape, kind="batches"),
            "a bare CURVE relay in Python, which is asked for batches",
            None,
        )
        yield compare(
            "groups/s end to end by keyed TCP, memory",
            str(shape),
            partial(rate, shape, "keys"),
            partial(rate, shape, "insecure"),
            "the same by plain TCP",
        )


def rate(shape: Shape, door: Literal["keys", "insecure"], lasts_s: float = LASTS_S) -> float:
    """Run one round through a new broker by its listener, and return groups a second."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as text:
        root = Path(text)
        run, clients, key = RunLayout(root / "run"), RunLayout(root / "clients"), root / "boss.key"
        for layout in (run, clients):
            layout.root.mkdir(mode=0o700)
        listens: dict[str, object] = {"listen": "tcp://127.0.0.1:0", "durability": "memory"}
        if door == "keys":
            keys = KeyDirectory.create(root / "keys")
            save_bundle(key, keys.new("boss", Role.ADMIN))
            listens["keys"] = str(keys.path)
        else:
            listens["insecure"] = True
        with stage.broker(run, stage.config(**listens)) as process:
            found = stage.bound(run, process)
            places = dict(zip(LISTENING, found.listen, strict=True))
            write_json(clients.endpoints, replace(found, **places, key=str(key) if door == "keys" else ""))
            clock = lasts_s, lasts_s * throughput.WARM_UP_PART, throughput.batch_groups(shape)
            return throughput.between(clients.root, shape, clock)


Kind = Literal["stream", "batches"]


class Keys(msgspec.Struct, frozen=True):
    """Keys and ports of a relay, in a file that its clients wait for."""

    public: str
    inward: str
    outward: str


def relay_rate(shape: Shape, lasts_s: float = LASTS_S, *, kind: Kind = "stream") -> float:
    """Run one round of a relay and return groups a second: of a stream of groups, or of batches on request."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory:
        words = (directory, shape.word, fastest(shape).word, kind)
        roles = [(f"producer-{number}", *words) for number in range(proxy.PRODUCERS)]
        with stage.player("network.curve", "relay", *words) as relay:
            relay.wait_ready()
            with (
                stage.player("network.curve", "consumer", *words, lasts_s) as consumer,
                stage.players("network.curve", roles) as producers,
            ):
                for one in (consumer, *producers):
                    one.wait_ready()
                for one in (relay, consumer, *producers):
                    one.begin()
                return float(consumer.line())


@contextlib.contextmanager
def _socket(kind: int, mode: Mode, server: str = "", secret: str = "") -> Iterator["zmq.Socket[bytes]"]:
    """Yield a socket of a server with its secret key, or of a client that knows the server's public one."""
    with zmq.Context() as context, context.socket(kind) as socket:
        socket.linger = 0
        socket.set_hwm(mode.mark)
        _lock(socket, server, secret)
        yield socket


def _lock(socket: "zmq.Socket[bytes]", server: str, secret: str) -> None:
    if secret:
        socket.curve_server = True
        socket.curve_secretkey = secret.encode()
        return
    public, own = key_pair()
    socket.curve_serverkey = server.encode()
    socket.curve_publickey, socket.curve_secretkey = public.encode(), own.encode()


def _relay(directory: Path, shape: Shape, mode: Mode, kind: Kind) -> None:
    public, secret = key_pair()
    with (
        _socket(zmq.PULL, mode, secret=secret) as inward,
        inward.context.socket(zmq.PUSH if kind == "stream" else zmq.ROUTER) as outward,
    ):
        outward.linger = 0
        outward.set_hwm(mode.mark)
        _lock(outward, "", secret)
        ports = [socket.bind_to_random_port("tcp://127.0.0.1") for socket in (inward, outward)]
        at = [f"tcp://127.0.0.1:{port}" for port in ports]
        write_json(directory / "relay.json", Keys(public, *at))
        stage.ready()
        if kind == "stream":
            zmq.proxy(inward, outward)
        else:
            _hand_out(inward, outward, throughput.batch_groups(shape))


def _hand_out(inward: "zmq.Socket[bytes]", outward: "zmq.Socket[bytes]", groups: int) -> None:
    """Answer each request with so many groups; a few batches wait in memory."""
    waiting: deque[zmq.Frame] = deque()
    asked: deque[bytes] = deque()
    most = BATCHES_AHEAD * groups
    poller = zmq.Poller()
    poller.register(outward, zmq.POLLIN)
    while True:
        poller.register(inward, zmq.POLLIN if len(waiting) < most else 0)
        readable = dict(poller.poll())
        if outward in readable:
            asked.append(outward.recv_multipart()[0])
        if inward in readable:
            with contextlib.suppress(zmq.Again):
                while len(waiting) < most:
                    waiting.append(inward.recv(zmq.NOBLOCK, copy=False))
        if asked and len(waiting) >= groups:
            outward.send_multipart([asked.popleft(), *[waiting.popleft() for _ in range(groups)]])


def _producer(number: int, keys: Keys, shape: Shape, mode: Mode) -> None:
    messages = [ENVELOPE + body for body in workload.bodies(shape, number)]
    with _socket(zmq.PUSH, mode, keys.public) as push:
        stage.ready()
        push.connect(keys.inward)
        for message in cycle(messages):
            push.send_multipart([message], copy=mode.copy_out)


def _consumer(keys: Keys, mode: Mode, kind: Kind, lasts_s: float) -> None:
    with _socket(zmq.PULL if kind == "stream" else zmq.DEALER, mode, keys.public) as source:
        stage.ready()
        source.connect(keys.outward)
        pull: Callable[[], Sequence[object]] = partial(source.recv_multipart, 0, copy=mode.copy_in)
        if kind == "batches":
            source.send(b"")
            pull = partial(_asked, source, copy=mode.copy_in)
        pull()
        _pulled(pull, lasts_s * proxy.WARM_UP_PART)
        print(_pulled(pull, lasts_s), flush=True)


def _asked(dealer: "zmq.Socket[bytes]", *, copy: bool) -> Sequence[object]:
    """Return a batch, and ask for the next one."""
    groups: Sequence[object] = dealer.recv_multipart(0, copy=copy)
    dealer.send(b"")
    return groups


def _pulled(pull: Callable[[], Sequence[object]], lasts_s: float) -> float:
    """Pull for this long, and return groups per second."""
    count, started = 0, time.perf_counter()
    while (spent := time.perf_counter() - started) < lasts_s:
        for _ in range(LOOK_EACH):
            count += len(pull())
    return count / spent


def main(role: str, directory: str, shape: str, mode: str, kind: Kind, *words: str) -> None:
    """Run one process of a round of a relay."""
    place, how, groups = Path(directory), Mode.parse(mode), Shape.parse(shape)
    if role == "relay":
        _relay(place, groups, how, kind)
        return
    keys = msgspec.json.decode((place / "relay.json").read_bytes(), type=Keys)
    if role == "consumer":
        _consumer(keys, how, kind, float(words[0]))
    else:
        _producer(int(role.removeprefix("producer-")), keys, groups, how)


if __name__ == "__main__":
    main(*sys.argv[1:])  # type: ignore[arg-type]
