"""Files of the page: what the package has below `page/`, and nothing else.

No part of a path may begin with a dot, so no path leads out of the folder. A file is kept until it changes.
"""

import hashlib
from importlib.resources import files
from pathlib import Path
from typing import Final, NamedTuple

PAGE: Final = Path(str(files("rolloutmq.services.dashboard"))) / "page"
INDEX: Final = "index.html"
KINDS: Final = {
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".svg": "image/svg+xml",
    ".png": "image/png",
    ".woff2": "font/woff2",
    ".json": "application/json",
    ".map": "application/json",
    ".txt": "text/plain; charset=utf-8",
}
"""Content type of each kind of file that is served."""


class PageFile(NamedTuple):
    """One file as it is sent."""

    body: bytes
    kind: str
    etag: str


class PageFiles:
    """The files by their path below `page/`."""

    def __init__(self, root: Path = PAGE) -> None:
        self._root = root
        self._known: dict[str, tuple[int, PageFile]] = {}

    def find(self, name: str) -> PageFile | None:
        """Return a file; None if the page has none of that name, or of no known kind. Blocks for a read."""
        kind = KINDS.get(Path(name).suffix)
        path = self._root / name
        parts = name.split("/")
        if kind is None or "\0" in name or any(part.startswith(".") or not part for part in parts):
            return None
        try:
            changed_at = path.stat().st_mtime_ns
            known = self._known.get(name)
            if known is None or known[0] != changed_at:
                body = path.read_bytes()
                etag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
                known = self._known[name] = changed_at, PageFile(body, kind, etag)
        except OSError:
            return None
        return known[1]
