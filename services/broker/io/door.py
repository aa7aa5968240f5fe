"""The door of the listener: who sent a message, and whether that key may send it.

libzmq notes with each message the address of its peer, and the `User-Id` that the gatekeeper gave the connection. A
client of the broker's host comes by a unix socket, has no `User-Id` and may do everything. The name of a key is looked
up for each message: once it is revoked, what a living connection still sends counts for nothing.
"""

import logging
from collections.abc import Iterable, Sequence
from typing import Final

import zmq
from msgspec.structs import replace

from rolloutmq.schemas.network.keys import Role
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.joining import KeyUse
from rolloutmq.schemas.wire.replies import ErrorReply
from rolloutmq.schemas.wire.requests import Pull, RegisterProducer, Request
from rolloutmq.services.broker.broker_state import refuse
from rolloutmq.services.broker.io.gatekeeper import Gatekeeper
from rolloutmq.services.broker.io.key_uses import KeyUses
from rolloutmq.services.broker.io.memory_guard import cut
from rolloutmq.services.broker.io.owner_log import OwnerLog
from rolloutmq.services.broker.requests.ownership import Ownership
from rolloutmq.services.broker.requests.roles import hears, may_of, refusal, tells

logger = logging.getLogger(__name__)

FOREIGN: Final = "use the name of another"
"""What a key is refused that sends under a name which it does not own."""
_LOCAL: Final = "localhost:"
"""How libzmq writes the address of a peer by unix socket, before its user, group and process."""


class Door:
    """Rules for the messages of the four sockets. For one thread.

    Args:
        gatekeeper: Decides who enters; None for an insecure listener, by which everybody does.
        log: Keeps the names of keys.
        addresses: Bound addresses of the listener.
    """

    def __init__(self, gatekeeper: Gatekeeper | None, log: OwnerLog | None, addresses: Sequence[str]) -> None:
        self._gatekeeper = gatekeeper
        self._log = log
        self._addresses = addresses
        self._names = Ownership(log.owners if log is not None else None)
        self._uses = KeyUses()
        self._now = 0.0
        """Time of the last look, which each round begins with."""

    @property
    def due(self) -> float:
        """When `look` is due, in monotonic seconds."""
        return self._gatekeeper.keys.due if self._gatekeeper is not None else float("inf")

    @property
    def address(self) -> str:
        """Address of the listener."""
        return self._addresses[0] if self._addresses else ""

    @property
    def is_insecure(self) -> bool:
        """Whether the listener asks for no key."""
        return self._gatekeeper is None

    @property
    def problem(self) -> str:
        """Why the list of keys cannot be read now; empty if it can."""
        return self._gatekeeper.keys.problem if self._gatekeeper is not None else ""

    @property
    def questions(self) -> "zmq.Socket[bytes] | None":
        """Socket with the questions who may enter."""
        return self._gatekeeper.socket if self._gatekeeper is not None else None

    def look(self, now: float) -> list[str]:
        """Answer who may enter, and end what a revoked key still uses; return the reasons of refused connections."""
        self._now = now
        if self._gatekeeper is None:
            return []
        lost = self._gatekeeper.keys.look(now)
        for key in lost:
            self._names.release(key)
        if lost:
            self._keep()
            # Subscriptions send no message that could be refused. Others of the same hosts come back by themselves.
            count = cut(self._addresses, self._gatekeeper.peers_of(lost))
            logger.warning("keys revoked names=%s connections_cut=%d", ",".join(sorted(lost)), count)
        return self._gatekeeper.answer()

    def sender_of(self, frame: zmq.Frame) -> str | None:
        """Return the name of the key that a message came with; None for a client of this host; empty for neither."""
        if _property(frame, "Peer-Address").startswith(_LOCAL):
            return None
        return _property(frame, "User-Id") if self._gatekeeper is not None else ""

    def role_of(self, sender: str | None) -> Role | None:
        """Return the role of a sender; None for a key that may not enter any more."""
        if sender is None or self._gatekeeper is None:
            return Role.ADMIN
        return self._gatekeeper.keys.roles.get(sender)

    def asked(self, sender: str | None, request: Request) -> Request | ErrorReply | None:
        """Return the request as it may be served, or its refusal; None if the key may not enter any more."""
        role = self.role_of(sender)
        if role is None:
            return None
        if sender is not None:
            request = _without_memory(request)
            if sender:
                self._uses.heard(sender, self._now)
        if sender is None or role is Role.ADMIN:
            self._names.take(request)
        elif why := refusal(sender, role, type(request)):
            self._uses.refused(sender, may_of(type(request)), self._now)
            return refuse(ErrorCode.FORBIDDEN, why)
        elif (refused := self._names.refusal(sender, request)) is not None:
            if refused.code is not ErrorCode.UNKNOWN:  # that one makes a client register
                self._uses.refused(sender, FOREIGN, self._now)
            return refused
        self._keep()
        return request

    def delivers(self, frame: zmq.Frame, producer: str) -> bool:
        """Return whether the key of a message of groups is that of its producer."""
        sender = self.sender_of(frame)
        role = self.role_of(sender)
        may = role is Role.ADMIN or (role is not None and self._names.owns(str(sender), producer))
        return self._noted(sender, FOREIGN, may=may)

    def subscribes(self, frame: zmq.Frame, topic: bytes) -> bool:
        """Return whether the sender of a subscription may hear this prefix."""
        sender = self.sender_of(frame)
        role = self.role_of(sender)
        return self._noted(sender, "subscribe to a topic", may=role is not None and hears(role, topic))

    def publishes(self, frame: zmq.Frame, topic: bytes) -> bool:
        """Return whether the sender of an event may publish it."""
        sender = self.sender_of(frame)
        role = self.role_of(sender)
        return self._noted(sender, "publish a topic", may=role is not None and tells(role, topic))

    def report(self, now: float) -> tuple[int, tuple[KeyUse, ...]]:
        """Return how many keys may enter, and those in use."""
        if self._gatekeeper is None:
            return 0, ()
        roles = self._gatekeeper.keys.roles
        return len(roles), self._uses.report(roles, self._gatekeeper.hosts, now)

    def owners_of(self, workers: Iterable[str]) -> dict[str, str]:
        """Return the key of each of these workers that has one."""
        owned = ((worker, self._names.owner(worker)) for worker in workers)
        return {worker: key for worker, key in owned if key}

    def _noted(self, sender: str | None, what: str, *, may: bool) -> bool:
        """Note a message and what is refused of it; return whether the sender may send it."""
        if sender and may:
            self._uses.heard(sender, self._now)
        elif sender:
            self._uses.refused(sender, what, self._now)
        return may

    def _keep(self) -> None:
        if self._log is not None and self._names.changes:
            self._log.write(self._names.changes)
        self._names.changes.clear()


def _without_memory(request: Request) -> Request:
    """Return the request without shared memory: a peer of another host can name any of this one's."""
    if isinstance(request, RegisterProducer) and request.arena is not None:
        return replace(request, arena=None)
    if isinstance(request, Pull) and request.arenas:
        return replace(request, arenas=False)
    return request


def _property(frame: zmq.Frame, name: str) -> str:
    """Return a property of the connection a frame came by; empty if the peer left before libzmq could read it."""
    try:
        return str(frame.get(name))
    except zmq.ZMQError:
        return ""
