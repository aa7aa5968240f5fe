"""Encoding and decoding of events."""

from typing import Any, Final, TypeVar

import msgspec

from rolloutmq.services.broker.journal.format.events import (
    Accepted,
    Began,
    Carved,
    Committed,
    ConsumerSnapshot,
    Declared,
    Disconnected,
    Dropped,
    EndedGroupsSnapshot,
    EndedLeaseSnapshot,
    Forgot,
    GpuAsked,
    GroupMeta,
    GroupSnapshot,
    Joined,
    LaneSnapshot,
    Leased,
    LeaseSnapshot,
    LedgerSnapshot,
    Lost,
    Numbers,
    Opened,
    Produced,
    Pulled,
    Requeued,
    RetainedBatchSnapshot,
    Rewound,
    RewoundBatchSnapshot,
    RunSnapshot,
    SessionSnapshot,
    Settles,
    Skipped,
    Table,
    TaskEnded,
    TaskQueueSnapshot,
    TaskReturned,
    TaskSnapshot,
    TaskSubmitted,
    TaskTaken,
    Told,
    Tuned,
    Vacated,
    Wanted,
    WasReset,
)

AnyEvent = (
    Accepted | Skipped | Opened | Declared | Produced | Joined | Leased | Pulled | Settles | Lost | Dropped
    | Committed | Forgot | Rewound | Requeued | Disconnected | WasReset | Wanted | Told | Began | Tuned | Vacated
    | Carved | GpuAsked | Numbers | Table | LaneSnapshot | SessionSnapshot | GroupSnapshot | LeaseSnapshot
    | EndedLeaseSnapshot | RetainedBatchSnapshot | RewoundBatchSnapshot
    | LedgerSnapshot | ConsumerSnapshot | RunSnapshot | EndedGroupsSnapshot
    | TaskSubmitted | TaskTaken | TaskReturned | TaskEnded | TaskQueueSnapshot | TaskSnapshot
)  # fmt: skip

_T = TypeVar("_T")
_encoder: Final = msgspec.msgpack.Encoder()
_events: Final = msgspec.msgpack.Decoder(tuple[AnyEvent, ...])
_meta: Final = msgspec.msgpack.Decoder(GroupMeta)


def encode(events: Any) -> bytes:
    """Encode a list of events, or the meta of a group."""
    return _encoder.encode(events)


def decode_events(data: memoryview | bytes) -> tuple[AnyEvent, ...]:
    """Decode a list encoded by `encode`; msgspec.MsgspecError if it is anything else."""
    return _decoded(_events, data)


def decode_meta(data: memoryview | bytes) -> GroupMeta:
    """Decode the meta of a group's record; msgspec.MsgspecError if it is anything else."""
    return _decoded(_meta, data)


def _decoded(decoder: "msgspec.msgpack.Decoder[_T]", data: memoryview | bytes) -> _T:
    try:
        return decoder.decode(data)
    except UnicodeDecodeError as error:
        raise msgspec.DecodeError(str(error)) from None
