"""The policy behind one OpenAI-compatible HTTP server, or several that serve the same.

A server that is away costs a pause and not a rollout: connection errors and the statuses of an overloaded or
restarting server are tried again, at once where there is another server, else with growing and jittered pauses, until
the patience of the call is over; each attempt chooses among the servers that there are by then, see `engines`. Any
other status is the fault of the request, and final. An attempt has no deadline of its own: how long an honest answer
may take, nobody here knows, and asking twice would double the load of a server that is merely slow.

One client has one session: connections are kept alive and used again, so that a call costs one round trip.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, TypeVar

import aiohttp

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError
from rolloutmq.services.worker import dialect
from rolloutmq.services.worker.endpoint import Endpoint
from rolloutmq.services.worker.engines import Engine, Engines
from rolloutmq.services.worker.policy import MAX_TOKENS, ChatMessage, Completion

logger = logging.getLogger(__name__)

BACKOFF_S: Final = 0.05
"""First pause before another attempt; doubles."""
BACKOFF_MAX_S: Final = 1.0
"""Longest pause: what a run waits in vain after the server is back."""
CONNECT_S: Final = 5.0
"""A connection attempt into silence ends after this."""
KEEPALIVE_S: Final = 60.0
"""An idle connection is kept that long; the server may close it earlier."""
LOG_EVERY_S: Final = 5.0
"""How often it is said that the server is away."""
RETRIED: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that pass by themselves."""

_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_T = TypeVar("_T", bytes, Engine)


class OpenAIPolicy:
    """Asks the servers that `engines` chooses.

    Made by `opened`. Any number of calls may be under way at once, in one event loop.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Engines,
        known: Callable[[], PolicyVersion],
        patience_s: float,
    ) -> None:
        self._session = session
        self._engines = engines
        self._known = known
        self._patience_s = patience_s
        self._address = ""
        self._said_at = -LOG_EVERY_S
        self.retries = 0
        """Attempts that failed and were made again."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        engines: Engines,
        *,
        known: Callable[[], PolicyVersion] = PolicyVersion,
        patience_s: float = 300.0,
    ) -> AsyncIterator["OpenAIPolicy"]:
        """Open a client for as long as the block lasts.

        Args:
            engines: Chooses whom to ask.
            known: The newest policy version heard of, for a server that stamps none.
            patience_s: How long one call tries again before it gives up, in seconds.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=_HEADERS, cookie_jar=aiohttp.DummyCookieJar()
        ) as session:
            yield cls(session, engines, known, patience_s)

    async def complete(
        self,
        prompt: str | Sequence[int],
        *,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.complete`."""
        sampling = _sampling(n, max_tokens, temperature, stop)
        before = self._known()
        body = await self._ask(
            dialect.COMPLETIONS, lambda model: dialect.text_request(model, prompt, **sampling)
        )
        return _counted(n, dialect.text_completions(body, (before, max(before, self._known())), temperature))

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.chat`."""
        sampling = _sampling(n, max_tokens, temperature, stop)
        before = self._known()
        body = await self._ask(dialect.CHAT, lambda model: dialect.chat_request(model, messages, **sampling))
        return _counted(n, dialect.chat_completions(body, (before, max(before, self._known())), temperature))

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """See `Policy.endpoint`."""
        engine = await self._until(self._found)
        engine.in_hand += 1
        try:
            yield Endpoint(engine.url + dialect.BASE, engine.model, self._known(), self._known)
        finally:
            engine.in_hand -= 1

    async def _ask(self, path: str, request: Callable[[str], bytes]) -> bytes:
        """Ask until there is an answer, or until the patience is over."""
        return await self._until(lambda engine: self._answered(engine, path, request))

    async def _until(self, attempt: Callable[[Engine], Awaitable[_T | str]]) -> _T:
        """Attempt it with one engine after the other, until one attempt says no longer why it failed."""
        until = time.monotonic() + self._patience_s
        longest_s = BACKOFF_S
        while True:
            engine = self._engines.take(time.monotonic())
            last = await self._attempt(engine, attempt, until - time.monotonic())
            if not isinstance(last, str):
                return last
            now = time.monotonic()
            another = engine is not None and self._engines.pass_over(engine, now)
            pause_s = 0.0 if another else longest_s * random.uniform(0.5, 1.0)
            if now + pause_s >= until:
                raise PolicyUnavailableError(self._address, self._patience_s, last)
            self._complain(last)
            await asyncio.sleep(pause_s)
            longest_s = longest_s if another else min(2 * longest_s, BACKOFF_MAX_S)

    async def _attempt(
        self, engine: Engine | None, attempt: Callable[[Engine], Awaitable[_T | str]], limit_s: float
    ) -> _T | str:
        """Attempt it once; return what came of it, or why it is to be tried again."""
        if engine is None:
            return "it has not said yet where it is"
        self._address = engine.url
        engine.in_hand += 1
        try:
            async with asyncio.timeout(limit_s):
                return await attempt(engine)
        except TimeoutError:
            return "it does not answer"
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            engine.model = ""  # what comes back at this address may serve another
            return f"{type(error).__name__} {error}"
        finally:
            engine.in_hand -= 1

    async def _answered(self, engine: Engine, path: str, request: Callable[[str], bytes]) -> bytes | str:
        """Ask an engine; return its answer, or why there is none."""
        if not engine.model and (why := await self._find(engine)):
            return why
        status, body = await self._post(engine.url + path, request(engine.model))
        if status == 200:
            return body
        if status not in RETRIED:
            raise PolicyRefusedError(status, dialect.error_text(body))
        return f"status {status}, {dialect.error_text(body)}"

    async def _found(self, engine: Engine) -> Engine | str:
        """Return the engine if it answers now, or why it does not."""
        return await self._find(engine) or engine

    async def _find(self, engine: Engine) -> str:
        """Look up the model that is served there; return why not, or nothing."""
        async with self._session.get(engine.url + dialect.MODELS) as response:
            body = await response.read()
        if response.status == 200:
            engine.model = dialect.first_model(body)
            return ""
        text = dialect.error_text(body)
        if response.status not in RETRIED:
            raise PolicyRefusedError(response.status, f"{dialect.MODELS}: {text}")
        return f"status {response.status}, {text}"

    async def _post(self, url: str, body: bytes) -> tuple[int, bytes]:
        async with self._session.post(url, data=body) as response:
            return response.status, await response.read()

    def _complain(self, why: str) -> None:
        """Say that the server is away, once in a while."""
        self.retries += 1
        now = time.monotonic()
        if now - self._said_at >= LOG_EVERY_S:
            self._said_at = now
            logger.warning("policy away address=%s retries=%d why=%s", self._address, self.retries, why)


def _sampling(
    n: int, max_tokens: int, temperature: float, stop: str | Sequence[str] | None
) -> dict[str, Any]:
    # Said even where it is the default: that of a server may come from a model's directory.
    sampling: dict[str, Any] = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "top_p": 1.0}
    if stop is not None:
        sampling["stop"] = stop if isinstance(stop, str) else list(stop)
    return sampling


def _counted(n: int, completions: list[Completion]) -> list[Completion]:
    if len(completions) != n:
        raise PolicyRefusedError(200, f"its answer has {len(completions)} choices, {n} were asked for")
    return completions
