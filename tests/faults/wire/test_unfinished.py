"""Peers that never finish a message, on every socket: memory stays bounded, and no other peer loses a group.

The socket library keeps unfinished messages outside every high-water mark, so the broker cuts connections when its
memory exceeds what its state explains, those of other hosts first. A good producer and a good consumer work beside each
attack, and every one of their groups arrives once.
"""

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pytest
from tests.bus.transport.listening import INSECURE, over_tcp
from tests.faults.support.borders import (
    ENV,
    LIMIT_S,
    MIB,
    BrokerProcess,
    Traffic,
    Wire,
    broker_process,
    connected,
    run_config,
    small_group,
    traffic,
    wait_for,
)

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import Split

REASON: Final = "sockets: unfinished messages"
REMOTE_REASON: Final = f"{REASON} of other hosts"
ALLOWANCE: Final = 64 * MIB
HIGH: Final = 16 * MIB
BOUND: Final = ALLOWANCE + HIGH + 176 * MIB
"""Allowed growth: the allowance, and the data that arrives between two checks and during a cut."""
CUTS: Final = 8
"""So often the same peer fills what is allowed: more in all than the bound."""


def _config(**broker: object) -> RunConfig:
    sizes = {"overhead_bytes": ALLOWANCE, "high_bytes": HIGH, "max_group_bytes": 4 * MIB}
    return run_config(**(sizes | broker))


@pytest.fixture
def broker(run_dir: Path) -> Iterator[BrokerProcess]:
    with broker_process(RunLayout(run_dir), _config()) as it:
        yield it


@pytest.fixture
def good(broker: BrokerProcess) -> Iterator[Traffic]:
    with traffic(broker.endpoints.serve) as it:
        yield it


class Babbler:
    """A peer that announces one more frame with every frame; it reconnects whenever it is cut off."""

    CHUNK_BYTES: Final = 1 << 20
    GREETING: Final = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    READY: Final = b"\x05READY\x0bSocket-Type"

    def __init__(self, address: str, kind: bytes, frame_bytes: int) -> None:
        self._address = address
        ready = self.READY + struct.pack(">I", len(kind)) + kind
        self._hello = self.GREETING + bytes([4, len(ready)]) + ready
        frame = bytes([Wire.LONG | Wire.MORE]) + frame_bytes.to_bytes(8, "big") + bytes(frame_bytes)
        self._frames = frame * max(1, self.CHUNK_BYTES // len(frame))
        self.cut_offs = 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="babbler")

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(LIMIT_S)
        assert not self._thread.is_alive()

    def _run(self) -> None:
        while not self._stop.is_set():
            with connected(self._address) as peer:
                try:
                    self._talk(peer)
                except ConnectionError:
                    self.cut_offs += 1

    def _talk(self, peer: socket.socket) -> None:
        peer.sendall(self._hello)
        self._receive(peer, 64)
        self._receive(peer, self._receive(peer, 2)[1])
        while not self._stop.is_set():
            peer.sendall(self._frames)

    @staticmethod
    def _receive(peer: socket.socket, nbytes: int) -> bytes:
        got = peer.recv(nbytes, socket.MSG_WAITALL)
        if len(got) < nbytes:
            raise ConnectionResetError
        return got


@contextmanager
def babbling(address: str, kind: bytes, frame_bytes: int) -> Iterator[Babbler]:
    """Run such a peer beside the block."""
    babbler = Babbler(address, kind, frame_bytes)
    babbler.start()
    try:
        yield babbler
    finally:
        babbler.stop()


@pytest.mark.parametrize(("name", "kind", "frame_bytes"), [
    pytest.param("ingest", b"PUSH", 900_000, marks=pytest.mark.extended),
    pytest.param("ingest", b"PUSH", 5000, marks=pytest.mark.extended),
    ("ingest", b"PUSH", 1),
    pytest.param("serve", b"DEALER", 900_000, marks=pytest.mark.extended),
    ("publish", b"PUB", 60_000),
    ("events", b"SUB", 1000),
])  # fmt: skip
def test_message_without_end_is_cut_off(
    broker: BrokerProcess, good: Traffic, name: str, kind: bytes, frame_bytes: int
) -> None:
    with broker.growth_below(BOUND):
        with babbling(getattr(broker.endpoints, name), kind, frame_bytes) as babbler:
            wait_for(lambda: babbler.cut_offs >= CUTS, 2 * LIMIT_S)
        good.advance()
    refused = broker.rejections()
    assert refused[REASON] >= CUTS // 2  # a cut may meet it again when it has just come back
    assert set(refused) <= {REASON, "duplicate"}


def test_the_same_over_tcp(run_dir: Path) -> None:
    with (
        broker_process(RunLayout(run_dir), _config(**INSECURE)) as broker,
        traffic(broker.endpoints.serve) as good,
        broker.growth_below(BOUND),
    ):
        with babbling(over_tcp(broker.endpoints).ingest, b"PUSH", 900_000) as babbler:
            wait_for(lambda: babbler.cut_offs >= CUTS, 2 * LIMIT_S)
        good.advance()
        refused = broker.rejections()
        assert refused[REMOTE_REASON] >= CUTS // 2
        assert REASON not in refused, "a peer of another host ended connections of this host"


def test_who_fills_the_queue_and_empties_it_is_not_cut_off(run_dir: Path) -> None:
    """Beyond the memory for groups, up to the mark, and back, with the same small allowance."""
    config = _config(high_bytes=96 * MIB, ram_bytes=24 * MIB, durability="os")
    groups = 120  # a part of the mark is kept for those who drain
    with broker_process(RunLayout(run_dir), config) as broker:
        with Producer.blocking(broker.endpoints.serve, env=ENV, producer="good", group_size=2) as producer:
            for number in range(groups):
                producer.send(small_group(f"g-{number}", messages=[{"text": "x" * (MIB // 4)}] * 2))
            assert producer.flush(LIMIT_S)
        assert broker.status().pressure.queued_bytes > 2 * 24 * MIB
        left = groups
        with Consumer.blocking(broker.endpoints.serve, sequences=40, split=Split.TRAIN) as consumer:
            while left:
                batch = consumer.pull(consumer.version.step + 1, consumer.version, LIMIT_S)
                assert batch is not None
                left -= len(batch.groups)
                batch.ack()
        assert not broker.rejections()
