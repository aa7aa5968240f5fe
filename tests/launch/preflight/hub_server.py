"""A hub on loopback: what huggingface_hub asks for a model or a data set, and the faults of a real one."""

import hashlib
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlsplit

DEADLINE_S: Final = 30.0


@dataclass
class Hub:
    """Repositories by name, and what the server does wrong.

    Attributes:
        commits: Files of each commit, by repository.
        refs: Commit of each branch or tag, by repository.
        gated: Status for requests of a repository without the token `secret`.
        failing: How often the next requests whose path contains a text fail with 503.
        truncated: Names of files of which the connection breaks after half, each time.
        shortened: Names of files that are served whole but shorter than listed.
        delay_s: Pause before each answer.
        answers: Until it is set, requests are accepted and get no answer; those of `DEADLINE_S` ago fail with 503.
        seen: Paths of the requests, with their methods.
    """

    url: str = ""
    commits: dict[str, dict[str, dict[str, bytes]]] = field(default_factory=dict)
    refs: dict[str, dict[str, str]] = field(default_factory=dict)
    gated: dict[str, int] = field(default_factory=dict)
    failing: Counter[str] = field(default_factory=Counter)
    truncated: set[str] = field(default_factory=set)
    shortened: set[str] = field(default_factory=set)
    delay_s: float = 0.0
    answers: threading.Event = field(default_factory=threading.Event)
    seen: list[str] = field(default_factory=list)

    def push(self, name: str, files: Path | Mapping[str, bytes], *, ref: str = "main") -> str:
        """Add a commit with the files of a directory, move a branch to it, and return its hash."""
        if isinstance(files, Path):
            found = {path.name: path.read_bytes() for path in sorted(files.iterdir()) if path.is_file()}
        else:
            found = dict(files)
        digest = hashlib.sha1(repr(sorted(found.items())).encode()).hexdigest()
        self.commits.setdefault(name, {})[digest] = found
        self.refs.setdefault(name, {})[ref] = digest
        return digest


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def do_GET(self) -> None:
        self._serve(body=True)

    def do_HEAD(self) -> None:
        self._serve(body=False)

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def _serve(self, *, body: bool) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path).strip("/")
        hub.seen.append(f"{self.command} /{path}")
        if hub.delay_s:
            time.sleep(hub.delay_s)
        if not hub.answers.wait(DEADLINE_S):
            self._answer(503, b"", {}, body=body)
            return
        for text, left in hub.failing.items():
            if left and text in path:
                hub.failing[text] -= 1
                self._answer(503, b"", {}, body=body)
                return
        parts = path.removeprefix("api/").removeprefix("models/").removeprefix("datasets/").split("/")
        name, rest = "/".join(parts[:2]), parts[2:]
        if name not in hub.commits:
            self._refuse(404, "RepoNotFound", body=body)
        elif name in hub.gated and self.headers.get("Authorization") != "Bearer secret":
            code = "GatedRepo" if hub.gated[name] == 403 else "RepoNotFound"
            self._refuse(hub.gated[name], code, body=body)
        else:
            self._repository(name, rest, body=body)

    def _repository(self, name: str, rest: list[str], *, body: bool) -> None:
        revision = rest[1] if len(rest) > 1 else "main"
        commit = self.hub.refs[name].get(revision, revision)
        files, file = self.hub.commits[name].get(commit), "/".join(rest[2:])
        if files is None:
            self._refuse(404, "RevisionNotFound", body=body)
        elif not rest or rest[0] == "revision":
            siblings = [{"rfilename": each} for each in files]
            self._json({"id": name, "sha": commit, "siblings": siblings}, body=body)
        elif rest[0] in {"tree", "paths-info"}:
            self._json([_entry(each, data) for each, data in files.items()], body=body)
        elif rest[0] == "resolve" and file in files:
            self._file(commit, file, files[file], body=body)
        else:
            self._refuse(404, "EntryNotFound", body=body)

    def _file(self, commit: str, file: str, data: bytes, *, body: bool) -> None:
        headers = {"ETag": f'"{_blob(data)}"', "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if body and file in self.hub.truncated:
            self.close_connection = True
            self._answer(200, data[: len(data) // 2], {**headers, "Content-Length": str(len(data))})
        elif body and file in self.hub.shortened:
            self._answer(200, data[: len(data) // 2], headers)
        else:
            self._answer(200, data, headers, body=body)

    def _json(self, value: Any, *, body: bool) -> None:
        self._answer(200, json.dumps(value).encode(), {"Content-Type": "application/json"}, body=body)

    def _refuse(self, status: int, code: str, *, body: bool) -> None:
        self._answer(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code}, body=body)

    def _answer(self, status: int, data: bytes, headers: Mapping[str, str], *, body: bool = True) -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(key, value)
        self.end_headers()
        if body:
            self.wfile.write(data)


def _blob(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


def _entry(file: str, data: bytes) -> dict[str, Any]:
    return {"type": "file", "path": file, "size": len(data), "oid": _blob(data)}


@contextmanager
def serving() -> Iterator[Hub]:
    """Serve an empty hub within the block."""
    hub = Hub()
    hub.answers.set()
    handler = type("Handler", (_Handler,), {"hub": hub})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.daemon_threads = True
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.answers.set()
            server.shutdown()
            thread.join(DEADLINE_S)
