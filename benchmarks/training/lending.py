"""Weight update latency: from the optimizer's step to the first token of the new weights, mapped by vLLM or sent to it.

The step is one of the trainer's own optimizer, with the gradients of a real loss. The clock starts with its last byte
written, still inside `writing`, and stops when a completion of one token from that version has arrived: it excludes the
step and includes the transfer. Both sides have the same model (20 million parameters in float32) and an idle vLLM of
their own; the rival's weights use vLLM's own transfer, through a file in memory. The comparison is between the transfer
paths, not between vLLMs.

    python -m benchmarks lending
"""

import asyncio
import gc
import tempfile
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.harness.row import Row, within
from benchmarks.training.weights import Updated
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.vllm.client import VllmClient
from rolloutmq.services.inference.vllm.process import Vllm, running
from rolloutmq.trainer.policy.model import build_policy, write_identity
from rolloutmq.trainer.weights.posix_shm import WeightShare
from rolloutmq.trainer.weights.vllm_http import SentWeights

PYTHON: Final = Path(".venv-vllm/bin/python")
MODEL: Final = ModelConfig(
    hidden_size=512, layers=4, heads=8, mlp_size=1536, vocab_size=8192, max_positions=512
)
PROMPT: Final = [1, 5, 6, 7]
READY_S: Final = 300.0
ROUNDS: Final = 3
"""Rounds of many updates each."""


def missing() -> str:
    """Return why this cannot be measured; empty if it can."""
    return "" if PYTHON.exists() else "make .venv-vllm/.installed"


def rows() -> Iterator[Row]:
    """One row: milliseconds."""
    with tempfile.TemporaryDirectory(prefix="rolloutmq-bench-") as directory, asyncio.Runner() as runner:
        stack = AsyncExitStack()
        try:
            ours, theirs = runner.run(_both(stack, Path(directory), runner))
            for side in (ours, theirs):
                side.version()  # the first request is slower
            parameters = sum(one.numel() for one in ours.policy.parameters())
            yield within(
                "weights, from the optimizer's step to the first token of the new version in vLLM, ms",
                f"{parameters / 1e6:.0f} M parameters, float32",
                Updated(ours.policy, ours.weights, ours.version).update_ms,
                Updated(theirs.policy, theirs.weights, theirs.version).update_ms,
                "vLLM's own transfer over HTTP",
                None,
                ROUNDS,
            )
            for side in (ours, theirs):
                side.weights.close(unlink=True)
        finally:
            runner.run(stack.aclose())
            gc.collect()


@dataclass(frozen=True)
class Side:
    """One transfer path with a vLLM at its end, called through `runner`."""

    policy: Any
    weights: WeightShare | SentWeights
    client: VllmClient
    runner: asyncio.Runner

    def version(self) -> PolicyVersion:
        """Return the version of one token."""
        (found,) = self.runner.run(self.client.generate(PROMPT, Sampling(max_tokens=1), [2]))
        return found.spans[0].version


async def _both(stack: AsyncExitStack, directory: Path, runner: asyncio.Runner) -> tuple[Side, Side]:
    shared, vllm, client = await _started(stack, directory / "shared")
    layout = RunLayout(directory / "shared")
    share = WeightShare.create_or_adopt(shared, layout.weights, fused=True)
    said = await client.call("attach_weights", str(layout.weights))
    if "error" in said:
        raise RuntimeError(said["error"])
    ours = Side(shared, share, client, runner)
    sent, vllm, client = await _started(stack, directory / "sent")
    weights = await asyncio.to_thread(SentWeights.create, sent, f"unix:{vllm.socket}", Path("/dev/shm"))
    return ours, Side(sent, weights, client, runner)


async def _started(stack: AsyncExitStack, root: Path) -> tuple[Any, Vllm, VllmClient]:
    layout = RunLayout(root)
    root.mkdir(mode=0o700)
    policy = build_policy(MODEL, 0)
    write_identity(policy, MODEL, layout.model)
    config = RunConfig.model_validate(
        {
            "run": {"dir": str(root)},
            "inference": {"kind": "vllm", "max_batch": 16, "vllm": {"python": str(PYTHON.absolute())}},
        }
    )
    vllm = await stack.enter_async_context(running(config, layout, "inference", 0))
    client = await stack.enter_async_context(VllmClient.opened(vllm.socket))
    async with asyncio.timeout(READY_S):
        while not await client.answers():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.2)
    return policy, vllm, client
