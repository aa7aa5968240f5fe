"""Stored groups by order, and the identities of those that ended. The bodies stay opaque.

Two groups are the same if environment, split, id, size and checksum of the contents are equal. The same group is
accepted once: as long as it exists, and after its end as long as its identity is among the last remembered ones.
"""

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from hashlib import blake2b

from rolloutmq.schemas.wire.envelope import GroupHeader, Split
from rolloutmq.services.broker.journal.stored_group import StoredGroup
from rolloutmq.services.broker.state.batch_share import BatchShare

Stream = tuple[str, Split]
"""A consumer group and a split: one step of it is leased at a time."""


def identity(env: str, split: Split, header: GroupHeader) -> int:
    """Return 64 bits that name a group: fewer than 1 in 10^13 new groups have those of one of a million others."""
    return identities(lane_text(env, split), (header,))[0]


def identities(lane: str, headers: Iterable[GroupHeader]) -> list[int]:
    """Return the `identity` of each group of one environment and split, which are given by their `lane_text`."""
    number = int.from_bytes
    return [
        number(blake2b(f"{lane}{one.nbytes}\0{one.crc}\0{one.group_id}".encode(), digest_size=8).digest())
        for one in headers
    ]


def lane_text(env: str, split: Split) -> str:
    """Return what the identities of all groups of an environment and split begin with."""
    return f"{env}\0{split.value}\0"


class Groups:
    """Every group that still exists, by its order: the contents of a snapshot.

    Args:
        remembered: Number of ended groups to recognize.
    """

    def __init__(self, remembered: int) -> None:
        self.next_order = 1
        self._groups: dict[int, StoredGroup] = {}
        self._of_lane: dict[tuple[str, Split], int] = {}
        self._present: dict[int, StoredGroup] = {}
        """Existing groups by identity."""
        self._remembered = remembered
        self._ended: deque[int] = deque()
        """Identities of ended groups, oldest first."""
        self._seen: set[int] = set()
        """The same ones."""

    def __iter__(self) -> Iterator[StoredGroup]:
        """Yield the groups in no certain order."""
        return iter(self._groups.values())

    def __len__(self) -> int:
        return len(self._groups)

    def add(self, *groups: StoredGroup) -> None:
        """Add groups of one environment and split; those without an order get the next ones."""
        first, before = groups[0], len(self._groups)
        for group in groups:
            order = group.order or self.next_order
            if order >= self.next_order:
                self.next_order = order + 1
            group.order = order
            self._groups[order] = group
            self._present[group.identity or _key(group)] = group
        lane = first.env, first.split
        self._of_lane[lane] = self._of_lane.get(lane, 0) + len(self._groups) - before

    def find(self, order: int) -> StoredGroup | None:
        return self._groups.get(order)

    def gone(self, share: BatchShare) -> None:
        """Remove groups for good and release their frames; a second call changes nothing."""
        ended = [group for group in share.groups if self._groups.pop(group.order, None) is not None]
        if len(ended) < len(share.groups):
            share = BatchShare(ended)
        for totals in share.lanes:
            lane = totals.first.env, totals.first.split
            self._of_lane[lane] -= totals.groups
            if not self._of_lane[lane]:
                del self._of_lane[lane]
        keys = [_key(group) for group in ended]
        for group, key in zip(ended, keys, strict=True):
            group.body.release()
            if self._present.get(key) is group:
                del self._present[key]
        self.remember(keys)

    def of_lane(self, env: str, split: Split) -> int:
        """Return how many groups of an environment and split exist, in any place."""
        return self._of_lane.get((env, split), 0)

    def present(self, key: int) -> StoredGroup | None:
        """Return the existing group of an identity."""
        return self._present.get(key)

    def known(self, key: int) -> bool:
        """Return whether the group of an identity exists, or ended and is remembered."""
        return key in self._present or key in self._seen

    def all_new(self, keys: Sequence[int]) -> bool:
        """Return whether no group of these identities is `known`, and no two are the same."""
        if len(keys) == 1:
            return keys[0] not in self._present and keys[0] not in self._seen
        if len(set(keys)) < len(keys):
            return False
        return self._present.keys().isdisjoint(keys) and self._seen.isdisjoint(keys)

    def remember(self, keys: Iterable[int]) -> None:
        """Remember ended groups, and forget the ones that ended first."""
        for key in keys:
            if key not in self._seen:
                self._seen.add(key)
                self._ended.append(key)
                if len(self._ended) > self._remembered:
                    self._seen.remove(self._ended.popleft())

    @property
    def ended(self) -> tuple[int, ...]:
        """Identities of the remembered groups, in the order of their end."""
        return tuple(self._ended)

    def clear(self) -> None:
        """Remove all groups, also the remembered ones; the numbers go on."""
        for group in list(self._groups.values()):
            self.gone(BatchShare((group,)))
        self._ended.clear()
        self._seen.clear()


def _key(group: StoredGroup) -> int:
    if not group.identity:
        group.identity = identity(group.env, group.split, group.header)
    return group.identity
