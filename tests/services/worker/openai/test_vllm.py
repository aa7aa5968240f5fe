"""Turns against a vLLM that is no part of a run: it renders, tokenizes and samples, and no sampled token changes."""

import os
import random
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.services.inference.vllm.support.lent import PYTHON, START_S, missing
from tests.services.worker.openai.test_stitching import CHATML, byte_pairs
from transformers import LlamaConfig

from rolloutmq.schemas.files import InferenceAddress
from rolloutmq.services.inference.vllm.command import EXECUTOR, VARIABLES
from rolloutmq.services.worker.openai.client import OpenAIPolicy
from rolloutmq.services.worker.openai.engine_choice import Engines
from rolloutmq.services.worker.trajectory import Trajectory

pytestmark = [pytest.mark.rival, pytest.mark.skipif(bool(missing()), reason=missing())]

END_S = 60.0


@pytest.fixture
def served(tmp_path: Path) -> Iterator[str]:
    """The address of a vLLM with a small model of random weights and a template that has turns."""
    text = byte_pairs(tmp_path, CHATML)
    (end,) = text.encode("<|im_end|>", special=False)
    LlamaConfig(
        vocab_size=1024,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=end,
        architectures=["LlamaForCausalLM"],
        dtype="float32",
    ).save_pretrained(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (tmp_path / "vllm.log").open("wb") as output:
        process = subprocess.Popen(
            [
                *(str(PYTHON), "-m", "vllm.entrypoints.openai.api_server", "--model", str(tmp_path)),
                *("--served-model-name", "policy", "--host", "127.0.0.1", "--port", str(port)),
                *("--load-format", "dummy", "--dtype", "float32", "--enforce-eager"),
                *("--kv-cache-memory-bytes", str(1 << 27), "--generation-config", "vllm"),
                *("--distributed-executor-backend", EXECUTOR),
            ],
            env={**os.environ, **VARIABLES, "OMP_NUM_THREADS": "1", "PYTHONPATH": ""},
            stdout=output,
            stderr=output,
        )
    try:
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(END_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(END_S)


async def test_turns_carry_the_sampled_tokens(served: str) -> None:
    engines = Engines(lambda: [InferenceAddress(url=served, pid=0)], random.Random(0))
    async with OpenAIPolicy.opened(engines, patience_s=2 * START_S) as policy:
        question = [{"role": "user", "content": "12 012"}]
        assert await policy.detokenize(await policy.render(question)) == (
            "<|im_start|>user\n12 012<|im_end|>\n<|im_start|>assistant\n"
        )
        answers = await policy.chat(question, n=8, max_tokens=8)
        for answer in answers:
            sequence = Trajectory.of(answer)
            result = [{"role": "tool", "content": "12"}]
            (second,) = await policy.chat(result, after=sequence, max_tokens=4)
            both = sequence.then(second)
            given = await policy.detokenize(second.prompt_token_ids[len(sequence.token_ids) :])
            end = "" if answer.finish_reason == "stop" else "<|im_end|>"
            assert given == f"{end}\n<|im_start|>tool\n12<|im_end|>\n<|im_start|>assistant\n"
            (third,) = await policy.complete(" the answer", after=both, max_tokens=4)
            assert await policy.detokenize(third.prompt_token_ids[len(both.token_ids) :]) == " the answer"
            assert sum(map(bool, both.then(third).mask)) == sum(
                len(one.token_ids) for one in (answer, second, third)
            )
    assert all(len(answer.token_ids) for answer in answers), "it has sampled"
