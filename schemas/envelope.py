"""What travels in front of the columns: protocol version 1 of the wire.

One multipart message is `[envelope, body, big column, ..., body, ...]`. The envelope is a msgpack array of at
most 4 KiB and is all that the broker decodes. Each group owns `frames` of the frames that follow it: one body, then
one frame for each block larger than `BIG_BLOCK_BYTES`. The body layout is described by a `ColumnTable`, which a
producer declares once and names by its content hash.
"""

import hashlib
from enum import IntEnum
from functools import cached_property
from typing import Annotated, Final

import msgspec
from msgspec import Meta

PROTOCOL_VERSION: Final = 1
ENVELOPE_LIMIT_BYTES: Final = 4096
"""Largest envelope frame; the broker never decodes more than this of a message."""
FRAMES_LIMIT: Final = 256
"""Most frames of one message, the envelope included."""
GROUP_LIMIT_BYTES: Final = 1 << 30
"""Largest group on the wire, all its frames together; a run may set less."""
SEQUENCES_LIMIT: Final = 1 << 16
"""Most sequences of one group."""
COLUMNS_LIMIT: Final = 64
"""Most columns of one table."""
BIG_BLOCK_BYTES: Final = 1 << 20
"""A block above this gets a frame of its own instead of a place in the body: copying it would cost more."""

Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A producer, consumer, environment or run. Never contains `/`, which ends a topic."""
GroupId = Annotated[str, Meta(min_length=1, max_length=128)]
TableId = Annotated[str, Meta(pattern=r"^[0-9a-f]{16}$")]
Count = Annotated[int, Meta(ge=0, le=(1 << 62))]
Seconds = float
"""Durations in seconds; times are seconds since the epoch of the wall clock, for people, never for decisions."""


class Split(IntEnum):
    """Which stream a group belongs to; training and evaluation never share a batch."""

    TRAIN = 0
    EVAL = 1


class Dtype(IntEnum):
    """Element type of a column. `OPAQUE` is msgpack of any value; `BF16` travels as its 16 bits."""

    BOOL = 0
    I8 = 1
    U8 = 2
    I16 = 3
    U16 = 4
    I32 = 5
    U32 = 6
    I64 = 7
    U64 = 8
    F16 = 9
    BF16 = 10
    F32 = 11
    F64 = 12
    OPAQUE = 13


class PolicyVersion(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Which policy sampled a token: `step` optimizer steps, in the trainer's `incarnation`.

    A trainer that resumes from a checkpoint is a new incarnation, so that a rewound step never passes for the
    policy that had the same number before.
    """

    incarnation: Count = 0
    step: Count = 0

    def distance(self, other: "PolicyVersion") -> int:
        """Return how many optimizer steps lie between the two, if neither incarnation lost any (see `bus.lineage`)."""
        return abs(self.step - other.step)


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    """One column of a table.

    `depth` is 0 for one value a sequence `[n]`, 1 for ragged `[n][length]`, 2 for `[n][length][k]`, and 0 for an
    opaque column. `lengths_of` names an earlier column of the same depth whose lengths this one shares; empty means
    that the lengths travel with the column.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,47}$")]
    dtype: Dtype
    depth: Annotated[int, Meta(ge=0, le=2)]
    lengths_of: Annotated[str, Meta(max_length=48)] = ""

    @property
    def blocks(self) -> int:
        """How many blocks of bytes the column takes: its own lengths, one per level, then its values."""
        return 1 if self.lengths_of else self.depth + 1


class ColumnTable(msgspec.Struct, frozen=True, array_like=True, dict=True):
    """The columns of a group, in the order of their blocks. Equal tables have equal ids everywhere."""

    columns: Annotated[tuple[ColumnSpec, ...], Meta(max_length=COLUMNS_LIMIT)]

    @cached_property
    def id(self) -> str:
        """First 8 bytes of the BLAKE2b hash of the encoded table, in hexadecimal."""
        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @cached_property
    def blocks(self) -> int:
        """Blocks of all columns together; the directory of the body has that many rows."""
        return sum(column.blocks for column in self.columns)


class RewardSummary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Scores of a group, so that a broker and a person can see rewards without reading the body."""

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0


class GroupHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What is known of one group without opening its body.

    Attributes:
        seq: Number of the group in its producer's session, from 1.
        position: Bytes of all groups of the session up to and including this one; credits are positions.
        group_id: Unique in the run; what every log and the ledger name.
        table: Id of the `ColumnTable` of its body.
        frames: Frames of the message that belong to this group, at least 1.
        nbytes: Bytes of those frames together.
        crc: CRC32C over those frames in their order.
        sequences: Number of sequences, `n`.
        tokens: Tokens of all sequences together.
        oldest, newest: Policy versions of the first and last sampled token of the whole group.
        started_at, finished_at: Wall-clock seconds.
        task: Id of the task it answers, empty if the environment drew its own.
    """

    seq: Annotated[int, Meta(ge=1, le=(1 << 62))]
    position: Count
    group_id: GroupId
    table: TableId
    frames: Annotated[int, Meta(ge=1, le=FRAMES_LIMIT)]
    nbytes: Annotated[int, Meta(ge=1, le=GROUP_LIMIT_BYTES)]
    crc: Annotated[int, Meta(ge=0, le=0xFFFFFFFF)]
    sequences: Annotated[int, Meta(ge=1, le=SEQUENCES_LIMIT)]
    tokens: Count
    oldest: PolicyVersion
    newest: PolicyVersion
    started_at: Seconds
    finished_at: Seconds
    rewards: RewardSummary
    task: Annotated[str, Meta(max_length=128)] = ""


class ArenaRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Where a process on this host has memory that it shares: its open descriptor `fd`, and what is to be found there.

    `ino` and `nbytes` are the number and the size of the file; another file is not the one that is meant.
    """

    pid: Count
    fd: Count
    ino: Count
    nbytes: Count


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First frame of a message from a producer; all its groups belong to one environment and split.

    `offsets` tells where each group begins in the arena whose file has the number `arena`; empty if the groups follow
    as frames. A message may reach another life of the broker than it was meant for, where the session has another
    arena.
    """

    version: int
    producer: Name
    session: Count
    run: Name
    env: Name
    split: Split
    groups: Annotated[tuple[GroupHeader, ...], Meta(min_length=1, max_length=64)]
    offsets: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    arena: Count = 0
