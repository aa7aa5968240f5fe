"""Actions: the core's instructions to the data plane. The core itself touches no socket and no file."""

from collections.abc import Callable
from typing import Any

import msgspec

from rolloutmq.schemas.files import DroppedGroup, SettledBatch
from rolloutmq.schemas.wire import replies
from rolloutmq.schemas.wire.envelope import Message
from rolloutmq.services.broker.journal.stored_group import StoredGroup

Route = tuple[bytes, ...]
"""Return address of a request: opaque to the core."""
Answer = Callable[[Route, replies.Reply, tuple[Any, ...]], object]
"""Sends a reply and its frames to a route."""


class Reply(msgspec.Struct, frozen=True):
    """Answer one request. `frames` follow the message unchanged."""

    route: Route
    message: replies.Reply
    frames: tuple[Any, ...] = ()
    durable: bool = False
    """Send it only when the events it reports are as durable as the run demands."""
    awaited: bool = False
    """A trainer does nothing until it has the reply."""


class Publish(msgspec.Struct, frozen=True):
    """Publish on `events`. Only an ack waits until its events are durable."""

    topic: bytes
    message: Message

    @property
    def durable(self) -> bool:
        return isinstance(self.message, replies.Ack)


class Dropped(msgspec.Struct, frozen=True):
    """Write one line of `dropped.jsonl`."""

    record: DroppedGroup
    durable: bool = False


class Recorded(msgspec.Struct, frozen=True):
    """Write one line of `settled.jsonl`."""

    record: SettledBatch
    durable: bool = True


class Expired(msgspec.Struct, frozen=True):
    """Warn that accepted groups of an environment were dropped as stale."""

    env: str
    groups: int
    max_staleness: int
    newest_step: int = 0
    """Step of the newest policy that sampled one of them."""
    durable: bool = False


class Bury(msgspec.Struct, frozen=True):
    """Write the dead letter of a group; `frames` is None if its contents are damaged."""

    group: StoredGroup
    frames: tuple[Any, ...] | None
    reason: str
    durable: bool = False


class Unbury(msgspec.Struct, frozen=True):
    """Remove the dead letter of a group queued again."""

    order: int
    durable: bool = True


Action = Reply | Publish | Dropped | Recorded | Expired | Bury | Unbury


class Outbox:
    """Actions gathered during one call into the core."""

    def __init__(self) -> None:
        self._actions: list[Action] = []
        self.muted = False
        """Events of an earlier life are being applied: its dead letters were written then."""
        self.answer: Answer | None = None
        """Takes each reply as it is made, ahead of what the call has yet to count; None: replies are actions."""

    def reply(
        self,
        route: Route,
        message: replies.Reply,
        frames: tuple[Any, ...] = (),
        *,
        durable: bool = False,
        awaited: bool = False,
    ) -> None:
        if self.answer is not None:
            self.answer(route, message, frames)
        else:
            self._actions.append(Reply(route, message, frames, durable, awaited))

    def bury(self, group: StoredGroup, frames: tuple[Any, ...] | None, reason: str) -> None:
        self._actions.append(Bury(group, frames, reason))

    def publish(self, topic: bytes, message: Message) -> None:
        self._actions.append(Publish(topic, message))

    def dropped(self, at: float, group_id: str, state: str, reason: str) -> None:
        self._actions.append(Dropped(DroppedGroup(at=at, group_id=group_id, state=state, reason=reason)))

    def settled(self, record: SettledBatch) -> None:
        self._actions.append(Recorded(record))

    def expired(self, env: str, groups: int, max_staleness: int, newest_step: int) -> None:
        self._actions.append(Expired(env, groups, max_staleness, newest_step))

    def drop_all(self) -> None:
        """Forget the gathered actions."""
        self._actions.clear()

    def take(self) -> list[Action]:
        """Return the gathered actions and start anew."""
        actions, self._actions = self._actions, []
        return actions
