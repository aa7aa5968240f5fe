"""Journal driver with the behaviour of the data plane: append, advance, sleep until woken, with backpressure."""

import contextlib
import os
import select
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.wire.envelope import ColumnTable, GroupHeader, Split
from rolloutmq.services.broker.journal.format.events import Began, Event, Numbers
from rolloutmq.services.broker.journal.journal import Journal
from rolloutmq.services.broker.journal.stored_group import BodyMemory, GroupBody, StoredGroup

BEHIND_BYTES: Final = 64 << 20
"""Maximum bytes accepted but not durable, as in the data plane."""
BURST_BYTES: Final = 16 << 20
BURST_GROUPS: Final = 64
"""Maximum groups of one turn of the data plane."""
STALLED_S: Final = 60.0
"""Silence of the disk that ends the measurement."""


ENV: Final = "bench"
PRODUCER: Final = "bench-0"
SESSION: Final = 1


class StalledError(Exception):
    """The journal makes no progress."""


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
        """Append groups as fast as backpressure allows."""
        for group in groups:
            while self.journal.behind_bytes + group.header.nbytes > BEHIND_BYTES:
                self.turn()
            self.journal.append([group])
            self._taken_bytes += group.header.nbytes
            self._taken_groups += 1
            if self._taken_bytes >= BURST_BYTES or self._taken_groups >= BURST_GROUPS:
                self._advance()

    def tell(self, events: Iterable[Event]) -> None:
        """Append events."""
        self.journal.append(list(events))

    def finish(self) -> None:
        """Block until everything appended is durable."""
        while self.journal.done < self.journal.ticket:
            self.turn()

    def turn(self) -> None:
        """Sleep until there is work, and do it; StalledError if there never is."""
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
def running(directory: Path, config: BrokerConfig, ram: BodyMemory) -> Iterator[Feeder]:
    """Run a new journal in a directory; closed, and therefore durable, at the end."""
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


def stored(header: GroupHeader, table: ColumnTable, frame: memoryview, ram: BodyMemory) -> StoredGroup:
    """Return a group of one frame as if just accepted."""
    return StoredGroup(
        header=header,
        env=ENV,
        split=Split.TRAIN,
        run="",
        producer=PRODUCER,
        session=SESSION,
        table=table,
        body=GroupBody((frame,), frame.nbytes, ram),
        accepted_at=time.monotonic(),
        accepted_wall=time.time(),
        order=header.seq,
    )
