"""Drives a journal as the data plane does: append, advance, sleep until woken; and holds back what is too much."""

import contextlib
import os
import select
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.schemas.config import BrokerConfig
from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, Split
from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.body import Body, Ram
from rolloutmq.services.broker.journal.facts import Began, Fact, Numbers
from rolloutmq.services.broker.journal.writer import Journal

BEHIND_BYTES: Final = 64 << 20
"""Most that may be accepted and not be durable, as in the data plane."""
BURST_BYTES: Final = 16 << 20
BURST_GROUPS: Final = 64
"""Most that one turn of the data plane takes in."""
STALLED_S: Final = 60.0
"""A disk that is silent for so long ends the measurement."""


ENV: Final = "bench"
PRODUCER: Final = "bench-0"
SESSION: Final = 1


class StalledError(Exception):
    """The journal did not get on."""


class Feeder:
    """One journal and its wake-ups; see `running`."""

    def __init__(self, journal: Journal, wake: int) -> None:
        self.journal = journal
        self._wake = wake
        self._poll = select.poll()
        self._poll.register(wake, select.POLLIN)
        self._taken_bytes = 0
        self._taken_groups = 0

    def feed(self, groups: Iterable[StoredGroup]) -> None:
        """Append groups, as fast as backpressure lets them."""
        for group in groups:
            while self.journal.behind_bytes + group.header.nbytes > BEHIND_BYTES:
                self.turn()
            self.journal.append([group])
            self._taken_bytes += group.header.nbytes
            self._taken_groups += 1
            if self._taken_bytes >= BURST_BYTES or self._taken_groups >= BURST_GROUPS:
                self._advance()

    def tell(self, facts: Iterable[Fact]) -> None:
        """Append facts."""
        self.journal.append(list(facts))

    def finish(self) -> None:
        """Block until all that was appended is durable."""
        while self.journal.done < self.journal.ticket:
            self.turn()

    def turn(self) -> None:
        """Sleep until there is something to do, and do it; StalledError if there never is."""
        left_s = self.journal.next_deadline() - time.monotonic()
        if not self._poll.poll(max(0.0, min(left_s, STALLED_S)) * 1e3):
            if left_s > STALLED_S:
                raise StalledError(f"{self.journal.behind_bytes} bytes behind, for {STALLED_S:g} s")
        else:
            os.eventfd_read(self._wake)
        self._advance()

    def _advance(self) -> None:
        self._taken_bytes = self._taken_groups = 0
        self.journal.advance(time.monotonic(), urgent=False)


@contextlib.contextmanager
def running(directory: Path, config: BrokerConfig, ram: Ram) -> Iterator[Feeder]:
    """Run a new journal in a directory; closed, and so durable, at the end."""
    directory.mkdir(exist_ok=True)
    wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        journal = Journal(directory, config, ram, lambda: os.eventfd_write(wake, 1))
        journal.recover()
        journal.start([Numbers(1, 1, 1), Began(1, os.getpid(), config.durability.value)])
        try:
            yield Feeder(journal, wake)
        finally:
            journal.close()
    finally:
        os.close(wake)


def stored(header: GroupHeader, table: ColumnTable, frame: memoryview, ram: Ram) -> StoredGroup:
    """Return a group of one frame as if it had just been accepted."""
    return StoredGroup(
        header=header,
        env=ENV,
        split=Split.TRAIN,
        run="",
        producer=PRODUCER,
        session=SESSION,
        table=table,
        body=Body((frame,), frame.nbytes, ram),
        accepted_at=time.monotonic(),
        accepted_wall=time.time(),
        order=header.seq,
    )
