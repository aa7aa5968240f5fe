"""A stand-in for vLLM's API server: the same interface on the same socket, with invented tokens.

It replaces `vllm.entrypoints.openai.api_server`. The first token of a prompt selects the behaviour:

    5   it answers after two seconds           7   it aborts the request, as if the weights could not be read
    6   it never answers                       8   it dies
    9   it never answers, and takes one step after the other
    others: it answers with the requested number of tokens, under the version of the weights
"""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from typing import Any

from aiohttp import web

from rolloutmq.trainer.weights.posix_shm import WeightShare


class Fake:
    def __init__(self) -> None:
        self.share: WeightShare | None = None
        self.steps = 0
        self.busy = 0
        self.refusal = os.environ.get("FAKE_VLLM_REFUSAL", "")

    async def health(self, _request: web.Request) -> web.Response:
        await self.hang("health")
        return web.Response()

    async def hang(self, where: str) -> None:
        if os.environ.get("FAKE_VLLM_HANGS") == where:
            await asyncio.sleep(3600.0)

    async def call(self, request: web.Request) -> web.Response:
        body = await request.json()
        if body["method"] == "sent_weights":
            return web.json_response({"results": [{"whole": bool(self.sent())}]})
        if body["method"] == "steps_taken":
            self.steps += self.busy
            return web.json_response({"results": [{"steps": self.steps}]})
        assert body["method"] == "attach_weights"
        await self.hang("attach")
        if self.share is not None and os.environ.get("FAKE_VLLM_REFUSES_ANOTHER"):
            return web.json_response({"results": [{"error": "tokenizer: it is another", "again": False}]})
        if self.refusal:
            return web.json_response({"results": [{"error": self.refusal, "again": False}]})
        address, tokenizer = body["args"]
        assert tokenizer
        self.share = WeightShare.open(Path(address))
        said = {"segment": self.share.path.name, "version": str(self.share.version)}
        return web.json_response({"results": [said]})

    async def paused(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_paused": False})

    async def version(self, _request: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.sent()})

    def sent(self) -> str:
        """Return what a test has put into a file, in place of what was sent."""
        file = Path(os.environ["FAKE_VLLM_SENT"])
        return file.read_text() if file.exists() else ""

    async def generate(self, request: web.Request) -> web.Response:
        body = await request.json()
        asked, first = body["sampling_params"], body["token_ids"][0]
        if first == 8:
            os.kill(os.getpid(), signal.SIGKILL)
        self.busy += first == 9
        try:
            await asyncio.sleep({5: 2.0, 6: 3600.0, 9: 3600.0}.get(first, 0.0))
        finally:
            self.busy -= first == 9
        choices = [self.choice(first, number, asked) for number in range(asked["n"])]
        return web.json_response({"choices": choices})

    def choice(self, first: int, number: int, asked: dict[str, Any]) -> dict[str, Any]:
        if first == 7:
            return {"index": number, "finish_reason": "abort"}
        ends = 3 + number in asked["stop_token_ids"]
        tokens = [3 + number] * (1 if ends else asked["max_tokens"])
        shared = self.share.version if self.share is not None else None
        label = self.sent() if shared is None else f"{shared.incarnation}.{shared.step}"
        return {
            "index": number,
            "finish_reason": "stop" if ends else "length",
            "token_ids": tokens,
            "logprobs": {"content": [{"token_id": token, "logprob": -float(first)} for token in tokens]},
            "weight_versions": [{"version": label, "start": 0, "end": len(tokens)}],
        }


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--uds")
    known, _ = parser.parse_known_args()
    if os.environ.get("FAKE_VLLM_DEAF"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    fake = Fake()
    app = web.Application()
    app.router.add_get("/health", fake.health)
    app.router.add_get("/is_paused", fake.paused)
    app.router.add_get("/weight_info", fake.version)
    app.router.add_post("/collective_rpc", fake.call)
    app.router.add_post("/inference/v1/generate", fake.generate)
    if os.environ.get("FAKE_VLLM_SLOW"):
        signal.pause()
    deaf = bool(os.environ.get("FAKE_VLLM_DEAF"))
    # Asked to end, it waits no longer for requests that it never answers.
    web.run_app(app, path=known.uds, handle_signals=not deaf, print=None, shutdown_timeout=0.1)


if __name__ == "__main__":
    main()
