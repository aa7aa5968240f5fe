"""How a model is served over HTTP: the listening socket, the routes, and errors as OpenAI says them."""

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
from rolloutmq.schemas.records import InferenceAddress
from rolloutmq.services.inference import answers, protocol
from rolloutmq.services.inference.protocol import ApiError

logger = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1
"""What a client is told to wait when the weights are not to be read."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


def application(routes: Mapping[str, tuple[str, Handler]]) -> web.Application:
    """Make an application of methods and handlers by path.

    It has one route of its own: so that an unknown path, too, is answered in the dialect.
    """

    async def dispatch(request: web.Request) -> web.Response:
        """Find the handler and answer every error as OpenAI does."""
        try:
            method, handler = routes.get(request.path, ("", _nothing))
            if method not in {"", request.method}:
                raise ApiError(405, f"{request.path} takes {method} only", "method_not_allowed")
            return await handler(request)
        except ApiError as error:
            return _refusal(error.status, error.message, error.code)
        except (RetryableError, ClosedError) as error:
            return _refusal(503, str(error), "unavailable")
        except web.HTTPRequestEntityTooLarge:
            return _refusal(413, f"a request may have {protocol.BODY_LIMIT_BYTES} bytes", "too_large")
        except Exception:
            logger.exception("request failed path=%s", request.path)
            return _refusal(500, "the server failed; its log tells why", "failed")

    app = web.Application(client_max_size=protocol.BODY_LIMIT_BYTES)
    app.router.add_route("*", "/{path:.*}", dispatch)
    return app


async def _nothing(request: web.Request) -> web.Response:
    raise ApiError(404, f"there is nothing at {request.path}", "not_found")


def _refusal(status: int, message: str, code: str) -> web.Response:
    response = replied(answers.error_body(status, message, code), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def replied(body: bytes, status: int = 200, kind: str = "application/json") -> web.Response:
    """Return the response that carries a body."""
    return web.Response(body=body, status=status, content_type=kind)


@asynccontextmanager
async def listening(app: web.Application, host: str, port: int, before: int | None) -> AsyncIterator[int]:
    """Listen as long as the block lasts, and yield the port.

    Args:
        port: 0 for any.
        before: The port to prefer where any will do.

    Raises:
        AddressInUseError: Somebody else has the port.
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
    """Return the port at which an earlier life said that it was, if one did."""
    with suppress(ValueError, json.JSONDecodeError):
        known = read_json(address, InferenceAddress)
        return urlsplit(known.url).port if known else None
    return None
