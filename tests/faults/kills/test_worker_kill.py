"""Workers killed while a group is under way: no part of the group is ever seen, and no other peer is harmed.

Between worker and broker is a proxy that forwards a number of bytes and then no more, so that the test decides where
the group is cut.
"""

import contextlib
import select
import socket
import threading
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import psutil
import pytest
from tests.bus.transport.listening import INSECURE, over_tcp
from tests.faults.support.processes import (
    LIMIT_S,
    SEQUENCES,
    BrokerProcess,
    Worker,
    acked,
    config,
    feed,
    is_whole,
    status,
    wait_until,
)

from rolloutmq.bus.consumer.client import BlockingConsumer, Consumer
from rolloutmq.bus.transport.endpoint import resolve_blocking

pytestmark = pytest.mark.usefixtures("impatient")

BIG_BYTES: Final = 100 << 20
"""A group of that size has a frame for each of its columns."""
CUTS_BYTES: Final = (30 << 20, 95 << 20)
"""In the first large frame, and in the one after it."""
SLACK_BYTES: Final = 24 << 20
"""Growth of a broker's memory without load."""


class CutLine:
    """Passes bytes on from each that connects to `target`, but no more than `most` in all until `open` is set."""

    def __init__(self, target: str, directory: Path, most: int) -> None:
        self.open = threading.Event()
        self.cut = threading.Event()
        """Set when it holds bytes back."""
        self._target = target
        self._left = most
        family = socket.AF_UNIX if target.startswith("ipc://") else socket.AF_INET
        self._listener = socket.socket(family)
        self._listener.bind(str(directory / "line") if family == socket.AF_UNIX else ("127.0.0.1", 0))
        self._listener.listen()
        self._ends, self._end = socket.socketpair()
        self._threads = [threading.Thread(target=self._accept, name="line")]

    @property
    def address(self) -> str:
        """Address to connect to in place of the target."""
        name = self._listener.getsockname()
        return f"ipc://{name}" if isinstance(name, str) else f"tcp://127.0.0.1:{name[1]}"

    def __enter__(self) -> Self:
        self._threads[0].start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._end.close()
        self.open.set()
        for thread in self._threads:
            thread.join()
        name = self._listener.getsockname()
        self._listener.close()
        if isinstance(name, str):
            Path(name).unlink()
        self._ends.close()

    def _accept(self) -> None:
        while self._listener in select.select([self._listener, self._ends], [], [])[0]:
            near, _ = self._listener.accept()
            thread = threading.Thread(target=self._pass_on, args=(near,), name="line")
            self._threads.append(thread)
            thread.start()

    def _pass_on(self, near: socket.socket) -> None:
        far = socket.socket(self._listener.family)
        with near, far, contextlib.suppress(ConnectionError):
            far.connect(self._place())
            while (ready := select.select([near, far, self._ends], [], [])[0]) and self._ends not in ready:
                for source in ready:
                    sink = far if source is near else near
                    data = source.recv(1 << 16)
                    if not data:
                        return
                    if source is near:
                        self._spend(len(data))
                    sink.sendall(data)

    def _place(self) -> str | tuple[str, int]:
        if self._target.startswith("ipc://"):
            return self._target.removeprefix("ipc://")
        host, _, port = self._target.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def _spend(self, nbytes: int) -> None:
        self._left -= nbytes
        if self._left < 0 and not self.open.is_set():
            self.cut.set()
            self.open.wait()


@pytest.mark.parametrize("transport", ["ipc", pytest.param("tcp", marks=pytest.mark.extended)])
def test_a_group_that_is_cut_is_never_seen(run_dir: Path, tmp_path: Path, transport: str) -> None:
    log = tmp_path / "acks.jsonl"
    sizes = {"max_group_bytes": 128 << 20, "high_bytes": 1 << 30}
    listens = INSECURE if transport == "tcp" else {}
    settings = config(shared_memory=False, **listens, **sizes)
    with BrokerProcess(run_dir, settings) as broker:
        process = psutil.Process(broker.child.pid)
        feed(run_dir, ["before-0"], "before")
        before = process.memory_info().rss
        sockets = process.num_fds()
        for number, most in enumerate(CUTS_BYTES):
            with (
                CutLine(ingest_of(run_dir, transport), tmp_path, most) as line,
                Worker(run_dir, "w", log, nbytes=BIG_BYTES, line=line.address, count=1) as worker,
            ):
                assert line.cut.wait(LIMIT_S), worker.tail()
                feed(run_dir, [f"beside-{number}"], "beside")
                worker.kill()
            found = status(run_dir)
            assert found.pressure.ledger.accepted == 2 + number
            assert found.rejected_by_reason == {}
        wait_until(lambda: process.memory_info().rss < before + SLACK_BYTES, "its memory to come back")
        wait_until(lambda: process.num_fds() <= sockets, "its connections to end")
        assert acked(log) == []
        with Worker(run_dir, "w", log, nbytes=BIG_BYTES, count=1) as worker:
            assert worker.wait() == 0, worker.tail()
        assert [line.group_id for line in acked(log)] == ["w-0"]
        with Consumer.blocking(run_dir, sequences=4 * SEQUENCES) as consumer:
            assert pulled(consumer, 1) == {"before-0", "beside-0", "beside-1", "w-0"}


def ingest_of(run_dir: Path, transport: str) -> str:
    """Return the address for groups, by unix socket or TCP."""
    found = resolve_blocking(run_dir)
    return over_tcp(found).ingest if transport == "tcp" else found.ingest


def pulled(consumer: BlockingConsumer, steps: int) -> set[str]:
    """Train on that many batches; return the ids of their groups, each of which is whole and new."""
    ids: list[str] = []
    for _ in range(steps):
        batch = next(consumer)
        for group in batch.groups:
            assert is_whole(group, BIG_BYTES if group.tokens > 1 << 20 else 0), group.group_id
        ids += [group.group_id for group in batch.groups]
        batch.ack()
    assert len(ids) == len(set(ids))
    return set(ids)


def has_acks(log: Path, enough: int) -> bool:
    return len(acked(log)) >= enough


def test_workers_killed_at_any_moment_lose_nothing_that_was_acked(run_dir: Path, tmp_path: Path) -> None:
    lives, log = 4, tmp_path / "acks.jsonl"
    with BrokerProcess(run_dir, config()):
        for life in range(lives):
            enough = len(acked(log)) + 20
            with Worker(run_dir, "w", log, first=1000 * life) as worker:
                wait_until(partial(has_acks, log, enough), "acks")
                worker.kill()
        counts = status(run_dir).pressure.ledger
        feed(run_dir, [f"filler-{number}" for number in range(-counts.accepted % 4)], "filler")
        with Consumer.blocking(run_dir, sequences=4 * SEQUENCES) as consumer:
            ids = pulled(consumer, -(-counts.accepted // 4))
        assert ids >= {line.group_id for line in acked(log)}
        counts = status(run_dir).pressure.ledger
        assert (counts.accepted, counts.queued, counts.trained) == (len(ids), 0, len(ids))
