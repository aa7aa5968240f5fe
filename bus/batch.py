"""Batches as a trainer sees them: decoded groups with where they came from. Pure.

The columns are views into the frames that arrived, or into the copy of what lay in an arena. A group
that does not decode is set aside with its reason, and is reported as rejected when the batch is settled; the others
are delivered without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from rolloutmq.bus.codec import Buffer, decode_group
from rolloutmq.schemas import delivery as wire
from rolloutmq.schemas.delivery import Delivery, Rejected
from rolloutmq.schemas.envelope import ColumnTable, PolicyVersion
from rolloutmq.schemas.errors import ChecksumError, MalformedError, UsageError, WireError
from rolloutmq.schemas.trajectory import Group

REASON_CHARS = 512
"""Longest reason of a rejection."""


class StepSize(NamedTuple):
    """How much a pull asks for, over all ranks; one of the two is 0."""

    sequences: int
    tokens: int


def step_size(sequences: int, tokens: int) -> StepSize:
    """Return how much a pull asks for; UsageError unless exactly one of the two says it."""
    if min(sequences, tokens) < 0 or bool(sequences) == bool(tokens):
        raise UsageError("a step has a number of sequences or a budget of tokens: name one of them")
    return StepSize(sequences, tokens)


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """This rank's part of a leased step.

    Attributes:
        groups: Decoded groups, zero-copy; read-only.
        deliveries: What the broker says of each, in the same order.
        rejected: Groups that did not decode; settling the batch reports them.
        step: The step that it was pulled for.
        version: The policy that it was pulled for.
        lease, generation: Name it at the broker.
        life: Registration of the consumer under which it was pulled.
        short: Fewer sequences than asked: no combination of whole groups had the number in time.
        over: More than asked: one group that is above that by itself and so came alone, or a rewound batch.
        rewound: It was trained before, in a life of the trainer that was lost.
    """

    groups: tuple[Group, ...]
    deliveries: tuple[Delivery, ...]
    rejected: tuple[Rejected, ...]
    step: int
    version: PolicyVersion
    lease: int
    generation: int
    life: int
    short: bool
    over: bool
    rewound: bool

    @property
    def content(self) -> dict[str, Any]:
        """The attributes by their names."""
        return {field.name: getattr(self, field.name) for field in fields(Batch)}

    @property
    def sequences(self) -> int:
        """Sequences of all groups together."""
        return sum(group.sequences for group in self.groups)

    @property
    def tokens(self) -> int:
        """Tokens of all groups together."""
        return sum(group.tokens for group in self.groups)

    def staleness(self, version: PolicyVersion | None = None) -> tuple[int, ...]:
        """Return for each group how many optimizer steps its oldest token is behind `version`, or the pulled one.

        By the numbers of the steps alone: a batch does not know what its trainer went back from. Steps that were lost
        when it resumed at a checkpoint, and taken otherwise since, do not count here; `bus.lineage` counts them.
        """
        policy = self.version if version is None else version
        return tuple(policy.distance(delivery.header.oldest) for delivery in self.deliveries)


def decode_groups(
    reply: wire.Batch,
    frames: Sequence[Buffer],
    arenas: Sequence[memoryview] = (),
    copy: Callable[[memoryview], Buffer] = bytes,
) -> tuple[list[Group], list[Delivery], list[Rejected]]:
    """Decode the groups of a reply; returns groups, their deliveries, and what does not decode.

    Args:
        reply: The batch.
        frames: Those of the groups that do not lie in an arena.
        arenas: The bytes of each arena that the batch names.
        copy: Copies what lies there.

    Raises:
        ChecksumError: What lies in an arena is not the group.
    """
    tables = {table.id: table for table in reply.tables}
    groups: list[Group] = []
    deliveries: list[Delivery] = []
    rejected: list[Rejected] = []
    start = 0
    for delivery in reply.groups:
        try:
            if delivery.place is not None:
                own: Sequence[Buffer] = (copy(_part(delivery, arenas)),)
            else:
                own = frames[start : start + delivery.header.frames]
                start += delivery.header.frames
            groups.append(_decoded(delivery, tables, own))
            deliveries.append(delivery)
        except WireError as error:
            if delivery.place is not None and isinstance(error, ChecksumError):
                raise
            rejected.append(Rejected(group_id=delivery.header.group_id, reason=str(error)[:REASON_CHARS]))
    return groups, deliveries, rejected


def _part(delivery: Delivery, arenas: Sequence[memoryview]) -> memoryview:
    """Return what a group has of an arena."""
    assert delivery.place is not None
    index, offset = delivery.place
    end = offset + delivery.header.nbytes
    if index >= len(arenas) or end > len(arenas[index]):
        raise MalformedError(f"group {delivery.header.group_id}: lies outside its arena")
    return arenas[index][offset:end]


def _decoded(delivery: Delivery, tables: Mapping[str, ColumnTable], frames: Sequence[Buffer]) -> Group:
    table = tables.get(delivery.header.table)
    if table is None:
        raise MalformedError(f"group {delivery.header.group_id}: its column table is not in the batch")
    return decode_group(delivery.header, table, frames, delivery.env)
