"""The gateway's ASGI application: bodies in and out, compressed or not, with Atropos' error format.

Bodies are bounded on arrival and while they inflate. Threads do the CPU-bound work (inflate, decode, encode, compress),
one group at a time, so that a status request does not wait for a post. Batches are streamed: the first byte leaves
before the last group is encoded.
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
from rolloutmq.services.gateway import pages
from rolloutmq.services.gateway.atropos_wire import (
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
from rolloutmq.services.gateway.http_io import (
    LONG_BYTES,
    SMALL_BYTES,
    Answer,
    InHand,
    Out,
    Part,
    Pool,
    Receive,
    Request,
    Scope,
    Send,
    TooLargeError,
    body_of,
    in_turn,
    off,
    watch,
)
from rolloutmq.services.gateway.in_doubt import digest_of
from rolloutmq.services.gateway.metrics import exposition
from rolloutmq.services.gateway.producers import NoRoomError
from rolloutmq.services.gateway.service import Gateway, NotRegisteredError

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = b"2"
SWITCH_S: Final = 0.0005
"""Switch interval of the interpreter: a decoding thread yields to the loop, which has little to do but many waiters.
The default is ten times as long, and a reply takes several turns."""


class BrokenAnswerError(Exception):
    """A reply failed half-way; the log has the cause."""


class GatewayApp:
    """ASGI application of one gateway."""

    def __init__(self, gateway: Gateway, config: GatewayConfig) -> None:
        self._gateway = gateway
        self._config = config
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
            "/status-env": {"GET": self._status_env},
            "/scored_data": {"POST": self._scored_data},
            "/scored_data_list": {"POST": self._scored_data_list},
            "/latest_example": {"GET": self._latest_example},
            "/reset_data": {"GET": self._reset_data},
            "/global-status": {"GET": self._global_status},
            "/metrics": {"GET": self._metrics},
            "/health": {"GET": self._health},
            "/docs": {"GET": self._docs},
            "/openapi.json": {"GET": self._openapi},
        }

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request = Request(
            scope["method"],
            scope["path"],
            parse_qs(scope["query_string"].decode("latin-1")),
            dict(scope["headers"]),
        )
        out = Out(send, request, self._config, self._pool)
        try:
            await self._exchange(request, receive, out)
        except TooLargeError as error:
            await out.answer(_refusal(413, str(error)))
        except zlib.error:
            await out.answer(Answer(b"Invalid gzip payload", 400, b"text/plain; charset=utf-8"))
        finally:
            self._hold(request, 0)

    async def _exchange(self, request: Request, receive: Receive, out: Out) -> None:
        if request.announced_bytes > SMALL_BYTES:
            await self._in_hand.room()
            self._hold(request, request.announced_bytes)
        request.body = await body_of(request, receive, self._config, self._pool)
        self._hold(request, max(request.held, len(request.body)))
        watching = asyncio.create_task(watch(receive, request.gone))
        try:
            await self._respond(request, out)
        finally:
            watching.cancel()

    def _hold(self, request: Request, nbytes: int) -> None:
        self._in_hand.change(nbytes - request.held)
        request.held = nbytes

    async def _respond(self, request: Request, out: "Out") -> None:
        try:
            if request.path == "/batch" and request.method == "GET":
                await self._batch(request, out)
                return
            answer = await self._handled(request)
        except RefusedBodyError as error:
            answer = _refusal(error.status, error.reason, error)
        except GroupTooLargeError as error:
            answer = _refusal(413, str(error))
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

    async def _handled(self, request: Request) -> Answer:
        methods = self._routes.get(request.path)
        if methods is None and request.path != "/batch":
            return _refusal(404, "Not Found")
        methods = methods or {}
        if request.method == "OPTIONS" and self._config.cors_origins:
            return Answer(b"")
        handler = methods.get(request.method)
        return await handler(request) if handler is not None else _not_allowed(methods or ["GET"])

    async def _decoded(self, request: Request, kind: Any) -> Any:
        return await off(self._pool, len(request.body), partial(decode, request.body, kind), LONG_BYTES)

    async def _posted(self, request: Request, kind: Any) -> PostedGroup:
        work = partial(_posted, request.body, kind)
        made = await off(self._pool, len(request.body), work, LONG_BYTES)
        request.body = b""
        self._hold(request, made.nbytes)
        return made

    # Atropos' endpoints

    async def _root(self, _request: Request) -> Answer:
        return _json({"message": "AtroposLib API"})

    async def _register(self, request: Request) -> Answer:
        answer = await self._gateway.register(await self._decoded(request, Registration))
        return Answer(b'{"uuid":%d}' % answer["uuid"])  # exceeds 64 bits

    async def _register_env(self, request: Request) -> Answer:
        return _json(await self._gateway.register_env(await self._decoded(request, RegisterEnv)))

    async def _disconnect_env(self, request: Request) -> Answer:
        asked = await self._decoded(request, EnvIdentifier)
        return _json(await self._gateway.disconnect_env(asked.env_id))

    async def _wandb_info(self, _request: Request) -> Answer:
        return _json(self._gateway.wandb_info())

    async def _info(self, _request: Request) -> Answer:
        return _json(await self._gateway.info())

    async def _status(self, _request: Request) -> Answer:
        return _json(await self._gateway.status())

    async def _status_env(self, request: Request) -> Answer:
        asked = request.query.get("env_id")
        if asked is not None:
            body = b'{"env_id":%s}' % msgspec.json.encode(asked[0])
            env_id = decode(body, EnvIdentifier).env_id
        else:
            env_id = decode(request.body, EnvIdentifier).env_id
        return _json(await self._gateway.status_env(env_id))

    async def _scored_data(self, request: Request) -> Answer:
        request.post = await self._gateway.take(await self._posted(request, ScoredData), request.gone)
        return _json({"status": "received"})

    async def _scored_data_list(self, request: Request) -> Answer:
        posted = await self._posted(request, list[ScoredData])
        if posted.groups:
            request.post = await self._gateway.take(posted, request.gone)
        return _json({"status": "received", "groups_processed": len(posted.groups)})

    async def _latest_example(self, _request: Request) -> Answer:
        latest = await self._gateway.latest_example()
        if latest is None:
            return _json(NOTHING_YET)
        size = json_bytes(latest)
        work = partial(in_turn, size, partial(_encoded, latest, b""))
        return Answer(await off(self._pool, size, work, LONG_BYTES))

    async def _reset_data(self, _request: Request) -> Answer:
        await self._gateway.reset_data()
        return Answer(b"Reset successful", kind=b"text/plain; charset=utf-8")

    async def _batch(self, request: Request, out: "Out") -> None:
        """Deliver a batch: complete once the client has received all but what the socket buffers hold."""
        try:
            async with self._gateway.batch() as offer:
                if offer is None:
                    await out.answer(_json({"batch": None}))
                    return
                await out.stream(_parts(offer.groups))
                offer.delivered = not request.gone.is_set()
                await out.end()
        except NotRegisteredError:
            message = "Trainer not registered. Call /register first."
            await out.answer(_json({"status": "error", "message": message, "batch": []}))

    # Our own endpoints

    async def _global_status(self, _request: Request) -> Answer:
        return _json(pages.global_status(self._gateway, await self._gateway.watch.refresh()))

    async def _metrics(self, _request: Request) -> Answer:
        text = exposition(self._gateway, await self._gateway.watch.refresh())
        return Answer(text.encode(), kind=b"text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, _request: Request) -> Answer:
        answer = pages.health(self._gateway, await self._gateway.watch.refresh())
        return _json(answer, 200 if answer["status"] == "ok" else 503)

    async def _docs(self, _request: Request) -> Answer:
        return Answer(pages.docs().encode(), kind=b"text/html; charset=utf-8")

    async def _openapi(self, _request: Request) -> Answer:
        return _json(pages.openapi())


def _posted(body: bytes, kind: Any) -> PostedGroup:
    return in_turn(len(body), partial(_built, digest_of(body), body, kind))


def _built(digest: bytes, body: bytes, kind: Any) -> PostedGroup:
    data, now = decode(body, kind), time.time()
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
