"""Stored groups by order. Their bodies stay opaque."""

from collections.abc import Iterator

from rolloutmq.schemas.wire.envelope import Split
from rolloutmq.services.broker.journal.stored_group import StoredGroup

Stream = tuple[str, Split]
"""A consumer group and a split: one step of it is leased at a time."""


class Groups:
    """Every group that still exists, by its order: the contents of a snapshot."""

    def __init__(self) -> None:
        self.next_order = 1
        self._groups: dict[int, StoredGroup] = {}

    def __iter__(self) -> Iterator[StoredGroup]:
        """Yield the groups in no certain order."""
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, group: StoredGroup) -> None:
        """Add a group; one without an order gets the next one."""
        if not group.order:
            group.order = self.next_order
        self.next_order = max(self.next_order, group.order + 1)
        self._groups[group.order] = group

    def find(self, order: int) -> StoredGroup | None:
        return self._groups.get(order)

    def gone(self, group: StoredGroup) -> None:
        """Remove a group for good and release its frames; a second call changes nothing."""
        if self._groups.pop(group.order, None) is not None:
            group.body.release()

    def clear(self) -> None:
        """Remove all groups; the numbers go on."""
        for group in list(self._groups.values()):
            self.gone(group)
