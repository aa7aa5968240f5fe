"""The trainer's side of a real vLLM: a tiny model of a family, its steps and forward pass, and the engine."""

import asyncio
import copy
import gc
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit

import aiohttp
import torch
from tests.services.inference.vllm.support.child import END_S
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.config.run import ModelConfig, RunConfig
from rolloutmq.schemas.files import InferenceAddress, RunLayout
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.trainer.policy.device import moved
from rolloutmq.trainer.policy.head import float32_head
from rolloutmq.trainer.policy.model import ROPE, write_identity
from rolloutmq.trainer.policy.tokenizer import write_tokenizer
from rolloutmq.trainer.weights.cuda_ipc import CudaShare
from rolloutmq.trainer.weights.fingerprint import directory_fingerprint
from rolloutmq.trainer.weights.posix_shm import WeightShare

PYTHON: Final = Path(".venv-vllm/bin/python").absolute()
ALPHABET: Final = "0123456789= abcdefghijklmnopqrstuvwxyz+"
VOCABULARY: Final = 99
"""No multiple of 64: vLLM has more rows."""
POSITIONS: Final = 512
START_S: Final = 300.0
ASKED_S: Final = 60.0
"""Longest wait for an answer; no thread that asks is there for longer."""
FAMILIES: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "qwen2": (Qwen2Config, {"tie_word_embeddings": True}),
    "qwen3": (Qwen3Config, {"tie_word_embeddings": False, "head_dim": 32}),
    "llama": (LlamaConfig, {"tie_word_embeddings": False, "head_dim": 32}),
}
_LAYERS: Final = ["sliding_attention", "full_attention"]
_GEMMA: Final = {"head_dim": 32, "tie_word_embeddings": True, "pad_token_id": 0}
_WINDOWS: Final = {**_GEMMA, "sliding_window": 16, "layer_types": _LAYERS, "query_pre_attn_scalar": 32}


def _llama(rope_type: str, **rope: Any) -> tuple[Any, dict[str, Any]]:
    parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, **rope}
    return LlamaConfig, {"tie_word_embeddings": False, "head_dim": 32, "rope_parameters": parameters}


_LLAMA3: Final = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 128}
_YARN: Final = {"factor": 4.0, "original_max_position_embeddings": 128}
_LONG: Final = {
    "short_factor": [1.0] * 16,
    "long_factor": [2.0] * 16,
    "original_max_position_embeddings": 128,
}
OTHERS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "mistral": (MistralConfig, {"head_dim": 32, "sliding_window": 16, "tie_word_embeddings": False}),
    "gemma": (GemmaConfig, _GEMMA),
    "gemma2": (Gemma2Config, _WINDOWS),
    "gemma3_text": (
        Gemma3TextConfig,
        {
            **_WINDOWS,
            "architectures": ["Gemma3ForCausalLM"],
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
                "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            },
        },
    ),
    "granite": (
        GraniteConfig,
        {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "head_dim": 32},
    ),
    "phi3": (Phi3Config, {"tie_word_embeddings": False}),
    "llama3": _llama("llama3", factor=8.0, **_LLAMA3),
    "yarn": _llama("yarn", **_YARN),
    "dynamic": _llama("dynamic", factor=2.0),
    "linear": _llama("linear", factor=4.0),
    "linear by 3": _llama("linear", factor=3.0),
    "longrope": _llama("longrope", **_LONG),
    "qwen3_moe": (
        Qwen3MoeConfig,
        {"head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
    ),
}
"""Other families, and Llama with other RoPE types: the rows of the table in `docs/guides/vllm.md`."""
REFUSED: Final = {
    "linear by 3": "vLLM divides positions by the factor",
    "longrope": "RoPE `longrope` is not supported with vLLM",
    "qwen3_moe": "`qwen3_moe` is not supported with vLLM: vLLM keeps the matrices of experts",
}
"""Rows that vLLM computes otherwise, and what is said of them."""


def missing() -> str:
    """Say why there is no vLLM to test with, or nothing."""
    return "" if PYTHON.exists() else "make .venv-vllm/.installed"


def model_of(family: str, dtype: torch.dtype = torch.float32, seed: int = 0) -> Any:
    """Build a model with values of its own for every tensor, biases and norms too: a norm of ones hides mistakes."""
    kind, more = (FAMILIES | OTHERS)[family]
    sizes: dict[str, Any] = dict(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=POSITIONS,
        initializer_range=0.05,
        rope_parameters=ROPE,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        architectures=[f"{kind.__name__.removesuffix('Config')}ForCausalLM"],
        dtype=str(dtype).removeprefix("torch."),
    )
    config = kind(**(sizes | more))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.05 * torch.randn_like(parameter))
    return model


class Lender:
    """A trainer that shares its weights and takes real optimizer steps on them."""

    def __init__(
        self,
        root: Path,
        family: str,
        dtype: torch.dtype = torch.float32,
        backend: str = "posix_shm",
        **vllm: Any,
    ) -> None:
        root.mkdir(mode=0o700, parents=True, exist_ok=True)
        self.layout = RunLayout(root)
        tokenizer = root / "tokenizer"
        tokenizer.mkdir()
        write_tokenizer(
            ModelConfig(alphabet=ALPHABET, vocab_size=VOCABULARY, max_positions=POSITIONS), tokenizer
        )
        device = "cuda" if backend == "cuda_ipc" else "cpu"
        self.model: Any = moved(model_of(family, dtype), torch.device(device))
        write_identity(self.model, ModelConfig(path=str(tokenizer)), self.layout.model)
        self.config = RunConfig.model_validate(
            {
                "run": {"dir": str(root)},
                "weights": {"backend": backend},
                "trainer": {"device": device},
                "inference": {
                    "kind": "vllm",
                    "max_batch": 64,
                    "vllm": {"python": str(PYTHON), "kv_cache_bytes": 1 << 27, "start_s": START_S, **vllm},
                },
            }
        )
        self.layout.config.write_text(self.config.model_dump_json())
        kind = CudaShare if backend == "cuda_ipc" else WeightShare
        self.share: WeightShare = kind.create_or_adopt(
            self.model, self.layout.weights, fused=True, tokenizer=directory_fingerprint(self.layout.model)
        )
        self.version = PolicyVersion()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def step(self, seed: int) -> PolicyVersion:
        """Take one optimizer step on the shared weights."""
        tokens = torch.randint(3, 40, (4, 24), generator=torch.Generator().manual_seed(seed))
        tokens = tokens.to(self.model.device)
        self.model(input_ids=tokens, labels=tokens).loss.backward()
        self.version = PolicyVersion(self.version.incarnation, self.version.step + 1)
        with self.share.writing(self.version):
            self.optimizer.step()
        self.optimizer.zero_grad()
        return self.version

    def kept(self) -> Any:
        """Return a copy of the model as it is now."""
        with torch.no_grad():
            return copy.deepcopy(self.model)

    def close(self) -> None:
        self.share.close(unlink=True)
        del self.model, self.optimizer
        gc.collect()


@torch.no_grad()
def forward(model: Any, prompt: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return what a forward pass says of each token of a completion, `(T,)`."""
    with float32_head(model):
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
    logprobs = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    found: Tensor = logprobs.gather(-1, torch.tensor(list(tokens))[:, None])[:, 0]
    return found


def worst(model: Any, choice: dict[str, Any], start: int = 0, end: int | None = None) -> float:
    """Return the largest difference between the log-probabilities of a choice and those of a forward pass."""
    told = torch.tensor(choice["logprobs"]["token_logprobs"])
    own = forward(model, choice["prompt_token_ids"], choice["token_ids"])
    return float((told - own)[start:end].abs().max())


class Engine:
    """The process that a run starts for `kind = "vllm"`, and a client of it."""

    def __init__(self, layout: RunLayout) -> None:
        self.layout = layout
        log = (layout.root / "inference.log").open("ab")
        with log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "rolloutmq.launch.cli", "inference", "--run-dir", str(layout.root)],
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stderr=log,
            )

    @property
    def url(self) -> str:
        address = read_json(self.layout.inference, InferenceAddress)
        return address.url if address and address.pid == self.process.pid else ""

    def wait_ready(self) -> None:
        until = time.monotonic() + START_S
        while not self.url:
            assert self.process.poll() is None, (self.layout.root / "inference.log").read_text()[-2000:]
            assert time.monotonic() < until, "it did not come up"
            time.sleep(0.1)

    def ask(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        """Ask it; return status and answer."""
        where = urlsplit(self.url)
        connection = http.client.HTTPConnection(where.hostname or "", where.port, timeout=ASKED_S)
        try:
            connection.request(method, path, None if body is None else json.dumps(body))
            response = connection.getresponse()
            return response.status, json.loads(response.read())
        finally:
            connection.close()

    def complete(self, **fields: Any) -> list[dict[str, Any]]:
        """Return the choices of a completion."""
        asked = {"prompt": "312=", "max_tokens": 24, "logprobs": 0, "return_token_ids": True, **fields}
        status, answer = self.ask("POST", "/v1/completions", asked)
        assert status == 200, answer
        choices: list[dict[str, Any]] = answer["choices"]
        return choices

    def status(self, **fields: Any) -> int:
        """Return the status of a completion alone."""
        return self.ask("POST", "/v1/completions", {"prompt": "312=", "max_tokens": 2, **fields})[0]

    def cached_tokens(self) -> int:
        """Return how many tokens of prompts vLLM has taken out of its prefix cache so far, as it counts them itself."""
        return self._metric("vllm:prefix_cache_hits_total")

    def running(self) -> int:
        """Return how many sequences vLLM computes at present."""
        return self._metric("vllm:num_requests_running")

    def _metric(self, name: str) -> int:
        told = asyncio.run(self._metrics())
        (line,) = [line for line in told.splitlines() if line.startswith(name)]
        return int(float(line.rpartition(" ")[2]))

    async def _metrics(self) -> str:
        connector = aiohttp.UnixConnector(str(self.layout.sockets / "inference-vllm" / "http"))
        async with (
            aiohttp.ClientSession(connector=connector) as session,
            session.get("http://vllm/metrics") as response,
        ):
            return await response.text()

    def end(self) -> int:
        """Ask it to end; return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait(END_S)


@contextmanager
def lent(
    root: Path, family: str, dtype: torch.dtype = torch.float32, **vllm: Any
) -> Iterator[tuple[Lender, Engine]]:
    """A trainer and a real vLLM that has its weights; `vllm` changes its section of the configuration."""
    trainer = Lender(root, family, dtype, **vllm)
    engine = Engine(trainer.layout)
    try:
        engine.wait_ready()
        yield trainer, engine
    finally:
        engine.end()
        trainer.close()


def long_prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt; the cache works in blocks of 128."""
    drawn = torch.randint(3, 40, (length - 1,), generator=torch.Generator().manual_seed(seed))
    return [1, *drawn.tolist()]
