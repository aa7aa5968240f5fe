"""HTTP client of the policy, for one or several OpenAI-compatible servers of the same model.

A server that is away costs a pause, not a rollout. Connection errors and the statuses of an overloaded or restarting
server are retried: at once if another server is available, otherwise with growing, jittered pauses, until the patience
of the call is over. Each attempt chooses among the servers registered at that moment (`engine_choice`). Any other
status is the request's fault and final. Attempts have no timeout of their own: nobody knows how long a valid answer may
take, and asking twice would double the load of a slow server.

A server that this host cannot reach is left to probes (`reach`). If no living one is within reach, a call gives up
early, so that workers of other hosts get its permit.

A client keeps its connections alive, so a call costs one round trip. Tokens of short texts and conversations are kept:
the members of a group ask for the same ones.
"""

import asyncio
import logging
import random
import ssl
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, NamedTuple, TypeVar

import aiohttp

from rolloutmq.schemas.errors import PolicyRefusedError, PolicyUnavailableError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import authorization, with_token
from rolloutmq.services.worker.completion import MAX_TOKENS, ChatMessage, Completion, TokenIds
from rolloutmq.services.worker.openai import wire
from rolloutmq.services.worker.openai.call_latencies import CallLatencies
from rolloutmq.services.worker.openai.call_trace import traced_call
from rolloutmq.services.worker.openai.engine_choice import Engine, Engines
from rolloutmq.services.worker.openai.reach import UNREACHED, Reach, reason_of
from rolloutmq.services.worker.openai.stitching import Stitcher
from rolloutmq.services.worker.openai.wire import Endpoint
from rolloutmq.services.worker.trajectory import Trajectory, check_messages, continued, tokens_so_far

logger = logging.getLogger(__name__)

BACKOFF_S: Final = 0.05
"""First pause between attempts, in seconds; doubles."""
BACKOFF_MAX_S: Final = 1.0
"""Longest pause, in seconds: the most a run loses after the server is back."""
CONNECT_S: Final = 5.0
"""Timeout of a connection attempt, in seconds."""
KEEPALIVE_S: Final = 60.0
"""Seconds to keep an idle connection; the server may close it earlier."""
LOG_EVERY_S: Final = 5.0
"""Seconds between two warnings about unavailable servers."""
KEPT: Final = 1024
"""Most tokenized texts and conversations that are kept."""
KEPT_TOKENS: Final = 1 << 18
"""Most tokens that are kept, of all of them together: about 10 MB."""
KEPT_BYTES: Final = 4096
"""Longest request for tokens whose answer is kept."""
RETRIED: Final = frozenset({408, 425, 429, 502, 503, 504})
"""Statuses that are retried."""

_HEADERS: Final = {"Content-Type": "application/json", "Accept-Encoding": "identity"}
_T = TypeVar("_T", bytes, Engine)


TokenOf = Callable[[Engine], str]
"""Returns the token that an engine gets; empty for none."""


def _no_token(_engine: Engine) -> str:
    return ""


class OpenAIPolicy:
    """A `Policy` over HTTP; `engines` chooses the server of each attempt.

    Made by `opened`. Any number of calls may run concurrently in one event loop.
    """

    def __init__(
        self,
        session: aiohttp.ClientSession,
        engines: Engines,
        known: Callable[[], PolicyVersion],
        patience_s: float,
        token: TokenOf,
        latencies: CallLatencies,
        root: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._root = root
        self._tls = tls
        self._latencies = latencies
        self._session = session
        self._engines = engines
        self.reach = Reach(engines, self._find)
        self._known = known
        self._patience_s = patience_s
        self._token = token
        self._logged_at = -LOG_EVERY_S
        self._stitcher = Stitcher(self)
        self._tokens: dict[bytes, list[int]] = {}
        self._tokens_kept = 0
        self._asking: dict[bytes, asyncio.Future[list[int]]] = {}
        """Requests for tokens under way; equal ones wait for them."""
        self.retries = 0
        """Failed attempts that were repeated."""

    @classmethod
    @asynccontextmanager
    async def opened(
        cls,
        engines: Engines,
        *,
        known: Callable[[], PolicyVersion] = PolicyVersion,
        patience_s: float = 300.0,
        token: TokenOf = _no_token,
        latencies: CallLatencies | None = None,
        root: str = "",
        tls: ssl.SSLContext | None = None,
    ) -> AsyncIterator["OpenAIPolicy"]:
        """Open a client for the duration of the block.

        Args:
            engines: Chooses the server.
            known: Returns the newest known policy version, for servers that report none.
            patience_s: Seconds of retries before a call gives up.
            token: Returns the token of a server, empty if it needs none.
            latencies: Measures the calls.
            root: Directory of the model's tokenizer on this host, in place of what the server names.
            tls: What to trust; None for the authorities of the system.
        """
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEPALIVE_S, ssl=tls or True)
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S)
        async with aiohttp.ClientSession(
            connector=connector,
            timeout=timeout,
            headers=_HEADERS,
            cookie_jar=aiohttp.DummyCookieJar(),
        ) as session:
            policy = cls(session, engines, known, patience_s, token, latencies or CallLatencies(), root, tls)
            try:
                yield policy
            finally:
                await policy.reach.close()

    async def complete(
        self,
        prompt: str | TokenIds,
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.complete`."""
        given = prompt
        if after is not None:
            new = await self.tokenize(prompt) if isinstance(prompt, str) else prompt
            given = continued(after, new, is_text=isinstance(prompt, str))
        sampling = _sampling(n, max_tokens, temperature, stop)
        before = self._known()
        body = await self._ask(wire.COMPLETIONS, lambda model: wire.text_request(model, given, **sampling))
        return _counted(n, wire.text_completions(body, (before, max(before, self._known())), temperature))

    async def chat(
        self,
        messages: Sequence[ChatMessage],
        *,
        after: Trajectory | None = None,
        n: int = 1,
        max_tokens: int = MAX_TOKENS,
        temperature: float = 1.0,
        stop: str | Sequence[str] | None = None,
    ) -> list[Completion]:
        """See `Policy.chat`."""
        if after is not None:
            prompt = await self.render(messages, after=after)
            return await self.complete(prompt, n=n, max_tokens=max_tokens, temperature=temperature, stop=stop)
        check_messages(messages, after)
        sampling = _sampling(n, max_tokens, temperature, stop)
        before = self._known()
        body = await self._ask(wire.CHAT, lambda model: wire.chat_request(model, messages, **sampling))
        return _counted(n, wire.chat_completions(body, (before, max(before, self._known())), temperature))

    async def tokenize(self, text: str) -> list[int]:
        """See `Policy.tokenize`."""
        return await self._tokenized(lambda model: wire.tokenize_request(model, text)) if text else []

    async def detokenize(self, tokens: TokenIds) -> str:
        """See `Policy.detokenize`."""
        if not len(tokens):
            return ""
        return wire.text_of(
            await self._ask(wire.DETOKENIZE, lambda model: wire.detokenize_request(model, tokens))
        )

    async def render(
        self,
        messages: Sequence[ChatMessage],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        after: Trajectory | None = None,
    ) -> list[int]:
        """See `Policy.render`."""
        check_messages(messages, after)
        if after is None:
            return await self.rendered(messages, tools)
        tokens = tokens_so_far(after)
        return tokens + await self._stitcher.following(tokens, messages, tools)

    async def rendered(
        self, messages: Sequence[ChatMessage], tools: Sequence[Mapping[str, Any]] | None
    ) -> list[int]:
        """Return the tokens of a whole conversation by the chat template."""
        return await self._tokenized(lambda model: wire.render_request(model, messages, tools))

    async def _tokenized(self, request: Callable[[str], bytes]) -> list[int]:
        """Return the tokens of a request, from an equal one if there was one or one is under way."""
        asked = request("")
        if len(asked) > KEPT_BYTES:
            return wire.tokens_of(await self._ask(wire.TOKENIZE, request))
        until = time.monotonic() + self._patience_s
        while asked not in self._tokens and (other := self._asking.get(asked)) is not None:
            await asyncio.wait([other])
            if other.cancelled():
                continue
            is_away = isinstance(other.exception(), PolicyUnavailableError)
            if not is_away or time.monotonic() >= until:
                return list(other.result())
        if (known := self._tokens.get(asked)) is not None:
            return list(known)
        answer = self._asking[asked] = asyncio.get_running_loop().create_future()
        try:
            tokens = wire.tokens_of(await self._ask(wire.TOKENIZE, request, until))
        except Exception as error:
            answer.set_exception(error)
            answer.exception()  # it is told, whether others wait or not
            raise
        else:
            answer.set_result(tokens)
            self._keep(asked, tokens)
            return list(tokens)
        finally:
            answer.cancel()  # has no effect unless this call was cancelled: another one asks then
            del self._asking[asked]

    def _keep(self, asked: bytes, tokens: list[int]) -> None:
        """Keep an answer instead of the oldest ones."""
        self._tokens[asked] = tokens
        self._tokens_kept += len(tokens)
        while len(self._tokens) > KEPT or self._tokens_kept > KEPT_TOKENS:
            self._tokens_kept -= len(self._tokens.pop(next(iter(self._tokens))))

    @asynccontextmanager
    async def endpoint(self) -> AsyncIterator[Endpoint]:
        """See `Policy.endpoint`."""
        engine = await self._until(self._found)
        engine.in_hand += 1
        try:
            base_url = with_token(engine.url, self._token(engine)) + wire.BASE
            root = self._root or engine.root
            yield Endpoint(base_url, engine.model, self._known(), self._known, root=root, tls=self._tls)
        finally:
            engine.in_hand -= 1

    async def _ask(self, path: str, request: Callable[[str], bytes], until: float | None = None) -> bytes:
        return await self._until(lambda engine: self._answered(engine, path, request), until)

    async def _until(
        self, attempt: Callable[[Engine], Awaitable[_T | str]], until: float | None = None
    ) -> _T:
        """Repeat the attempt, each time with a chosen engine, until it returns something other than an error
        text, or its patience ends; `until` is that of a caller who has waited.
        """
        until = time.monotonic() + self._patience_s if until is None else until
        began, longest_s, address = time.monotonic(), BACKOFF_S, ""
        while True:
            self.reach.probe()
            engine = self._engines.take(time.monotonic())
            last = await self._attempt(engine, attempt, until - time.monotonic())
            if not isinstance(last, _Retry):
                return last
            now, another = time.monotonic(), last.another
            pause_s = 0.0 if another else longest_s * random.uniform(0.5, 1.0)
            address = address if engine is None else engine.url
            if now + pause_s >= until:
                raise PolicyUnavailableError(address, self._patience_s, last.why)
            if self.reach.is_lost:
                raise PolicyUnavailableError(address, now - began, last.why)
            self._complain(address, last.why)
            await asyncio.sleep(pause_s)
            longest_s = longest_s if another else min(2 * longest_s, BACKOFF_MAX_S)

    async def _attempt(
        self, engine: Engine | None, attempt: Callable[[Engine], Awaitable[_T | str]], limit_s: float
    ) -> "_T | _Retry":
        """Attempt it once; return the result, or the reason to retry."""
        if engine is None:
            return _Retry(self._engines.missing, another=False)
        engine.in_hand += 1
        try:
            async with asyncio.timeout(limit_s):
                result = await attempt(engine)
        except UNREACHED as error:
            engine.model = ""
            return _Retry(reason_of(error), self.reach.missed(engine, error))
        except TimeoutError:
            # The patience may end during a connection that would not have been made either.
            return self._passed(engine, engine.away or "the request timed out")
        except (aiohttp.ClientConnectionError, aiohttp.ClientPayloadError) as error:
            engine.model = ""  # a restarted server may serve another model
            return self._passed(engine, f"{type(error).__name__} {error}")
        finally:
            engine.in_hand -= 1
        self.reach.reached(engine)
        return self._passed(engine, result) if isinstance(result, str) else result

    def _passed(self, engine: Engine, why: str) -> "_Retry":
        return _Retry(why, self._engines.pass_over(engine, time.monotonic()))

    async def _answered(self, engine: Engine, path: str, request: Callable[[str], bytes]) -> bytes | str:
        """Post a request to an engine; return the body, or the reason to retry."""
        if not engine.model and (why := await self._find(engine)):
            return why
        with (
            traced_call(engine.name or engine.url, path) as call,
            self._latencies.attempt(engine.name, path) as attempt,
        ):
            status, body = await self._post(engine, path, request(engine.model))
            call.status = status
            attempt.answered(status, body)
            call.tokens, call.prompt_tokens = attempt.tokens, attempt.prompt_tokens
        if status == 200:
            return body
        if status == 404 and path in {wire.TOKENIZE, wire.DETOKENIZE} and not wire.lacks_model(body):
            raise PolicyRefusedError(status, wire.without_tokenizer(path))
        if status not in RETRIED:
            raise PolicyRefusedError(status, wire.error_text(body))
        return f"status {status}, {wire.error_text(body)}"

    async def _found(self, engine: Engine) -> Engine | str:
        return await self._find(engine) or engine

    async def _find(self, engine: Engine) -> str:
        """Look up the model of an engine; return the reason to retry, or an empty string."""
        headers = authorization(self._token(engine))
        async with self._session.get(engine.url + wire.MODELS, headers=headers) as response:
            body = await response.read()
        if response.status == 200:
            model = wire.first_model(body)
            engine.model, engine.root = model.id, model.root or ""
            return ""
        text = wire.error_text(body)
        if response.status not in RETRIED:
            raise PolicyRefusedError(response.status, f"{wire.MODELS}: {text}")
        return f"status {response.status}, {text}"

    async def _post(self, engine: Engine, path: str, body: bytes) -> tuple[int, bytes]:
        headers = authorization(self._token(engine))
        async with self._session.post(engine.url + path, data=body, headers=headers) as response:
            return response.status, await response.read()

    def _complain(self, address: str, why: str) -> None:
        """Count a retry, and log it once in a while."""
        self.retries += 1
        now = time.monotonic()
        if now - self._logged_at >= LOG_EVERY_S:
            self._logged_at = now
            logger.warning("policy unavailable address=%s retries=%d error=%s", address, self.retries, why)


class _Retry(NamedTuple):
    """A failed attempt: the reason, and whether another engine can be asked at once."""

    why: str
    another: bool


def _sampling(
    n: int, max_tokens: int, temperature: float, stop: str | Sequence[str] | None
) -> dict[str, Any]:
    # Always explicit: the defaults of a server may come from the model's directory.
    sampling: dict[str, Any] = {"n": n, "max_tokens": max_tokens, "temperature": temperature, "top_p": 1.0}
    if stop is not None:
        sampling["stop"] = stop if isinstance(stop, str) else list(stop)
    return sampling


def _counted(n: int, completions: list[Completion]) -> list[Completion]:
    if len(completions) != n:
        raise PolicyRefusedError(200, f"{len(completions)} choices in the response, {n} were requested")
    return completions
