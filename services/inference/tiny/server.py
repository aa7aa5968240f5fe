"""The tiny inference server: one engine of a run, with OpenAI's interface, on one core.

    trainer --(shared memory)--> ServedPolicy <--(thread)-- Batcher <-- HTTP handlers <-- workers

It may start before the trainer: it waits for `weights.json` and `model/`, listens, generates once as a warm-up, and
then publishes its address in `inference.json`. After a restart it takes the same port, so clients need not look it up
again. While the weights are half-written by a dead trainer, requests and `/health` get status 503 and clients retry.

SIGUSR1 drains: the address file says so, requests in flight are answered, new ones get 503 so that another engine
answers them, and the process exits with 0. Engines other than the first remove their address file.
"""

import asyncio
import logging
import random
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

import torch

from rolloutmq.bus.engine_registry import FIRST, is_engine
from rolloutmq.bus.log_throttle import LogThrottle
from rolloutmq.bus.rundir import FILE_POLL_S, load_run
from rolloutmq.bus.transport.run_identity import run_id_of
from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.inference.app import WATCH_S, InferenceApp, Leaving, serve_http
from rolloutmq.services.inference.batcher import Batcher
from rolloutmq.services.inference.jobs import Job
from rolloutmq.services.inference.tiny.policy import ServedPolicy
from rolloutmq.services.process.runner import Stop, run_service

logger = logging.getLogger(__name__)


class TinyServer(InferenceApp):
    """The HTTP side of a policy sampled in this process."""

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
        """See `InferenceApp.policy`."""
        return self.served

    @property
    def busy_s(self) -> float:
        """See `InferenceApp.busy_s`."""
        return self.batcher.busy_s

    async def sample(self, job: Job) -> None:
        """See `Batcher.sample`."""
        await self.batcher.sample(job)

    async def follow(self, layout: RunLayout, seed: int) -> None:
        """Attach again whenever the trainer shares another segment, until cancelled."""
        refrain = LogThrottle()
        while True:
            # Another process writes the file: there is no event to wait for.
            await asyncio.sleep(WATCH_S)
            try:
                if not self.served.is_replaced():
                    continue
            except OSError as error:  # such as want of descriptors: the next look counts
                if refrain.is_due(str(error), time.monotonic()):
                    logger.warning("weights not looked for error=%s", error)
                continue
            rows = self.served.limits.max_rows
            attach = partial(ServedPolicy.attach, layout, max_rows=rows, seed=seed, refrain=refrain)
            try:
                fresh = await self.batcher.call(attach)
            except OSError as error:
                if refrain.is_due(str(error), time.monotonic()):
                    logger.warning("weights not attached error=%s", error)
                continue
            if fresh is not None:
                old, self.served = self.served, fresh
                await self.batcher.call(old.close)


async def serve(run_dir: Path, stop: Stop, name: str = FIRST, draining: asyncio.Event | None = None) -> None:
    """Serve the policy of a run until asked to stop or drain.

    Args:
        run_dir: The run.
        stop: Ends the server at once; requests in flight are refused.
        name: Name of the engine.
        draining: Set from outside to drain.

    Raises:
        ConfigError: `inference.kind` is not "tiny", or the name is not that of an engine.
        AddressInUseError: Another process uses the configured port.
        WeightsMismatchError: The trainer's weights belong to another model than that in `model/`.
    """
    run, layout = load_run(run_dir)
    if run.inference.kind != "tiny":
        raise ConfigError("inference.kind", f'must be "tiny" (got "{run.inference.kind}")')
    if not is_engine(name):
        raise ConfigError("engine", f"{name!r} is not an engine; the names are {FIRST}, {FIRST}-1, ...")
    leaving = Leaving(stop, draining or asyncio.Event())
    run_id = run_id_of(layout)
    seed = _seed(run.run.seed, name)
    ServedPolicy.prepare(run.model)
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
            await serve_http(server, layout, name, run, leaving, run_id)
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
    refrain = LogThrottle()
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
