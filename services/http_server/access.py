"""Who may send a request to the HTTP servers of a run: the gateway, the engines, the teacher, `/metrics`.

Pure but for `access_of`.

No web page of anybody else's may, although a browser on this machine reaches the servers:

- `Host` must be an IP address, a name without a dot, this machine's name, the bound host, or one of `run.http_hosts`.
  A page that points its own name at this machine (DNS rebinding) has a name with a dot that is none of these.
- `Origin` must be that of the server itself, or an allowed one. Browsers send it with every POST.
- `Sec-Fetch-Site` must not be `cross-site` or `same-site`, unless the origin is allowed.

With a token, each request must have it, as `Authorization: Bearer TOKEN`, or as first part of its path, `/t/TOKEN/...`,
for programs that can be told a base URL and no header.
"""

import hmac
import ipaddress
import os
import re
import socket
import stat
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from rolloutmq.bus.files import open_regular
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError

TOKEN_PATH: Final = "/t/"
"""First part of a path with a token."""
ANY: Final = "*"
_FOREIGN: Final = frozenset({"cross-site", "same-site"})
_SCHEME: Final = "bearer "
_TOKEN: Final = re.compile(r"[A-Za-z0-9._~-]{16,}")
"""Characters that need no quoting in a path."""

_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO

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
        token: Secret that each request must have; empty for none.
        remedy: What allows another origin, for the refusal.
    """

    hosts: frozenset[str] = frozenset()
    origins: frozenset[str] = frozenset()
    token: str = ""
    remedy: str = "; send it from a program"

    def refusal(self, header: Header, given: str, *, preflight: bool = False) -> Refused | None:
        """Return why a request is refused, None if it may be answered.

        Args:
            header: Its headers.
            given: Token of its path.
            preflight: It is a browser's question, which has no token.
        """
        host, origin = header("host").lower(), header("origin")
        if not self._is_ours(host):
            known = "use an IP address, or add the name to run.http_hosts"
            return Refused(403, f"host: unknown name (got {host[:80]!r}); {known}")
        is_allowed = bool(self.origins & {origin, ANY})
        if origin and not is_allowed and not _is_same(origin, host):
            return Refused(403, f"origin: no page of this server (got {origin[:80]!r}){self.remedy}")
        if header("sec-fetch-site").lower() in _FOREIGN and not is_allowed:
            return Refused(403, f"sec-fetch-site: a foreign web page sent this request{self.remedy}")
        if not self.token or preflight:
            return None
        given = given or _bearer(header("authorization"))
        # aiohttp gives bytes that are no UTF-8 as surrogates.
        if hmac.compare_digest(given.encode(errors="surrogatepass"), self.token.encode()):
            return None
        return Refused(401, "authorization: no valid token; send `Authorization: Bearer TOKEN`")

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


def http_token(run: RunConfig) -> str:
    """Return the token of a run's servers, empty if it has none.

    Raises:
        ConfigError: The file cannot be read, is not private to this user, or has no such token.
    """
    if run.run.http_token_file is None:
        return ""
    path = run.base_dir / run.run.http_token_file
    try:
        with open_regular(path) as file:
            _require_secret(path, os.fstat(file.fileno()))
            token = file.read().decode("ascii").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("run.http_token_file", f"cannot be read: {error}") from None
    if _TOKEN.fullmatch(token) is None:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must have one line, of at least 16 letters, digits, `-`, `.`, `_` or `~` "
            f"(got {len(token)} characters); make one: (umask 077; openssl rand -hex 32 > {path})",
        )
    return token


def _require_secret(path: Path, found: os.stat_result) -> None:
    """Require that a file with a token belongs to this user, and that nobody else may open it."""
    user = os.geteuid()
    if found.st_uid != user:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must belong to this user, {user} (got user {found.st_uid}); use a file of your own",
        )
    if found.st_mode & _OTHERS:
        raise ConfigError(
            "run.http_token_file",
            f"{path} must be closed to other users (got mode {stat.S_IMODE(found.st_mode):04o}); "
            f"run chmod 600 {path}, and write another token if they may know this one",
        )


def access_of(run: RunConfig, host: str, origins: tuple[str, ...] = (), remedy: str = "") -> HttpAccess:
    """Return the rules of a server of a run.

    Args:
        run: Configuration of the run.
        host: Address that the server binds.
        origins: Allowed origins of web pages.
        remedy: What allows another one.

    Raises:
        ConfigError: There is no token in `run.http_token_file`.
    """
    ours = names_of(host, run.run.http_hosts)
    return HttpAccess(ours, frozenset(origins), http_token(run), remedy or HttpAccess.remedy)


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


def _bearer(value: str) -> str:
    return value[len(_SCHEME) :].strip() if value[: len(_SCHEME)].lower() == _SCHEME else ""
