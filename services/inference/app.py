"""HTTP front end of an inference engine: OpenAI's interface, vLLM's for tokens, drain, and the address file.

An engine derives from `InferenceApp` and implements `sample`. The base class decodes requests, answers or refuses them,
counts those in flight, publishes the engine's address once it is warm, and drains on request.
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from typing import Any, Final, Protocol
from uuid import uuid4

from aiohttp import web

from rolloutmq.bus.engine_registry import FIRST, is_of_other_host
from rolloutmq.bus.rundir import FILE_POLL_S
from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RetryableError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import HttpAccess, access_of
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.http_server.request_latencies import count_tokens
from rolloutmq.services.http_server.roles import Server
from rolloutmq.services.http_server.tls import server_tls
from rolloutmq.services.inference.heartbeat import EngineHeartbeat
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.openai import requests, responses, tokenize
from rolloutmq.services.inference.openai.requests import ApiError, ChatRequest, Limits, TextRequest
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.server import Handler, application, port_before, replied
from rolloutmq.services.inference.token_api.requests import token_job, token_request
from rolloutmq.services.inference.token_api.responses import token_response
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.services.process.descriptors import raise_descriptor_limit
from rolloutmq.services.process.latency_publisher import publishing, recorder_of
from rolloutmq.services.process.latency_recorder import LatencyRecorder
from rolloutmq.services.process.runner import Stop

logger = logging.getLogger(__name__)

WATCH_S: Final = 0.25
"""Seconds between two checks for a new shared-memory segment of the trainer."""


class ModelBackend(Protocol):
    """The policy of an engine."""

    @property
    def text(self) -> TextTokenizer: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def version(self) -> PolicyVersion: ...

    def is_torn(self) -> bool: ...


class InferenceApp(ABC):
    """Front end of one engine. Subclasses implement `policy`, `sample` and `busy_s`."""

    def __init__(self) -> None:
        self.ready = False
        self.draining = False
        self.in_hand = 0
        """Unanswered requests."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._routes: dict[str, tuple[str, Handler]] = {
            "/v1/completions": ("POST", self._text),
            "/v1/chat/completions": ("POST", self._chat),
            "/inference/v1/generate": ("POST", self._tokens),
            "/tokenize": ("POST", self._tokenize),
            "/detokenize": ("POST", self._detokenize),
            "/v1/models": ("GET", self._models),
            "/health": ("GET", self._health),
        }
        self._numbers = itertools.count(1)
        self._created = int(time.time())

    @property
    @abstractmethod
    def policy(self) -> ModelBackend:
        """The policy served now; may be replaced later."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds spent generating so far."""

    @abstractmethod
    async def sample(self, job: Job) -> None:
        """Wait until the job has its results; raises the errors of `Batcher.sample`."""

    def trouble(self) -> str:
        """Return one word for why nothing can be sampled now, or an empty string."""
        return "torn" if self.policy.is_torn() else ""

    def app(self, access: HttpAccess, latencies: LatencyRecorder | None = None) -> web.Application:
        return application(self._routes, access, latencies)

    async def drained(self) -> None:
        """Refuse new requests, and wait until all others are answered."""
        self.draining = True
        await self._empty.wait()

    async def warm_up(self) -> None:
        """Generate a few tokens as soon as the weights are there."""
        self.policy.text.warm_up()
        while True:
            try:
                await self.sample(Job([[0], [0, 0]], Sampling(n=2, max_tokens=2)))
            except RetryableError:
                await asyncio.sleep(FILE_POLL_S)
            else:
                self.ready = True
                return

    async def _text(self, request: web.Request) -> web.Response:
        asked = requests.text_request(await request.read())
        return await self._answer(asked, requests.prompts_of(asked, self.policy.text.encode))

    async def _chat(self, request: web.Request) -> web.Response:
        asked = requests.chat_request(await request.read())
        return await self._answer(asked, [self.policy.text.encode_chat(asked.messages)])

    async def _tokens(self, request: web.Request) -> web.Response:
        asked = token_request(await request.read())
        policy = self.policy
        job = token_job(asked, policy.limits)
        await self._sampled(job)
        body = token_response(
            asked,
            job,
            model=policy.limits.model,
            request_id=asked.request_id or uuid4().hex,
            created=int(time.time()),
        )
        return replied(body)

    async def _tokenize(self, request: web.Request) -> web.Response:
        policy = self.policy
        return replied(tokenize.tokenize_response(await request.read(), policy.text, policy.limits))

    async def _detokenize(self, request: web.Request) -> web.Response:
        policy = self.policy
        return replied(tokenize.detokenize_response(await request.read(), policy.text, policy.limits))

    async def _answer(self, asked: TextRequest | ChatRequest, prompts: list[list[int]]) -> web.Response:
        policy = self.policy
        job = requests.job_of(asked, prompts, policy.limits)
        await self._sampled(job)
        number, now = next(self._numbers), int(time.time())
        return replied(
            responses.completion_response(
                asked, job, policy.text, model=policy.limits.model, number=number, created=now
            )
        )

    async def _sampled(self, job: Job) -> None:
        """Wait until the job has its results, and count it meanwhile. Raises `ApiError` while the engine drains."""
        if self.draining:
            raise ApiError(503, "this server is draining; send the request to another one", "draining")
        self.in_hand += 1
        self._empty.clear()
        try:
            await self.sample(job)
            count_tokens(sum(len(one.token_ids) for one in job.results))
        finally:
            self.in_hand -= 1
            if not self.in_hand:
                self._empty.set()

    async def _models(self, _request: web.Request) -> web.Response:
        limits, root = self.policy.limits, str(self.policy.text.directory.absolute())
        return replied(responses.models(limits.model, self._created, limits.positions, root))

    async def _health(self, _request: web.Request) -> web.Response:
        status = self.trouble() or ("draining" if self.draining else "ok" if self.ready else "starting")
        return replied(responses.health(status, self.policy.version), 200 if status == "ok" else 503)


class Leaving:
    """The two orders that end an engine: stop and drain."""

    def __init__(self, stop: Stop, draining: asyncio.Event) -> None:
        self.stop = stop
        self._draining = draining

    def is_asked(self) -> bool:
        """Return whether the engine has been asked to stop or drain."""
        return self.stop.event.is_set() or self._draining.is_set()

    async def asked(self) -> None:
        """Wait for the order to stop or drain."""
        await first(self.stop.event.wait(), self._draining.wait())


async def first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of the coroutines; cancel the others and wait for their end."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def wanted_port(name: str, configured: int) -> int:
    """Return the port that an engine binds, also after a restart; 0 for any.

    The configured one is that of the first engine, or of the one that has joined: it has a configuration of its own.
    """
    return configured if name == FIRST or is_of_other_host(name) else 0


def _tells_version(run: RunConfig) -> bool:
    """Return whether an engine knows its version while it is idle, as in shared memory.

    Elsewhere it is that of the last request, and workers that wait for a newer one would wait for ever.
    """
    return run.inference.kind == "tiny" and run.weights.backend in {"posix_shm", "stream"}


async def serve_http(
    front: InferenceApp, layout: RunLayout, name: str, run: RunConfig, leaving: Leaving, run_id: str = ""
) -> None:
    """Listen, warm up, publish the address; when asked to end, answer the requests in flight and return.

    Args:
        front: The engine's front end.
        layout: The run directory, for the address file and for latency samples.
        name: Name of the engine, see `wanted_port`.
        run: Configuration, with host, port and token.
        leaving: Order to end.
        run_id: Id of the run, as it was in the directory before any weights were looked for.

    Raises:
        ConfigError: There is no token in `run.http_token_file`, or the certificate cannot be used.
        AddressInUseError: Another process uses the configured port.
    """
    config, address = run.inference, layout.engine(name)
    raise_descriptor_limit()
    latencies = recorder_of(name, run.telemetry)
    wanted = wanted_port(name, config.port)
    app = front.app(access_of(run, Server.ENGINE, config.host), latencies)
    async with (
        publishing(latencies, layout, run.telemetry.interval_s),
        listening(app, config.host, wanted, port_before(address), server_tls(run)) as port,
    ):
        await first(front.warm_up(), leaving.asked())
        if not front.ready:
            return
        url = http_url(config.host, port, run.run.scheme)
        heartbeat = EngineHeartbeat(
            address,
            name,
            url,
            lambda: front.busy_s,
            lambda: front.in_hand,
            lambda: front.trouble(),
            run_id,
            lambda: front.policy.version if _tells_version(run) else None,
        )
        beating = asyncio.create_task(heartbeat.run(), name="heartbeat")
        logger.info("serving name=%s url=%s", name, url)
        try:
            await leaving.asked()
            heartbeat.draining = True
            heartbeat.publish()
            logger.info("draining in_hand=%d", front.in_hand)
            await first(front.drained(), leaving.stop.event.wait())
        finally:
            beating.cancel()
            if name != FIRST:  # the first keeps its port for the next life
                address.unlink(missing_ok=True)
