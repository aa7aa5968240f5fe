"""Groups as the broker holds them: headers, where they came from, and bodies that nobody here opens."""

from collections.abc import Iterator

import msgspec

from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, Split
from rolloutmq.services.broker.journal.body import Body
from rolloutmq.services.broker.journal.facts import Accepted

Stream = tuple[str, Split]
"""A consumer group and a split: one step of it is leased at a time."""


class StoredGroup(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    """One accepted group, from its acceptance until its checkpoint.

    Attributes:
        body: The frames as they arrived; released when the group is settled for good.
        accepted_at: Monotonic seconds of this broker's clock; `accepted_wall` is for people and for the journal.
        deliveries: How many times it was handed out.
        failures: How many of its leases were lost.
        requeued: Somebody brought it back from the dead; it is never too old.
        order: Number of its acceptance, unique in the run. A group that comes back takes its old place.
    """

    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    table: ColumnTable
    body: Body
    accepted_at: float
    accepted_wall: float
    deliveries: int = 0
    failures: int = 0
    requeued: bool = False
    order: int = 0

    def accepted(self) -> Accepted:
        """Return the fact of its acceptance, without a place: only who writes it knows that."""
        return Accepted(
            order=self.order,
            header=self.header,
            env=self.env,
            split=self.split,
            run=self.run,
            producer=self.producer,
            session=self.session,
            at=self.accepted_wall,
            requeued=self.requeued,
        )


class Groups:
    """Every group that still exists, by its order: what the journal must be able to give back."""

    def __init__(self) -> None:
        self.next_order = 1
        self._groups: dict[int, StoredGroup] = {}

    def __iter__(self) -> Iterator[StoredGroup]:
        """Yield the groups in no certain order."""
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: StoredGroup) -> None:
        """Take in a group; one without an order gets the next one."""
        if not group.order:
            group.order = self.next_order
        self.next_order = max(self.next_order, group.order + 1)
        self._groups[group.order] = group

    def find(self, order: int) -> StoredGroup | None:
        return self._groups.get(order)

    def gone(self, group: StoredGroup) -> None:
        """Let a group go for good, with its frames; a second time changes nothing."""
        if self._groups.pop(group.order, None) is not None:
            group.body.release()

    def clear(self) -> None:
        """Let all groups go; the numbers go on."""
        for group in list(self._groups.values()):
            self.gone(group)
