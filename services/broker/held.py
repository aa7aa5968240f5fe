"""Binding actions that wait until what they tell of is durable, in their order; those of facts that go ahead apart.

While the disk is full the wait may be long, so memory is bounded: who asks for the same batch again gets it once, of
all replies the oldest are dropped beyond `HELD_LIMIT` (who asked asks again), and of acks the last durable one is said
again, with the reason.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.delivery import Ack, Batch, Settled, Wait
from rolloutmq.services.broker.actions import Action, Publish, Reply

HELD_LIMIT: Final = 20_000
ACKS_HELD: Final = 8
"""Acks of one session that wait at once; what they say is said again anyway."""
ACKS_LIMIT: Final = 1 << 16
"""Sessions whose last durable ack is remembered."""


class _Entry(msgspec.Struct):
    ticket: int
    action: Action | None
    """None if a later action took its place."""
    ahead: bool


class Promises(Protocol):
    """What an action may wait for; see `Journal`."""

    ticket: int
    ahead_ticket: int

    @property
    def ahead(self) -> bool:
        """Whether leases wait for nothing but facts that go ahead."""
        ...


class Held:
    """Actions by the batch of the journal that they wait for."""

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._ahead: deque[_Entry] = deque()
        self._batches: dict[tuple[bytes, int], _Entry] = {}
        """The newest held reply to whoever asks for a lease, by its address."""
        self._acks: dict[int, Ack] = {}
        self._waiting_acks: dict[int, int] = {}
        """Held acks of each session."""
        self._replies = 0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._ahead)

    @property
    def urgent(self) -> bool:
        """Whether a peer waits for an answer, and not only for facts that go ahead; acks can be gathered."""
        return self._replies > 0

    def wait_for(self, promises: Promises, action: Action) -> None:
        """Keep an action until all that it may tell of is durable."""
        if promises.ahead and _is_of_leases(action):
            self.hold(promises.ahead_ticket, action, ahead=True)
        else:
            self.hold(promises.ticket, action)

    def hold(self, ticket: int, action: Action, *, ahead: bool = False) -> None:
        """Keep an action until the batches up to `ticket` are durable; tickets never fall.

        Args:
            ticket: Of all batches, or of those that go ahead.
            action: A binding one.
            ahead: It waits for nothing but facts that go ahead.
        """
        if self._is_held(action):
            return
        entry = _Entry(ticket, action, ahead)
        waiting = self._ahead if ahead else self._waiting
        waiting.append(entry)
        self._count(entry, 1)
        if (key := _batch(action)) is not None:
            if key in self._batches:
                self._count(self._batches[key], -1)
                self._batches[key].action = None
            self._batches[key] = entry
        if len(self) > HELD_LIMIT:
            self._next(waiting)

    def _count(self, entry: _Entry, sign: int) -> None:
        self._replies += sign * (isinstance(entry.action, Reply) and not entry.ahead)

    def _is_held(self, action: Action) -> bool:
        """Whether enough of a session's acks wait: one for what is being written, and one for what is open.

        The older ones stay: were they replaced, none would ever leave where the next is always sooner.
        """
        if not isinstance(action, Publish) or not isinstance(action.message, Ack):
            return False
        waiting = self._waiting_acks.get(action.message.session, 0)
        if waiting < ACKS_HELD:
            self._waiting_acks[action.message.session] = waiting + 1
        return waiting >= ACKS_HELD

    def _next(self, waiting: deque[_Entry]) -> Action | None:
        """Remove and return the first action."""
        entry = waiting.popleft()
        action = entry.action
        if isinstance(action, Publish) and isinstance(action.message, Ack):
            session = action.message.session
            self._waiting_acks[session] -= 1
            if not self._waiting_acks[session]:
                del self._waiting_acks[session]
        self._count(entry, -1)
        if action is not None and (key := _batch(action)) is not None:
            del self._batches[key]
        return action

    def release(self, done: int, ahead_done: int) -> Iterator[Action]:
        """Yield what waited for batches up to `done`, or for those that go ahead up to `ahead_done`."""
        for waiting, reached in ((self._ahead, ahead_done), (self._waiting, done)):
            while waiting and waiting[0].ticket <= reached:
                action = self._next(waiting)
                if action is not None:
                    self.said(action)
                    yield action

    def said(self, action: Action) -> None:
        """Note an ack that is said."""
        if isinstance(action, Publish | Reply) and isinstance(action.message, Ack):
            ack = action.message
            self._acks.pop(ack.session, None)
            self._acks[ack.session] = ack
            if len(self._acks) > ACKS_LIMIT:
                del self._acks[next(iter(self._acks))]

    def last(self, action: Action) -> Action | None:
        """Return the last durable ack in place of one that is not, or None if there is none to say."""
        if not isinstance(action, Publish | Reply) or not isinstance(action.message, Ack):
            return None
        ack = self._acks.get(action.message.session)
        if ack is None or ack.epoch != action.message.epoch:
            return None
        return replace(action, message=replace(ack, wait=Wait.JOURNAL_SLOW))


def _batch(action: Action) -> tuple[bytes, int] | None:
    """Return who is given which lease, if the action is a batch."""
    if isinstance(action, Reply) and isinstance(action.message, Batch):
        return action.route[0], action.message.lease
    return None


def _is_of_leases(action: Action) -> bool:
    """Whether an action tells of a lease, and of nothing else that changed."""
    return isinstance(action, Reply) and isinstance(action.message, Batch | Settled)
