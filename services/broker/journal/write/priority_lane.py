"""The priority lane: events that may be written before the groups queued ahead of them.

A trainer therefore never waits for the groups of other producers. The events of one call take the priority lane if
all of these hold; each of them then commutes with everything it overtakes, and a restart reads the same state from
the log:

    kind      every event is in `PRIORITY_EVENTS`: it moves stored groups out of queues and leases
    groups    every group it names is durable
    overtaken everything appended and not yet durable is in `PASSABLE_EVENTS`: new groups, and events about neither
              groups nor leases

Any other event closes the lane until it is durable, and all later events queue behind it. While the lane is open,
every event about leases is therefore durable or took the lane itself.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from rolloutmq.services.broker.journal.event_buffer import Entry
from rolloutmq.services.broker.journal.format.events import (
    Carved,
    Committed,
    Declared,
    Dropped,
    Event,
    Forgot,
    Leased,
    Produced,
    Pulled,
    Settles,
    Skipped,
    TaskEnded,
    TaskReturned,
    TaskSubmitted,
    TaskTaken,
)
from rolloutmq.services.broker.journal.stored_group import StoredGroup

PRIORITY_EVENTS: Final[frozenset[type]] = frozenset(
    {Leased, Pulled, Carved, Settles, Committed, Forgot, Dropped}
)
"""They change stored groups, leases, retained batches, and sums of the ledger."""
PASSABLE_EVENTS: Final[frozenset[type]] = frozenset(
    {StoredGroup, Skipped, Declared, Produced, TaskSubmitted, TaskTaken, TaskReturned, TaskEnded}
)
"""They append groups to queues, and change sessions, tasks, and sums of the ledger."""


class PriorityLane:
    """Tracks appended events and groups that are not yet durable."""

    def __init__(self) -> None:
        self._done = 0
        self._closing = 0
        """Newest batch with an entry that cannot be overtaken."""
        self._new: deque[tuple[int, int]] = deque()
        """Each batch with new groups, and the order of its first one; orders only grow."""

    @property
    def open(self) -> bool:
        """Whether events may take the lane at all."""
        return self._closing <= self._done

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Return whether the events of one call may take the lane."""
        if not self.open:
            return False
        oldest = self._new[0][1] if self._new else math.inf
        return all(type(entry) in PRIORITY_EVENTS and _newest(entry) < oldest for entry in entries)

    def note(self, entries: Sequence[object], batch: int) -> None:
        """Note the entries added to a batch of groups."""
        for entry in entries:
            if type(entry) not in PASSABLE_EVENTS:
                self._closing = batch
            elif isinstance(entry, StoredGroup) and (not self._new or self._new[-1][0] != batch):
                self._new.append((batch, entry.order))

    def finished(self, batch: int) -> None:
        """Note that the batches up to this one are durable."""
        self._done = batch
        while self._new and self._new[0][0] <= batch:
            self._new.popleft()


def _newest(entry: StoredGroup | Event) -> int:
    """Return the highest order of the groups in an event; 0 if it has none."""
    match entry:
        case Leased(shards=shards):
            return max((order for orders in shards for order in orders), default=0)
        case Dropped(order=order):
            return order
    return 0
