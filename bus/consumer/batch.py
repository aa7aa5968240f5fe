"""Batches of a trainer: decoded groups with their origin. Pure.

Columns are views into the received frames, or into a copy of the arena. An undecodable group is listed in
`Batch.rejected` with the reason; settling the batch reports it. The other groups are delivered without it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, Final, NamedTuple

import msgspec

from rolloutmq.bus.encoding.codec import Buffer, decode_group
from rolloutmq.schemas.errors import ChecksumError, MalformedError, UsageError, WireError
from rolloutmq.schemas.group import Group, counted, policy_range
from rolloutmq.schemas.printable import html_table
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire import replies
from rolloutmq.schemas.wire.envelope import ColumnTable, PolicyVersion
from rolloutmq.schemas.wire.replies import Delivery, Rejected

REASON_CHARS = 512
"""Longest reason of a rejection."""


class StepSize(NamedTuple):
    """Size of one step over all ranks, or of one lease of a window in groups; two of the three are 0."""

    sequences: int = 0
    tokens: int = 0
    groups: int = 0

    @property
    def text(self) -> str:
        """The size in words."""
        if self.groups:
            return f"up to {self.groups} groups"
        return f"{self.tokens} tokens" if self.tokens else str(self.sequences)


def step_size(sequences: int, tokens: int) -> StepSize:
    """Return the size of a step; UsageError unless exactly one argument is positive and the other 0."""
    are_numbers = isinstance(sequences, int) and isinstance(tokens, int)
    if not are_numbers or min(sequences, tokens) < 0 or bool(sequences) == bool(tokens):
        raise UsageError(
            "sequences, tokens: must be one positive number and one 0 "
            f"(got sequences={sequences!r}, tokens={tokens!r}); give exactly one of them"
        )
    return StepSize(sequences, tokens)


def checked_version(key: str, version: object) -> PolicyVersion:
    """Return a `PolicyVersion` with plain integers, also one of integers of numpy; UsageError for anything else."""
    if not isinstance(version, PolicyVersion):
        raise UsageError(
            f"{key}: must be a PolicyVersion (got {version!r:.80}); pass `PolicyVersion(incarnation, step)`"
        )
    try:
        numbers = [int(index(one)) for one in (version.incarnation, version.step)]
        return msgspec.convert(numbers, PolicyVersion)
    except (TypeError, msgspec.ValidationError):
        raise UsageError(
            f"{key}: must have integers from 0 (got {version!r:.80}); count steps from 0"
        ) from None


def given_version(key: str, version: object) -> PolicyVersion | None:
    """Return a version as `checked_version` does; None is one that the caller fills in."""
    return None if version is None else checked_version(key, version)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Batch:
    """This rank's shard of a leased step.

    Attributes:
        groups: Decoded groups. Their arrays are read-only and stay valid after the lease.
        deliveries: Header, environment, producer and delivery count of each group, in the same order.
        rejected: Undecodable groups; settling the batch reports them.
        step: Optimizer step of the batch, as given to `pull`.
        version: Learning policy, as given to `pull`.
        lease, generation: The broker's identifiers of the lease.
        life: Registration of the pulling consumer.
        short: The step has fewer sequences than asked: no combination of whole groups matched in time.
        over: The step has more than asked: a group larger than a step is delivered alone, and a rewound batch
            is never cut.
        rewound: The batch was trained before; the trainer has since resumed from an earlier checkpoint.
        moments: Moments of the raw scores of each environment of the step: every group that the broker had accepted
            when it leased the step. All ranks get the same; a rewound batch brings those of its first lease.
            `Moments.groups` is the version, `(score - moments.mean) / moments.deviation` a z-score.
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
    moments: Mapping[str, Moments]

    @property
    def content(self) -> dict[str, Any]:
        """All attributes by name."""
        return {name: getattr(self, name) for name in _ATTRIBUTES}

    @property
    def sequences(self) -> int:
        """Number of sequences in this shard."""
        return sum(group.sequences for group in self.groups)

    @property
    def tokens(self) -> int:
        """Number of tokens in this shard."""
        return sum(group.tokens for group in self.groups)

    def staleness(self, version: PolicyVersion | None = None) -> tuple[int, ...]:
        """Return the staleness of each group: optimizer steps from its oldest token's policy to `version`.

        Only step numbers are compared. Lost steps of a resumed trainer are not counted; `schemas.policy_lineage` counts
        them.

        Args:
            version: Policy to compare with. None: the policy of the pull.
        """
        policy = self.version if version is None else version
        return tuple(policy.staleness(delivery.header.oldest) for delivery in self.deliveries)

    @property
    def _title(self) -> str:
        sizes = {"group": len(self.groups), "sequence": self.sequences, "token": self.tokens}
        marks = [name for name in ("short", "over", "rewound") if getattr(self, name)]
        marks += [f"{len(self.rejected)} undecodable"] if self.rejected else []
        parts = [*(counted(number, noun) for noun, number in sizes.items()), *marks]
        return f"Batch of step {self.step}: {', '.join(parts)}"

    def __repr__(self) -> str:
        """Return one line, see `Group`."""
        return f"<{self._title}>"

    def _repr_html_(self) -> str:
        """Return a table of the first groups, for a notebook."""
        rows = (
            (
                group.group_id,
                group.env,
                group.sequences,
                group.tokens,
                f"{delivery.header.rewards.mean:.4g}",
                policy_range(group.oldest, group.newest),
                stale,
                delivery.deliveries,
            )
            for group, delivery, stale in zip(self.groups, self.deliveries, self.staleness(), strict=True)
        )
        head = ("group", "env", "sequences", "tokens", "score", "policy", "staleness", "deliveries")
        return html_table(self._title, head, rows, len(self.groups))


_ATTRIBUTES: Final = tuple(field.name for field in fields(Batch))


def decode_groups(
    reply: replies.Batch,
    frames: Sequence[Buffer],
    arenas: Sequence[memoryview] = (),
    copy: Callable[[memoryview], Buffer] = bytes,
    known: Sequence[ColumnTable] = (),
) -> tuple[list[Group], list[Delivery], list[Rejected]]:
    """Decode the groups of a reply; return the groups, their deliveries and the undecodable groups.

    Args:
        reply: The batch.
        frames: Frames of the groups outside the arenas.
        arenas: Bytes of each arena of the batch.
        copy: Copies a group out of its arena.
        known: Tables of an earlier reply: if the reply has the same, all that was found out about them is used again.

    Raises:
        ChecksumError: The bytes in an arena are not those of the group.
    """
    tables = {table.id: table for table in (known if known == reply.tables else reply.tables)}
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
    """Return the bytes of a group in its arena."""
    assert delivery.place is not None
    index, offset = delivery.place
    end = offset + delivery.header.nbytes
    if index >= len(arenas) or end > len(arenas[index]):
        raise MalformedError(
            f"group {delivery.header.group_id}: ends outside its arena (at byte {end} of arena {index})"
        )
    return arenas[index][offset:end]


def _decoded(delivery: Delivery, tables: Mapping[str, ColumnTable], frames: Sequence[Buffer]) -> Group:
    table = tables.get(delivery.header.table)
    if table is None:
        raise MalformedError(
            f"group {delivery.header.group_id}: the batch lacks its column table {delivery.header.table}"
        )
    return decode_group(delivery.header, table, frames, delivery.env)
