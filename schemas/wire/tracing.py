"""Calls of the rollouts that are traced; see `telemetry.trace_ratio`."""

from typing import Annotated, Final

from msgspec import Meta, Struct

from rolloutmq.schemas.wire.envelope import Count, GroupId, Message, Name, Seconds

CALLS_LIMIT: Final = 256
"""Most calls of a traced rollout; further ones count in `dropped_calls`."""


class Call(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One call of a rollout to an inference server."""

    engine: Annotated[str, Meta(max_length=256)]
    """Name of the server, or its address."""
    path: Annotated[str, Meta(max_length=256)]
    """Path of the request."""
    began_at: Seconds
    """Wall clock of the worker."""
    seconds: Seconds
    """Duration."""
    status: Annotated[int, Meta(ge=0, le=999)] = 0
    """Status of the answer; 0 if none came."""
    tokens: Count = 0
    """Sampled tokens."""
    prompt_tokens: Count = 0
    """Tokens of the prompt."""


class RolloutTrace(Message, tag="rollout_trace", frozen=True, kw_only=True):
    """Calls of the rollout of a sampled group; published on `telemetry.trace.WORKER`."""

    group_id: GroupId
    env: Name
    worker: Name
    at: Seconds
    """End of the rollout, wall clock of the worker."""
    calls: Annotated[tuple[Call, ...], Meta(max_length=CALLS_LIMIT)] = ()
    """In the order in which they ended."""
    dropped_calls: Count = 0
    """Calls beyond the limit."""


def is_sampled(group_id: str, ratio: float) -> bool:
    """Return whether a group is traced: by a hash of its id, so that every process decides the same."""
    return int.from_bytes(digest_of(group_id)[:8]) < ratio * (1 << 64)


def digest_of(text: str) -> bytes:
    """Return the 24 bytes of the BLAKE2b hash of a text."""
    import hashlib  # it loads OpenSSL, and only a process with traces needs it

    return hashlib.blake2b(text.encode(), digest_size=24).digest()
