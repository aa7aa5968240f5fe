"""Producer and consumer programs of the network tests, with the settings that users have.

    python -m tests.network.support.peers produce|consume|ledger JSON

Every group follows from its id, as in `tests.faults.support.processes`. A producer leaves its ack log, a consumer a
line for each batch before it settles it and one after, so that a killed one is accounted for too.
"""

import logging
import sys
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Final

import msgspec
from tests.faults.support.processes import LIMIT_S, SEQUENCES, is_whole, made

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport.endpoint import Where, resolve_blocking
from rolloutmq.bus.transport.remote import remote
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import LeaseLostError
from rolloutmq.schemas.wire.control import GetStatus, StatusReply

BATCH: Final = 4
"""Groups of a batch."""
WAIT_S: Final = 0.5


class Door(msgspec.Struct):
    """How a program finds its broker: the run directory on its own host, or an address and the file of a key."""

    run_dir: str = ""
    address: str = ""
    key: str = ""

    def where(self) -> Where:
        return remote(self.address, self.key) if self.address else Path(self.run_dir)


class Produce(msgspec.Struct):
    """Work of a producer: groups `NAME-NUMBER` of consecutive numbers, and a pause after each.

    It sends `count` groups, or until the file `until` exists.
    """

    door: Door
    name: str
    acks: str
    until: str
    first: int = 0
    count: int = 0
    nbytes: int = 0
    pause_s: float = 0.0
    slots: int = 1


class Consume(msgspec.Struct):
    """Work of a consumer: it trains until the file `until` exists and a pull found nothing."""

    door: Door
    log: str
    until: str
    name: str = "trainer-0"
    step_s: float = 0.0


class Line(msgspec.Struct):
    """Line of a consumer's log: a batch in hand, settled, or lost."""

    what: str
    ids: tuple[str, ...]


def produce(told: Produce) -> None:
    """Send the groups and wait until all are acked."""
    with Producer.blocking(
        told.door.where(),
        env="e",
        producer=told.name,
        group_size=SEQUENCES,
        slots=told.slots,
        ack_log=Path(told.acks),
    ) as producer:
        for number in range(told.count) if told.count else count():
            if not told.count and Path(told.until).exists():
                break
            producer.send(made(f"{told.name}-{told.first + number}", told.nbytes))
            time.sleep(told.pause_s)
        assert producer.flush(LIMIT_S)


def consume(told: Consume) -> None:
    """Train, and write down each batch."""
    with (
        Path(told.log).open("ab", buffering=0) as log,
        Consumer.blocking(told.door.where(), sequences=BATCH * SEQUENCES, consumer=told.name) as consumer,
    ):

        def note(what: str, ids: tuple[str, ...]) -> None:
            log.write(msgspec.json.encode(Line(what, ids)) + b"\n")

        while True:
            over = Path(told.until).exists()
            version = consumer.version
            try:
                batch = consumer.pull(version.step + 1, version, WAIT_S)
                if batch is None:
                    if over:
                        return
                    continue
                ids = tuple(group.group_id for group in batch.groups)
                whole = not batch.rejected and all(is_whole(group) for group in batch.groups)
                note("pulled" if whole else "damaged", ids)
                time.sleep(told.step_s)
                batch.ack()
            except LeaseLostError:
                note("lost", ())
            else:
                note("settled", ids)


def ledger(door: Door) -> None:
    """Print what the ledger of the broker counts."""
    with BlockingClient(resolve_blocking(door.where(), LIMIT_S).serve) as client:
        reply = client.request(GetStatus(), LIMIT_S)
    assert isinstance(reply, StatusReply)
    sys.stdout.buffer.write(msgspec.json.encode(reply.pressure.ledger))


def settled(lines: list[Line]) -> Counter[str]:
    """Return how often each group was settled by consumers that live to say so."""
    return Counter(name for line in lines if line.what == "settled" for name in line.ids)


def main(role: str, told: str) -> None:
    logging.basicConfig(level=logging.WARNING, format="%(name)s %(levelname)s %(message)s")
    roles: dict[str, tuple[type, Callable[..., None]]] = {
        "produce": (Produce, produce),
        "consume": (Consume, consume),
        "ledger": (Door, ledger),
    }
    kind, work = roles[role]
    work(msgspec.json.decode(told, type=kind))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
