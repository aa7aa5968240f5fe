"""The base of control messages, and the envelope of groups: protocol version 4.

A control message is one frozen class with a `kind` tag. Unknown fields and kinds are refused. Requests, replies and
events are separate unions, so a reader can match them exhaustively.

A message with groups is `[envelope, body, big column, ..., body, ...]`. The envelope is a msgpack array of at most 4
KiB; the broker decodes nothing else. Each group owns `frames` of the following frames: one body, then one frame for
each block above `BIG_BLOCK_BYTES`. A `ColumnTable` describes the layout of a body; a producer declares it once and
refers to it by its content hash.
"""

from enum import IntEnum, StrEnum
from functools import cached_property
from typing import Annotated, Final

import msgspec
from msgspec import Meta


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="kind"):
    """Base of all control messages: a msgpack map with a `kind`."""


PROTOCOL_VERSION: Final = 4

ENVELOPE_LIMIT_BYTES: Final = 4096
"""Largest envelope; the broker never decodes more of a message."""

FRAMES_LIMIT: Final = 256
"""Most frames of one message, envelope included."""

GROUP_LIMIT_BYTES: Final = 1 << 30
"""Largest group on the wire, with all its frames; a run may set less."""

SEQUENCES_LIMIT: Final = 1 << 16
"""Most sequences of one group."""

COLUMNS_LIMIT: Final = 64
"""Most columns of one table."""

BIG_BLOCK_BYTES: Final = 1 << 20
"""A larger block has its own frame instead of a copy in the body, because the copy would cost more."""


Name = Annotated[str, Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}\Z")]
"""Name of a producer, consumer, environment or run. It has no `/`, which ends a topic."""

KnownName = Annotated[str, Meta(max_length=64)]
"""A name that the reader compares with those it knows: no pattern needs to hold."""

RunId = Annotated[str, Meta(pattern=r"^([0-9a-f]{32})?\Z")]
"""Id of a run, made with it; empty where none is known. Runs of one name have different ones."""

GroupId = Annotated[str, Meta(min_length=1, max_length=128)]

TaskRef = Annotated[str, Meta(max_length=128)]
"""Id of the submitted task that a group answers; empty if the environment drew its own."""

TableId = Annotated[str, Meta(max_length=16)]
"""Content hash of a column table, in hexadecimal. A reader compares it with those it knows, like a `KnownName`."""

Count = Annotated[int, Meta(ge=0, le=(1 << 62))]

Seconds = float
"""A duration, or a wall-clock time since the epoch. Wall-clock times are for people, never for decisions."""


class Split(IntEnum):
    """Training or evaluation; a batch has groups of one split only."""

    TRAIN = 0
    EVAL = 1


class Dtype(IntEnum):
    """Element type of a column. `OPAQUE` is msgpack of any value; `BF16` is stored as its 16 bits."""

    __hash__ = int.__hash__  # that of an enumeration is a function of Python, and tables are found by it

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


class PolicyVersion(msgspec.Struct, frozen=True, array_like=True, order=True, gc=False):
    """Version of a policy: `step` optimizer steps in an `incarnation` of the trainer.

    A trainer that resumes from a checkpoint starts a new incarnation, so a repeated step differs from the lost one
    of the same number.
    """

    incarnation: Count = 0
    step: Count = 0

    def staleness(self, sampled: "PolicyVersion") -> int:
        """Return by how many optimizer steps this policy has moved on from the one that sampled a group.

        Only step numbers are compared; `schemas.policy_lineage` also counts the lost steps of a resumed trainer.
        """
        if sampled.incarnation >= self.incarnation:
            return max(0, self.step - sampled.step)
        return abs(self.step - sampled.step)


class ColumnSpec(msgspec.Struct, frozen=True, array_like=True):
    """One column of a table.

    `depth` is 0 for `[n]` and for an opaque column, 1 for ragged `[n][length]`, 2 for `[n][length][k]`. `lengths_of`
    names an earlier column of the same depth with the same lengths; empty means that the column has its own.
    """

    name: Annotated[str, Meta(pattern=r"^[a-z][a-z0-9_]{0,47}\Z")]
    dtype: Dtype
    depth: Annotated[int, Meta(ge=0, le=2)]
    lengths_of: Annotated[str, Meta(max_length=48)] = ""

    @property
    def blocks(self) -> int:
        """Number of blocks of the column: one for each level of its own lengths, then its values."""
        return 1 if self.lengths_of else self.depth + 1


class ColumnTable(msgspec.Struct, frozen=True, array_like=True, dict=True, cache_hash=True):
    """The columns of a group in the order of their blocks. Equal tables have equal ids in every process."""

    columns: Annotated[tuple[ColumnSpec, ...], Meta(max_length=COLUMNS_LIMIT)]

    @cached_property
    def id(self) -> str:
        """First 8 bytes of the BLAKE2b hash of the encoded table, in hexadecimal."""
        import hashlib  # it loads OpenSSL, and only a process with groups needs it

        return hashlib.blake2b(msgspec.msgpack.encode(self), digest_size=8).hexdigest()

    @cached_property
    def blocks(self) -> int:
        """Number of blocks of all columns, and of rows in the directory of a body."""
        return sum(column.blocks for column in self.columns)


class RewardSummary(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Moments and range of the scores of a group, readable without its body.

    Attributes:
        mean: Mean of the scores.
        low: Lowest score.
        high: Highest score.
        m2: Sum of the squared deviations from the mean; with the number of sequences it merges exactly.
    """

    mean: float = 0.0
    low: float = 0.0
    high: float = 0.0
    m2: float = 0.0


class GroupHeader(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Header of one group: everything that needs no look into its body.

    Attributes:
        seq: Number of the group in its producer's session, from 1.
        position: Bytes of the session up to the end of this group; byte credit is such a position.
        group_id: Unique in the run; logs and the ledger name it.
        table: Id of the `ColumnTable` of its body.
        frames: Number of its frames in the message, at least 1.
        nbytes: Bytes of those frames.
        crc: CRC32C over those frames in order.
        sequences: Number of sequences, `n`.
        tokens: Tokens of all sequences.
        oldest: Policy version of the first sampled token of the group.
        newest: Policy version of the last sampled token of the group.
        started_at: Start of the rollout, wall-clock seconds.
        finished_at: End of the rollout, wall-clock seconds.
        rewards: Summary of its scores.
        task: Id of the submitted task it answers; empty if the environment drew its own.
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
    task: TaskRef = ""


class ArenaRef(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Reference to an arena: the descriptor `fd` of a process on this host.

    `ino` and `nbytes` are inode number and size of the file, by which a reader recognises it.
    """

    pid: Count
    fd: Count
    ino: Count
    nbytes: Count


class Envelope(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """First frame of a message from a producer; all its groups belong to one environment and split.

    `offsets` has the start of each group in the arena with inode number `arena`; it is empty if the groups follow as
    frames. A message may reach a restarted broker, for which the session has another arena.
    """

    version: int
    producer: KnownName
    session: Count
    run: KnownName
    env: KnownName
    split: Split
    groups: Annotated[tuple[GroupHeader, ...], Meta(min_length=1, max_length=64)]
    offsets: Annotated[tuple[Count, ...], Meta(max_length=64)] = ()
    arena: Count = 0


class ErrorCode(StrEnum):
    """Reason of a refused request, in `ErrorReply.code`."""

    MALFORMED = "malformed"
    LIMIT = "limit"
    VERSION = "version"
    FENCED = "fenced"
    LEASE_LOST = "lease_lost"
    UNKNOWN = "unknown"
    """The broker does not know the producer, consumer, lease or worker of the request."""
    CONFLICT = "conflict"
    """The request contradicts an earlier one, for example with another world size for the same step."""
    INVALID = "invalid"
    FORBIDDEN = "forbidden"
    """The key of the client may not do this, or the name belongs to another key."""
