"""An inference server with the interface of OpenAI that says what its script says: the numbers after the one asked."""

import asyncio
import sys
from typing import Any, Final

from aiohttp import web

LATENCY_S: Final = 0.003
LENGTH: Final = 12


async def complete(request: web.Request) -> web.Response:
    """Answer a chat with `n` rows of numbers, each with the log-probability that `logprob` gives it."""
    asked = await request.json()
    await asyncio.sleep(LATENCY_S)
    last = asked["messages"][-1]["content"]
    number = int(last) if last.isdecimal() else 0
    choices = [_choice(number, row) for row in range(asked.get("n") or 1)]
    usage = dict.fromkeys(("prompt_tokens", "completion_tokens", "total_tokens"), 1)
    head = {"id": "x", "object": "chat.completion", "created": 0, "model": asked["model"]}
    return web.json_response({**head, "choices": choices, "usage": usage})


def answer(number: int, row: int) -> list[int]:
    """Return what is said."""
    return [(number + row + step) % 1000 for step in range(1, LENGTH + row)]


def logprob(token: int) -> float:
    """Return how likely that was."""
    return -(token + 1) / 1001


def _choice(number: int, row: int) -> dict[str, Any]:
    said = answer(number, row)
    content: list[dict[str, Any]] = [
        {"token": str(token), "logprob": logprob(token), "bytes": None, "top_logprobs": []} for token in said
    ]
    message = {"role": "assistant", "content": " ".join(map(str, said))}
    return {"index": row, "finish_reason": "stop", "message": message, "logprobs": {"content": content}}


if __name__ == "__main__":
    app = web.Application()
    app.router.add_post("/v1/chat/completions", complete)
    web.run_app(app, host="127.0.0.1", port=int(sys.argv[1]), print=None, access_log=None)
