"""Server with the interface of the dashboard's and a played run: a test sets what it tells and reads what it got.

It has the same headers and the same rules for token, cookie and origin, so that the page meets the same browser.
"""

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from aiohttp import web
from tests.services.dashboard.page import figures

PAGE = Path(__file__).parents[4] / "services" / "dashboard" / "page"
HEADERS = {
    "Content-Security-Policy": "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
    " object-src 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
}
TOKEN = "played-token"
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PlayedServer:
    """Server in a thread of its own, on a free port of the loopback; `stop` and `start` again keep the port."""

    def __init__(self, *, workers: int = 24) -> None:
        self.state = figures.state(workers)
        self.history = figures.history()
        self.workers = figures.workers(workers)
        self.dead = figures.dead_letters()
        self.groups: dict[str, dict[str, Any]] = {}
        self.actions: list[tuple[str, Any]] = []
        self.answer: dict[str, Any] = {"ok": True, "code": 0, "text": ["done as asked"]}
        self.streams_opened = 0
        self.queries: list[dict[str, str]] = []
        self.port = 0
        self.beats = True
        self._streams: set[web.StreamResponse] = set()
        self._loop: asyncio.AbstractEventLoop
        self._thread: threading.Thread | None = None
        self._runner: web.AppRunner | None = None

    @property
    def link(self) -> str:
        return f"http://127.0.0.1:{self.port}/#token={TOKEN}"

    def start(self) -> None:
        started = threading.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, args=(started,), name="played server")
        self._thread.start()
        assert started.wait(20)

    def stop(self) -> None:
        if self._thread is None:
            return
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(20)
        assert not self._thread.is_alive()
        self._thread = None

    def tell(self, event: str, data: Any) -> None:
        """Send an event to each open page, and wait until it is written."""
        asyncio.run_coroutine_threadsafe(self._tell(event, data), self._loop).result(20)

    def change(self, **sections: Any) -> None:
        """Change sections of the state, and tell each open page."""
        self.state |= sections
        self.tell("state", {"full": False, "sections": sections})

    def _serve(self, started: threading.Event) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._open())
        started.set()
        self._loop.run_forever()
        assert self._runner is not None
        for stream in list(self._streams):
            stream.force_close()
            if stream._req is not None and stream._req.transport is not None:
                stream._req.transport.abort()
        self._loop.run_until_complete(self._runner.cleanup())
        self._loop.close()

    async def _open(self) -> None:
        app = web.Application(middlewares=[_guard])
        app.router.add_get("/", _index)
        app.router.add_get("/static/{path:.+}", _static)
        app.router.add_post("/api/session", self._session)
        app.router.add_get("/api/state", self._state)
        app.router.add_get("/api/events", self._events)
        app.router.add_get("/api/latencies", self._latencies)
        app.router.add_get("/api/workers", self._workers)
        app.router.add_get("/api/dead", self._dead_list)
        app.router.add_get("/api/dead/{id}", self._dead_group)
        app.router.add_post("/api/actions/{name}", self._act)
        self._runner = web.AppRunner(app, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port, reuse_address=True)
        await site.start()
        assert self._runner.addresses
        self.port = int(self._runner.addresses[0][1])

    async def _session(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body.get("token") != TOKEN:
            return _error(401, "token", "the token was used or is wrong")
        answer = web.Response(status=204)
        answer.set_cookie("rolloutmq-played", "yes", httponly=True, samesite="Strict", path="/")
        return answer

    async def _state(self, _request: web.Request) -> web.Response:
        return web.json_response(self.state)

    async def _events(self, request: web.Request) -> web.StreamResponse:
        stream = web.StreamResponse(
            headers={**HEADERS, "Content-Type": "text/event-stream", "Cache-Control": "no-store"}
        )
        await stream.prepare(request)
        self.streams_opened += 1
        self._streams.add(stream)
        try:
            await stream.write(b"retry: 300\n\n")
            await _send(stream, "state", {"full": True, "sections": self.state})
            await _send(stream, "history", {"cursor": "1", "reset": True, "series": self.history})
            while True:
                await asyncio.sleep(1.0)
                if self.beats:
                    await _send(stream, "beat", {"at": figures.BEGAN})
        except (ConnectionError, asyncio.CancelledError):
            return stream
        finally:
            self._streams.discard(stream)

    async def _tell(self, event: str, data: Any) -> None:
        for stream in list(self._streams):
            await _send(stream, event, data)

    async def _workers(self, request: web.Request) -> web.Response:
        query = dict(request.query)
        self.queries.append(query)
        wanted = query["filter"].lower()
        found = [
            row for row in self.workers if wanted in f"{row['worker']} {row['env']} {row['state']}".lower()
        ]
        found.sort(key=lambda row: (row[query["sort"]], row["pid"]), reverse=query["order"] == "desc")
        offset, limit = int(query["offset"]), int(query["limit"])
        rows = found[offset : offset + limit]
        return web.json_response(
            {"version": 1, "total": len(self.workers), "matching": len(found), "offset": offset, "rows": rows}
        )

    async def _latencies(self, request: web.Request) -> web.Response:
        rows = figures.part_latencies(request.query["by"], len(self.workers))
        found = [row for row in rows if request.query["filter"].lower() in row["name"]]
        shown = found[: int(request.query["limit"])]
        return web.json_response(
            {"by": request.query["by"], "total": len(rows), "matching": len(found), "rows": shown}
        )

    async def _dead_list(self, request: web.Request) -> web.Response:
        offset, limit = int(request.query["offset"]), int(request.query["limit"])
        return web.json_response(
            {"total": len(self.dead), "offset": offset, "rows": self.dead[offset : offset + limit]}
        )

    async def _dead_group(self, request: web.Request) -> web.Response:
        group_id, first = request.match_info["id"], int(request.query["sequence"])
        group = self.groups.get(group_id) or figures.dead_group(group_id)
        rows = group["sequences"][first : first + int(request.query["limit"])]
        return web.json_response({**group, "sequences": rows, "offset": first})

    async def _act(self, request: web.Request) -> web.Response:
        self.actions.append((request.match_info["name"], await request.json()))
        return web.json_response(self.answer)


def _error(status: int, code: str, message: str) -> web.Response:
    return web.json_response({"error": {"code": code, "message": message}}, status=status)


async def _send(stream: web.StreamResponse, event: str, data: Any) -> None:
    await stream.write(f"event: {event}\ndata: {json.dumps(data)}\n\n".encode())


@web.middleware
async def _guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Ask for the cookie below `/api/`, for the origin of the page on a POST, and add the headers."""
    origin = f"http://127.0.0.1:{request.url.port}"
    if request.method == "POST" and request.headers.get("Origin") != origin:
        answer: web.StreamResponse = _error(403, "origin", "only this page may ask")
    elif (
        request.path.startswith("/api/")
        and request.path != "/api/session"
        and "rolloutmq-played" not in request.cookies
    ):
        answer = _error(401, "session", "no session")
    else:
        try:
            answer = await handler(request)
        except web.HTTPException as error:
            answer = _error(error.status, "error", error.reason)
    if not answer.prepared:
        answer.headers.update(HEADERS)
    return answer


async def _index(_request: web.Request) -> web.FileResponse:
    return web.FileResponse(PAGE / "index.html")


async def _static(request: web.Request) -> web.FileResponse:
    path = PAGE / request.match_info["path"]
    if not path.is_file():
        raise web.HTTPNotFound
    return web.FileResponse(path)
