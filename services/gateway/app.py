"""The gateway's ASGI application: bodies in and out, compressed or not, with Atropos' error format.

Bodies are bounded on arrival, in bytes and in time, and while they inflate; a refused request's body is not read.
Threads do the CPU-bound work (inflate, decode, encode, compress), one group at a time, so that a status request does
not wait for a post. One piece of work inflates and decodes a body, so that there are never more inflated bodies than
threads. Batches are streamed: the first byte leaves before the last group is encoded.
"""

import asyncio
import logging
import time
import zlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import Any, Final
from urllib.parse import parse_qs

import msgspec

from rolloutmq.bus.encoding.codec import group_bytes
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.errors import (
    BrokerUnavailableError,
    ClosedError,
    GroupTooLargeError,
    RetryableError,
    RolloutMQError,
)
from rolloutmq.schemas.group import Group
from rolloutmq.services.gateway.atropos_replies import Batch, NotRegistered, Received, ReceivedList, Root
from rolloutmq.services.gateway.atropos_wire import (
    GROUP_BYTES,
    EnvIdentifier,
    RefusedBodyError,
    RegisterEnv,
    Registration,
    ScoredData,
    decode,
)
from rolloutmq.services.gateway.group_mapping import (
    NOTHING_YET,
    UNNAMED,
    PostedGroup,
    from_group,
    json_bytes,
    to_group,
)
from rolloutmq.services.gateway.in_doubt import digest_of
from rolloutmq.services.gateway.pages.docs import POLICY, docs
from rolloutmq.services.gateway.pages.metrics import exposition
from rolloutmq.services.gateway.pages.openapi import openapi
from rolloutmq.services.gateway.pages.state import global_status, health
from rolloutmq.services.gateway.producers import NoRoomError
from rolloutmq.services.gateway.service import Gateway, NotRegisteredError
from rolloutmq.services.gateway.web.arrival import SilentError, body_of
from rolloutmq.services.gateway.web.http_io import (
    LONG_BYTES,
    Answer,
    Out,
    Part,
    Pool,
    Receive,
    Request,
    Scope,
    Send,
    TooLargeError,
    in_turn,
    inflated,
    off,
    watch,
)
from rolloutmq.services.gateway.web.in_hand import InHand
from rolloutmq.services.http_server.access import HttpAccess, is_browser, split_token
from rolloutmq.services.http_server.request_latencies import RequestLatencies
from rolloutmq.services.process.latency_recorder import LatencyRecorder
from rolloutmq.services.programs.command import split_path

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = b"2"
CLOSE: Final = (b"connection", b"close")
QUESTION_BYTES: Final = 64 << 10
"""Largest body of a request that sends no groups, on the wire and inflated."""
BATCH: Final = "/batch"
RESET: Final = "/reset_data"
CHANGING: Final = {BATCH: "take batches with a program", RESET: "send a POST"}
"""Paths of Atropos where a GET changes something. A link on any page makes a browser send one, so it is refused."""
BATCH_METHODS: Final = ("GET",)
GROUPS: Final = frozenset({"/scored_data", "/scored_data_list"})
"""Paths of requests that send groups."""
SWITCH_S: Final = 0.0005
"""Switch interval of the interpreter: a decoding thread yields to the loop, which has little to do but many waiters.
The default is ten times as long, and a reply takes several turns."""


Body = bytes | bytearray


class BrokenAnswerError(Exception):
    """A reply failed half-way; the log has the cause."""


class GatewayApp:
    """ASGI application of one gateway.

    Args:
        gateway: Answers.
        config: Limits.
        access: Who may ask.
        group_bytes: `broker.max_group_bytes`.
        latencies: Gets the duration of each request, from its headers to the end of its reply.
    """

    def __init__(
        self,
        gateway: Gateway,
        config: GatewayConfig,
        access: HttpAccess,
        group_bytes: int = GROUP_BYTES,
        latencies: LatencyRecorder | None = None,
    ) -> None:
        self._gateway = gateway
        self._config = config
        self._access = access
        self._group_bytes = group_bytes
        self._pool = Pool(config.threads)
        self._in_hand = InHand(config.max_in_hand_bytes)
        self._routes: dict[str, dict[str, Callable[[Request], Awaitable[Answer]]]] = {
            "/": {"GET": self._root},
            "/register": {"POST": self._register},
            "/register-env": {"POST": self._register_env},
            "/disconnect-env": {"POST": self._disconnect_env},
            "/wandb_info": {"GET": self._wandb_info},
            "/info": {"GET": self._info},
            "/status": {"GET": self._status},
            "/status-env": {"GET": self._status_env, "POST": self._status_env},
            "/scored_data": {"POST": self._scored_data},
            "/scored_data_list": {"POST": self._scored_data_list},
            "/latest_example": {"GET": self._latest_example},
            RESET: {"GET": self._reset_data, "POST": self._reset_data},
            "/global-status": {"GET": self._global_status},
            "/metrics": {"GET": self._metrics},
            "/health": {"GET": self._health},
            "/docs": {"GET": self._docs},
            "/openapi.json": {"GET": self._openapi},
        }
        self._latencies = RequestLatencies(latencies, {*self._routes, BATCH})

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        token, path = split_token(scope["path"])
        worker, path = split_path(path)
        request = Request(
            scope["method"],
            path,
            parse_qs(scope["query_string"].decode("latin-1")),
            dict(scope["headers"]),
            worker=worker,
            token=token,
        )
        out = Out(send, request, self._config, self._pool)
        with self._latencies.request(request.path) as exchange:
            try:
                refusal = self._refused(request) or await self._read(request, receive)
                if refusal is not None:
                    await out.answer(refusal)
                else:
                    await self._exchange(request, receive, out)
            finally:
                exchange.status = out.status
                self._in_hand.release(request.held)

    def _refused(self, request: Request) -> Answer | None:
        """Return the reply to a request whose body need not be read."""
        preflight = request.method == "OPTIONS" and bool(self._config.cors_origins)
        denied = self._access.refusal(
            request.header, request.token, request.path, method=request.method, preflight=preflight
        )
        if denied is not None:
            answer = _refusal(denied.status, denied.reason)
            answer.headers = tuple((name.encode(), value.encode()) for name, value in denied.headers.items())
            return answer
        if request.worker and self._gateway.programs.find(request.worker) is None:
            return _refusal(404, f"/w/{request.worker}: no program of this run has that name")
        methods = BATCH_METHODS if request.path == BATCH else self._routes.get(request.path)
        if methods is None:
            return _refusal(404, "Not Found")
        if preflight:
            return Answer(b"")
        if request.method == "GET" and request.path in CHANGING and is_browser(request.header):
            return _refusal(
                403, f"{request.path}: a GET of a browser changes nothing; {CHANGING[request.path]}"
            )
        return None if request.method in methods else _not_allowed(methods)

    async def _read(self, request: Request, receive: Receive) -> Answer | None:
        """Read the body of a request; return the reply if it cannot be read."""
        most = self._config.max_body_bytes if request.path in GROUPS else QUESTION_BYTES
        try:
            request.body = await body_of(
                request, receive, self._in_hand, most=most, silent_s=self._config.silent_s
            )
        except TooLargeError as error:
            return _refusal(413, str(error))
        except SilentError as error:
            answer = _refusal(408, str(error))
            answer.headers = (CLOSE,)
            return answer
        return None

    async def _exchange(self, request: Request, receive: Receive, out: Out) -> None:
        watching = asyncio.create_task(watch(receive, request.gone))
        try:
            await self._respond(request, out)
        finally:
            watching.cancel()

    async def _respond(self, request: Request, out: "Out") -> None:
        try:
            if request.path == BATCH:
                await self._batch(request, out)
                return
            answer = await self._routes[request.path][request.method](request)
        except RefusedBodyError as error:
            answer = _refusal(error.status, error.reason, error)
        except (GroupTooLargeError, TooLargeError) as error:
            answer = _refusal(413, str(error))
        except zlib.error:
            answer = Answer(b"Invalid gzip payload", 400, b"text/plain; charset=utf-8")
        except (NoRoomError, BrokerUnavailableError, RetryableError, ClosedError) as error:
            answer = _refusal(503, str(error))
            answer.headers = ((b"retry-after", RETRY_AFTER_S),)
        except TimeoutError:
            logger.warning("client does not read its reply path=%s", request.path)
            answer = _refusal(503, "too slow")
        except RolloutMQError as error:
            logger.exception("request failed path=%s", request.path)
            answer = _refusal(500, str(error))
        except Exception:
            logger.exception("request failed path=%s", request.path)
            answer = _refusal(500, "internal error; see the gateway's log")
        if out.begun:
            raise BrokenAnswerError(
                request.path
            )  # the server closes the connection, so that the reply is not taken for complete
        await self._answer(request, answer, out)

    async def _answer(self, request: Request, answer: Answer, out: Out) -> None:
        """Reply; a post whose client is gone stays in doubt."""
        post, heard = request.post, False
        try:
            await out.answer(answer)
            heard = not request.gone.is_set()
        finally:
            if post is not None:
                (self._gateway.in_doubt.end if heard else self._gateway.in_doubt.leave)(post)

    def _decoded(self, request: Request, kind: Any) -> Any:
        body = inflated(request.body, QUESTION_BYTES) if request.compressed and request.body else request.body
        return decode(body, kind)

    async def _posted(self, request: Request, kind: Any) -> PostedGroup:
        most = self._config.max_inflated_bytes
        built = partial(_built, kind=kind, limit=self._group_bytes)
        work = partial(_posted, request.body, built, compressed=request.compressed)
        size = request.probable_bytes
        try:
            bound = min(most, LONG_BYTES) if size < LONG_BYTES else most
            made = await off(self._pool, size, partial(work, most=bound), LONG_BYTES)
        except TooLargeError:
            if size >= LONG_BYTES:
                raise
            # It is larger than it says, or has several members.
            made = await off(self._pool, LONG_BYTES, partial(work, most=most), LONG_BYTES)
        if request.worker:
            made = self._gateway.signed(made, request.worker)
        request.body = b""
        self._in_hand.hold(request.held, made.nbytes)
        return made

    # Atropos' endpoints

    async def _root(self, _request: Request) -> Answer:
        return _json(Root())

    async def _register(self, request: Request) -> Answer:
        answer = await self._gateway.register(self._decoded(request, Registration))
        return Answer(b'{"uuid":%d}' % answer.uuid)  # exceeds 64 bits

    async def _register_env(self, request: Request) -> Answer:
        asked = self._decoded(request, RegisterEnv)
        if request.worker:
            asked = self._gateway.program(request.worker, asked)
        return _json(await self._gateway.register_env(asked))

    async def _disconnect_env(self, request: Request) -> Answer:
        asked = self._decoded(request, EnvIdentifier)
        return _json(await self._gateway.disconnect_env(asked.env_id))

    async def _wandb_info(self, _request: Request) -> Answer:
        return _json(await self._gateway.wandb_info())

    async def _info(self, _request: Request) -> Answer:
        return _json(await self._gateway.info())

    async def _status(self, _request: Request) -> Answer:
        return _json(await self._gateway.status())

    async def _status_env(self, request: Request) -> Answer:
        asked = request.query.get("env_id")
        if asked is not None:
            request.body = b'{"env_id":%s}' % msgspec.json.encode(asked[0])
        env_id = self._decoded(request, EnvIdentifier).env_id
        return _json(await self._gateway.paced(env_id, request.gone))

    async def _scored_data(self, request: Request) -> Answer:
        posted = await self._posted(request, ScoredData)
        with self._gateway.posting(posted):
            request.post = await self._gateway.take(posted, request.gone)
        return _json(Received())

    async def _scored_data_list(self, request: Request) -> Answer:
        posted = await self._posted(request, list[ScoredData])
        if posted.groups:
            with self._gateway.posting(posted):
                request.post = await self._gateway.take(posted, request.gone)
        return _json(ReceivedList(groups_processed=len(posted.groups)))

    async def _latest_example(self, request: Request) -> Answer:
        latest = await self._gateway.latest_example()
        if latest is None:
            return _json(NOTHING_YET)
        await self._in_hand.room(request.held)
        size = json_bytes(latest)
        self._in_hand.hold(request.held, size)
        work = partial(in_turn, size, partial(_encoded, latest, b""))
        answer = Answer(await off(self._pool, size, work, LONG_BYTES))
        self._in_hand.hold(request.held, len(answer.body))
        return answer

    async def _reset_data(self, _request: Request) -> Answer:
        await self._gateway.reset_data()
        return Answer(b"Reset successful", kind=b"text/plain; charset=utf-8")

    async def _batch(self, request: Request, out: "Out") -> None:
        """Deliver a batch: complete once the client has received all but what the socket buffers hold."""
        try:
            async with self._gateway.batch() as offer:
                if offer is None:
                    await out.answer(_json(Batch()))
                    return
                await out.stream(_parts(offer.groups))
                offer.delivered = not request.gone.is_set()
                await out.end()
        except NotRegisteredError:
            await out.answer(_json(NotRegistered()))

    # Our own endpoints

    async def _global_status(self, _request: Request) -> Answer:
        return _json(global_status(self._gateway, await self._gateway.watch.refresh()))

    async def _metrics(self, _request: Request) -> Answer:
        text = exposition(self._gateway, await self._gateway.watch.refresh())
        return Answer(text.encode(), kind=b"text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, _request: Request) -> Answer:
        answer = health(self._gateway, await self._gateway.watch.refresh())
        return _json(answer, 200 if answer["status"] == "ok" else 503)

    async def _docs(self, _request: Request) -> Answer:
        page = Answer(docs(), kind=b"text/html; charset=utf-8")
        # The address may have a token.
        page.headers = ((b"content-security-policy", POLICY), (b"referrer-policy", b"no-referrer"))
        return page

    async def _openapi(self, _request: Request) -> Answer:
        return _json(openapi())


def _posted(
    body: bytes, built: Callable[[bytes, Body], PostedGroup], *, compressed: bool, most: int
) -> PostedGroup:
    whole = inflated(body, most) if compressed and body else body
    return in_turn(len(whole), partial(built, digest_of(whole), whole))


def _built(digest: bytes, body: Body, *, kind: Any, limit: int) -> PostedGroup:
    data, now = decode(body, kind, limit), time.time()
    several = data if isinstance(data, list) else [data]
    groups = [to_group(one, UNNAMED, at=now) for one in several]
    return PostedGroup(digest, [one.env_id for one in several], groups, sum(map(group_bytes, groups)))


def _parts(groups: Sequence[Group]) -> Iterator[Part]:
    """Return the groups of a batch as parts of a reply, with the surrounding JSON.

    The end is a part of its own: it is sent once the client has received everything before it.
    """
    for number, group in enumerate(groups):
        size, before = json_bytes(group), b"," if number else b'{"batch":['
        yield size, partial(in_turn, size, partial(_encoded, group, before))
    yield 0, partial(bytes, b"]}")


def _encoded(group: Group, before: bytes) -> bytes:
    return before + msgspec.json.encode(from_group(group))


def _json(value: Any, status: int = 200) -> Answer:
    return Answer(msgspec.json.encode(value), status)


def _refusal(status: int, reason: str, error: RefusedBodyError | None = None) -> Answer:
    """Return an error in Atropos' format: a text, or for a body a list with the place of the error."""
    if error is None or status != 422:
        return _json({"detail": reason}, status)
    return _json({"detail": [{"type": error.kind, "loc": error.place, "msg": reason}]}, status)


def _not_allowed(methods: Iterable[str]) -> Answer:
    answer = _refusal(405, "Method Not Allowed")
    answer.headers = ((b"allow", ", ".join(methods).encode()),)
    return answer
