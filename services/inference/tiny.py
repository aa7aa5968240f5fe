"""The tiny inference server, one engine of a run: its policy, behind the OpenAI dialect, on one core.

    trainer --(shared memory)--> ServedPolicy <--(thread)-- Batcher <-- HTTP handlers <-- workers

It starts in any order with the trainer: it waits for `weights.json` and `model/`, listens, generates once so that the
first request finds everything warm, and only then says in `inference.json` where it is. It goes back to the port that
it had before, so that those who know it need not look again. While the weights are half-written by a trainer that died,
every request and `/health` are answered 503, to be tried again.

SIGUSR1 drains: its address says so, what is in hand is answered, what comes is refused with 503, for another engine to
answer, and it ends with 0. An engine beyond the first takes its address file along.
"""

import asyncio
import errno
import itertools
import json
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import torch
from aiohttp import web

from rolloutmq.bus.endpoint import http_url
from rolloutmq.bus.engines import FIRST, engine_number
from rolloutmq.bus.rundir import FILE_POLL_S, load_run, read_json
from rolloutmq.schemas.config import InferenceConfig
from rolloutmq.schemas.errors import AddressInUseError, ClosedError, ConfigError, RetryableError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.schemas.records import InferenceAddress
from rolloutmq.services.inference import answers, protocol
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.generate import Job
from rolloutmq.services.inference.presence import Presence
from rolloutmq.services.inference.protocol import ApiError, ChatRequest, TextRequest
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.served import MODEL, ServedPolicy
from rolloutmq.services.runner import Stop, run_service

logger = logging.getLogger(__name__)

WATCH_S: Final = 0.25
"""How often it is looked whether the trainer shares another segment."""
RETRY_AFTER_S: Final = 1
"""What a client is told to wait when the weights are not to be read."""

Handler = Callable[[web.Request], Awaitable[web.Response]]


class TinyServer:
    """The HTTP side of one served policy."""

    def __init__(self, served: ServedPolicy, config: InferenceConfig) -> None:
        self.served = served
        self.batcher = Batcher(
            lambda jobs, on_done: self.served.generate(jobs, on_done),
            max_rows=config.max_batch,
            max_waiting=config.max_waiting,
        )
        self.ready = False
        self.draining = False
        self.in_hand = 0
        """Requests that are not answered yet."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self._text),
            "/v1/chat/completions": ("POST", self._chat),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }
        self._numbers = itertools.count(1)
        self._created = int(time.time())

    def app(self) -> web.Application:
        """Make the application. It has one route: so that an unknown path, too, is answered in the dialect."""
        app = web.Application(client_max_size=protocol.BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._dispatch)
        return app

    async def drained(self) -> None:
        """Take nothing new, and wait until all that is in hand is answered."""
        self.draining = True
        await self._empty.wait()

    async def warm_up(self) -> None:
        """Generate a few tokens, as soon as there are weights to do it with."""
        self.served.text.warm_up()
        while True:
            try:
                await self.batcher.sample(Job([[0], [0, 0]], Sampling(n=2, max_tokens=2)))
            except RetryableError:
                await asyncio.sleep(FILE_POLL_S)
            else:
                self.ready = True
                return

    async def follow(self, layout: RunLayout, seed: int) -> None:
        """Attach anew whenever the trainer shares another segment, until cancelled."""
        while True:
            # The address is another process's file: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            if not self.served.is_replaced():
                continue
            rows = self.served.limits.max_rows
            fresh = await self.batcher.call(partial(ServedPolicy.attach, layout, max_rows=rows, seed=seed))
            if fresh is not None:
                old, self.served = self.served, fresh
                await self.batcher.call(old.close)

    async def _dispatch(self, request: web.Request) -> web.Response:
        """Find the handler and answer every error as OpenAI does."""
        try:
            method, handler = self._routes.get(request.path, ("", self._nothing))
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

    async def _nothing(self, request: web.Request) -> web.Response:
        raise ApiError(404, f"there is nothing at {request.path}", "not_found")

    async def _text(self, request: web.Request) -> web.Response:
        asked = protocol.text_request(await request.read())
        return await self._answer(asked, protocol.prompts_of(asked, self.served.text.encode))

    async def _chat(self, request: web.Request) -> web.Response:
        asked = protocol.chat_request(await request.read())
        return await self._answer(asked, [self.served.text.encode_chat(asked.messages)])

    async def _answer(self, asked: TextRequest | ChatRequest, prompts: list[list[int]]) -> web.Response:
        served = self.served
        job = protocol.job_of(asked, prompts, served.limits)
        if self.draining:
            raise ApiError(503, "this engine ends; others go on", "draining")
        self.in_hand += 1
        self._empty.clear()
        try:
            await self.batcher.sample(job)
        finally:
            self.in_hand -= 1
            if not self.in_hand:
                self._empty.set()
        number, now = next(self._numbers), int(time.time())
        return _json(answers.answer(asked, job, served.text, model=MODEL, number=number, created=now))

    async def _models(self, _request: web.Request) -> web.Response:
        return _json(answers.models(MODEL, self._created, self.served.limits.positions))

    async def _health(self, _request: web.Request) -> web.Response:
        torn = self.served.is_torn()
        status = "torn" if torn else "draining" if self.draining else "ok" if self.ready else "starting"
        return _json(answers.health(status, self.served.version), 200 if status == "ok" else 503)


def _refusal(status: int, message: str, code: str) -> web.Response:
    response = _json(answers.error_body(status, message, code), status)
    if status == 503:
        response.headers["Retry-After"] = str(RETRY_AFTER_S)
    return response


def _json(body: bytes, status: int = 200) -> web.Response:
    return web.Response(body=body, status=status, content_type="application/json")


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


def _port_before(address: Path) -> int | None:
    with suppress(ValueError, json.JSONDecodeError):
        known = read_json(address, InferenceAddress)
        return urlsplit(known.url).port if known else None
    return None


async def serve(run_dir: Path, stop: Stop, name: str = FIRST, draining: asyncio.Event | None = None) -> None:
    """Serve the policy of a run until asked to stop, or to drain.

    Args:
        run_dir: The run.
        stop: Ends it at once; requests in hand are refused.
        name: Of the engine.
        draining: Set from outside to let it drain.

    Raises:
        ConfigError: This run uses an external server, or the name is none of an engine.
        AddressInUseError: Somebody else has the configured port.
        WeightsMismatchError: The trainer's weights are not of the model in `model/`.
    """
    run, layout = load_run(run_dir)
    if run.inference.kind != "tiny":
        raise ConfigError("inference.kind", "this run uses an external server")
    if engine_number(name) < 0:
        raise ConfigError("engine", f"{name!r} is no engine; they are called {FIRST}, {FIRST}-1, ...")
    leaving = Leaving(stop, draining or asyncio.Event())
    seed = _seed(run.run.seed, name)
    served = await _attached(layout, run.inference, seed, leaving)
    if served is None:
        return
    server = TinyServer(served, run.inference)
    try:
        async with server.batcher, asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(server.batcher.run()),
                tasks.create_task(server.follow(layout, seed)),
            ]
            await _serve_http(server, layout.engine(name), name, run.inference, leaving)
            for task in work:
                task.cancel()
    finally:
        server.served.close()


class Leaving:
    """The two ways in which an engine is asked to go."""

    def __init__(self, stop: Stop, draining: asyncio.Event) -> None:
        self.stop = stop
        self._draining = draining

    def is_asked(self) -> bool:
        """Whether it is to go, one way or the other."""
        return self.stop.event.is_set() or self._draining.is_set()

    async def asked(self) -> None:
        """Wait until it is."""
        await _first(self.stop.event.wait(), self._draining.wait())


def _seed(seed: int, name: str) -> int:
    """Return the seed of an engine's noise: two that drew the same would sample every answer twice."""
    return seed if name == FIRST else random.Random(f"{seed}/{name}").getrandbits(31)


async def _first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them; the others are cancelled."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _attached(
    layout: RunLayout, config: InferenceConfig, seed: int, leaving: Leaving
) -> ServedPolicy | None:
    logger.info("waiting for=%s", layout.weights)
    while not leaving.is_asked():
        served = ServedPolicy.attach(layout, max_rows=config.max_batch, seed=seed)
        if served is not None:
            return served
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.asked(), FILE_POLL_S)
    return None


async def _serve_http(
    server: TinyServer, address: Path, name: str, config: InferenceConfig, leaving: Leaving
) -> None:
    wanted = config.port if name == FIRST else 0
    async with listening(server.app(), config.host, wanted, _port_before(address)) as port:
        await _first(server.warm_up(), leaving.asked())
        if not server.ready:
            return
        url = http_url(config.host, port)
        presence = Presence(address, name, url, lambda: server.batcher.busy_s, lambda: server.in_hand)
        telling = asyncio.create_task(presence.run(), name="presence")
        logger.info("serving name=%s url=%s", name, url)
        try:
            await leaving.asked()
            presence.draining = True
            presence.tell()
            logger.info("draining in_hand=%d", server.in_hand)
            await _first(server.drained(), leaving.stop.event.wait())
        finally:
            telling.cancel()
            if name != FIRST:  # the first goes back to its port
                address.unlink(missing_ok=True)


def main(run_dir: Path, name: str = FIRST) -> int:
    """Run the engine of that name as a process; return its exit code."""
    torch.set_num_threads(1)  # a second one would spin for the core that the trainer needs
    draining = asyncio.Event()
    return run_service(name, lambda stop: serve(run_dir, stop, name, draining), on_drain=draining.set)
