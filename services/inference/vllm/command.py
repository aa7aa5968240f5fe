"""Command line and environment of vLLM, from the configuration of a run. Pure.

Every argument other than a size affects the log-probabilities; the comment beside it gives the reason.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config.inference import InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.weights.vllm_http import BACKEND

EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Scheduler and worker in one process, so that one step reads the weights once. The full name, because vLLM
replaces the short one on CPUs.
"""
WORKERS: Final = "mp"
"""A process for each of several workers, for weights that are sent."""
EXTENSION: Final = "rolloutmq.services.inference.vllm.extension.SharedWeights"
SERVED_NAME: Final = "policy"
"""Model name inside vLLM; clients see the configured one."""
_HEAD: Final = ("--hf-overrides", json.dumps({"head_dtype": "float32"}))
"""Logits in float32, as in the trainer: rounded to the model's type, log-probabilities would be off by .02."""
START: Final = Path(__file__).with_name("start.py")
VARIABLES: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, on a socket that only this user reaches
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # trainer and workers share the cores
    "VLLM_HOST_IP": "127.0.0.1",  # its internal sockets have no authentication
    "GLOO_SOCKET_IFNAME": "lo",  # nor have those of gloo
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def arguments(
    config: InferenceConfig,
    model: Path,
    socket: Path,
    parent: int,
    seed: int,
    *,
    mapped: bool,
    fp32_head: bool = True,
) -> tuple[str, ...]:
    """Return the command that starts vLLM.

    Args:
        config: `[inference]`.
        model: Directory with the configuration and the tokenizer of the policy.
        socket: Unix socket to listen on.
        parent: Process id; vLLM ends with that process.
        seed: Seed of vLLM's sampling.
        mapped: vLLM maps the trainer's weights; otherwise they are sent to it.
        fp32_head: Whether the trainer computes the logits of a coarser policy in float32.

    Raises:
        ConfigError: The model's configuration has no dtype.
    """
    settings = json.loads((model / "config.json").read_bytes())
    return (
        *(str(config.vllm.python), str(START), str(parent)),
        *("--model", str(model), "--served-model-name", SERVED_NAME, "--uds", str(socket)),
        # The directory has no weights: they are attached later.
        *("--load-format", "dummy", "--worker-extension-cls", EXTENSION),
        *("--distributed-executor-backend", WORKERS if config.vllm.tensor_parallel > 1 else EXECUTOR),
        *("--tensor-parallel-size", str(config.vllm.tensor_parallel)),
        # Where vLLM can, it takes several steps at a time, which would be several reads.
        *(("--no-async-scheduling",) if mapped else ()),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        # `auto` would turn float32 into another type.
        *("--dtype", _dtype(settings)),
        *(_HEAD if fp32_head and _dtype(settings) != "float32" else ()),
        *("--max-model-len", str(_text(settings)["max_position_embeddings"])),
        *("--max-num-seqs", str(config.max_batch)),
        *("--kv-cache-memory-bytes", str(config.vllm.kv_cache_bytes)),
        # Log-probabilities after temperature, of the sampling distribution; the default is before it.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's generation_config would silently change the distribution.
        *("--generation-config", "vllm"),
        # Compiled code keeps pointers to old weights, and compiling takes a minute.
        *(() if config.vllm.compiled else ("--enforce-eager",)),
        "--enable-scale-out",  # tokens in, tokens and their versions out
        *("--seed", str(seed)),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *config.vllm.arguments,
    )


def variables(config: InferenceConfig, path: Path) -> Mapping[str, str]:
    """Return the environment variables of vLLM; `path` is a directory with a link to this package only."""
    gpus = {"CUDA_VISIBLE_DEVICES": config.vllm.visible_gpus} if config.vllm.visible_gpus else {}
    return {**VARIABLES, **gpus, "OMP_NUM_THREADS": str(config.vllm.threads), "PYTHONPATH": str(path)}


def _text(settings: dict[str, Any]) -> dict[str, Any]:
    """Return the text part of a model configuration."""
    return {**settings, **settings.get("text_config", {})}


def _dtype(settings: dict[str, Any]) -> str:
    found = _text(settings).get("dtype") or _text(settings).get("torch_dtype")
    if not isinstance(found, str):
        raise ConfigError("model", "config.json of the model has no dtype")
    return found
