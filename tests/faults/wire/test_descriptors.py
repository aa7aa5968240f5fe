"""A broker with fewer descriptors than peers: connected peers go on, others connect as these leave."""

import os
import resource
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Final, Self

import pytest
from tests.bus.transport.listening import INSECURE, over_tcp
from tests.faults.support.borders import (
    ENV,
    LIMIT_S,
    MIB,
    BrokerProcess,
    broker_process,
    run_config,
    small_group,
    traffic,
)
from tests.faults.support.processes import ROOT
from tests.services.broker.journal.journals import Driven, config, contents, group

from rolloutmq.bus.consumer.client import Consumer
from rolloutmq.bus.producer.client import Producer
from rolloutmq.bus.transport import sockets
from rolloutmq.bus.transport.request_client import BlockingClient
from rolloutmq.schemas.errors import BrokerUnavailableError, JournalWaitsError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.replies import InfoReply, Wait
from rolloutmq.schemas.wire.requests import GetInfo
from rolloutmq.services.broker.journal.disk import Disk
from rolloutmq.services.broker.journal.stored_group import Source

DESCRIPTORS = 320
"""The broker and its two good peers use about fifty."""
FEW = f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({DESCRIPTORS}, {DESCRIPTORS}))\n"


@pytest.mark.parametrize("transport", ["tcp", "ipc"])
def test_broker_out_of_descriptors_serves_those_it_has(run_dir: Path, transport: str) -> None:
    listens = INSECURE if transport == "tcp" else {}
    with broker_process(RunLayout(run_dir), run_config(**listens), FEW) as broker, ExitStack() as stack:
        serve = over_tcp(broker.endpoints).serve if listens else broker.endpoints.serve
        good = stack.enter_context(traffic(serve))
        stack.enter_context(broker.growth_below(48 * MIB))
        crowd = stack.enter_context(Crowd(serve))
        inside = crowd.fill(broker)
        good.advance()
        assert all(_answered(client) for client in inside)
        outside = [crowd.join() for _ in inside[::2]]
        for client in inside:
            client.close()
        assert all(_answered(client) for client in outside)
        good.advance()
        crowd.disperse()
        with Producer.blocking(serve, env=ENV, producer="late", group_size=2) as late:
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


def test_batch_waits_for_a_descriptor_and_loses_no_group(run_dir: Path) -> None:
    """Once a file exists every open fails: the trainer gets no batch, and no group is condemned."""
    starved = run_dir.with_name("starved")
    config = run_config(segment_bytes=1 << 16, ram_bytes=1)
    with broker_process(RunLayout(run_dir), config, STARVED.format(path=str(starved))) as broker:
        with Producer.blocking(run_dir, env=ENV, producer="p", group_size=2) as producer:
            for number in range(2):
                producer.send(small_group(f"g-{number}"))
            assert producer.flush(LIMIT_S)
        with Consumer.blocking(run_dir, sequences=4) as consumer:
            starved.touch()
            assert consumer.pull(1, consumer.version, 0.5) is None
            assert broker.status().pressure.waits_s[Wait.JOURNAL_SLOW.value] > 0.3
            starved.unlink()
            batch = consumer.pull(1, consumer.version, LIMIT_S)
            assert batch is not None
            assert [group.group_id for group in batch.groups] == ["g-0", "g-1"]
            batch.ack()
        assert broker.status().journal.quarantined == 0


STARVED: Final = """
import errno, os
from pathlib import Path
from rolloutmq.services.broker.journal import disk
opened = disk._opened
def starved(path, flags):
    if Path({path!r}).exists() and not flags & os.O_CREAT:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return opened(path, flags)
disk._opened = starved
"""


GROUPS: Final = 90
"""Groups in more segments than are kept open."""


@pytest.mark.parametrize("how", ["all_taken", "all_taken_again_and_again"])
def test_no_group_is_condemned_for_want_of_a_descriptor(tmp_path: Path, how: str) -> None:
    program = f"from tests.faults.wire import test_descriptors as it; it.{how}({str(tmp_path / 'journal')!r})"
    command = [sys.executable, "-c", program]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ended.returncode == 0, ended.stderr
    assert not (tmp_path / "journal" / "quarantine").exists()


def all_taken(directory: str) -> None:
    """Read groups while every descriptor is in use: the reserved one serves all reads."""
    run, places = _journal(Path(directory))
    Thief().take_all()
    assert all(_is_read(place, number) for number, place in places.items())
    assert run.journal.status().quarantined == 0
    os._exit(0)


def all_taken_again_and_again(directory: str) -> None:
    """Read groups while every freed descriptor is taken: unreadable groups are read later."""
    thief = Thief()
    run, places = _journal(Path(directory), thief)
    thief.take_all()
    waited = 0
    for number, place in places.items():
        try:
            assert _is_read(place, number)
        except JournalWaitsError:
            waited += 1
    assert waited > GROUPS // 2
    thief.give_back()
    assert all(_is_read(place, number) for number, place in places.items())
    assert run.journal.status().quarantined == 0
    os._exit(0)


class Thief(Disk):
    """A disk in a process that takes every free descriptor."""

    def __init__(self) -> None:
        self._taken: list[int] = []
        self._steals = False

    def close(self, fd: int) -> None:
        super().close(fd)
        if self._steals:
            self.take_all()

    def take_all(self) -> None:
        """Take every free descriptor, and each one closed from now on."""
        self._steals = True
        with suppress(OSError):
            while True:
                self._taken.append(os.open("/dev/null", os.O_RDONLY))

    def give_back(self) -> None:
        """Close all taken descriptors."""
        self._steals = False
        for fd in self._taken:
            os.close(fd)


def _journal(directory: Path, disk: Disk | None = None) -> tuple[Driven, dict[int, tuple[Source, int]]]:
    """Write groups to many segments in a process with few descriptors; return their addresses."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    run = Driven(directory, config(), disk).start()
    written = {number: group(number, 20_000) for number in range(1, GROUPS + 1)}
    run.write(*written.values())
    return run, {number: one.body.place for number, one in written.items() if one.body.place is not None}


def _is_read(place: tuple[Source, int], number: int) -> bool:
    source, offset = place
    return tuple(map(bytes, source.read(offset))) == contents(number, 20_000)


class Crowd:
    """Clients that connect one after the other, take one descriptor of the broker each, and stay."""

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
        """Connect clients until one gets no answer; return the connected ones: a third of the free descriptors.

        The broker withholds a part of them for the journal and, over tcp, another for clients of its own host.
        """
        free = DESCRIPTORS - broker.descriptors
        for number in range(2 * DESCRIPTORS):
            if not _answered(self.join(), 1.0):
                assert broker.process.poll() is None, "the broker died"
                assert number > free // 3
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
