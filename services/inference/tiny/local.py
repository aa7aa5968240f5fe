"""A tiny server for this process alone: the policy of `[model]`, built or loaded here, whose weights nobody changes.

    main thread: the caller  --(HTTP over loopback)-->  this thread: handlers and batcher  --(thread)-->  policy

It answers as the server of a run does, on a port of the system's choice, and writes the identity of the policy into a
directory that ends with it. It has a thread of its own, so that it answers while a debugger holds the caller.
"""

import asyncio
import tempfile
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from rolloutmq.bus.transport.bindings import http_url
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.http_server.access import HttpAccess
from rolloutmq.services.http_server.listening import listening
from rolloutmq.services.inference.openai.requests import Limits
from rolloutmq.services.inference.tiny.generate import Generator
from rolloutmq.services.inference.tiny.policy import ServedPolicy, end_ids
from rolloutmq.services.inference.tiny.server import TinyServer
from rolloutmq.services.inference.tokenizer import TextTokenizer
from rolloutmq.trainer.policy.model import build_policy, policy_positions, policy_vocabulary, write_identity

HOST: Final = "127.0.0.1"


class OwnWeights:
    """The weights of a policy that this process has built; see `WeightShare` for the same of a run."""

    version = PolicyVersion()

    def keeping(self) -> AbstractContextManager[None]:
        """See `WeightShare.keeping`."""
        return nullcontext()

    def reading(self) -> AbstractContextManager[PolicyVersion]:
        """See `WeightShare.reading`."""
        return nullcontext(self.version)

    def is_torn(self) -> bool:
        """Return False."""
        return False

    def is_replaced(self) -> bool:
        """Return False."""
        return False

    def close(self) -> None:
        """Do nothing: the weights end with the policy."""


@dataclass(frozen=True)
class LocalServer:
    """A running server.

    Attributes:
        url: Its address, without `/v1`.
        text: Tokenizer of its policy.
    """

    url: str
    text: TextTokenizer


@contextmanager
def serving(run: RunConfig, seed: int) -> Iterator[LocalServer]:
    """Serve the policy of `[model]` for the duration of the block, in a thread. Blocks while the policy is made.

    Args:
        run: Configuration; its trainer, weights and addresses do not matter.
        seed: Seed of the weights of a built policy, and of the sampling.

    Raises:
        ConfigError: `model.path` holds no model.
        MissingError: It has no tokenizer.
    """
    with tempfile.TemporaryDirectory(prefix="rolloutmq-policy-") as directory:
        served = _served(run, RunLayout(Path(directory)), seed)
        ready: Future[str] = Future()
        stop: Future[None] = Future()
        thread = threading.Thread(
            target=_run, args=(TinyServer(served, run.inference), ready, stop), name="policy", daemon=True
        )
        thread.start()
        try:
            yield LocalServer(ready.result(), served.text)
        finally:
            stop.set_result(None)
            thread.join()


def _served(run: RunConfig, layout: RunLayout, seed: int) -> ServedPolicy:
    policy = build_policy(run.model, seed)
    write_identity(policy, run.model, layout.model)
    text, weights = TextTokenizer(layout.model), OwnWeights()
    limits = Limits(
        run.model.name, policy_positions(policy), policy_vocabulary(policy), run.inference.max_batch
    )
    generator = Generator(
        policy, weights, end_ids(layout, policy.config), text.decode, seed, fp32_head=run.trainer.fp32_head
    )
    return ServedPolicy(policy, weights, text, limits, generator)


def _run(server: TinyServer, ready: "Future[str]", stop: "Future[None]") -> None:
    """Serve in this thread until stopped."""
    try:
        asyncio.run(_serve(server, ready, stop))
    except BaseException as error:  # noqa: BLE001 - the border of the thread
        if not ready.done():
            ready.set_exception(error)


async def _serve(server: TinyServer, ready: "Future[str]", stop: "Future[None]") -> None:
    torch.set_num_threads(1)
    async with server.batcher:
        batches = asyncio.create_task(server.batcher.run(), name="batches")
        try:
            async with listening(server.app(HttpAccess()), HOST, 0, None) as port:
                await server.warm_up()
                ready.set_result(http_url(HOST, port))
                await asyncio.wrap_future(stop)
        finally:
            batches.cancel()
