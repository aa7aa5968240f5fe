"""A page of the dashboard as its server sees it: its files, the session, the stream, and the list of workers each time
that it changes. It renders nothing.
"""

import contextlib
import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator
from typing import Any, Final

from benchmarks.harness.stage import StageError
from rolloutmq.services.dashboard.page_files import INDEX, KINDS, PAGE

TIMEOUT_S: Final = 60.0
"""Silence of the server that ends the measurement; it says something every five seconds."""


class PageClient:
    """One browser at a link. Its cookie stays, so the page can be opened again.

    Args:
        link: The link that the command printed.

    Raises:
        StageError: It is no link, or the server refuses it.
    """

    def __init__(self, link: str) -> None:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]+)", link)
        if found is None:
            raise StageError(f"the dashboard printed no link (got {link!r})")
        self._port = int(found[1])
        self.cookie = ""
        headers = {"Origin": f"http://127.0.0.1:{self._port}", "Content-Type": "application/json"}
        reply = self._ask("POST", "/api/session", json.dumps({"token": found[2]}), headers)
        self.cookie = reply.headers.get("Set-Cookie", "").partition(";")[0]

    def get(self, path: str) -> int:
        """Read a path, and return the bytes of its body; StageError if it is refused."""
        return len(self._ask("GET", path, None, {}).read())

    @contextlib.contextmanager
    def opened(self) -> Iterator["OpenPage"]:
        """Keep the page open for the block."""
        files = sum(self.get(path) for path in ("/", *_static()))
        connection = self.connected()
        page = OpenPage(self, connection, files)
        thread = threading.Thread(target=page.read, name="page")
        thread.start()
        try:
            yield page
        finally:
            page.leave()
            thread.join()
            connection.close()

    def connected(self) -> http.client.HTTPConnection:
        """Return a connection to the server."""
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=TIMEOUT_S)
        connection.connect()
        return connection

    def _ask(
        self, method: str, path: str, body: str | None, headers: dict[str, str]
    ) -> http.client.HTTPResponse:
        connection = self.connected()
        with contextlib.closing(connection):
            connection.request(method, path, body, {"Cookie": self.cookie, "Connection": "close", **headers})
            reply = connection.getresponse()
            if not 200 <= reply.status < 300:
                raise StageError(f"{path}: status {reply.status}")
        return reply


class OpenPage:
    """Stream of an open page, read in a thread.

    Attributes:
        opening: Bytes of the files and of the first update, which has everything.
        later: Bytes of the updates after that, and of the lists of workers.
        updates: Number of updates.
        whole: Set once the first update has arrived.
        failure: Why the stream ended by itself; empty while it lives.
    """

    def __init__(self, client: PageClient, connection: http.client.HTTPConnection, files: int) -> None:
        self._client = client
        self._connection = connection
        self._leaves = False
        self.opening, self.later, self.updates = files, 0, 0
        self.whole = threading.Event()
        self.failure = ""

    def read(self) -> None:
        """Read the stream until `leave`."""
        try:
            self._connection.request("GET", "/api/events", headers={"Cookie": self._client.cookie})
            for name, data, nbytes in _events(self._connection.getresponse()):
                self._take(name, data, nbytes)
            self.failure = "the server ended the stream"
        except (OSError, ValueError, http.client.HTTPException, StageError) as error:
            self.failure = repr(error)
        finally:
            self.whole.set()

    def _take(self, name: str, data: Any, nbytes: int) -> None:
        if self.updates > 1:
            self.later += nbytes
        else:
            self.opening += nbytes
        if name != "state":
            return
        self.updates += 1
        if "workers_version" in data["sections"]:
            self.later += self._client.get("/api/workers?sort=worker&order=asc&filter=&offset=0&limit=50")
        self.whole.set()

    def leave(self) -> None:
        """Close the connection, which ends `read`."""
        self._leaves = True
        with contextlib.suppress(OSError):
            self._connection.sock.shutdown(socket.SHUT_RDWR)

    def check(self) -> None:
        """Raise StageError if the stream has ended by itself."""
        if self.failure and not self._leaves:
            raise StageError(f"the page is lost: {self.failure}")


def _events(reply: http.client.HTTPResponse) -> Iterator[tuple[str, Any, int]]:
    """Yield name, data and bytes of each event."""
    name, nbytes = "", 0
    while line := reply.readline():
        nbytes += len(line)
        key, _, value = line.decode().rstrip("\n").partition(": ")
        if key == "event":
            name = value
        elif key == "data":
            yield name, json.loads(value), nbytes
            nbytes = 0


def _static() -> list[str]:
    """Return the paths of the page's files, but for the first."""
    found = (path for path in sorted(PAGE.rglob("*")) if path.suffix in KINDS and path.name != INDEX)
    return [f"/static/{path.relative_to(PAGE).as_posix()}" for path in found]
