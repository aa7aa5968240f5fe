"""Facts as bytes, and back."""

from typing import Any, Final, TypeVar

import msgspec

from rolloutmq.services.broker.journal.facts import (
    Accepted,
    Began,
    Committed,
    ConsumerItem,
    Declared,
    Disconnected,
    Dropped,
    EndedItem,
    Forgot,
    GpuAsked,
    GroupItem,
    GroupMeta,
    Joined,
    KeptItem,
    LaneItem,
    Leased,
    LeaseItem,
    LedgerItem,
    Lost,
    Numbers,
    Opened,
    Produced,
    Pulled,
    Requeued,
    ReturningItem,
    Rewound,
    RunItem,
    SessionItem,
    Settles,
    Skipped,
    Table,
    Told,
    Tuned,
    Wanted,
    WasReset,
)
from rolloutmq.services.broker.journal.taskfacts import (
    TaskEnded,
    TaskItem,
    TaskReturned,
    TasksItem,
    TaskSubmitted,
    TaskTaken,
)

AnyFact = (
    Accepted | Skipped | Opened | Declared | Produced | Joined | Leased | Pulled | Settles | Lost | Dropped
    | Committed | Forgot | Rewound | Requeued | Disconnected | WasReset | Wanted | Told | Began | Tuned | GpuAsked
    | Numbers | Table | LaneItem | SessionItem | GroupItem | LeaseItem | EndedItem | KeptItem | ReturningItem
    | LedgerItem | ConsumerItem | RunItem
    | TaskSubmitted | TaskTaken | TaskReturned | TaskEnded | TasksItem | TaskItem
)  # fmt: skip

_T = TypeVar("_T")
_encoder: Final = msgspec.msgpack.Encoder()
_facts: Final = msgspec.msgpack.Decoder(tuple[AnyFact, ...])
_meta: Final = msgspec.msgpack.Decoder(GroupMeta)


def encode(facts: Any) -> bytes:
    """Encode a list of facts, or the meta of a group."""
    return _encoder.encode(facts)


def decode_facts(data: memoryview | bytes) -> tuple[AnyFact, ...]:
    """Decode what `encode` made of a list; msgspec.MsgspecError if it is nothing of the kind."""
    return _decoded(_facts, data)


def decode_meta(data: memoryview | bytes) -> GroupMeta:
    """Decode the meta of a group's record; msgspec.MsgspecError if it is nothing of the kind."""
    return _decoded(_meta, data)


def _decoded(decoder: "msgspec.msgpack.Decoder[_T]", data: memoryview | bytes) -> _T:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
