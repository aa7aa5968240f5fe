"""Proxy between the `train` client of `verifiers` 0.4 and the engines: what the policy sampled, with its version.

    agent --> their interception --> their train client --(loopback)--> Proxy --> engine
                                                                          |
                                                            what was sampled, by trace

Their client renders messages to tokens, posts these, and keeps neither the policy version nor which server answered.
The proxy is the server that it knows. It reads the id of the trace in each request, asks the engine of the group, moves
to another one when it fails (`engine`), and keeps each completion. A trace that is unknown, or over, is refused.

Only this process has the path of the proxy. A cancelled request cancels the one to the engine. Connections, headers and
bodies have the bounds of every HTTP server of a run: an agent may start programs that connect and send nothing.
"""

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any, Final

import aiohttp
import msgspec
from aiohttp import web

from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError
from rolloutmq.services.http_server.connection_bounds import client_limit
from rolloutmq.services.http_server.listening import serving
from rolloutmq.services.http_server.sockets import bound_socket
from rolloutmq.services.worker.completion import Completion
from rolloutmq.services.worker.openai import wire
from rolloutmq.services.worker.openai.client import CONNECT_S, RETRIED
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.policy import Policy
from rolloutmq.services.worker.verifiers.engine import OVER, Engine

GENERATE: Final = "/inference/v1/generate"
TRACE: Final = "X-Session-ID"
"""Header with the id of the trace that a request belongs to."""
BODY_LIMIT_BYTES: Final = 64 << 20
"""Largest request body; the engine's own limit is lower."""
BODY_S: Final = 30.0
"""Time for the body of a request, in seconds."""
HOST: Final = "127.0.0.1"
_encode: Final = msgspec.json.Encoder().encode


class _RefusedError(Exception):
    """An engine's answer other than 200."""

    def __init__(self, status: int, body: bytes) -> None:
        super().__init__(f"status {status}, {wire.error_text(body)}")
        self.status = status
        self.body = body


class GroupCalls:
    """Calls of the rollouts of one group. Made by `Proxy.opened`."""

    def __init__(self, engine: Engine, session: aiohttp.ClientSession, patience_s: float) -> None:
        self.sampled: dict[str, list[Completion]] = {}
        """What the policy sampled, by trace, in the order of time."""
        self.refusal = ""
        """What a server said of the last request that it refused."""
        self._engine = engine
        self._session = session
        self._until = time.monotonic() + patience_s

    async def endpoint(self) -> Endpoint:
        """Return the present engine; wait until one answers. Raises PolicyUnavailableError."""
        return await self._engine.endpoint()

    async def models(self) -> bytes:
        """Return the engine's list of models."""
        endpoint = await self._engine.endpoint()
        async with self._session.get(_root(endpoint) + wire.MODELS, ssl=endpoint.tls or True) as response:
            return await response.read()

    async def generate(self, trace: str, asked: dict[str, Any]) -> bytes:
        """Sample an answer of a trace and keep it; return the response for their client."""
        # Programs of theirs ask again after a failure: the patience is that of the group.
        patience_s = self._until - time.monotonic()
        try:
            completion = await self._engine.answered(
                lambda endpoint: self._sampled(endpoint, asked), _is_final, patience_s
            )
        except (_RefusedError, PolicyRefusedError, PolicyUnavailableError, aiohttp.ClientError) as error:
            self.refusal = str(error) or type(error).__name__
            raise
        self.sampled[trace].append(completion)
        return _response(completion, f"{trace}-{len(self.sampled[trace])}")

    async def _sampled(self, endpoint: Endpoint, asked: dict[str, Any]) -> Completion:
        sampling = dict(asked.get("sampling_params") or {})
        if endpoint.greedy:
            sampling["temperature"] = 0.0
        body = {**asked, "model": endpoint.model, "sampling_params": sampling, "return_token_ids": True}
        url, trusted = _root(endpoint) + GENERATE, endpoint.tls or True
        async with self._session.post(url, data=_encode(body), ssl=trusted) as response:
            answer = await response.read()
            if response.status != 200:
                raise _RefusedError(response.status, answer)
        temperature = sampling.get("temperature")
        (completion,) = endpoint.completions(answer, 1.0 if temperature is None else temperature or 1.0)
        return completion


class Proxy:
    """The server on loopback. Made by `listening`."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self._session = session
        self._groups: dict[str, GroupCalls] = {}
        """Groups under way, by trace."""
        self._path = f"/{secrets.token_urlsafe(16)}"
        self._url = ""

    @property
    def base_url(self) -> str:
        """Address for their client, ends in `/v1`."""
        return f"{self._url}{self._path}{wire.BASE}"

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator["Proxy"]:
        """Listen for the duration of the block, on a port of the system's choice."""
        connector = aiohttp.TCPConnector(limit=0)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        headers = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=connector, timeout=timeout, headers=headers, cookie_jar=aiohttp.DummyCookieJar()
                )
            )
            made = cls(session)
            app = web.Application(client_max_size=BODY_LIMIT_BYTES)
            app.router.add_post(made._path + GENERATE, made._generate)
            app.router.add_get(made._path + wire.MODELS, made._models)
            port = await stack.enter_async_context(serving(app, bound_socket(HOST, 0), client_limit()))
            made._url = f"http://{HOST}:{port}"
            yield made

    @asynccontextmanager
    async def opened(self, policy: Policy, patience_s: float) -> AsyncIterator[GroupCalls]:
        """Open the calls of one group; they are refused after the block.

        Args:
            policy: Chooses the engines.
            patience_s: Seconds from now in which failed calls are repeated.
        """
        engine = Engine(policy)
        calls = GroupCalls(engine, self._session, patience_s)
        try:
            yield calls
        finally:
            for trace in calls.sampled:
                del self._groups[trace]
            await engine.close()

    def expect(self, calls: GroupCalls, trace: str) -> None:
        """Answer the requests of a trace with the engine of a group."""
        self._groups[trace] = calls
        calls.sampled[trace] = []

    async def _generate(self, request: web.Request) -> web.Response:
        trace = request.headers.get(TRACE, "")
        calls = self._groups.get(trace)
        if calls is None:
            return _error(409, OVER)
        try:
            asked = msgspec.json.decode(await _body(request), type=dict[str, Any])
        except TimeoutError:
            return _late()
        except web.HTTPRequestEntityTooLarge:
            return _error(413, f"request body too large; at most {BODY_LIMIT_BYTES} bytes")
        except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            return _error(400, f"invalid request: {error}")
        return await _answered(calls, trace, asked)

    async def _models(self, _request: web.Request) -> web.Response:
        calls = next(iter(self._groups.values()), None)
        if calls is None:
            return _error(409, OVER)
        try:
            return _json(await calls.models())
        except (PolicyUnavailableError, aiohttp.ClientError, RuntimeError) as error:
            return _error(503, str(error) or type(error).__name__)


async def _answered(calls: GroupCalls, trace: str, asked: dict[str, Any]) -> web.Response:
    try:
        return _json(await calls.generate(trace, asked))
    except msgspec.MsgspecError as error:
        return _error(400, f"invalid request: {error}")
    except _RefusedError as error:
        return _json(error.body, error.status)
    except PolicyRefusedError as error:
        return _error(400, str(error))
    except (PolicyUnavailableError, aiohttp.ClientError) as error:
        return _error(503, str(error) or type(error).__name__)
    except RuntimeError as error:
        return _error(409, str(error))


async def _body(request: web.Request) -> bytes:
    """Return the body; TimeoutError if it does not arrive in time."""
    async with asyncio.timeout(BODY_S):
        return await request.read()


def _late() -> web.Response:
    response = _error(408, f"the request body did not arrive within {BODY_S:g} s")
    response.force_close()
    return response


def _is_final(error: Exception) -> bool:
    if isinstance(error, _RefusedError):
        return error.status not in RETRIED
    return not isinstance(error, aiohttp.ClientConnectionError | aiohttp.ClientPayloadError)


def _root(endpoint: Endpoint) -> str:
    """Return the address of an engine without `/v1`, with its token."""
    return endpoint.base_url.removesuffix(wire.BASE)


def _response(completion: Completion, request_id: str) -> bytes:
    """Return what their client reads: it wants each token named, and some servers leave the names out."""
    pairs = zip(completion.token_ids, completion.logprobs, strict=True)
    content = [{"token": f"token_id:{token}", "logprob": logprob} for token, logprob in pairs]
    choice = {
        "index": 0,
        "token_ids": completion.token_ids,
        "logprobs": {"content": content},
        "finish_reason": completion.finish_reason,
    }
    return _encode({"request_id": request_id, "choices": [choice]})


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


def _error(status: int, message: str) -> web.Response:
    return _json(_encode({"error": {"message": message, "type": "proxy_error", "code": status}}), status)
