"""A broker with fewer descriptors than it has peers: those that it has go on, others come in as these leave."""

from pathlib import Path
from typing import Self

import pytest
from tests.faults.borders import (
    ENV,
    LIMIT_S,
    MIB,
    BrokerProcess,
    broker_process,
    run_config,
    small_group,
    traffic,
)

from rolloutmq.bus import sockets
from rolloutmq.bus.client import BlockingClient
from rolloutmq.bus.producer import Producer
from rolloutmq.schemas.delivery import GetInfo, InfoReply
from rolloutmq.schemas.errors import BrokerUnavailableError
from rolloutmq.schemas.layout import RunLayout

DESCRIPTORS = 320
"""About thirty are the broker's own."""
FEW = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_broker_out_of_descriptors_serves_those_it_has(run_dir: Path, transport: str) -> None:
    with (
        broker_process(RunLayout(run_dir), run_config(transport=transport), FEW) as broker,
        traffic(broker.endpoints.serve) as good,
        broker.growth_below(48 * MIB),
        Crowd(broker.endpoints.serve) as crowd,
    ):
        inside = crowd.fill(broker)
        good.advance()
        assert all(_answered(client) for client in inside)
        outside = [crowd.join() for _ in inside[::2]]
        for client in inside:
            client.close()
        assert all(_answered(client) for client in outside)
        good.advance()
        crowd.disperse()
        with Producer.blocking(broker.endpoints.serve, env=ENV, producer="late", group_size=2) as late:
            late.send(small_group("late"))
            assert late.flush(LIMIT_S)


def test_journal_has_descriptors_where_clients_have_none(run_dir: Path) -> None:
    """A new segment begins about every thirty groups, and needs a descriptor each time."""
    config = run_config(segment_bytes=1 << 16)
    with (
        broker_process(RunLayout(run_dir), config, FEW) as broker,
        traffic(broker.endpoints.serve) as good,
        Crowd(broker.endpoints.serve) as crowd,
    ):
        crowd.fill(broker)
        good.advance(200)


class Crowd:
    """Clients that come one after the other, each a descriptor of the broker, and stay."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._context = sockets.make_context()
        self._clients: list[BlockingClient] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.disperse()
        self._context.term()

    def join(self) -> BlockingClient:
        """Connect one more."""
        self._clients.append(BlockingClient(self._address, self._context))
        return self._clients[-1]

    def fill(self, broker: BrokerProcess) -> list[BlockingClient]:
        """Connect clients until one gets no answer; return those that did."""
        for number in range(2 * DESCRIPTORS):
            if not _answered(self.join(), 1.0):
                assert broker.process.poll() is None, "the broker died"
                assert number > DESCRIPTORS // 3
                return self._clients[:number]
        raise AssertionError("there were descriptors for all")

    def disperse(self) -> None:
        """Close all clients."""
        for client in self._clients:
            client.close()


def _answered(client: BlockingClient, timeout_s: float = LIMIT_S) -> bool:
    try:
        return isinstance(client.request(GetInfo(), timeout_s, timeout_s), InfoReply)
    except BrokerUnavailableError:
        return False
