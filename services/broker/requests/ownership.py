"""Ownership: the names of producers, consumers and workers that belong to a key.

Numbers of sessions and leases can be guessed. Whoever registers a name first with a key keeps it: requests and groups
under this name with another key are refused, so its session and its leases are that key's. Names that clients of the
broker's own host registered are theirs; they, and admins, may take any name over. A revoked key has no names. Pure.
"""

from collections.abc import Iterator, Mapping
from typing import Final

from rolloutmq.schemas.wire.control import WorkerBeat
from rolloutmq.schemas.wire.envelope import ErrorCode
from rolloutmq.schemas.wire.replies import ErrorReply
from rolloutmq.schemas.wire.requests import RegisterConsumer, RegisterProducer, Request
from rolloutmq.services.broker.broker_state import refuse

NAMES_LIMIT: Final = 4096
"""Most names of one key: as many producers as a host could have. Further ones are refused."""
LOCAL_LIMIT: Final = 1 << 16
"""Most remembered names of this host's clients; the one that registered longest ago is forgotten first."""

_FIELDS: Final = {"producer": "producer", "worker": "producer", "consumer": "consumer"}
"""Fields with a name, and the kind of that name: a worker has that of its producer."""
_CLAIMS: Final = (RegisterProducer, RegisterConsumer, WorkerBeat)


class Ownership:
    """Which key each name belongs to.

    Args:
        owners: Owner of each name, as changes of an earlier broker left them.
    """

    def __init__(self, owners: Mapping[str, str] | None = None) -> None:
        self.changes: dict[str, str] = {}
        """Owners since the caller cleared it, empty for a freed name; the caller keeps them over a restart."""
        self._owners: dict[str, str] = {}
        self._names: dict[str, dict[str, None]] = {}
        self._local: dict[str, None] = {}
        for name, owner in (owners or {}).items():
            self._give(name, owner)
        self.changes.clear()

    def refusal(self, key: str, request: Request) -> ErrorReply | None:
        """Return why a key may not send a request under its names, None if it may. A registration takes free names."""
        for name in _names(request):
            owner = self._owners.get(name)
            if owner == key:
                continue
            kind, _, plain = name.partition(":")
            if owner is not None or name in self._local:
                whose = "another key" if owner is not None else "a client of the broker's host"
                return refuse(
                    ErrorCode.FORBIDDEN,
                    f"{kind}: belongs to {whose} (got {plain} with key {key}); use another name, or that key",
                )
            if not isinstance(request, _CLAIMS):
                return refuse(ErrorCode.UNKNOWN, f"{kind} {plain} is not registered with key {key}")
            if len(self._names.get(key, ())) >= NAMES_LIMIT:
                return refuse(
                    ErrorCode.LIMIT,
                    f"{kind}: key {key} has {NAMES_LIMIT} names, the limit (got {plain}); use one again",
                )
            self._give(name, key)
        return None

    def owns(self, key: str, producer: str) -> bool:
        """Return whether the groups of a producer may come with this key."""
        return self._owners.get(f"producer:{producer}") == key

    def owner(self, producer: str) -> str:
        """Return the key of a producer or worker, empty if it has none."""
        return self._owners.get(f"producer:{producer}", "")

    def take(self, request: Request) -> None:
        """Note that a client of the broker's host, or an admin, registers a name."""
        if not isinstance(request, _CLAIMS):
            return
        for name in _names(request):
            if name in self._owners:
                self._drop(name)
            self._local.pop(name, None)
            self._local[name] = None
            if len(self._local) > LOCAL_LIMIT:
                del self._local[next(iter(self._local))]

    def release(self, key: str) -> None:
        """Free the names of a key, which was revoked."""
        for name in tuple(self._names.get(key, ())):
            self._drop(name)

    def _give(self, name: str, owner: str) -> None:
        self._owners[name] = self.changes[name] = owner
        self._names.setdefault(owner, {})[name] = None

    def _drop(self, name: str) -> None:
        owner = self._owners.pop(name)
        self.changes[name] = ""
        del self._names[owner][name]
        if not self._names[owner]:
            del self._names[owner]


def _names(request: Request) -> Iterator[str]:
    """Yield the names under which a request is sent, as `KIND:NAME`."""
    for field, kind in _FIELDS.items():
        name = getattr(request, field, None)
        if isinstance(name, str):
            yield f"{kind}:{name}"
