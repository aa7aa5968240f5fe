"""A gateway over real sockets: its ASGI application behind uvicorn, in the loop of the test, on a real broker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

from rolloutmq.schemas.config.broker import BrokerConfig
from rolloutmq.schemas.config.gateway import GatewayConfig
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.gateway.server import serve
from rolloutmq.services.process.runner import Stop

TRAINER: dict[str, Any] = {
    "wandb_group": "g",
    "wandb_project": "p",
    "batch_size": 4,
    "max_token_len": 64,
    "checkpoint_dir": "checkpoints",
    "save_checkpoint_interval": 7,
    "starting_step": 0,
    "num_steps": 100,
}
ENVIRONMENT: dict[str, Any] = {
    "max_token_length": 64,
    "desired_name": "maths",
    "weight": 1.0,
    "group_size": 2,
    "min_batch_allocation": None,
}


def scored(tag: int, sequences: int = 2, **changes: Any) -> dict[str, Any]:
    """Return a group that is known by its first token."""
    return {
        "tokens": [[tag, 5 + row] for row in range(sequences)],
        "masks": [[-100, 5 + row] for row in range(sequences)],
        "scores": [float(row) for row in range(sequences)],
        **changes,
    }


class Site:
    """One client of one gateway."""

    def __init__(self, session: aiohttp.ClientSession, layout: RunLayout) -> None:
        self.session = session
        self.layout = layout

    async def get(self, path: str, **options: Any) -> Any:
        async with self.session.get(path, **options) as answer:
            assert answer.status == 200, await answer.text()
            return await answer.json()

    async def post(self, path: str, body: Any, status: int = 200) -> Any:
        async with self.session.post(path, json=body) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def begin(self, **changes: Any) -> None:
        """Register a trainer and let it ask once."""
        await self.post("/register", {**TRAINER, **changes})
        assert (await self.get("/batch"))["batch"] is None

    async def enrol(self, **changes: Any) -> int:
        """Register an environment."""
        answer = await self.post("/register-env", {**ENVIRONMENT, **changes})
        assert answer["status"] == "success"
        env_id: int = answer["env_id"]
        return env_id

    async def standing(self, env_id: int) -> Any:
        return await self.get("/status-env", json={"env_id": env_id})

    async def tags(self) -> list[int] | None:
        """Return the first tokens of the groups of the next batch."""
        batch = (await self.get("/batch"))["batch"]
        return None if batch is None else [group["tokens"][0][0] for group in batch]


@asynccontextmanager
async def listening(run_dir: Path, **gateway: Any) -> AsyncIterator[Site]:
    """Run a gateway where a broker runs, or will."""
    config = GatewayConfig(enabled=True, port=0, **gateway)
    layout, stop = RunLayout(run_dir), Stop()
    layout.gateway.unlink(missing_ok=True)
    serving = asyncio.create_task(serve(run_dir, stop, config))
    try:
        while not layout.gateway.exists():
            assert not serving.done(), serving.result()
            await asyncio.sleep(0.01)
        url = json.loads(layout.gateway.read_text())["url"]
        async with aiohttp.ClientSession(url) as session:
            yield Site(session, layout)
    finally:
        stop.request("test")
        await serving


def configured(**broker: Any) -> RunConfig:
    return RunConfig(
        broker=BrokerConfig(**{"exact_wait_s": 0.2, **broker}),
        gateway=GatewayConfig(enabled=True, port=0),
    )


Opened = Callable[..., AbstractAsyncContextManager[Site]]
