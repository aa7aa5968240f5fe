"""The tokens of a run's HTTP servers, and whose they are: that of the run, and those of the key directory.

Only hashes are kept. A token is looked up by the first characters of its hash, which a client cannot choose one by one,
and the whole hash is then compared in constant time: the time of an answer tells nothing about a token. Revocations
count without a restart, see `bus.transport.keys.watched_file`.
"""

import hashlib
import hmac
import time
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Final, NamedTuple, Protocol

from rolloutmq.bus.transport.keys.watched_file import WatchedFile
from rolloutmq.schemas.network.keys import Role

OWN: Final = "(run)"
"""Name of the holder of the run's own token; no key has such a name."""
_START: Final = 16
"""Characters of a hash by which it is looked up, 64 bits."""


class Holder(NamedTuple):
    """Whose a token is.

    Attributes:
        name: Name of the key, or `OWN`.
        role: What it may do.
        is_revoked: It may do nothing any more.
    """

    name: str
    role: Role
    is_revoked: bool = False


class Listed(Protocol):
    """A key of a list, as far as HTTP needs it."""

    @property
    def name(self) -> str: ...
    @property
    def role(self) -> Role: ...
    @property
    def token(self) -> str: ...
    @property
    def revoked(self) -> float | None: ...


class TokenStore:
    """The tokens of one server. For one thread.

    Args:
        own: Tokens that the run has made for itself, and their holders.
        listed: The keys of the run; None if it has none.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        own: Mapping[str, Holder] = MappingProxyType({}),
        listed: WatchedFile[tuple[Listed, ...]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._own = {_hash(token): holder for token, holder in own.items()}
        self._known: dict[str, tuple[str, Holder]] = {}
        """Hash and holder, by the start of the hash."""
        self._listed = listed
        self._clock = clock
        self._names: dict[str, Holder] = {}
        self._take(listed.value if listed is not None else ())

    @property
    def is_open(self) -> bool:
        """Whether the server asks for no token: the run has none."""
        return not self._own and self._listed is None

    def holder(self, token: str) -> Holder | None:
        """Return whose a token is; None if it is nobody's."""
        self._look()
        wanted = _hash(token)
        known, holder = self._known.get(wanted[:_START], ("", None))
        return holder if hmac.compare_digest(known, wanted) else None

    def named(self, name: str) -> Holder | None:
        """Return the holder of the key of this name; None if there is none."""
        self._look()
        return self._names.get(name)

    def _look(self) -> None:
        if self._listed is not None and self._listed.look(self._clock()):
            self._take(self._listed.value)

    def _take(self, keys: Iterable[Listed]) -> None:
        found = {key.token: Holder(key.name, key.role, key.revoked is not None) for key in keys}
        self._names = {holder.name: holder for holder in found.values()}
        self._known = {each[:_START]: (each, holder) for each, holder in (found | self._own).items()}


def _hash(token: str) -> str:
    # aiohttp gives bytes that are no UTF-8 as surrogates.
    return hashlib.sha256(token.encode(errors="surrogatepass")).hexdigest()
