"""A group as the broker holds it: its header, where it came from, and frames that nobody here opens."""

from typing import Any

import msgspec

from rolloutmq.schemas.envelope import ColumnTable, GroupHeader, Split


class StoredGroup(msgspec.Struct, kw_only=True, eq=False, weakref=True):
    """One accepted group, from its acceptance until its checkpoint.

    Attributes:
        frames: The buffers as they arrived; released when the group is settled for good.
        accepted_at: Monotonic seconds of this broker's clock; `accepted_wall` is for people and for `saved.rmq`.
        deliveries: How many times it was handed out.
        failures: How many of its leases were lost.
        order: Place in the order of acceptance. A group that comes back takes its old place.
    """

    header: GroupHeader
    env: str
    split: Split
    run: str
    producer: str
    session: int
    table: ColumnTable
    frames: tuple[Any, ...]
    accepted_at: float
    accepted_wall: float
    deliveries: int = 0
    failures: int = 0
    order: int = 0
