"""HTTP server of a model: listening socket, routes, and errors in OpenAI's format."""

import errno
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from aiohttp import web

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import AddressInUseError, ClosedError, RetryableError
from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.inference.openai import requests, responses
from rolloutmq.services.inference.openai.requests import ApiError

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
"""Value of `Retry-After` for responses with status 503, in seconds."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


def application(routes: Mapping[str, tuple[str, Handler]]) -> web.Application:
    """Make an application from methods and handlers by path.

    One wildcard route dispatches all requests, so that unknown paths get an error in OpenAI's format too.
    """

    async def dispatch(request: web.Request) -> web.Response:
        try:
            method, handler = routes.get(request.path, ("", _nothing))
            if method not in {"", request.method}:
                raise ApiError(
                    405,
                    f"{request.path}: method {request.method} not allowed; use {method}",
                    "method_not_allowed",
                )
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
            logger.exception("request failed path=%s", request.path)
            return _refusal(500, "internal server error; see the log of the server", "failed")

    app = web.Application(client_max_size=requests.BODY_LIMIT_BYTES)
    app.router.add_route("*", "/{path:.*}", dispatch)
    return app


async def _nothing(request: web.Request) -> web.Response:
    raise ApiError(404, f"{request.path}: no such path", "not_found")


def _refusal(status: int, message: str, code: str) -> web.Response:
    response = replied(responses.error_body(status, message, code), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def replied(body: bytes, status: int = 200, kind: str = "application/json") -> web.Response:
    return web.Response(body=body, status=status, content_type=kind)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, before: int | None) -> AsyncIterator[int]:
    """Listen for the duration of the block, and yield the port.

    Args:
        port: Port, or 0 for any.
        before: Preferred port if `port` is 0.

    Raises:
        AddressInUseError: Another process uses the port.
    """
    runner = web.AppRunner(app, access_log=None, handler_cancellation=True, shutdown_timeout=1.0)
    await runner.setup()
    try:
        wanted = [port] if port else [before, 0] if before else [0]
        for candidate in wanted:
            try:
                await web.TCPSite(runner, host, candidate).start()
                break
            except OSError as error:
                if error.errno != errno.EADDRINUSE or candidate == 0:
                    raise
        else:
            raise AddressInUseError(f"{host}:{port}")
        yield int(runner.addresses[0][1])
    finally:
        await runner.cleanup()


def port_before(address: Path) -> int | None:
    """Return the port that an earlier life published, if any."""
    with suppress(ValueError, json.JSONDecodeError):
        known = read_json(address, InferenceAddress)
        return urlsplit(known.url).port if known else None
    return None
