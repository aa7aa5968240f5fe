"""A small policy server with all failures of a real one."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]
PROMPT = [1, 2, 3]


class FakeServer:
    """Speaks the dialect; answers `sampled`.

    Attributes:
        failures: What the next requests get instead of an answer: a status, or None for a cut connection.
        step: Policy version that it stamps; None stamps nothing.
        asked: Bodies of the requests for completions so far.
        gate: Answers are held back while it is not set.
        missing: Choices by which its answers fall short.
        text: Text of its answers.
        code: Code of its errors.
        root: Directory of its model.
        sampler: What it answers to the tokens of a prompt, in place of `sampled`.
        logprobs: Tokens with a log-probability in an answer of tokens; None: all.
        tokenized: Bodies of the requests for tokens so far; a token is the code point of a character.
        tokenizing: Bodies of the next refusals of requests for tokens, with status 404.
        tokenizes: Whether it has the paths for them, as vLLM has.
    """

    def __init__(self) -> None:
        self.failures: list[int | None] = []
        self.step: int | None = 0
        self.asked: list[dict[str, Any]] = []
        self.tokenized: list[dict[str, Any]] = []
        self.tokenizes = True
        self.tokenizing: list[dict[str, Any]] = []
        self.models_asked = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.waiting = 0
        self.missing = 0
        self._peers: set[asyncio.Transport] = set()
        self.sampled = [4, 5]
        self.text = "answer"
        self.code: str | None = None
        self.url = ""
        self.root: str | None = None
        self.logprobs: int | None = None
        self.sampler: Callable[[list[int]], list[int]] | None = None
        self._runner: web.AppRunner | None = None

    async def start(self, port: int = 0) -> str:
        """Listen on a port, by default of the system's choice, and return the address."""
        app = web.Application()
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/completions", self._completions)
        app.router.add_post("/v1/chat/completions", self._completions)
        app.router.add_post("/inference/v1/generate", self._completions)
        app.router.add_post("/tokenize", self._tokenize)
        app.router.add_post("/detokenize", self._tokenize)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self.url

    async def stop(self) -> None:
        """Cut every connection and close the port, as a kill does."""
        if self._runner is not None:
            for peer in self._peers:
                peer.abort()
            self.gate.set()
            await self._runner.cleanup()
            self._runner = None

    @property
    def model(self) -> dict[str, Any]:
        """The model that it lists."""
        return {"id": "tiny", "object": "model", "root": self.root}

    @property
    def connections(self) -> int:
        """Connections that were ever used."""
        return len(self._peers)

    async def _models(self, _request: web.Request) -> web.Response:
        self.models_asked += 1
        return web.json_response({"object": "list", "data": [self.model]})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        assert request.transport is not None
        self._peers.add(request.transport)
        body = await request.json()
        self.asked.append(body)
        self.waiting += 1
        try:
            await self.gate.wait()
        finally:
            self.waiting -= 1
        if self.failures:
            failure = self.failures.pop(0)
            if failure is None:
                request.transport.abort()
                return web.Response()
            error = {"message": f"says {failure}", "code": self.code}
            return web.json_response({"error": error}, status=failure)
        if request.path.endswith("/generate"):
            return web.json_response(self._tokens(body))
        chat = request.path.endswith("/chat/completions")
        choices = [self._choice(index, chat, body.get("prompt")) for index in range(body["n"] - self.missing)]
        return web.Response(
            body=json.dumps({**self._about(chat), "choices": choices}),
            content_type="application/json",
        )

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        if not self.tokenizes:
            return web.json_response({"detail": "Not Found"}, status=404)
        body = await request.json()
        self.tokenized.append(body)
        await self.gate.wait()
        if self.tokenizing:
            return web.json_response(self.tokenizing.pop(0), status=404)
        if "tokens" in body:
            return web.json_response({"prompt": "".join(map(chr, body["tokens"]))})
        text = body.get("prompt")
        if text is None:
            text = "".join(f"[{one['role']}]{one['content']};" for one in body["messages"]) + "[assistant]"
        return web.json_response({"count": len(text), "max_model_len": 99, "tokens": list(map(ord, text))})

    def _tokens(self, body: dict[str, Any]) -> dict[str, Any]:
        sampled = self.sampled if self.sampler is None else self.sampler(body["token_ids"])
        content = [{"token_id": token, "logprob": -0.25} for token in sampled]
        choice = {
            "index": 0,
            "finish_reason": "stop",
            "token_ids": sampled,
            "logprobs": {"content": content[: self.logprobs]},
            **self._versions(sampled),
        }
        return {"request_id": "r", "prompt_token_ids": body["token_ids"], "choices": [choice]}

    def _versions(self, sampled: list[int]) -> dict[str, Any]:
        if self.step is None:
            return {}
        version = {"incarnation": 0, "step": self.step}
        return {"weight_versions": [{"start": 0, "end": len(sampled), "version": version}]}

    def _about(self, chat: bool) -> dict[str, Any]:
        usage = {"prompt_tokens": len(PROMPT), "completion_tokens": 2, "total_tokens": len(PROMPT) + 2}
        kind = "chat.completion" if chat else "text_completion"
        return {"id": "x", "object": kind, "created": 0, "model": "tiny", "usage": usage}

    def _choice(self, index: int, chat: bool, prompt: str | list[int] | None) -> dict[str, Any]:
        logprobs = [-0.25] * len(self.sampled)
        choice: dict[str, Any] = {
            "index": index,
            "finish_reason": "stop",
            "token_ids": self.sampled,
            "prompt_token_ids": PROMPT if prompt is None or isinstance(prompt, str) else prompt,
        }
        if chat:
            choice["message"] = {"role": "assistant", "content": self.text}
            told = [{"token": "a", "logprob": value, "top_logprobs": []} for value in logprobs]
            choice["logprobs"] = {"content": told}
        else:
            choice["text"] = self.text
            choice["logprobs"] = {"token_logprobs": logprobs, "tokens": ["a"] * len(logprobs)}
        return choice | self._versions(self.sampled)


@pytest.fixture
async def server() -> AsyncIterator[FakeServer]:
    """A server that listens."""
    async with _started() as made:
        yield made


@pytest.fixture
async def other_server() -> AsyncIterator[FakeServer]:
    """Another one, on another port."""
    async with _started() as made:
        yield made


@asynccontextmanager
async def _started() -> AsyncIterator[FakeServer]:
    made = FakeServer()
    await made.start()
    try:
        yield made
    finally:
        await made.stop()
