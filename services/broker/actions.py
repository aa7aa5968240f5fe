"""What the core asks its shell to do. The core itself touches no socket and no file."""

from typing import Any

import msgspec

from rolloutmq.schemas import delivery
from rolloutmq.schemas.message import Message
from rolloutmq.schemas.records import DroppedGroup
from rolloutmq.services.broker.groups import StoredGroup

Route = tuple[bytes, ...]
"""Return address of a request: opaque to the core."""


class Reply(msgspec.Struct, frozen=True):
    """Answer one request. `frames` follow the message, untouched."""

    route: Route
    message: delivery.Reply
    frames: tuple[Any, ...] = ()
    binding: bool = False
    """It tells of a change, and must not be said before the change is as durable as the run demands."""


class Publish(msgspec.Struct, frozen=True):
    """Publish on `events`. An ack is binding; everything else is not."""

    topic: bytes
    message: Message

    @property
    def binding(self) -> bool:
        return isinstance(self.message, delivery.Ack)


class Dropped(msgspec.Struct, frozen=True):
    """Write one line of `dropped.jsonl`."""

    record: DroppedGroup
    binding: bool = False


class Bury(msgspec.Struct, frozen=True):
    """Put a dead group's contents aside; without frames they are damaged."""

    group: StoredGroup
    frames: tuple[Any, ...] | None
    reason: str
    binding: bool = False


class Unbury(msgspec.Struct, frozen=True):
    """Remove a dead group's contents: it lives again, and will do so after a restart too."""

    order: int
    binding: bool = True


Action = Reply | Publish | Dropped | Bury | Unbury


class Outbox:
    """Actions gathered during one call into the core."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self.muted = False
        """An earlier life is being brought back: what it did was done then."""

    def reply(
        self, route: Route, message: delivery.Reply, frames: tuple[Any, ...] = (), *, binding: bool = False
    ) -> None:
        self._actions.append(Reply(route, message, frames, binding))

    def bury(self, group: StoredGroup, frames: tuple[Any, ...] | None, reason: str) -> None:
        self._actions.append(Bury(group, frames, reason))

    def publish(self, topic: bytes, message: Message) -> None:
        self._actions.append(Publish(topic, message))

    def dropped(self, at: float, group_id: str, state: str, reason: str) -> None:
        self._actions.append(Dropped(DroppedGroup(at=at, group_id=group_id, state=state, reason=reason)))

    def drop_all(self) -> None:
        """Forget what was gathered."""
        self._actions.clear()

    def take(self) -> list[Action]:
        """Return what was gathered and start anew."""
        actions, self._actions = self._actions, []
        return actions
