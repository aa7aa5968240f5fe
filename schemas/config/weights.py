"""`[weights]`: the way of the weights from the trainer to the inference server."""

from typing import Literal

from rolloutmq.schemas.config.base import Section


class WeightsConfig(Section):
    """`[weights]`: the way of the weights from the trainer to the inference server."""

    backend: Literal["posix_shm", "disk", "vllm_http", "cuda_ipc"] = "posix_shm"
    """`posix_shm`: trainer and server map the same memory, without a copy. `disk`: each step writes a version below
    `weights/` in the run directory; a `tiny` server or your own reads it. `vllm_http`: the trainer sends each step to
    the run's vLLM through vLLM's weight-update interface. `cuda_ipc`: your own server maps the weights of a trainer on
    the same GPU."""
