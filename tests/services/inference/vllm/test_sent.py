"""Weight transfer to a real vLLM over its HTTP interface. `make test-vllm` runs them."""

import asyncio
import copy
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.services.inference.vllm.support.lent import Lender, forward, long_prompt, missing, model_of

from rolloutmq.schemas.errors import WeightsMismatchError, WeightsNotSentError, WeightsTornError
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.services.inference.jobs import Continuation
from rolloutmq.services.inference.sampling import Sampling
from rolloutmq.services.inference.vllm.client import EngineFailedError, VllmClient
from rolloutmq.services.inference.vllm.process import running
from rolloutmq.trainer.policy.device import moved
from rolloutmq.trainer.weights.layout import TensorSpec
from rolloutmq.trainer.weights.share import Level
from rolloutmq.trainer.weights.vllm_http import SafetensorsFile, SentWeights

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

EXACT = 1e-5
V = PolicyVersion


def worst(model: Any, prompt: list[int], found: list[Continuation]) -> float:
    return max(
        float((torch.tensor(one.logprobs) - forward(model, prompt, one.token_ids)).abs().max())
        for one in found
    )


def step(model: Any, optimizer: torch.optim.Optimizer, sent: SentWeights, version: PolicyVersion) -> None:
    tokens = torch.randint(3, 40, (4, 24), generator=torch.Generator().manual_seed(version.step)).to(
        model.device
    )
    model(input_ids=tokens, labels=tokens).loss.backward()
    with sent.writing(version):
        optimizer.step()
    optimizer.zero_grad()


@pytest.fixture
def made(tmp_path: Path) -> Iterator[Lender]:
    trainer = Lender(tmp_path / "run", "qwen2")
    yield trainer
    trainer.close()


async def ready(client: VllmClient) -> None:
    async with asyncio.timeout(300):
        while not await client.answers():  # noqa: ASYNC110 - it is another process
            await asyncio.sleep(0.2)


WHOLE = SafetensorsFile.write


def damaged(
    parcel: SafetensorsFile,
    described: Iterable[TensorSpec],
    tensors: Iterable[tuple[TensorSpec, torch.Tensor]],
    metadata: Mapping[str, str],
) -> None:
    """Leave one tensor out of the file."""
    left_out = "model.layers.1.self_attn.k_proj.weight"
    pairs = [(spec, one) for spec, one in tensors if spec.name != left_out]
    WHOLE(parcel, [spec for spec in described if spec.name != left_out], pairs, metadata)


async def test_a_tied_model_is_sent_and_sent_again(
    made: Lender, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One start: steps, caches, what is under way, files that do not fit, a transfer that fails and is restored."""
    run, layout = made.config, made.layout
    short, long = [1, 6, 7, 8], long_prompt(3, 300)
    async with running(run, layout, "inference", 0) as vllm, VllmClient.opened(vllm.socket) as client:
        await ready(client)
        url = f"unix:{vllm.socket}"

        async def ask(prompt: list[int], n: int = 4, tokens: int = 24) -> list[Continuation]:
            return await client.generate(prompt, Sampling(n=n, max_tokens=tokens), [2])

        # Nothing was sent yet: the dummy weights that it started with are never sampled from.
        with pytest.raises(EngineFailedError):
            await ask(short)

        model = model_of("qwen2", seed=3)
        sent = await asyncio.to_thread(SentWeights.create, model, url, tmp_path, version=V(2, 0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for number in range(1, 4):
            for prompt in (short, long, long):
                found = await ask(prompt)
                assert {span.version for one in found for span in one.spans} == {V(2, number - 1)}
                assert worst(model, prompt, found) < EXACT
            await asyncio.to_thread(step, model, optimizer, sent, V(2, number))
        assert len(sent.verify(Level.DIGESTS, exact=True).digests) == len(sent.manifest().fused)

        # What is under way goes on with the new weights, all of it read anew.
        asking = asyncio.create_task(ask(long_prompt(4, 140), tokens=360))
        await asyncio.sleep(0.2)
        before = copy.deepcopy(model)
        await asyncio.to_thread(step, model, optimizer, sent, V(2, 4))
        models = {V(2, 3): before, V(2, 4): model}
        spans = 0
        for one in await asking:
            own = {v: forward(m, long_prompt(4, 140), one.token_ids) for v, m in models.items()}
            for span in one.spans:
                told = torch.tensor(one.logprobs[span.start : span.end])
                assert float((told - own[span.version][span.start : span.end]).abs().max()) < EXACT
            spans = max(spans, len(one.spans))
        assert spans > 1, "nothing was under way"

        # A model that does not fit is refused, by the name of its tensor, and nothing of it was loaded.
        with pytest.raises(WeightsMismatchError, match=r"model\.layers\.0\.self_attn"):
            await asyncio.to_thread(SentWeights.create, model_of("qwen3"), url, tmp_path, version=V(9, 9))
        assert worst(model, short, await ask(short)) < EXACT
        del before, models

        # A file that was damaged on its way: vLLM stays paused, and answers again after a restore only.
        monkeypatch.setattr(SafetensorsFile, "write", damaged)
        with pytest.raises(WeightsNotSentError, match="must be in both the file"), sent.writing(V(2, 5)):
            pass
        monkeypatch.undo()
        assert sent.is_torn()
        with pytest.raises(WeightsTornError), sent.writing(V(2, 5)):
            pass
        waiting = asyncio.create_task(ask(short))
        await asyncio.sleep(0.5)
        assert not waiting.done()
        assert not list(tmp_path.glob("rolloutmq-*"))
        with sent.writing(V(2, 5), restoring=True):
            pass
        found = await waiting
        assert worst(model, short, found) < EXACT
        assert found[0].spans[0].version == V(2, 5)
        # They count as whole when vLLM samples again: whoever sent them may have died before it let it.
        for path, version in (("/pause?mode=keep", None), ("/resume", "2.5")):
            sent._post(path, {})
            assert await client.sent_version() == version

        # A trainer that dies in the middle leaves vLLM paused; its next life sends all anew.
        monkeypatch.setattr(SafetensorsFile, "write", damaged)
        with pytest.raises(WeightsNotSentError, match="must be in both the file"), sent.writing(V(2, 6)):
            pass
        monkeypatch.undo()
        assert await client.sent_version() is None
        waiting = asyncio.create_task(ask(short))
        heir = await asyncio.to_thread(SentWeights.create, model, url, tmp_path, version=V(3, 5))
        found = await waiting
        assert worst(model, short, found) < EXACT
        assert found[0].spans[0].version == heir.version
        sent.close()
    gc.collect()


@pytest.mark.parametrize("family", ["qwen3", "llama"])
async def test_other_families_are_sent_as_exactly(tmp_path: Path, family: str) -> None:
    lender = Lender(tmp_path / "run", family)
    prompt = [1, 6, 7, 8]
    try:
        async with (
            running(lender.config, lender.layout, "inference", 0) as vllm,
            VllmClient.opened(vllm.socket) as client,
        ):
            await ready(client)
            model = model_of(family, seed=3)
            address = f"unix:{vllm.socket}"
            sent = await asyncio.to_thread(SentWeights.create, model, address, tmp_path, version=V(0, 0))
            optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
            for number in range(3):
                found = await client.generate(prompt, Sampling(n=4, max_tokens=24), [2])
                assert {span.version for one in found for span in one.spans} == {V(0, number)}
                assert worst(model, prompt, found) < EXACT
                await asyncio.to_thread(step, model, optimizer, sent, V(0, number + 1))
            sent.close()
    finally:
        lender.close()
        gc.collect()


async def exact_steps(lender: Lender, tmp_path: Path, device: str = "cpu", limit: float = EXACT) -> None:
    """Send three steps to a vLLM of this configuration, and compare each with a forward pass on the CPU."""
    layout, prompt = lender.layout, long_prompt(3, 300)
    async with (
        running(lender.config, layout, "inference", 0) as vllm,
        VllmClient.opened(vllm.socket) as client,
    ):
        await ready(client)
        model = moved(model_of("qwen2", seed=3), torch.device(device))
        sent = await asyncio.to_thread(
            SentWeights.create, model, f"unix:{vllm.socket}", tmp_path, version=V(0, 0)
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
        for number in range(3):
            assert await client.sent_version() == f"0.{number}"
            before = await client.steps()
            found = await client.generate(prompt, Sampling(n=4, max_tokens=24), [2])
            assert await client.steps() > before
            assert {span.version for one in found for span in one.spans} == {V(0, number)}
            assert worst(copy.deepcopy(model).cpu(), prompt, found) < limit
            await asyncio.to_thread(step, model, optimizer, sent, V(0, number + 1))
        sent.close()


@pytest.fixture
def sending(tmp_path: Path) -> Iterator[Callable[..., Lender]]:
    made: list[Lender] = []

    def lender(**vllm: Any) -> Lender:
        made.append(Lender(tmp_path / "run", "qwen2", backend="vllm_http", **vllm))
        return made[0]

    yield lender
    for one in made:
        one.close()
    gc.collect()


async def test_two_workers_take_their_parts_of_what_is_sent(
    sending: Callable[..., Lender], tmp_path: Path
) -> None:
    await exact_steps(sending(tensor_parallel=2), tmp_path)


ON_GPU = 1e-3
"""Nats in float32, between kernels of a GPU and of the CPU. An estimate: no GPU has run it yet."""


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("trainer", ["cpu", "cuda"])
@pytest.mark.parametrize("compiled", [False, True])
async def test_a_vllm_on_a_gpu_takes_what_is_sent(
    sending: Callable[..., Lender], tmp_path: Path, trainer: str, compiled: bool
) -> None:
    await exact_steps(sending(compiled=compiled), tmp_path, trainer, ON_GPU)
