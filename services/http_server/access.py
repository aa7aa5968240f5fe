"""Who may send a request to the HTTP servers of a run: the gateway, the engines, the teacher, `/metrics`.

Pure but for `access_of`.

No web page of anybody else's may, although a browser on this machine reaches the servers:

- `Host` must be an IP address, a name without a dot, this machine's name, the bound host, or one of `run.http_hosts`.
  A page that points its own name at this machine (DNS rebinding) has a name with a dot that is none of these. With a
  valid token any name is good: hosts that join use whatever name they reach the run by, and such a page has no token.
- `Origin` must be that of the server itself, or an allowed one. Browsers send it with every POST.
- `Sec-Fetch-Site` must not be `cross-site` or `same-site`, unless the origin is allowed.

If the run has tokens, each request must have one, as `Authorization: Bearer TOKEN`, or as first part of its path,
`/t/TOKEN/...`, for programs that can be told a base URL and no header. The token of a key opens the paths of its role
(`roles`), that of the run all.
"""

import ipaddress
import socket
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rolloutmq.bus.rundir import read_json
from rolloutmq.bus.transport.keys.directory import KeyDirectory
from rolloutmq.bus.transport.keys.key_files import read_secret
from rolloutmq.bus.transport.keys.watched_file import WatchedFile
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import Connection, RunLayout
from rolloutmq.schemas.network.keys import Role, TokenRecord
from rolloutmq.services.http_server import roles
from rolloutmq.services.http_server.refusals import HttpRefusals
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.run_token import http_token
from rolloutmq.services.http_server.tokens import OWN, Holder, Listed, TokenStore

TOKEN_PATH: Final = "/t/"
"""First part of a path with a token."""
ANY: Final = "*"
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
_SCHEME: Final = "bearer "

Header = Callable[[str], str]
"""Returns a header by its lower-case name, empty if it is absent."""


@dataclass(frozen=True)
class Refused:
    """The reply to a request that may not be sent."""

    status: int
    reason: str

    @property
    def headers(self) -> Mapping[str, str]:
        """Headers of the reply."""
        return {"www-authenticate": "Bearer"} if self.status == 401 else {}


@dataclass(frozen=True)
class HttpAccess:
    """Rules of one server.

    Attributes:
        hosts: Names of the server, in lower case, besides those that are always good; `*` for all.
        origins: Origins of web pages that may send requests; `*` for all.
        server: What it is, for the paths of each role.
        tokens: Tokens of which each request must have one, if there are any.
        remedy: What allows another origin, for the refusal.
        refusals: Counts what keys are refused, for the status of the run; None for nobody.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    server: Server = Server.ENGINE
    tokens: TokenStore = field(default_factory=TokenStore)
    remedy: str = "; send it from a program"
    refusals: HttpRefusals | None = None

    def refusal(
        self, header: Header, given: str, path: str, *, method: str = "GET", preflight: bool = False
    ) -> Refused | None:
        """Return why a request is refused, None if it may be answered.

        Args:
            header: Its headers.
            given: Token of its path.
            path: Its path, without the token.
            method: Its method.
            preflight: It is a browser's question, which has no token.
        """
        asks = not self.tokens.is_open and not preflight
        holder = self.tokens.holder(given or bearer(header("authorization"))) if asks else None
        if (foreign := self.foreign(header, is_known=holder is not None)) is not None:
            return foreign
        return self.denied(holder, method, path) if asks else None

    def foreign(self, header: Header, *, is_known: bool = False) -> Refused | None:
        """Return why a request is refused for where it comes from, None if it is not.

        Args:
            header: Its headers.
            is_known: It has a token of somebody, and a page that points its own name here has none.
        """
        host, origin = header("host").lower(), header("origin")
        if not is_known and not self._is_ours(host):
            known = "use an IP address, or add the name to run.http_hosts"
            return Refused(403, f"host: unknown name (got {host[:80]!r}); {known}")
        is_allowed = bool(self.origins & {origin, ANY})
        if origin and not is_allowed and not _is_same(origin, host):
            return Refused(403, f"origin: no page of this server (got {origin[:80]!r}){self.remedy}")
        if header("sec-fetch-site").lower() in _FOREIGN and not is_allowed:
            return Refused(403, f"sec-fetch-site: a foreign web page sent this request{self.remedy}")
        return None

    def denied(self, holder: Holder | None, method: str, path: str) -> Refused | None:
        """Return why the holder of a token may not send a request, None if it may; count what a key is refused."""
        if holder is None:
            return Refused(401, "authorization: no valid token; send `Authorization: Bearer TOKEN`")
        refused, what = None, ""
        if holder.is_revoked:
            revoked = "get another one, of `rolloutmq keys new`"
            refused = Refused(401, f"authorization: key {holder.name} was revoked; {revoked}")
            what = "with a revoked token"
        elif why := roles.refusal(holder.name, holder.role, self.server, method[:20], path[:200]):
            refused, what = Refused(403, why), path if path in roles.PATHS[self.server] else "other paths"
        if self.refusals is not None:
            if refused is not None:
                self.refusals.add(holder.name, f"HTTP {self.server.value} {what}")
            self.refusals.write()
        return refused

    def _is_ours(self, host: str) -> bool:
        name = _host_name(host)
        if not name or "." not in name or self.hosts & {name, ANY} or name.endswith(".localhost"):
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def is_browser(header: Header) -> bool:
    """Return whether a browser sent the request. Each names itself Mozilla, and a page cannot change that in a link."""
    marks = ("origin", "sec-fetch-site", "sec-fetch-mode", "sec-fetch-dest")
    return any(map(header, marks)) or header("user-agent").lower().startswith("mozilla/")


def split_token(path: str) -> tuple[str, str]:
    """Return the token of a path, and the path without it; no token if it has none."""
    if not path.startswith(TOKEN_PATH):
        return "", path
    token, _, rest = path.removeprefix(TOKEN_PATH).partition("/")
    return token, f"/{rest}"


def with_token(url: str, token: str) -> str:
    """Return the base URL of a server for programs that can send no header."""
    return f"{url}{TOKEN_PATH}{token}" if token else url


def authorization(token: str) -> dict[str, str]:
    """Return the headers of a client; none without a token."""
    return {"Authorization": f"Bearer {token}"} if token else {}


def access_of(
    run: RunConfig, server: Server, host: str, origins: tuple[str, ...] = (), remedy: str = ""
) -> HttpAccess:
    """Return the rules of a server of a run.

    Args:
        run: Configuration of the run.
        server: What it is.
        host: Address that the server binds.
        origins: Allowed origins of web pages.
        remedy: What allows another one.

    Raises:
        ConfigError: There is no token in `run.http_token_file`, or the list of keys is damaged.
        MissingError, NotPrivateError, UnusablePathError: The key directory cannot be used.
    """
    ours, tokens = names_of(host, run.run.http_hosts), store_of(run)
    refusals = None if tokens.is_open else HttpRefusals(RunLayout(run.run.dir).http_refused)
    return HttpAccess(ours, frozenset(origins), server, tokens, remedy or HttpAccess.remedy, refusals)


def store_of(run: RunConfig) -> TokenStore:
    """Return the tokens of a run's servers; raises what `access_of` raises."""
    token = http_token(run)
    own = {token: Holder(OWN, Role.ADMIN)} if token else {}
    return TokenStore(own, listed_keys(run))


def listed_keys(run: RunConfig) -> WatchedFile[tuple[Listed, ...]] | None:
    """Return the keys of a run, None if it has none: of its key directory, or as the broker tells them another host.

    Raises what `KeyDirectory.records` raises.
    """
    layout = RunLayout(run.run.dir)
    if (connection := read_json(layout.connection, Connection)) is not None:
        told = layout.http_tokens
        return WatchedFile[tuple[Listed, ...]](told, lambda: _told(told)) if connection.key else None
    if not run.broker.keys:
        return None
    directory = KeyDirectory(run.base_dir / run.broker.keys)
    return WatchedFile[tuple[Listed, ...]](directory.authorized, directory.records)


def _told(path: Path) -> tuple[TokenRecord, ...]:
    return read_secret(path, tuple[TokenRecord, ...], "the mirror of the run writes it again")


def names_of(host: str, known: Iterable[str] = ()) -> frozenset[str]:
    """Return the names of a server besides those that are always good: this machine's, the bound one, known ones."""
    return frozenset(name.lower() for name in (socket.gethostname(), host, *known) if name)


def _host_name(host: str) -> str:
    """Return the name in a `Host` header, without port and brackets."""
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.rstrip(".")


def _is_same(origin: str, host: str) -> bool:
    try:
        where = urlsplit(origin.lower())
    except ValueError:
        return False
    return where.scheme in {"http", "https"} and where.netloc == host


def bearer(value: str) -> str:
    """Return the token of an `Authorization` header, empty if it has none."""
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""
