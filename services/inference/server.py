"""HTTP server of a model: routes, and errors in OpenAI's format."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import msgspec
from aiohttp import web

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import ClosedError, RetryableError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.http_server.access import HttpAccess, Refused, split_token
from rolloutmq.services.http_server.request_latencies import RequestLatencies
from rolloutmq.services.inference.openai import requests, responses
from rolloutmq.services.inference.openai.requests import ApiError
from rolloutmq.services.process.latency_recorder import LatencyRecorder

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
"""Value of `Retry-After` for responses with status 503, in seconds."""
BODY_S: Final = 30.0
"""Time for the body of a request, in seconds."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


def application(
    routes: Mapping[str, tuple[str, Handler]], access: HttpAccess, latencies: LatencyRecorder | None = None
) -> web.Application:
    """Make an application from methods and handlers by path, for those who have access.

    `latencies` gets the duration of each request by its path of `routes`, from its headers to the response.

    One wildcard route dispatches all requests, so that unknown paths get an error in OpenAI's format too.
    """

    measured = RequestLatencies(latencies, routes)

    async def dispatch(request: web.Request) -> web.Response:
        token, path = split_token(request.path)  # errors and the log name the path without the token
        with measured.request(path) as exchange:
            response = await answered(request, token, path)
            exchange.status = response.status
            return response

    async def answered(request: web.Request, token: str, path: str) -> web.Response:
        try:
            denied = access.refusal(
                lambda name: request.headers.get(name, ""), token, path, method=request.method
            )
            if denied is not None:
                return _denial(denied)
            method, handler = routes.get(path, ("", partial(_nothing, path)))
            if method not in {"", request.method}:
                raise ApiError(
                    405,
                    f"{path}: method {request.method} not allowed; use {method}",
                    "method_not_allowed",
                )
            await _read(request)
            return await handler(request)
        except ApiError as error:
            return _refusal(error.status, error.message, error.code)
        except (RetryableError, ClosedError) as error:
            return _refusal(503, str(error), "unavailable")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(
                413, f"request body too large; at most {requests.BODY_LIMIT_BYTES} bytes", "too_large"
            )
        except Exception:
            logger.exception("request failed path=%s", path)
            return _refusal(500, "internal server error; see the log of the server", "failed")

    app = web.Application(client_max_size=requests.BODY_LIMIT_BYTES)
    app.router.add_route("*", "/{path:.*}", dispatch)
    return app


async def _read(request: web.Request) -> None:
    """Read the body, which the request keeps for its handler. A client that stops in the middle is refused."""
    try:
        async with asyncio.timeout(BODY_S):
            await request.read()
    except TimeoutError:
        raise ApiError(408, f"the request body did not arrive within {BODY_S:g} s", "timeout") from None


async def _nothing(path: str, _request: web.Request) -> web.Response:
    raise ApiError(404, f"{path}: no such path", "not_found")


def _refusal(status: int, message: str, code: str) -> web.Response:
    response = replied(responses.error_body(status, message, code), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    if status == 408:
        response.force_close()
    return response


def _denial(denied: Refused) -> web.Response:
    response = _refusal(denied.status, denied.reason, "refused")
    response.headers.update(denied.headers)
    return response


def replied(body: bytes, status: int = 200, kind: str = "application/json") -> web.Response:
    return web.Response(body=body, status=status, content_type=kind)


def port_before(address: Path) -> int | None:
    """Return the port that an earlier life published, if any."""
    with suppress(msgspec.DecodeError, ValueError):
        known = read_json(address, InferenceAddress)
        return urlsplit(known.url).port if known else None
    return None
