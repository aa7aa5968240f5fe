"""The gatekeeper: answers libzmq's question who may enter by the listener, from the keys of the run's key directory.

libzmq asks during the handshake of each connection (ZAP, RFC 27), on a socket that the data plane polls. The name of
the key becomes the `User-Id` of the connection's messages. An error in an answer refuses that one connection and no
other. Without an answer nobody enters: libzmq gives the connection up after `TCP_HANDSHAKE_MS`, and the client tries
again.

The list of keys is read again when its file has changed, as `bus.transport.keys.watched_file` says.
"""

import logging
from collections.abc import Container, Iterable, Mapping
from typing import Final

import zmq
from zmq.utils import z85

from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.watched_file import WatchedFile
from rolloutmq.bus.transport.sockets import Socket
from rolloutmq.schemas.network.keys import Role

logger = logging.getLogger(__name__)

BURST: Final = 64
"""Most questions answered in a round: libzmq's thread makes fewer than that in 0.3 s."""

HOSTS_LIMIT: Final = 1024
"""Most remembered hosts of one key."""

_VERSION: Final = b"1.0"
_FRAMES: Final = 8
"""Frames of a question with a key: routing id, empty, version, request, domain, address, identity, mechanism, key."""


class KnownKeys:
    """The keys that may enter, as the list last told. For one thread.

    Args:
        directory: The key directory; its list must be readable now.

    Raises:
        MissingError, NotPrivateError, ConfigError, UnusablePathError: As for `KeyDirectory.records`.
    """

    def __init__(self, directory: KeyDirectory) -> None:
        self.roles: dict[str, Role] = {}
        """Role of each name that may enter."""
        self._names: dict[bytes, str] = {}
        self._revoked: dict[bytes, str] = {}
        self._list = WatchedFile(directory.authorized, directory.records)
        self._take()

    @property
    def due(self) -> float:
        """When to look again, in monotonic seconds."""
        return self._list.due

    @property
    def problem(self) -> str:
        """Why the list cannot be read now; empty if it can."""
        return self._list.problem

    def look(self, now: float) -> frozenset[str]:
        """Read the list again if that is due and its file has changed; return names that may not enter any more."""
        if not self._list.look(now):
            return frozenset()
        before = self.roles
        self._take()
        logger.info("keys read keys=%d revoked=%d", len(self.roles), len(self._revoked))
        return frozenset(name for name, role in before.items() if self.roles.get(name) is not role)

    def verdict(self, key: bytes) -> tuple[bytes, bytes, bytes]:
        """Return status, reason and name for a public key of 32 bytes."""
        name = self._names.get(key)
        if name is not None:
            return b"200", b"OK", name.encode()
        revoked = self._revoked.get(key)
        return b"400", f"key {revoked} was revoked".encode() if revoked else b"unknown key", b""

    def _take(self) -> None:
        names: dict[bytes, str] = {}
        revoked: dict[bytes, str] = {}
        roles: dict[str, Role] = {}
        for key in self._list.value:
            public = z85.decode(key.public)
            if key.revoked is None:
                names[public] = key.name
                roles[key.name] = key.role
            else:
                revoked[public] = key.name
        self._names, self._revoked, self.roles = names, revoked, roles


class Gatekeeper:
    """Answers the questions of one context. For one thread.

    Args:
        socket: From `zap_router`; must outlive the listeners.
        keys: The keys that may enter.
    """

    def __init__(self, socket: Socket, keys: KnownKeys) -> None:
        self.socket = socket
        self.keys = keys
        self._peers: dict[str, set[str]] = {}
        """Hosts from which each key has entered, at most `HOSTS_LIMIT`."""

    def peers_of(self, names: Iterable[str]) -> Container[str] | None:
        """Return the hosts from which keys have entered, and forget them; None if there were too many to know."""
        hosts = [self._peers.pop(name, set()) for name in names]
        return None if any(len(one) >= HOSTS_LIMIT for one in hosts) else set().union(*hosts)

    @property
    def hosts(self) -> Mapping[str, set[str]]:
        """Hosts from which each key has entered, at most `HOSTS_LIMIT` of one key."""
        return self._peers

    def answer(self) -> list[str]:
        """Answer the questions that have arrived, and return the reasons of refusals.

        Never waits, and never raises for what is in a question.
        """
        refused: list[str] = []
        for _ in range(BURST):
            try:
                question = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                break
            try:
                status, reason, name = self._verdict(question)
            except Exception:
                logger.exception("question who may enter not answered")
                status, reason, name = b"400", b"error in the broker", b""
            if status != b"200":
                refused.append(reason.decode())
            if len(question) > 3:  # without a request id there is nothing to answer
                answer = [question[0], b"", _VERSION, question[3], status, reason, name, b""]
                self.socket.send_multipart(answer, zmq.NOBLOCK)
        return refused

    def _verdict(self, question: list[bytes]) -> tuple[bytes, bytes, bytes]:
        if len(question) <= _FRAMES or question[2] != _VERSION or question[7] != b"CURVE":
            return b"400", b"no key", b""
        status, reason, name = self.keys.verdict(question[8])
        if name:
            hosts = self._peers.setdefault(name.decode(), set())
            if len(hosts) < HOSTS_LIMIT:
                hosts.add(question[5].decode().partition("%")[0])
        return status, reason, name
