"""The HTTP side of a served policy, whoever samples from it: the OpenAI dialect, drain, and its address while it lives.

An engine derives from `Front` and says how a job is sampled. What all engines do is here: they decode, answer, refuse,
count what is in hand, say where they are once they are warm, and drain when they are asked to.
"""

import asyncio
import itertools
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final, Protocol

from aiohttp import web

from rolloutmq.bus.endpoint import http_url
from rolloutmq.bus.engines import FIRST
from rolloutmq.bus.rundir import FILE_POLL_S
from rolloutmq.schemas.config import InferenceConfig
from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import RetryableError
from rolloutmq.services.inference import answers, protocol
from rolloutmq.services.inference.generate import Job
from rolloutmq.services.inference.listener import Handler, application, listening, port_before, replied
from rolloutmq.services.inference.presence import Presence
from rolloutmq.services.inference.protocol import ApiError, ChatRequest, Limits, TextRequest
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.text import Text
from rolloutmq.services.runner import Stop

logger = logging.getLogger(__name__)

WATCH_S: Final = 0.25
"""How often it is looked whether the trainer shares another segment."""


class Served(Protocol):
    """A policy as an engine has it."""

    @property
    def text(self) -> Text: ...
    @property
    def limits(self) -> Limits: ...
    @property
    def version(self) -> PolicyVersion: ...

    def is_torn(self) -> bool: ...


class Front(ABC):
    """Answers for one engine. What derives from it has `policy`, `sample` and `busy_s`."""

    def __init__(self) -> None:
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

    @property
    @abstractmethod
    def policy(self) -> Served:
        """What is served now; it may be another one later."""

    @property
    @abstractmethod
    def busy_s(self) -> float:
        """Seconds in which it generated so far."""

    @abstractmethod
    async def sample(self, job: Job) -> None:
        """Wait until the job has its results; see `Batcher.sample` for what it raises."""

    def trouble(self) -> str:
        """Say in a word why nothing can be sampled now, or nothing."""
        return "torn" if self.policy.is_torn() else ""

    def app(self) -> web.Application:
        """Make the application."""
        return application(self._routes)

    async def drained(self) -> None:
        """Take nothing new, and wait until all that is in hand is answered."""
        self.draining = True
        await self._empty.wait()

    async def warm_up(self) -> None:
        """Generate a few tokens, as soon as there are weights to do it with."""
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
        asked = protocol.text_request(await request.read())
        return await self._answer(asked, protocol.prompts_of(asked, self.policy.text.encode))

    async def _chat(self, request: web.Request) -> web.Response:
        asked = protocol.chat_request(await request.read())
        return await self._answer(asked, [self.policy.text.encode_chat(asked.messages)])

    async def _answer(self, asked: TextRequest | ChatRequest, prompts: list[list[int]]) -> web.Response:
        policy = self.policy
        job = protocol.job_of(asked, prompts, policy.limits)
        if self.draining:
            raise ApiError(503, "this engine ends; others go on", "draining")
        self.in_hand += 1
        self._empty.clear()
        try:
            await self.sample(job)
        finally:
            self.in_hand -= 1
            if not self.in_hand:
                self._empty.set()
        number, now = next(self._numbers), int(time.time())
        return replied(
            answers.answer(asked, job, policy.text, model=policy.limits.model, number=number, created=now)
        )

    async def _models(self, _request: web.Request) -> web.Response:
        return replied(answers.models(self.policy.limits.model, self._created, self.policy.limits.positions))

    async def _health(self, _request: web.Request) -> web.Response:
        status = self.trouble() or ("draining" if self.draining else "ok" if self.ready else "starting")
        return replied(answers.health(status, self.policy.version), 200 if status == "ok" else 503)


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
        await first(self.stop.event.wait(), self._draining.wait())


async def first(*waits: Coroutine[Any, Any, Any]) -> None:
    """Wait for the first of them; the others are cancelled, and have ended when it returns."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def serve_http(
    front: Front, address: Path, name: str, config: InferenceConfig, leaving: Leaving
) -> None:
    """Listen, warm up, say where it is; when asked to go, answer what is in hand and return.

    Args:
        front: Whose answers.
        address: File in which it says where it is.
        name: Of the engine; the first has the configured port, and goes back to it.
        config: Where to listen.
        leaving: Asks it to go.

    Raises:
        AddressInUseError: Somebody else has the configured port.
    """
    wanted = config.port if name == FIRST else 0
    async with listening(front.app(), config.host, wanted, port_before(address)) as port:
        await first(front.warm_up(), leaving.asked())
        if not front.ready:
            return
        url = http_url(config.host, port)
        presence = Presence(
            address, name, url, lambda: front.busy_s, lambda: front.in_hand, lambda: front.trouble()
        )
        telling = asyncio.create_task(presence.run(), name="presence")
        logger.info("serving name=%s url=%s", name, url)
        try:
            await leaving.asked()
            presence.draining = True
            presence.tell()
            logger.info("draining in_hand=%d", front.in_hand)
            await first(front.drained(), leaving.stop.event.wait())
        finally:
            telling.cancel()
            if name != FIRST:  # the first goes back to its port
                address.unlink(missing_ok=True)
