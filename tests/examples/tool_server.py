"""A policy server that calls tools as its script says, in OpenAI's dialect with token ids, and a few ways to fail.

Its tokens are the code points of what is said, then `END`. A conversation is rendered as `transcript` says, so that
every prompt begins with the one before and what was sampled after it, and everything can be read back from the tokens.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from itertools import cycle
from typing import Any, Final

from aiohttp import web

END: Final = 0
QUESTION: Final = re.compile(r"\((\d+) \+ (\d+)\) \* (\d+)")
Message = Mapping[str, Any]

SCORED: Final = ("calculates", "at once", "raises", "unknown", "malformed", "never ends", "flaky")
LOST: Final = ("fails", "no tokens", "rewrites")
"""What becomes of the questions, in turn: all conversations about one question go the same way."""
ERRORS: Final = {"fails": 500, "flaky": 503}


def logprob(token: int) -> float:
    """Return what is said to be the log-probability of a token; exact in four bytes."""
    return -(token % 16 + 1) / 16


def rendered(message: Message) -> str:
    """Return what a message is in a prompt: its role, its content, its calls."""
    calls = [call["function"] for call in message.get("tool_calls") or ()]
    said = (message["content"] or "") + "".join(f"<{call['name']}({call['arguments']})>" for call in calls)
    return f"[{message['role']}]{said}{chr(END)}"


def transcript(messages: Sequence[Message]) -> str:
    """Return a conversation as the policy sees it."""
    return "".join(map(rendered, messages))


class ToolServer:
    """Speaks the dialect.

    Attributes:
        url: Where it is, with `/v1`.
        ways: What becomes of each question that was asked.
        failed: How many requests were answered by an error.
    """

    def __init__(self) -> None:
        self.url = ""
        self.ways: dict[str, str] = {}
        self.failed = 0
        self._begun = 0
        self._cycle = cycle(SCORED + LOST)

    @classmethod
    @asynccontextmanager
    async def listening(cls) -> AsyncIterator["ToolServer"]:
        """Listen on a port of the system's choice."""
        server = cls()
        app = web.Application()
        app.router.add_get("/v1/models", server._models)
        app.router.add_post("/v1/chat/completions", server._chat)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        try:
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            host, port = runner.addresses[0][:2]
            server.url = f"http://{host}:{port}/v1"
            yield server
        finally:
            await runner.cleanup()

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "scripted", "object": "model"}]})

    async def _chat(self, request: web.Request) -> web.Response:
        asked = await request.json()
        messages = asked["messages"]
        question = messages[0]["content"]
        way = self.ways.get(question) or self.ways.setdefault(question, next(self._cycle))
        again = int(request.headers["x-stainless-retry-count"])
        if way in ERRORS and not (way == "flaky" and (again or len(messages) > 1)):
            self.failed += 1
            return web.json_response({"error": {"message": f"this one {way}"}}, status=ERRORS[way])
        assert asked.items() >= {"model": "scripted", "logprobs": True, "return_token_ids": True}.items()
        assert asked["tools"][0]["function"]["name"] == "calculate"
        if len(messages) == 1:
            self._begun += 1
        return web.json_response(self._answer(way, messages))

    def _answer(self, way: str, messages: Sequence[Message]) -> dict[str, Any]:
        message = {"role": "assistant", **self._said(way, messages)}
        prompt = transcript(messages) + "[assistant]"
        if way == "rewrites" and len(messages) > 1:
            prompt = prompt.replace("calculate", "calc")
        sampled = list(map(ord, rendered(message).removeprefix("[assistant]")))
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if message["tool_calls"] else "stop",
            "logprobs": {"content": [_told(token) for token in sampled]},
        }
        if way != "no tokens":
            choice["token_ids"] = sampled
        return {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "scripted",
            "choices": [choice],
            "prompt_token_ids": list(map(ord, prompt)),
        }

    def _said(self, way: str, messages: Sequence[Message]) -> dict[str, Any]:
        """Say what the script has for this turn."""
        found = QUESTION.search(messages[0]["content"])
        assert found
        a, b, c = map(int, found.groups())
        told = [message["content"] for message in messages if message["role"] == "tool"]
        calls: list[tuple[str, str]] = []
        match way, len(told):
            case ("calculates" | "flaky", 0):
                calls = [call("add", a, b)]
            case ("calculates" | "flaky", 1):
                calls = [call("multiply", int(told[0]), c)]
            case ("at once", 0):
                calls = [call("add", a, b), call("multiply", a + b, c)]
            case ("raises", 0):
                calls = [call("divide", a, 0)]
            case ("unknown", 0):
                calls = [("search", json.dumps({"for": "help"}))]
            case ("malformed", 0):
                calls = [("calculate", '{"operation": "add", "a": ')]
            case ("never ends", _):
                calls = [call("add", a, b)]
            case ("rewrites", 0):
                calls = [call("add", a, b)]
        if calls:
            return {"content": None, "tool_calls": [_call(*one, number=len(messages)) for one in calls]}
        # Of each group some are right and some are wrong.
        answer = (a + b) * c + self._begun % 2
        return {"content": f"It is {answer}.", "tool_calls": None}


def call(operation: str, a: int, b: int) -> tuple[str, str]:
    """Return a call of the calculator: name and arguments."""
    return "calculate", json.dumps({"operation": operation, "a": a, "b": b})


def _told(token: int) -> dict[str, Any]:
    return {"token": chr(token), "logprob": logprob(token), "bytes": None, "top_logprobs": []}


def _call(name: str, arguments: str, number: int) -> dict[str, Any]:
    return {
        "id": f"call-{number}-{len(arguments)}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
