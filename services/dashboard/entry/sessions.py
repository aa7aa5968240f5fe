"""Who may read a run's page: one link, and the cookie for which its token is exchanged. Pure, but for randomness.

The token stands in the fragment of the printed link: no server, log, `Referer` or preview of a link ever gets it. The
page sends it once, and it is void from then on. The cookie is signed with a key of the server, so nothing is stored for
a session. Reading needs it as well as acting: a page shows prompts, completions and paths, and on a machine of several
users everybody reaches the port.

The token of a key of role `monitor` or `admin` is exchanged for a cookie, too, as often as its holder likes. The cookie
names the key, so that its revocation ends the session.
"""

import hmac
import secrets
import time
from collections.abc import Callable
from typing import Final

KEY_BYTES: Final = 32
LIFE_S: Final = 7 * 24 * 3600
"""Longest life of a session."""


class Sessions:
    """Token and cookies of one server.

    Args:
        token: Secret of the link; random by default.
        key: Secret of the cookies; random by default. With the same key another server takes them, too.
        wall: Wall clock, in seconds.
        is_used: Whether the token was exchanged before.
        on_used: Called when it is.
    """

    def __init__(
        self,
        token: str = "",
        key: bytes = b"",
        wall: Callable[[], float] = time.time,
        *,
        is_used: bool = False,
        on_used: Callable[[], None] = lambda: None,
    ) -> None:
        self.token = token or secrets.token_urlsafe(KEY_BYTES)
        self._key = key or secrets.token_bytes(KEY_BYTES)
        self._wall = wall
        self._is_used = is_used
        self._on_used = on_used

    def exchange(self, token: str) -> str | None:
        """Return a cookie for the token of the link; None if it is another one, or was exchanged before."""
        is_right = hmac.compare_digest(token.encode(errors="replace"), self.token.encode())
        if self._is_used or not is_right:
            return None
        self._is_used = True
        self._on_used()
        return self.cookie()

    def cookie(self, name: str = "") -> str:
        """Return a cookie for the holder of a key; without a name, for that of the link."""
        content = f"{int(self._wall())}.{secrets.token_urlsafe(12)}.{name}"
        return f"{content}.{self._signature(content)}"

    def holder(self, cookie: str) -> str | None:
        """Return whose a cookie is: the name of a key, or an empty text for the link; None if it is not of this
        server, or too old."""
        content, _, signature = cookie.rpartition(".")
        expected = self._signature(content)
        if not hmac.compare_digest(signature.encode(errors="replace"), expected.encode()):
            return None
        began, _, name = content.split(".", 2)
        return name if 0 <= self._wall() - int(began) < LIFE_S else None

    def _signature(self, content: str) -> str:
        return hmac.digest(self._key, content.encode(errors="replace"), "sha256").hex()


def link(url: str, token: str) -> str:
    """Return the link that opens the page at a base URL."""
    return f"{url}/#token={token}"
