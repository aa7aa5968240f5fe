"""A stand-in for vLLM as the receiver of weights: records requests, and reads the file while it exists."""

import http.server
import json
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors import safe_open

from rolloutmq.bus.shm import segment_file
from rolloutmq.trainer.weights.manifest import WeightManifest
from rolloutmq.trainer.weights.vllm_http import MANIFEST


class Server(http.server.ThreadingHTTPServer):
    """One that is there for as long as `receiving` lasts."""

    daemon_threads = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.asked: list[str] = []
        self.failing = ""
        self.mismatch: dict[str, str] = {}
        self.digests: dict[str, str] = {}
        self.problem = ""
        self.workers = 1
        self.received: dict[str, torch.Tensor] = {}
        self.manifest: WeightManifest | None = None
        self.mode = 0
        self.held = False

    def finished(self) -> list[str]:
        """Return the versions that arrived whole, in order."""
        prefix = "/finish_weight_update"
        return [one.removeprefix(prefix) for one in self.asked if one.startswith(prefix) and one != prefix]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    server: Server

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer: Any = {}
        if self.path == "/collective_rpc":
            told = {
                "match_weights": self.server.mismatch,
                "weight_digests": self.server.digests,
                "update_problem": {"problem": self.server.problem},
            }.get(body["method"], {})
            answer = {"results": [{}] * (self.server.workers - 1) + [told]}
        else:
            self.server.asked.append(self.path + str(body.get("weight_version", "")))
        if self.path == "/update_weights":
            self.look(Path(body["update_info"]["path"]))
        failed = self.path == self.server.failing
        self.send_response(500 if failed else 200)
        self.end_headers()
        self.wfile.write(b"no room" if failed else json.dumps(answer).encode())

    def look(self, path: Path) -> None:
        self.server.mode = stat.S_IMODE(path.stat().st_mode)
        self.server.held = segment_file.in_use(path)
        with safe_open(path, framework="pt") as file:
            self.server.received = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            self.server.manifest = msgspec.json.decode(file.metadata()[MANIFEST], type=WeightManifest)

    def log_message(self, *_: Any) -> None: ...


@contextmanager
def receiving() -> Iterator[Server]:
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield made
    finally:
        made.shutdown()
        thread.join()
        made.server_close()
