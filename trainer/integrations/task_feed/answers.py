"""What a request for the group of a task gets: the group, or the reason why there is none."""

from dataclasses import dataclass
from enum import StrEnum

from rolloutmq.schemas.group import Group


class Missing(StrEnum):
    """Reason why a trajectory is missing."""

    FAILED = "failed"
    """Its task failed as often as `broker.max_deliveries` allows."""
    DEADLINE = "deadline"
    """It did not come in time."""
    LOST = "lost"
    """The broker no longer has its group: dropped as stale, say."""
    CANCELLED = "cancelled"
    """Somebody cancelled its task."""
    REFUSED = "refused"
    """The broker does not accept its task."""
    SHORT = "short"
    """Its group has fewer sequences, such as after an early close."""
    UNUSABLE = "unusable"
    """The trainer cannot learn from it: it has no trained token, say, or another temperature."""
    CLOSED = "closed"
    """The connection to the bus has ended."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What came for a prompt group.

    Attributes:
        group: The group; None if nothing came.
        missing: Why nothing came.
        detail: More about it, for people.
        waited_s: Seconds from the request to the answer.
        staleness: Optimizer steps between the oldest token and the trainer, when the group came.
    """

    group: Group | None = None
    missing: Missing | None = None
    detail: str = ""
    waited_s: float = 0.0
    staleness: int = 0
