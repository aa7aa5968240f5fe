"""Clients of the network tests that do what their key does not allow, or that read nothing.

    python -m tests.network.support.intruders orders|groups|deaf ADDRESS KEY

Each prints lines for the test, and ends with its standard input.
"""

import sys
from typing import Final

import zmq
from tests.faults.support.processes import SEQUENCES, made

from rolloutmq.bus.encoding import codec
from rolloutmq.bus.encoding.topics import CONTROL
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.endpoint import resolve_blocking
from rolloutmq.bus.transport.keys.bundle import keys_of
from rolloutmq.bus.transport.remote import remote
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import RefusedError
from rolloutmq.schemas.files import Endpoints
from rolloutmq.schemas.wire import control, requests
from rolloutmq.schemas.wire.envelope import (
    PROTOCOL_VERSION,
    Envelope,
    GroupHeader,
    PolicyVersion,
    RewardSummary,
    Split,
)
from rolloutmq.schemas.wire.requests import Request

ORDERS: Final[tuple[Request, ...]] = (
    control.Drain(worker="e-0"),
    control.SetValues(values={"env.e.weight": 2.0}),
    control.SetWorkers(env="e", count=9),
    control.Reset(),
    control.Shutdown(),
    requests.RegisterProducer(producer="p0", run="run", env="e", split=Split.TRAIN, slots=1, group_size=2),
    requests.RegisterConsumer(consumer="trainer-0"),
    requests.Pull(
        consumer="trainer-0", run="run", step=1, version=PolicyVersion(), sequences=8, request_id="r"
    ),
)
"""What nobody but an admin, a worker or a trainer may ask."""
FORGED: Final = 50
CONNECTIONS: Final = 20
QUESTIONS: Final = 300
"""Requests of each connection: more replies than the broker queues for one."""


def found_at(address: str, key: str) -> Endpoints:
    return resolve_blocking(remote(address, key))


def orders(address: str, key: str) -> None:
    """Ask for everything, and print a line for each reply."""
    found = found_at(address, key)
    with BlockingClient(found.serve, keys=keys_of(found)) as client:
        for order in ORDERS:
            try:
                reply = client.request(order, 30.0)
            except RefusedError as error:
                say(f"{type(order).__name__} {error.code.value} {error.detail}")
            else:
                say(f"{type(order).__name__} done {reply}")


def groups(address: str, key: str) -> None:
    """Push groups under the name of a living producer, and orders to its worker as events."""
    found = found_at(address, key)
    context = sockets.make_context()
    push = sockets.producer_push(context, found.ingest, keys_of(found))
    publish = sockets.publisher(context, found.publish, keys_of(found))
    encoded = codec.encode_group(made("forged-0"), 1 << 30)
    for session in range(1, FORGED + 1):
        push.send_multipart([codec.encode_envelope(forged(encoded, session)), *encoded.frames])
        publish.send_multipart([CONTROL + b"e-0", codec.encode(control.Drain(worker="e-0"))])
    say("pushed")
    sys.stdin.read()
    for socket in (push, publish):
        socket.close(0)
    context.term()


def forged(encoded: codec.EncodedGroup, session: int) -> Envelope:
    header = GroupHeader(
        seq=1,
        position=encoded.nbytes,
        group_id="forged-0",
        table=encoded.table.id,
        frames=len(encoded.frames),
        nbytes=encoded.nbytes,
        crc=encoded.crc,
        sequences=SEQUENCES,
        tokens=2,
        oldest=PolicyVersion(),
        newest=PolicyVersion(),
        started_at=1.0,
        finished_at=2.0,
        rewards=RewardSummary(),
    )
    return Envelope(
        version=PROTOCOL_VERSION,
        producer="p0",
        session=session,
        run="run",
        env="e",
        split=Split.TRAIN,
        groups=(header,),
    )


def deaf(address: str, key: str) -> None:
    """Ask for the newest group again and again, and read no reply."""
    found = found_at(address, key)
    context = sockets.make_context()
    asked = [b"\0" * 8, b"", codec.encode(control.LatestExample())]
    clients = [sockets.client_dealer(context, found.serve, keys_of(found)) for _ in range(CONNECTIONS)]
    for client in clients:
        client.setsockopt(zmq.RCVHWM, 1)
    sent = 0
    while sent < CONNECTIONS * QUESTIONS and any(client.poll(5000, zmq.POLLOUT) for client in clients):
        for client in clients:
            try:
                client.send_multipart(asked, zmq.NOBLOCK)
            except zmq.Again:
                continue
            sent += 1
    say("asked")
    sys.stdin.read()
    for client in clients:
        client.close(0)
    context.term()


def say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    {"orders": orders, "groups": groups, "deaf": deaf}[sys.argv[1]](*sys.argv[2:])
