"""A client like the page: it opens the link, keeps the cookie, and asks from the page's origin."""

import http.client
import json
import re
import socket
from collections.abc import Iterator
from typing import Any, NamedTuple

TIMEOUT_S = 60.0


class Answer(NamedTuple):
    """Reply to one request."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of an error."""
        return str(self.json["error"]["code"])


class Browser:
    """One browser at a link."""

    def __init__(self, link: str) -> None:
        found = re.fullmatch(r"http://127\.0\.0\.1:(\d+)/#token=([\w-]+)", link)
        assert found is not None, link
        self.port, self.token, self.cookie = int(found[1]), found[2], ""
        self.origin = f"http://127.0.0.1:{self.port}"

    def ask(self, method: str, path: str, body: bytes | str = b"", **headers: str) -> Answer:
        """Send one request with exactly these headers; `_` stands for `-`."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=TIMEOUT_S)
        try:
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, body or None, named)
            reply = connection.getresponse()
            return Answer(reply.status, reply.headers, reply.read())
        finally:
            connection.close()

    def enter(self) -> Answer:
        """Exchange the token for a cookie."""
        answer = self.post("/api/session", {"token": self.token})
        if "Set-Cookie" in answer.headers:
            self.cookie = answer.headers["Set-Cookie"].partition(";")[0]
        return answer

    def get(self, path: str, **headers: str) -> Answer:
        """Read something with the cookie."""
        return self.ask("GET", path, **{"Cookie": self.cookie, **headers})

    def post(self, path: str, body: Any, **headers: str) -> Answer:
        """Send JSON with the cookie, as the page does."""
        told = {"Cookie": self.cookie, "Origin": self.origin, "Content-Type": "application/json", **headers}
        return self.ask("POST", path, body if isinstance(body, bytes | str) else json.dumps(body), **told)

    def state(self) -> Any:
        answer = self.get("/api/state")
        assert answer.status == 200, answer
        return answer.json

    def stream(self, timeout_s: float = TIMEOUT_S, buffer_bytes: int = 0) -> "Stream":
        """Open the stream of events, with a small buffer of the kernel for a slow reader."""
        return Stream(self, timeout_s, buffer_bytes)


class Stream:
    """Events of one stream, for `with`."""

    def __init__(self, browser: Browser, timeout_s: float, buffer_bytes: int) -> None:
        self.socket = socket.socket()
        self.socket.settimeout(timeout_s)
        if buffer_bytes:
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
        self.socket.connect(("127.0.0.1", browser.port))
        head = (
            f"GET /api/events HTTP/1.1\r\nHost: 127.0.0.1:{browser.port}\r\nCookie: {browser.cookie}\r\n\r\n"
        )
        self.socket.sendall(head.encode())
        self._reply = http.client.HTTPResponse(self.socket)
        self._reply.begin()
        self.status = self._reply.status
        self.headers = self._reply.headers

    def __enter__(self) -> "Stream":
        return self

    def __exit__(self, *_: object) -> None:
        self._reply.close()
        self.socket.close()

    def events(self) -> Iterator[tuple[str, Any]]:
        """Yield name and data of each event, until the stream ends."""
        name = ""
        while line := self._reply.readline():
            key, _, value = line.decode().rstrip("\n").partition(": ")
            if key == "event":
                name = value
            elif key == "data":
                yield name, json.loads(value)

    def until(self, wanted: str) -> Any:
        """Return the data of the next event of a name."""
        for name, data in self.events():
            if name == wanted:
                return data
        raise AssertionError(f"the stream ended before an event {wanted}")
