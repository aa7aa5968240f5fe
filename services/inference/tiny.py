"""The tiny inference server, one engine of a run: its policy, behind the OpenAI dialect, on one core.

    trainer --(shared memory)--> ServedPolicy <--(thread)-- Batcher <-- HTTP handlers <-- workers

It starts in any order with the trainer: it waits for `weights.json` and `model/`, listens, generates once so that the
first request finds everything warm, and only then says in `inference.json` where it is. It goes back to the port that
it had before, so that those who know it need not look again. While the weights are half-written by a trainer that died,
every request and `/health` are answered 503, to be tried again.

SIGUSR1 drains: its address says so, what is in hand is answered, what comes is refused with 503, for another engine to
answer, and it ends with 0. An engine beyond the first takes its address file along.
"""

import asyncio
import logging
import random
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from rolloutmq.bus.engines import FIRST, engine_number
from rolloutmq.bus.refrain import Refrain
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.schemas.config import InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.layout import RunLayout
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.front import WATCH_S, Front, Leaving, serve_http
from rolloutmq.services.inference.generate import Job
from rolloutmq.services.inference.served import ServedPolicy
from rolloutmq.services.runner import Stop, run_service

logger = logging.getLogger(__name__)


class TinyServer(Front):
    """The HTTP side of one policy that is sampled from in this process."""

    def __init__(self, served: ServedPolicy, config: InferenceConfig) -> None:
        super().__init__()
        self.served = served
        self.batcher = Batcher[Job](
            lambda jobs, on_done: self.served.generate(jobs, on_done),
            max_rows=config.max_batch,
            max_waiting=config.max_waiting,
        )

    @property
    def policy(self) -> ServedPolicy:
        """See `Front.policy`."""
        return self.served

    @property
    def busy_s(self) -> float:
        """See `Front.busy_s`."""
        return self.batcher.busy_s

    async def sample(self, job: Job) -> None:
        """See `Batcher.sample`."""
        await self.batcher.sample(job)

    async def follow(self, layout: RunLayout, seed: int) -> None:
        """Attach anew whenever the trainer shares another segment, until cancelled."""
        refrain = Refrain()
        while True:
            # The address is another process's file: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            if not self.served.is_replaced():
                continue
            rows = self.served.limits.max_rows
            attach = partial(ServedPolicy.attach, layout, max_rows=rows, seed=seed, refrain=refrain)
            fresh = await self.batcher.call(attach)
            if fresh is not None:
                old, self.served = self.served, fresh
                await self.batcher.call(old.close)


async def serve(run_dir: Path, stop: Stop, name: str = FIRST, draining: asyncio.Event | None = None) -> None:
    """Serve the policy of a run until asked to stop, or to drain.

    Args:
        run_dir: The run.
        stop: Ends it at once; requests in hand are refused.
        name: Of the engine.
        draining: Set from outside to let it drain.

    Raises:
        ConfigError: This run uses an external server, or the name is none of an engine.
        AddressInUseError: Somebody else has the configured port.
        WeightsMismatchError: The trainer's weights are not of the model in `model/`.
    """
    run, layout = load_run(run_dir)
    if run.inference.kind != "tiny":
        raise ConfigError("inference.kind", "this run uses another server")
    if engine_number(name) < 0:
        raise ConfigError("engine", f"{name!r} is no engine; they are called {FIRST}, {FIRST}-1, ...")
    leaving = Leaving(stop, draining or asyncio.Event())
    seed = _seed(run.run.seed, name)
    served = await _attached(layout, run.inference, seed, leaving)
    if served is None:
        return
    server = TinyServer(served, run.inference)
    try:
        async with server.batcher, asyncio.TaskGroup() as tasks:
            work = [
                tasks.create_task(server.batcher.run()),
                tasks.create_task(server.follow(layout, seed)),
            ]
            await serve_http(server, layout.engine(name), name, run.inference, leaving)
            for task in work:
                task.cancel()
    finally:
        server.served.close()


def _seed(seed: int, name: str) -> int:
    """Return the seed of an engine's noise: two that drew the same would sample every answer twice."""
    return seed if name == FIRST else random.Random(f"{seed}/{name}").getrandbits(31)


async def _attached(
    layout: RunLayout, config: InferenceConfig, seed: int, leaving: Leaving
) -> ServedPolicy | None:
    logger.info("waiting for=%s", layout.weights)
    refrain = Refrain()
    while not leaving.is_asked():
        served = ServedPolicy.attach(layout, max_rows=config.max_batch, seed=seed, refrain=refrain)
        if served is not None:
            return served
        with suppress(TimeoutError):
            await asyncio.wait_for(leaving.asked(), FILE_POLL_S)
    return None


def main(run_dir: Path, name: str = FIRST) -> int:
    """Run the engine of that name as a process; return its exit code."""
    torch.set_num_threads(1)  # a second one would spin for the core that the trainer needs
    draining = asyncio.Event()
    return run_service(name, lambda stop: serve(run_dir, stop, name, draining), on_drain=draining.set)
