"""HTTP interface of the page: its files, the state of the run, its stream of updates, and actions.

| path | reply |
|---|---|
| `GET /`, `GET /static/...` | the page; it tells nothing of the run, so it needs no session |
| `POST /api/session` | the cookie for the token of the link, or of a key |
| `GET /api/state`, `/api/history`, `/api/events` | the run, and what changes |
| `GET /api/latencies`, `/api/workers`, `/api/dead`, `/api/dead/ID` | lists, as far as they are shown |
| `POST /api/actions/NAME` | the end of the command of that name |

Every reply has the headers of `SECURITY`. A request must name this server, no foreign page may send it, and all below
`/api/` need the session, or the token of a key of role `monitor`; actions need one of role `admin`. A `POST` must also
name its origin: browsers do.
"""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import unquote

import msgspec
from aiohttp import web

from rolloutmq.schemas.errors import RolloutMQError, UsageError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.printable import shell_word
from rolloutmq.services.dashboard import stream as streams
from rolloutmq.services.dashboard.actions import ACTIONS, Actions, words_of
from rolloutmq.services.dashboard.crew import SORTS, page_of
from rolloutmq.services.dashboard.dead_letters import DeadLetters
from rolloutmq.services.dashboard.entry.sessions import LIFE_S, Sessions
from rolloutmq.services.dashboard.page_files import INDEX, PageFiles
from rolloutmq.services.dashboard.record.latency_parts import PARTS
from rolloutmq.services.dashboard.run_files import REMOVED
from rolloutmq.services.dashboard.stream import encoded_json
from rolloutmq.services.dashboard.watch import STREAMS_LIMIT, Watch
from rolloutmq.services.http_server.access import HttpAccess, Refused, bearer, split_token
from rolloutmq.services.http_server.tokens import Holder
from rolloutmq.services.monitor.profile.latencies import By

logger = logging.getLogger(__name__)

BODY_LIMIT_BYTES: Final = 1 << 16
BODY_S: Final = 10.0
"""Time for the body of a request."""
BEAT_S: Final = 5.0
"""Silence after which a stream says that it lives."""
SEND_S: Final = 20.0
"""Longest time in which a reader takes nothing; then its stream is closed."""
API: Final = "/api/"
STATIC: Final = "/static/"
SECURITY: Final = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), microphone=(), geolocation=()",
    "Server": "rolloutmq",
}
"""Headers of every reply."""
ERROR_HEADERS: Final = {**SECURITY, "Cache-Control": "no-store"}
"""Headers of the replies to what is no HTTP, which reaches no handler."""

Reply = web.StreamResponse
Handler = Callable[[web.Request], Awaitable[Reply]]


class _RefusalError(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


class DashboardApp:
    """The page of one run.

    Args:
        layout: The run directory.
        access: Who may send requests.
        sessions: Token and cookies.
        port: Port of the server, which names its cookie: a browser sends the cookies of a host to all its ports.
        actions: Carries out actions.
        page: Files of the page.
    """

    def __init__(
        self,
        layout: RunLayout,
        access: HttpAccess,
        sessions: Sessions,
        port: int,
        actions: Actions | None = None,
        page: PageFiles | None = None,
    ) -> None:
        self._layout = layout
        self._access = access
        self._sessions = sessions
        self._cookie = f"rolloutmq-{port}"
        self._actions = actions or Actions(layout.root)
        self._page = page or PageFiles()
        self._dead = DeadLetters(layout)
        self._one_letter = asyncio.Lock()
        self._in_hand = self._streams = 0
        self._asked_at = time.monotonic()
        self._farewell = streams.leaving("the server of this page ends")
        self.watch = Watch(layout)
        self._routes: dict[str, tuple[str, Handler]] = {
            "/": ("GET", self._index),
            "/api/session": ("POST", self._session),
            "/api/state": ("GET", self._state),
            "/api/history": ("GET", self._history),
            "/api/events": ("GET", self._events),
            "/api/latencies": ("GET", self._latencies),
            "/api/workers": ("GET", self._workers),
            "/api/dead": ("GET", self._dead_list),
        }

    def app(self) -> web.Application:
        """Return the application; one wildcard route, so that unknown paths get the same errors and headers."""
        app = web.Application(client_max_size=BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        app.on_response_prepare.append(_secure)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, _app: web.Application) -> None:
        await self.watch.close()

    def end_with_run(self) -> None:
        """Say to open pages that the server ends because the run has ended."""
        again = f"rolloutmq dashboard {shell_word(self._layout.root)}"
        self._farewell = streams.leaving(f"The run has ended; `{again}` shows how.", over=True)

    def idle_s(self) -> float:
        """Return the time since the last request; 0 while one is under way, such as an open stream."""
        return 0.0 if self._in_hand else time.monotonic() - self._asked_at

    async def _dispatch(self, request: web.Request) -> Reply:
        self._in_hand += 1
        try:
            return await self._replied(request)
        finally:
            self._in_hand -= 1
            self._asked_at = time.monotonic()

    async def _replied(self, request: web.Request) -> Reply:
        try:
            method, handler = self._route(request.path)
            self._admit(request)
            if request.method not in {method, "HEAD" if method == "GET" else method}:
                raise _RefusalError(405, "method", f"{_shown(request)}: use {method}")
            return await handler(request)
        except _RefusalError as refusal:
            return _error(refusal.status, refusal.code, str(refusal))
        except web.HTTPRequestEntityTooLarge:
            return _error(413, "too_large", f"the body has more than {BODY_LIMIT_BYTES} bytes")
        except RolloutMQError as error:
            return _error(400, "bad_request", str(error))
        except ConnectionError:  # the client is gone, and nobody reads an answer
            raise
        except Exception:
            logger.exception("request failed path=%s", _shown(request))
            return _error(500, "failed", "internal server error; see the log of the dashboard")

    def _route(self, path: str) -> tuple[str, Handler]:
        found = self._routes.get(path)
        if found is not None:
            return found
        if path.startswith(STATIC):
            return "GET", self._static
        if path.startswith("/api/dead/"):
            return "GET", self._dead_show
        if path.startswith("/api/actions/"):
            return "POST", self._act
        return "GET", self._nothing

    def _admit(self, request: web.Request) -> None:
        """Refuse what may not be asked. A link to the page may be anywhere, so its navigation may be foreign."""
        is_link = request.path == "/" and request.headers.get("Sec-Fetch-Mode") == "navigate"

        def header(name: str) -> str:
            return "" if is_link and name == "sec-fetch-site" else request.headers.get(name, "")

        _require(self._access.foreign(header))
        if request.method == "POST" and not request.headers.get("Origin"):
            raise _RefusalError(403, "refused", "origin: missing; send the origin of this server")
        is_open = not request.path.startswith(API) or request.path == "/api/session"
        if not is_open and not self._has_link(request):
            holder = self._holder(request)
            if holder is None:
                raise _RefusalError(401, "session", "no session; open the link that the command printed")
            _require(self._access.denied(holder, request.method, request.path))

    def _has_link(self, request: web.Request) -> bool:
        return self._sessions.holder(request.cookies.get(self._cookie, "")) == ""

    def _holder(self, request: web.Request) -> Holder | None:
        """Return the holder of the key that a request shows, by its cookie or its token; None if it shows none."""
        if token := bearer(request.headers.get("Authorization", "")):
            return self._access.tokens.holder(token)
        return self._access.tokens.named(self._sessions.holder(request.cookies.get(self._cookie, "")) or "")

    async def _index(self, request: web.Request) -> Reply:
        return await self._file(request, INDEX)

    async def _static(self, request: web.Request) -> Reply:
        return await self._file(request, request.path.removeprefix(STATIC))

    async def _file(self, request: web.Request, name: str) -> Reply:
        found = await asyncio.to_thread(self._page.find, name)
        if found is None:
            raise _RefusalError(404, "not_found", f"{_shown(request)}: no such path")
        headers = {"ETag": found.etag, "Cache-Control": "no-cache"}
        if found.etag in request.headers.get("If-None-Match", ""):
            return web.Response(status=304, headers=headers)
        return web.Response(body=found.body, headers={**headers, "Content-Type": found.kind})

    async def _nothing(self, request: web.Request) -> Reply:
        if split_token(request.path)[0]:
            reason = "the page takes no token in a path; send `Authorization: Bearer TOKEN`"
            raise _RefusalError(404, "not_found", f"{_shown(request)}: {reason}")
        raise _RefusalError(404, "not_found", f"{_shown(request)}: no such path")

    async def _session(self, request: web.Request) -> Reply:
        body = await _body(request)
        try:
            token = msgspec.json.decode(body, type=dict[str, str]).get("token", "")
        except (msgspec.MsgspecError, UnicodeDecodeError):
            raise _RefusalError(400, "bad_request", 'the body must be {"token": "..."}') from None
        holder = self._access.tokens.holder(token)
        if holder is not None:
            _require(self._access.denied(holder, "GET", API))
        elif self._sessions.holder(request.cookies.get(self._cookie, "")) is not None:
            return web.Response(status=204)
        cookie = self._sessions.exchange(token) if holder is None else self._sessions.cookie(holder.name)
        if cookie is None:
            reason = (
                "the link was used before, or is another server's; run `rolloutmq dashboard` for a new one"
            )
            raise _RefusalError(401, "token", reason)
        response = web.Response(status=204)
        response.set_cookie(
            self._cookie,
            cookie,
            httponly=True,
            secure=request.secure,
            samesite="Strict",
            path="/",
            max_age=LIFE_S,
        )
        return response

    async def _state(self, _request: web.Request) -> Reply:
        async with self.watch.viewed():
            return _json(self.watch.state())

    async def _history(self, request: web.Request) -> Reply:
        epoch, _, version = request.query.get("since", "").partition(".")
        cursor = (int(epoch), int(version)) if _is_number(epoch) and _is_number(version) else None
        async with self.watch.viewed():
            return _json(msgspec.json.encode(streams.history_since(self.watch.update(), cursor)))

    async def _events(self, request: web.Request) -> Reply:
        if self._streams >= STREAMS_LIMIT:
            raise _RefusalError(503, "too_many", f"{STREAMS_LIMIT} pages are open; close one")
        response = web.StreamResponse(
            headers={
                "Content-Type": "text/event-stream",
                "Cache-Control": "no-store",
                "X-Accel-Buffering": "no",
            }
        )
        await response.prepare(request)
        if request.method == "HEAD":
            return response
        self._streams += 1
        try:
            await _send(response, streams.opening())
            async with self.watch.stream() as stream:
                while not stream.is_leaving:
                    told = stream.take() if await stream.wait(BEAT_S) else streams.beat(time.time())
                    if told:
                        await _send(response, told)
                await _send(response, self._farewell)
        except (ConnectionError, TimeoutError):
            if request.transport is not None:
                request.transport.abort()
        finally:
            self._streams -= 1
        return response

    async def _latencies(self, request: web.Request) -> Reply:
        by, query = request.query.get("by", ""), request.query
        if by not in PARTS:
            raise _RefusalError(
                400, "bad_request", f"by: must be one of {', '.join(PARTS)} (got {by[:40]!r})"
            )
        async with self.watch.viewed():
            found = self.watch.record.latency_parts.page(
                By(by), query.get("filter", "")[:200], _number(query, "limit", 50)
            )
            return _json(encoded_json(found))

    async def _workers(self, request: web.Request) -> Reply:
        query = request.query
        sort, order = query.get("sort", "worker"), query.get("order", "asc")
        if sort not in SORTS:
            raise UsageError(f"sort: must be one of {', '.join(SORTS)} (got {sort[:40]!r})")
        if order not in {"asc", "desc"}:
            raise UsageError(f"order: must be asc or desc (got {order[:40]!r})")
        async with self.watch.viewed():
            found = page_of(
                self.watch.crew,
                sort=sort,
                descending=order == "desc",
                wanted=query.get("filter", "")[:200],
                offset=_number(query, "offset", 0),
                limit=_number(query, "limit", 100),
            )
            return _json(encoded_json({"version": self.watch.crew_version, **found}))

    async def _dead_list(self, request: web.Request) -> Reply:
        self._require_directory()
        offset, limit = _number(request.query, "offset", 0), _number(request.query, "limit", 100)
        async with self._one_letter:
            found = await asyncio.to_thread(self._dead.page, offset, limit)
        return _json(encoded_json(found))

    async def _dead_show(self, request: web.Request) -> Reply:
        self._require_directory()
        group_id = unquote(request.rel_url.raw_path.removeprefix("/api/dead/"))
        query = request.query
        order = _number(query, "order", 0) if "order" in query else None
        sequence, limit = _number(query, "sequence", 0), _number(query, "limit", 4)
        async with self.watch.viewed(), self._one_letter:
            found = await asyncio.to_thread(
                self._dead.show, group_id, order, self.watch.config, sequence, limit
            )
        if found is None:
            raise _RefusalError(404, "not_found", f"{group_id[:200]}: no such dead group")
        return _json(encoded_json(found))

    def _require_directory(self) -> None:
        if not self._layout.root.is_dir():
            raise _RefusalError(410, REMOVED, f"the run directory {self._layout.root} is gone")

    async def _act(self, request: web.Request) -> Reply:
        name = request.path.removeprefix("/api/actions/")
        if name not in ACTIONS:
            raise _RefusalError(404, "not_found", f"{name[:80]}: no such action")
        words = words_of(name, await _body(request))
        async with self.watch.viewed():
            if not self.watch.files.answers:
                raise _RefusalError(409, "read_only", self.watch.files.text)
        if self._actions.is_busy:
            raise _RefusalError(429, "busy", "another action is under way; try again when it has ended")
        try:
            outcome = await self._actions.carry_out(words)
        except TimeoutError:
            raise _RefusalError(
                504, "timeout", f"{name}: no answer in time; it may still be carried out"
            ) from None
        logger.info("action name=%s code=%d", name, outcome.code)
        return _json(encoded_json({"ok": outcome.code == 0, "code": outcome.code, "text": outcome.lines}))


def _shown(request: web.Request) -> str:
    """Return the path for errors and the log: without a token that somebody put there."""
    return split_token(request.path)[1]


def _require(denied: Refused | None) -> None:
    if denied is not None:
        raise _RefusalError(denied.status, "refused", denied.reason)


async def _secure(_request: web.Request, response: Reply) -> None:
    response.headers.update(SECURITY)
    if "Cache-Control" not in response.headers:
        response.headers["Cache-Control"] = "no-store"


async def _send(response: Reply, data: bytes) -> None:
    """Send data to a reader; TimeoutError if it takes none for long."""
    async with asyncio.timeout(SEND_S):
        await response.write(data)


async def _body(request: web.Request) -> bytes:
    """Return the JSON body of a request."""
    if request.content_type != "application/json":
        raise _RefusalError(
            415, "media_type", f"content-type: must be application/json (got {request.content_type!r})"
        )
    try:
        async with asyncio.timeout(BODY_S):
            return await request.read()
    except TimeoutError:
        raise _RefusalError(408, "timeout", f"the body did not arrive within {BODY_S:g} s") from None


def _json(body: bytes) -> Reply:
    return web.Response(body=body, content_type="application/json")


def _error(status: int, code: str, message: str) -> Reply:
    body = encoded_json({"error": {"code": code, "message": message}})
    return web.Response(body=body, status=status, content_type="application/json")


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) <= 18


def _number(query: Mapping[str, str], key: str, without: int) -> int:
    text = query.get(key)
    if text is None:
        return without
    if not _is_number(text):
        raise UsageError(f"{key}: must be a number of at most 18 digits (got {text[:40]!r})")
    return int(text)
