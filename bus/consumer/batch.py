"""Batches of a trainer: decoded groups with their origin. Pure.

Columns are views into the received frames, into a copy of a part of the arena, or into the arena itself. An undecodable
group is listed in `Batch.rejected` with the reason; settling the batch reports it. The other groups are delivered
without it.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from itertools import islice
from operator import index
from typing import Any, Final, NamedTuple, Self

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.codec import Buffer, decode_body, decode_tables
from rolloutmq.bus.encoding.received_columns import TablePlan, plan_of
from rolloutmq.schemas.errors import ChecksumError, MalformedError, UsageError, WireError
from rolloutmq.schemas.group import Group, counted, policy_range
from rolloutmq.schemas.printable import html_table
from rolloutmq.schemas.statistics.moments import Moments
from rolloutmq.schemas.wire import replies
from rolloutmq.schemas.wire.envelope import GroupHeader, PolicyVersion
from rolloutmq.schemas.wire.replies import Delivery, Rejected

REASON_CHARS = 512
"""Longest reason of a rejection."""
RUN_BYTES: Final = 128 << 10
"""Most bytes of small groups that are copied together: one of them that the trainer keeps keeps them all in memory."""
GAP_BYTES: Final = 64
"""Largest gap between groups that are copied together: the alignment of slots."""

BATCHES_KEPT: Final = 16
"""Encoded tables of batches whose plans are kept."""
NEAR_BYTES: Final = 16 << 10, 3 << 19
"""Sizes of memory that is read ahead of its checksum: less costs little, more exceeds the processor's cache."""
LINE: Final = 64
"""Bytes of a cache line."""

Bytes = bytes | NDArray[np.uint8]
Copy = Callable[[memoryview], Bytes]
"""Copies bytes of an arena, or returns the same."""


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
        groups: Decoded groups. Their arrays are read-only and stay valid after the lease, except for a consumer with
            `views`.
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

    @classmethod
    def received(cls, *values: Any) -> Self:
        """Return a batch with these attributes, in their order; at half of the cost of the constructor."""
        batch = cls.__new__(cls)
        for assign, value in zip(_slots_of(cls), values, strict=True):  # type: ignore[arg-type]
            assign(batch, value)
        return batch

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


@cache
def _slots_of(kind: type[Batch]) -> tuple[Callable[[Batch, Any], None], ...]:
    """Return what assigns the attributes of a kind of batch, in their order."""
    return tuple(getattr(kind, field.name).__set__ for field in fields(kind))


class DecodedBatch(NamedTuple):
    """Groups of a batch, their deliveries, and the undecodable groups."""

    groups: list[Group]
    deliveries: list[Delivery]
    rejected: list[Rejected]


def decode_groups(
    reply: replies.Batch,
    frames: Sequence[Buffer],
    arenas: Sequence[memoryview] = (),
    copy: Copy = memoryview.tobytes,
) -> DecodedBatch:
    """Decode the groups of a reply.

    Args:
        reply: The batch.
        frames: Frames of the groups outside the arenas.
        arenas: Bytes of each arena of the batch.
        copy: Copies groups out of their arena, or returns the same bytes.

    Raises:
        ChecksumError: The bytes in an arena are not those of the group.
    """
    plans = _plans(bytes(reply.tables))
    bodies = _bodies(reply.groups, frames, arenas, copy)
    groups: list[Group] = []
    deliveries: list[Delivery] = []
    rejected: list[Rejected] = []
    for delivery, body in zip(reply.groups, bodies, strict=True):
        header = delivery.header
        try:
            plan = plans.get(header.table)
            if body is None or plan is None:
                raise _misplaced(delivery) if body is None else _tableless(header)
            groups.append(decode_body(header, plan, body, delivery.env))
            deliveries.append(delivery)
        except WireError as error:
            if delivery.place is not None and isinstance(error, ChecksumError):
                raise
            rejected.append(Rejected(group_id=header.group_id, reason=str(error)[:REASON_CHARS]))
    return DecodedBatch(groups, deliveries, rejected)


@lru_cache(maxsize=BATCHES_KEPT)
def _plans(tables: bytes) -> Mapping[str, TablePlan]:
    """Return how to read the groups of each table of a batch, by its id."""
    return {table.id: plan_of(table) for table in decode_tables(tables)}


def brought_near(source: Buffer) -> NDArray[np.uint8]:
    """Return the same bytes, once they are in the processor's cache.

    The checksum waits for each line of memory that another processor has written; a plain read does not, and both
    together take half as long.
    """
    near = np.frombuffer(source, np.uint8)
    if NEAR_BYTES[0] <= near.nbytes <= NEAR_BYTES[1]:
        np.maximum.reduce(near[::LINE])
    return near


def _bodies(
    deliveries: Sequence[Delivery],
    frames: Sequence[Buffer],
    arenas: Sequence[memoryview],
    copy: Copy,
) -> Iterator[Sequence[Bytes] | None]:
    """Yield the frames of each group in turn; None for one outside its arena.

    Groups that lie behind each other are copied together, right before the first of them is needed: the checksum then
    finds them in the processor's cache.
    """
    following = start = end = 0
    source = -1
    copied: Bytes = b""
    for at, delivery in enumerate(deliveries):
        header, place = delivery.header, delivery.place
        if place is None:
            own = frames[following : following + header.frames]
            yield [brought_near(frame) for frame in own]
            following += header.frames
            continue
        index, offset = place
        stop = offset + header.nbytes
        if index != source or offset < start or stop > end:
            if index >= len(arenas) or stop > arenas[index].nbytes:
                yield None
                continue
            alone = at + 1 == len(deliveries)
            end = stop if alone else _run_end(deliveries, at, arenas[index].nbytes)
            source, start, copied = index, offset, copy(arenas[index][offset:end])
        yield (copied[offset - start : stop - start],)


def _run_end(deliveries: Sequence[Delivery], first: int, limit: int) -> int:
    """Return where the run of groups ends that lie behind each other in the arena of the first."""
    place = deliveries[first].place
    assert place is not None
    index, start = place
    end = start + deliveries[first].header.nbytes
    limit = min(limit, start + RUN_BYTES)
    for delivery in islice(deliveries, first + 1, None):
        place = delivery.place
        if place is None or place[0] != index or not end <= place[1] <= end + GAP_BYTES:
            break
        stop = place[1] + delivery.header.nbytes
        if stop > limit:
            break
        end = stop
    return end


def _misplaced(delivery: Delivery) -> MalformedError:
    assert delivery.place is not None
    index, offset = delivery.place
    return MalformedError(
        f"group {delivery.header.group_id}: ends outside its arena "
        f"(at byte {offset + delivery.header.nbytes} of arena {index})"
    )


def _tableless(header: GroupHeader) -> MalformedError:
    return MalformedError(f"group {header.group_id}: the batch lacks its column table {header.table}")
