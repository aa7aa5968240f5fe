"""How vLLM is called: its arguments and variables, from the configuration of a run. Pure.

Each argument that is not mere size says something that the log-probabilities depend on, and why.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from rolloutmq.schemas.config import InferenceConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.trainer.weights.vllm_http import BACKEND

EXECUTOR: Final = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
"""Scheduler and worker in one process: a step of both is one read of the weights. By its full name, since the short
one is replaced on CPUs."""
EXTENSION: Final = "rolloutmq.services.inference.vllm.extension.SharedWeights"
SERVED_NAME: Final = "policy"
"""What vLLM calls it; clients see the name in the configuration."""
START: Final = Path(__file__).with_name("start.py")
VARIABLES: Final = {
    "VLLM_SERVER_DEV_MODE": "1",  # opens /collective_rpc, on a socket that only this user reaches
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # a trainer and workers share the cores
    "VLLM_HOST_IP": "127.0.0.1",  # what its parts listen on for each other asks nobody who they are
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
}


def arguments(config: InferenceConfig, model: Path, socket: Path, parent: int, seed: int) -> tuple[str, ...]:
    """Return the command that starts vLLM.

    Args:
        config: `[inference]`.
        model: Directory with the configuration and the tokenizer of the policy.
        socket: Unix socket to listen on.
        parent: Process with which it shall end.
        seed: Of what it draws.

    Raises:
        ConfigError: The model's configuration says no element type.
    """
    facts = json.loads((model / "config.json").read_bytes())
    return (
        *(str(config.vllm.python), str(START), str(parent)),
        *("--model", str(model), "--served-model-name", SERVED_NAME, "--uds", str(socket)),
        # There are no weights in the directory, and none are loaded: they are attached.
        *("--load-format", "dummy", "--worker-extension-cls", EXTENSION),
        *("--distributed-executor-backend", EXECUTOR),
        *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
        # `auto` would make another type of float32.
        *("--dtype", _dtype(facts)),
        *("--max-model-len", str(_text(facts)["max_position_embeddings"])),
        *("--max-num-seqs", str(config.max_batch)),
        *("--kv-cache-memory-bytes", str(config.vllm.kv_cache_bytes)),
        # Those of the distribution that is sampled from, after temperature; the default is before it.
        *("--logprobs-mode", "processed_logprobs"),
        # The model's own generation_config would change the distribution silently.
        *("--generation-config", "vllm"),
        # Compiled code holds pointers, and takes a minute.
        "--enforce-eager",
        "--enable-scale-out",  # tokens in, tokens and their versions out
        *("--seed", str(seed)),
        *("--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
        *config.vllm.arguments,
    )


def variables(config: InferenceConfig, path: Path) -> Mapping[str, str]:
    """Return the variables that vLLM gets; `path` is the directory in which it finds this package, and nothing else."""
    return {**VARIABLES, "OMP_NUM_THREADS": str(config.vllm.threads), "PYTHONPATH": str(path)}


def _text(facts: dict[str, Any]) -> dict[str, Any]:
    """Return the part of a configuration that is about text."""
    return {**facts, **facts.get("text_config", {})}


def _dtype(facts: dict[str, Any]) -> str:
    found = _text(facts).get("dtype") or _text(facts).get("torch_dtype")
    if not isinstance(found, str):
        raise ConfigError("model", "its config.json does not say its dtype")
    return found
