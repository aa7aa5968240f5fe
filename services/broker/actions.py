"""What the core asks its shell to do. The core itself touches no socket and no file."""

from typing import Any

import msgspec

from rolloutmq.schemas import delivery
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.records import DroppedGroup

Route = tuple[bytes, ...]
"""Return address of a request: opaque to the core."""


class Reply(msgspec.Struct, frozen=True):
    """Answer one request. `frames` follow the message, untouched."""

    route: Route
    message: delivery.Reply
    frames: tuple[Any, ...] = ()


class Publish(msgspec.Struct, frozen=True):
    """Publish on `events`."""

    topic: bytes
    message: Message


class Dropped(msgspec.Struct, frozen=True):
    """Write one line of `dropped.jsonl`."""

    record: DroppedGroup


Action = Reply | Publish | Dropped


class Outbox:
    """Actions gathered during one call into the core."""

    def __init__(self) -> None:
        self._actions: list[Action] = []

    def reply(self, route: Route, message: delivery.Reply, frames: tuple[Any, ...] = ()) -> None:
        self._actions.append(Reply(route, message, frames))

    def publish(self, topic: bytes, message: Message) -> None:
        self._actions.append(Publish(topic, message))

    def dropped(self, at: float, group_id: str, state: str, reason: str) -> None:
        self._actions.append(Dropped(DroppedGroup(at=at, group_id=group_id, state=state, reason=reason)))

    def take(self) -> list[Action]:
        """Return what was gathered and start anew."""
        actions, self._actions = self._actions, []
        return actions
