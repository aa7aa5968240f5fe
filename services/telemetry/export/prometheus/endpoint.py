"""The endpoint: `GET /metrics` in the loop of telemetry.

It is outside of the run's way: an endpoint that cannot listen is logged and tried again, and telemetry records on.
However many clients ask, a page is made at most once in `PAGE_S`. A connection is answered one request at a time:
further ones wait. Of `CONNECTIONS` answers under way, the oldest that has lasted `STUCK_S` makes room for a new one:
its client reads too slowly. Beyond `OPEN_LIMIT` connections the one that has been idle for the longest time is closed.
"""

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Final

from aiohttp import web
from prometheus_client.exposition import choose_encoder

from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.services.http_server.access import HttpAccess, access_of, split_token
from rolloutmq.services.http_server.bounded_site import BoundedSite
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.http_server.tls import server_tls
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.telemetry.export.prometheus.families import Families

logger = logging.getLogger(__name__)

PATH: Final = "/metrics"
PAGE_S: Final = 0.5
"""Age up to which a page is sent again."""
CONNECTIONS: Final = 32
"""Requests that are answered at a time; while all are younger than `STUCK_S`, further ones are told to come again."""
STUCK_S: Final = 1.0
"""Age from which an answer makes room for a new one."""
OPEN_LIMIT: Final = 4 * CONNECTIONS
"""Most connections at a time, idle ones included."""
HEADERS: Final = {
    "Content-Security-Policy": "default-src 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every reply: a browser shows a page of labels as text, whatever is in them."""
KEEP_ALIVE_S: Final = 75.0
SEND_S: Final = 30.0
"""Longest time of a client for one answer."""
RETRY_S: Final = 5.0
"""Time between two tries to listen."""
BACKLOG: Final = 128
_OPEN_METRICS: Final = "application/openmetrics-text"

Collect = Callable[[], Families]
"""Returns the samples of a page of now."""


@dataclass(frozen=True, slots=True)
class Page:
    """One answer.

    Attributes:
        kind: Its content type.
        body: Its text.
    """

    kind: str
    body: bytes


class Pages:
    """Pages in OpenMetrics and in the text format 0.0.4, each made at most once in `page_s`."""

    def __init__(self, collect: Collect, page_s: float = PAGE_S) -> None:
        self._collect = collect
        self._page_s = page_s
        self._made: dict[str, tuple[float, Page]] = {}

    def page(self, accept: str, now: float) -> Page:
        """Return a page in the format that a request accepts, at a monotonic time."""
        wanted = f"{_OPEN_METRICS};version=1.0.0" if _OPEN_METRICS in accept else ""
        made = self._made.get(wanted)
        if made is None or now - made[0] >= self._page_s:
            encode, kind = choose_encoder(wanted)
            made = self._made[wanted] = now, Page(kind, encode(self._collect()))
        return made[1]


class Endpoint:
    """Answers requests.

    Args:
        pages: What it answers.
        access: Who may ask.
        send_s: Longest time of a client for one answer.
    """

    def __init__(self, pages: Pages, access: HttpAccess, send_s: float = SEND_S) -> None:
        self._pages = pages
        self._access = access
        self._send_s = send_s
        self._in_hand: dict[int, tuple[web.BaseRequest, float]] = {}
        """Requests that are being answered, by number, the oldest first, and the times at which they came."""
        self._numbers = itertools.count()
        self._throttle = LogThrottle()
        self._cut = self._refused = 0

    def application(self) -> web.Application:
        """Return the application; one route dispatches all paths, so that each is checked for access."""
        made = web.Application()
        made.router.add_route("*", "/{path:.*}", self._answer)
        made.on_response_prepare.append(_secure)
        return made

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        token, path = split_token(request.path)
        denied = self._access.refusal(
            lambda name: request.headers.get(name, ""), token, path, method=request.method
        )
        if denied is not None:
            return web.Response(status=denied.status, text=f"{denied.reason}\n", headers=dict(denied.headers))
        if path != PATH:
            return web.Response(status=404, text=f"{path[:80]}: no such path; GET {PATH} has the metrics\n")
        if request.method not in {"GET", "HEAD"}:
            refused = f"method {request.method[:20]} not allowed; use GET\n"
            return web.Response(status=405, text=refused, headers={"Allow": "GET, HEAD"})
        now = asyncio.get_running_loop().time()
        if not self._has_room(now):
            return web.Response(status=503, text="too many requests\n", headers={"Retry-After": "1"})
        number = next(self._numbers)
        self._in_hand[number] = request, now
        try:
            return await self._send(request)
        finally:
            self._in_hand.pop(number, None)

    def _has_room(self, now: float) -> bool:
        """Return whether a further request may be answered; end the oldest answer that is stuck, if need be."""
        if len(self._in_hand) < CONNECTIONS:
            return True
        number, (oldest, since) = next(iter(self._in_hand.items()))
        is_stuck = now - since >= STUCK_S
        if is_stuck:
            self._cut += 1
            del self._in_hand[number]
            if oldest.transport is not None:
                oldest.transport.abort()
        else:
            self._refused += 1
        if self._throttle.is_due("crowded", now):
            logger.warning(
                "metrics have slow or too many readers limit=%d cut=%d refused=%d",
                CONNECTIONS,
                self._cut,
                self._refused,
            )
        return is_stuck

    async def _send(self, request: web.Request) -> web.StreamResponse:
        now = asyncio.get_running_loop().time()
        page = self._pages.page(request.headers.get("accept", ""), now)
        response = web.Response(body=page.body, headers={"Content-Type": page.kind})
        try:
            async with asyncio.timeout(self._send_s):
                await response.prepare(request)
                await response.write_eof()
        except (TimeoutError, ConnectionError) as error:  # it reads too slowly, or has gone
            if isinstance(error, TimeoutError) and self._throttle.is_due(
                "slow", asyncio.get_running_loop().time()
            ):
                logger.warning("metrics reader too slow, its connection is ended after_s=%g", self._send_s)
            if request.transport is not None:
                request.transport.abort()
        return response


async def _secure(_request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)


async def serve_metrics(run: RunConfig, collect: Collect, stop: Stop, retry_s: float = RETRY_S) -> None:
    """Serve the metrics of a run until `stop`. Raises nothing: what prevents it is logged, once for each reason."""
    config, why = run.telemetry, ""
    while not stop.event.is_set():
        try:
            access = access_of(run, Server.METRICS, config.metrics_host)
            async with _listening(Endpoint(Pages(collect), access).application(), run) as url:
                logger.info("metrics listening url=%s%s", url, PATH)
                why = ""
                await stop.wait()
        except Exception as error:  # noqa: BLE001 - the border of the endpoint: telemetry goes on without it
            if why != (why := str(error)):
                address = f"{config.metrics_host}:{config.metrics_port}"
                logger.error(
                    "metrics endpoint not listening address=%s error=%s; telemetry.metrics_port chooses another",
                    address,
                    error,
                )
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.event.wait(), retry_s)


@contextlib.asynccontextmanager
async def _listening(app: web.Application, run: RunConfig) -> AsyncIterator[str]:
    """Listen for the duration of the block; yield the URL. OSError if the address cannot be bound; raises what
    `server_tls` raises."""
    config, tls = run.telemetry, server_tls(run)
    runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=KEEP_ALIVE_S)
    await runner.setup()
    try:
        bound = bound_socket(config.metrics_host, config.metrics_port)
        try:
            site = BoundedSite(runner, bound, backlog=BACKLOG, limit=OPEN_LIMIT, headers=HEADERS, tls=tls)
            await site.start()
        except OSError:
            bound.close()
            raise
        yield http_url(config.metrics_host, int(runner.addresses[0][1]), run.run.scheme)
    finally:
        await runner.cleanup()
