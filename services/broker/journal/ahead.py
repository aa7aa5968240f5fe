"""Which facts may be written ahead of the groups that came before them, so that no trainer waits for other groups.

A call's facts go ahead if all of these hold; then what a restart makes of the log is the same, since each of them
commutes with everything that it passes:

    kind     each is of `AHEAD`: they move groups that are stored, from a queue to a lease, a settlement, or the end
    groups   each group that they name is durable
    passed   all that is appended and not durable is quiet: new groups, and what touches neither groups nor leases

Whatever else happens closes the way until it is durable, and is followed in its order by all that comes after it. So
while the way is open, all that was ever said of leases is durable or went ahead itself.
"""

import math
from collections import deque
from collections.abc import Sequence
from typing import Final

from rolloutmq.services.broker.groups import StoredGroup
from rolloutmq.services.broker.journal.facts import (
    Committed,
    Declared,
    Dropped,
    Fact,
    Forgot,
    Leased,
    Produced,
    Pulled,
    Settles,
    Skipped,
)
from rolloutmq.services.broker.journal.taskfacts import TaskEnded, TaskReturned, TaskSubmitted, TaskTaken
from rolloutmq.services.broker.log import Entry

AHEAD: Final[frozenset[type]] = frozenset({Leased, Pulled, Settles, Committed, Forgot, Dropped})
"""They change groups that exist, leases, what is kept for a checkpoint, and sums of the ledger."""
QUIET: Final[frozenset[type]] = frozenset(
    {StoredGroup, Skipped, Declared, Produced, TaskSubmitted, TaskTaken, TaskReturned, TaskEnded}
)
"""They add groups at the end of queues, and change sessions, tasks, and sums of the ledger."""


class Ahead:
    """Follows what is appended and not durable."""

    def __init__(self) -> None:
        self._done = 0
        self._closing = 0
        """Newest batch with something that is not quiet."""
        self._new: deque[tuple[int, int]] = deque()
        """Each batch with new groups, and the order of its first one; orders only grow."""

    @property
    def open(self) -> bool:
        """Whether facts may go ahead at all."""
        return self._closing <= self._done

    def fits(self, entries: Sequence[Entry]) -> bool:
        """Whether the facts of one call may go ahead."""
        if not self.open:
            return False
        oldest = self._new[0][1] if self._new else math.inf
        return all(type(entry) in AHEAD and _newest(entry) < oldest for entry in entries)

    def note(self, entries: Sequence[object], batch: int) -> None:
        """Note what joined a batch of groups."""
        for entry in entries:
            if type(entry) not in QUIET:
                self._closing = batch
            elif isinstance(entry, StoredGroup) and (not self._new or self._new[-1][0] != batch):
                self._new.append((batch, entry.order))

    def finished(self, batch: int) -> None:
        """Note that the batches up to this one are durable."""
        self._done = batch
        while self._new and self._new[0][0] <= batch:
            self._new.popleft()


def _newest(entry: StoredGroup | Fact) -> int:
    """Return the highest order among the groups that a fact names; 0 if it names none."""
    match entry:
        case Leased(shards=shards):
            return max((order for orders in shards for order in orders), default=0)
        case Dropped(order=order):
            return order
    return 0
