"""Deferred replies: durable actions that wait until the journal has made their events durable.

Actions leave in the order in which they came. Replies about leases have a queue of their own while the priority lane
is open (see `journal.write.priority_lane`), so they do not wait for groups.

While the disk is full the wait may be long, so memory is bounded:

    batches   a consumer that asks again for the same lease gets one reply
    replies   beyond `DEFERRED_LIMIT` the oldest is dropped; its peer repeats the request
    acks      the last durable ack is sent again with `wait = journal_slow`
"""

from collections import deque
from collections.abc import Iterator
from typing import Final, Protocol

import msgspec
from msgspec.structs import replace

from rolloutmq.schemas.wire.replies import Ack, Batch, Settled, Wait
from rolloutmq.services.broker.actions import Action, Publish, Reply

DEFERRED_LIMIT: Final = 20_000
ACKS_DEFERRED: Final = 8
"""Acks of one session that wait at once; later acks repeat their content."""
ACKS_LIMIT: Final = 1 << 16
"""Sessions with a remembered last durable ack."""


_WITH_ACK: Final = (Publish, Reply)
"""Actions that may carry an ack."""
_ABOUT_LEASES: Final = (Batch, Settled)
"""Replies that report a lease and no other change."""


class _Entry(msgspec.Struct, eq=False):
    ticket: int
    action: Action | None
    """The deferred action; None if a later one replaced it."""
    priority: bool
    at: float = 0.0
    """When it was deferred, if a trainer waits for it."""


class DurableTickets(Protocol):
    """Tickets to wait for; see `Journal`."""

    ticket: int
    priority_ticket: int

    @property
    def priority_open(self) -> bool:
        """Whether replies about leases wait for the priority lane alone."""
        ...


class DeferredReplies:
    """Actions by the commit batch they wait for."""

    def __init__(self) -> None:
        self._waiting: deque[_Entry] = deque()
        self._priority: deque[_Entry] = deque()
        self._batches: dict[tuple[bytes, int], _Entry] = {}
        """The newest deferred lease reply of each consumer connection."""
        self._acks: dict[int, Ack] = {}
        self._deferred_acks: dict[int, int] = {}
        """Deferred acks of each session."""
        self._replies = 0
        self._awaited: list[_Entry] = []
        """Those that a trainer waits for."""
        self._counted_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting) + len(self._priority)

    @property
    def urgent(self) -> bool:
        """Whether a peer waits for a reply outside the priority lane; acks can be gathered."""
        return self._replies > 0

    def defer(self, tickets: DurableTickets, action: Action, now: float = 0.0) -> None:
        """Keep an action until every event it may report is durable; `now` is monotonic seconds."""
        if tickets.priority_open and _is_lease_reply(action):
            self.hold(tickets.priority_ticket, action, now, priority=True)
        else:
            self.hold(tickets.ticket, action, now)

    def hold(self, ticket: int, action: Action, now: float = 0.0, *, priority: bool = False) -> None:
        """Keep an action until the commit batches up to `ticket` are durable; tickets never fall.

        Args:
            ticket: Of all batches, or of those in the priority lane.
            action: A durable one.
            now: Monotonic seconds.
            priority: It waits for the priority lane alone.
        """
        if self._enough_acks(action):
            return
        entry = _Entry(ticket, action, priority, now)
        if isinstance(action, Reply) and action.awaited:
            self._awaited.append(entry)
        waiting = self._priority if priority else self._waiting
        waiting.append(entry)
        self._count(entry, 1)
        if (key := _batch(action)) is not None:
            if key in self._batches:
                self._count(self._batches[key], -1)
                self._batches[key].action = None
            self._batches[key] = entry
        if len(self) > DEFERRED_LIMIT:
            self._next(waiting)

    def _count(self, entry: _Entry, sign: int) -> None:
        self._replies += sign * (isinstance(entry.action, Reply) and not entry.priority)

    def _enough_acks(self, action: Action) -> bool:
        """Return whether enough acks of a session wait: one for the batch being written, one for the open one.

        The older acks stay: if newer ones replaced them, none would ever leave while new ones keep coming.
        """
        if not isinstance(action, Publish) or not isinstance(action.message, Ack):
            return False
        waiting = self._deferred_acks.get(action.message.session, 0)
        if waiting < ACKS_DEFERRED:
            self._deferred_acks[action.message.session] = waiting + 1
        return waiting >= ACKS_DEFERRED

    def _next(self, waiting: deque[_Entry]) -> Action | None:
        """Remove and return the first action."""
        entry = waiting.popleft()
        action = entry.action
        if entry in self._awaited:
            self._awaited.remove(entry)
        if isinstance(action, Publish) and isinstance(action.message, Ack):
            session = action.message.session
            self._deferred_acks[session] -= 1
            if not self._deferred_acks[session]:
                del self._deferred_acks[session]
        self._count(entry, -1)
        if action is not None and (key := _batch(action)) is not None:
            del self._batches[key]
        return action

    def release(self, done: int, priority_done: int) -> Iterator[Action]:
        """Yield the actions deferred up to batch `done`, or up to `priority_done` in the priority lane."""
        for waiting, reached in ((self._priority, priority_done), (self._waiting, done)):
            while waiting and waiting[0].ticket <= reached:
                action = self._next(waiting)
                if action is not None:
                    self.sent(action)
                    yield action

    def waited_s(self, now: float) -> tuple[float, float]:
        """Return the seconds that trainers have waited since the last call, and since when the first one waits.

        Replies over one connection wait together. Call it before `release`, and now and then.
        """
        began: dict[bytes, float] = {}
        for entry in self._awaited:
            if isinstance(entry.action, Reply):  # it was not replaced
                peer = entry.action.route[0]
                began[peer] = min(began.get(peer, now), entry.at)
        seconds = sum(now - max(at, self._counted_at) for at in began.values())
        self._counted_at = now
        return seconds, now - min(began.values(), default=now)

    def sent(self, action: Action) -> None:
        """Remember a sent ack."""
        if isinstance(action, _WITH_ACK) and isinstance(action.message, Ack):
            ack = action.message
            self._acks.pop(ack.session, None)
            self._acks[ack.session] = ack
            if len(self._acks) > ACKS_LIMIT:
                del self._acks[next(iter(self._acks))]

    def last_durable_ack(self, action: Action) -> Action | None:
        """Return the last durable ack in place of a deferred one, or None if there is none."""
        if not isinstance(action, _WITH_ACK) or not isinstance(action.message, Ack):
            return None
        ack = self._acks.get(action.message.session)
        if ack is None or ack.epoch != action.message.epoch:
            return None
        return replace(action, message=replace(ack, wait=Wait.JOURNAL_SLOW))


def _batch(action: Action) -> tuple[bytes, int] | None:
    """Return the address and the lease of a batch reply."""
    if isinstance(action, Reply) and isinstance(action.message, Batch):
        return action.route[0], action.message.lease
    return None


def _is_lease_reply(action: Action) -> bool:
    """Return whether an action reports a lease and no other change."""
    return isinstance(action, Reply) and isinstance(action.message, _ABOUT_LEASES)
