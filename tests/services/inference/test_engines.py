"""Several engines of one run: same weights, work that survives each of them, a drain for each."""

import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partialmethod
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from tests.services.inference.tiny.test_server import Trainer, until

from rolloutmq.bus.engine_registry import engines_of
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import AckedGroup, InferenceAddress, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.broker.server import running_broker
from rolloutmq.services.inference import heartbeat
from rolloutmq.services.inference.tiny.server import serve
from rolloutmq.services.orchestrator.engines.pool import EnginePool
from rolloutmq.services.process.runner import Stop
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.runtime import Worker
from rolloutmq.trainer.weights.posix_shm import WeightShare

V = PolicyVersion
DEADLINE_S = 120.0
ENVIRONMENT = """
from rolloutmq import SingleTurn

class Digits(SingleTurn):
    max_tokens = 64

    def task(self, rng):
        return rng.randrange(1000)

    def prompt(self, task):
        return f"{task}="

    def score(self, task, completion):
        return float(len(completion.text))
"""


@pytest.fixture
def trainer(run_dir: Path, tmp_path: Path) -> Any:
    """A trainer's side whose run may have two engines."""
    (tmp_path / "digits.py").write_text(ENVIRONMENT)
    section = {"entry": "digits.py:Digits", "group_size": 4, "concurrency": 12, "pacing": False}
    config = RunConfig.model_validate(
        {
            "environment": {"digits": section},
            "inference": {"max_engines": 2, "max_batch": 8},
            "broker": {"durability": "memory"},
            "base_dir": tmp_path,
        }
    )
    made = Trainer(run_dir, config)
    made.start()
    yield made
    made.stop()


class Served:
    """An engine in this process."""

    def __init__(self, layout: RunLayout, name: str) -> None:
        self.layout = layout
        self.name = name
        self.stop, self.draining = Stop(), asyncio.Event()
        self.task = asyncio.create_task(serve(layout.root, self.stop, name, self.draining))

    @property
    def address(self) -> InferenceAddress | None:
        return read_json(self.layout.engine(self.name), InferenceAddress)

    async def post(self, session: aiohttp.ClientSession, **fields: Any) -> tuple[int, Any]:
        address = self.address
        assert address is not None
        body = {"prompt": "31=", "max_tokens": 4, "logprobs": 0, "return_token_ids": True, **fields}
        async with session.post(f"{address.url}/v1/completions", json=body) as response:
            return response.status, await response.json()


@asynccontextmanager
async def served(layout: RunLayout, *names: str) -> AsyncIterator[list[Served]]:
    """Run engines until the block ends."""
    engines = [Served(layout, name) for name in names]
    try:
        await until(lambda: all(one.address is not None for one in engines))
        yield engines
    finally:
        for one in engines:
            one.stop.request("the test is over")
        await asyncio.wait([one.task for one in engines])
    for one in engines:
        one.task.result()


async def test_all_engines_answer_with_the_version_of_the_last_step(trainer: Trainer) -> None:
    async with served(trainer.layout, "inference", "inference-1") as engines, aiohttp.ClientSession() as http:
        for step in range(1, 4):
            with trainer.share.writing(V(0, step)):
                pass
            for engine in engines:
                status, answer = await engine.post(http)
                assert status == 200
                (span,) = answer["choices"][0]["weight_versions"]
                assert span["version"] == {"incarnation": 0, "step": step}
        one, other = [(await engine.post(http, n=8, max_tokens=16))[1]["choices"] for engine in engines]
    # The same noise twice would be the same rollouts twice.
    assert [choice["token_ids"] for choice in one] != [choice["token_ids"] for choice in other]


async def test_a_draining_engine_answers_what_it_has_and_refuses_the_rest(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    monkeypatch.setattr(WeightShare, "reading", partialmethod(WeightShare.reading, patience_s=60.0))
    async with served(trainer.layout, "inference-1") as (engine,), aiohttp.ClientSession() as http:
        with trainer.share.writing(V(0, 1)):  # nothing is generated meanwhile
            asking = [asyncio.create_task(engine.post(http)) for _ in range(8)]
            await until(lambda: engine.address is not None and engine.address.in_hand == 8)
            engine.draining.set()
            await until(lambda: engine.address is not None and engine.address.draining)
            status, answer = await engine.post(http)
            assert (status, answer["error"]["code"]) == (503, "draining")
            assert engine.address is not None
            assert engine.address.in_hand == 8
            assert not engine.task.done()
        assert [status for status, _ in await asyncio.gather(*asking)] == [200] * 8
        await engine.task
        assert not trainer.layout.engine("inference-1").exists()


async def test_an_engine_that_is_to_go_before_it_serves_goes(trainer: Trainer) -> None:
    trainer.stop()
    async with asyncio.timeout(DEADLINE_S):
        draining = asyncio.Event()
        task = asyncio.create_task(serve(trainer.layout.root, Stop(), "inference-1", draining))
        await asyncio.sleep(0)
        draining.set()
        await task


async def test_a_name_that_is_none_is_refused(trainer: Trainer) -> None:
    with pytest.raises(ConfigError, match="'vllm' is not an engine"):
        await serve(trainer.layout.root, Stop(), "vllm")


async def first_engine(run_dir: Path) -> asyncio.subprocess.Process:
    """Start the first engine as the launcher does."""
    arguments = ["-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(run_dir)]
    with (run_dir / "inference.log").open("ab") as log:
        return await asyncio.create_subprocess_exec(
            sys.executable, *arguments, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=log
        )


class Crowd:
    """One worker of many rollouts, and the engines that it asks."""

    def __init__(self, layout: RunLayout, pool: EnginePool, worker: Worker) -> None:
        self.layout = layout
        self.pool = pool
        self.worker = worker

    async def until(self, condition: Callable[[], bool], wanted: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                self.pool.look({}, time.monotonic(), wanted)
                await asyncio.sleep(0.02)

    def asks(self, name: str) -> bool:
        """Whether the engine has requests in hand now."""
        return any(one.name == name and one.in_hand > 0 for one in engines_of(self.layout))


@pytest.mark.extended
async def test_engines_are_killed_and_drained_under_load_and_no_rollout_is_lost(trainer: Trainer) -> None:
    """Real processes: while a worker rolls out, the second engine is killed, comes back, and is drained."""
    layout = trainer.layout
    first = await first_engine(layout.root)
    try:
        with running_broker(trainer.config, layout) as broker:
            worker, stop = Worker(layout.root, "digits-0"), Stop()
            async with EnginePool(trainer.config, layout, f"load-{os.getpid()}", lambda _: None) as pool:
                crowd = Crowd(layout, pool, worker)
                await crowd.until(lambda: pool.ready == 2, 2)
                rolling = asyncio.create_task(worker.run(stop))
                await crowd.until(lambda: crowd.asks("inference") and crowd.asks("inference-1"), 2)
                await crowd.until(lambda: all(one.busy > 0.1 for one in engines_of(layout)), 2)
                killed = next(one.pid for one in engines_of(layout) if one.name == "inference-1")
                os.kill(killed, signal.SIGKILL)
                produced = worker.beat().produced
                await crowd.until(lambda: worker.beat().produced > produced + 30, 2)
                await crowd.until(lambda: pool.ready == 2 and crowd.asks("inference-1"), 2)  # its next life
                await crowd.until(lambda: not layout.engine("inference-1").exists(), 1)
                produced = worker.beat().produced
                await crowd.until(lambda: worker.beat().produced > produced + 30, 1)
                worker.start_draining()
                await rolling
            broker.stop()
        log = layout.log("inference-1").read_text()
        assert "draining in_hand=" in log
        assert "ended service=inference-1" in log
        acked = [
            msgspec.json.decode(line, type=AckedGroup)
            for line in layout.ack_log("digits-0").read_bytes().splitlines()
        ]
        assert worker.beat().abandoned == 0
        assert len({group.group_id for group in acked}) == len(acked) == worker.beat().produced
    finally:
        if first.returncode is None:
            first.kill()
        await first.wait()


async def test_a_client_goes_on_through_the_drain_of_one_engine(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat, "BEAT_S", 0.02)
    layout = trainer.layout
    async with served(layout, "inference", "inference-1") as (_, second):
        chosen = Engines(lambda: engines_of(layout), random.Random(0))
        async with OpenAIPolicy.opened(chosen) as policy:

            async def ask() -> int:
                """Ask until the engine has gone, and once more."""
                asked = 0
                while not second.task.done():
                    asked += len(await policy.complete("12=", max_tokens=4))
                return asked + len(await policy.complete("12=", max_tokens=4))

            asking = [asyncio.create_task(ask()) for _ in range(6)]
            await until(lambda: second.address is not None and second.address.in_hand > 0)
            second.draining.set()
            assert min(await asyncio.gather(*asking)) >= 2
