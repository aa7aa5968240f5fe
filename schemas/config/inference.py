"""`[inference]` and `[inference.vllm]`: the servers that sample from the policy."""

from pathlib import Path
from typing import Annotated, Final, Literal, Self

from pydantic import (
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from rolloutmq.schemas.config.base import MIB, PROCESSES_LIMIT, Section

_ONE_READ: Final = (
    "scheduler and worker must be one process that takes one step under one read lock; for weights that are sent see "
    "inference.vllm.tensor_parallel"
)

_ATTACHED: Final = "this run attaches the trainer's weights itself"

_MOVED: Final = "moved or wrapped weights are not the memory that the trainer writes"

_COMPILED: Final = (
    "compiled code would keep the first version of mapped weights; for weights that are sent see "
    "inference.vllm.compiled"
)

_CACHED: Final = "keys and values from elsewhere belong to older weights"

_DRAFTED: Final = "the trainer does not update the weights of a draft model"

_EXACT: Final = "the log-probabilities would be those of another model or distribution than the trainer's"

_REACHED: Final = "this run needs its own value to connect to vLLM"

_BY_REASON: Final = {
    _ONE_READ: (
        *(
            "--distributed-executor-backend",
            "--tensor-parallel-size",
            "-tp",
            "--pipeline-parallel-size",
            "-pp",
        ),
        *("--data-parallel-size", "-dp", "--decode-context-parallel-size", "-dcp"),
        *("--prefill-context-parallel-size", "-pcp", "--nnodes", "-n", "--node-rank", "-r"),
        *("--async-scheduling", "--scheduler-cls"),
    ),
    _ATTACHED: (
        *("--worker-cls", "--worker-extension-cls", "--load-format", "--weight-transfer-config"),
        *("--model-impl", "--model-class-overrides", "--convert", "--runner"),
    ),
    _MOVED: (
        *("--enable-sleep-mode", "--sleep-mode-offload-cudagraph", "--enable-cumem-allocator"),
        *("--cpu-offload-gb", "--cpu-offload-params", "--offload-backend", "--offload-group-size"),
        *("--offload-num-in-group", "--offload-prefetch-step", "--offload-params"),
        *("--enable-lora", "--lora-modules", "--default-mm-loras", "--enable-eplb", "--enable-elastic-ep"),
    ),
    _COMPILED: (
        *("--no-enforce-eager", "--compilation-config", "-cc", "-O", "--optimization-level"),
        *("--cudagraph-capture-sizes", "--max-cudagraph-capture-size"),
    ),
    _CACHED: (
        "--kv-transfer-config",
        "--ec-transfer-config",
        "--kv-offloading-size",
        "--kv-offloading-backend",
    ),
    _DRAFTED: ("--speculative-config", "-sc", "--spec-method", "--spec-model", "--spec-tokens"),
    _EXACT: (
        *("--model", "--tokenizer", "--dtype", "--quantization", "-q", "--quantization-config"),
        *("--kv-cache-dtype", "--calculate-kv-scales", "--mamba-cache-dtype", "--mamba-ssm-cache-dtype"),
        *("--enable-mamba-cache-stochastic-rounding", "--disable-sliding-window"),
        *("--hf-overrides", "--hf-config-path", "--config-format", "--rope-theta", "--rope-scaling"),
        *("--logprobs-mode", "--generation-config", "--override-generation-config"),
        *("--logits-processors", "--logits-processor-pattern", "--watermark-config", "--enable-trace-replay"),
        *("--diffusion-config", "-dc"),
    ),
    _REACHED: (
        *("--served-model-name", "--uds", "--api-key", "--no-enable-scale-out"),
        *("--headless", "--grpc", "--skip-tokenizer-init"),
    ),
    "the run could not check the arguments in that file": ("--config",),
}

KEPT: Final = {name: why for why, names in _BY_REASON.items() for name in names}
"""Arguments of vLLM that `arguments` may not contain, with the reason."""


class VllmConfig(Section):
    """`[inference.vllm]`: a vLLM in its own Python environment, which this run starts, watches and ends."""

    python: Path = Path(".venv-vllm/bin/python")
    """Python interpreter of the environment with vLLM, relative to the working directory. Symlinks are not resolved,
    because an interpreter finds its environment through its own path."""
    threads: PositiveInt = 1
    """Cores for vLLM. More would take cores from the trainer."""
    tensor_parallel: PositiveInt = 1
    """Workers that share each layer: GPUs, or processes on a CPU. More than one needs `weights.backend = "vllm_http"`.
    Tested with two workers on a CPU; not yet run on a GPU."""
    compiled: bool = False
    """Let vLLM compile the model, and capture CUDA graphs where there is a GPU. Needs `weights.backend = "vllm_http"`.
    Only vLLM's command is tested: compiled code has not yet run, on a GPU or a CPU."""
    visible_gpus: str = ""
    """`CUDA_VISIBLE_DEVICES` of vLLM; empty leaves it as it is. Not yet run with a GPU."""
    kv_cache_bytes: PositiveInt = 256 * MIB
    """Size of the KV cache. vLLM's own default is a fraction of all memory."""
    start_s: PositiveFloat = 300.0
    """Longest start-up. On two free cores it takes half a minute, mostly for imports."""
    stalled_s: PositiveFloat = 120.0
    """vLLM counts as stalled after this time with requests but without a step or an answer; its requests are then
    answered 503. Keep it above the longest step: vLLM reads a prompt in chunks of some thousand tokens."""
    grace_s: PositiveFloat = 10.0
    """Time from SIGTERM until vLLM and all its processes are killed."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's API server. They override the run's own, except for arguments that would break the
    weight updates or change the sampled distribution; the run refuses those and gives the reason."""

    @field_validator("arguments")
    @classmethod
    def _without_what_is_kept(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            for name in kept_by(argument):
                raise ValueError(f"{argument} must not be set here: {KEPT[name]}")
        return arguments


def kept_by(argument: str) -> list[str]:
    """Return the arguments of `KEPT` that vLLM may parse this one as.

    vLLM accepts underscores for dashes, a value after `=` or directly after a short name, a field after a dot, and
    unambiguous prefixes.
    """
    if not argument.startswith("-") or argument in {"-", "--"}:
        return []
    name = argument.partition("=")[0].partition(".")[0]
    if name.startswith("--"):
        return [kept for kept in KEPT if kept.startswith(name.replace("_", "-"))]
    short = (kept for kept in KEPT if not kept.startswith("--"))
    return [kept for kept in short if name.startswith(kept) or kept.startswith(name)]


class InferenceConfig(Section):
    """`[inference]`: the servers that sample from the policy."""

    kind: Literal["tiny", "vllm", "external", "none"] = "tiny"
    """`tiny`: the built-in server, with the policy of `[model]`. `vllm`: a vLLM started by this run; `weights.backend`
    brings it the weights. `external`: the server at `url`. `none`: no server, for environments that sample
    themselves."""
    url: str = ""
    """Base address of an external OpenAI-compatible server, such as `http://127.0.0.1:8000/v1`."""
    host: str = "127.0.0.1"
    """Address to bind. Another one than loopback needs tokens, by `run.http_token_file` or `broker.keys`, or
    `insecure`."""
    insecure: bool = False
    """Allow a `host` within reach of other machines without a token: everybody who reaches the address samples from
    the policy."""
    advertise: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]*$", max_length=253)] = ""
    """Name or address by which other hosts reach the engines. Empty: `host`. For a wildcard, clients use the host of
    the broker."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """Port of the first engine; further engines use any free port. 0 lets the system choose."""
    vllm: VllmConfig = VllmConfig.default()
    max_batch: PositiveInt = 512
    """Most sequences generated together."""
    max_waiting: PositiveInt = 4096
    """Most waiting requests. Above it the server answers 503."""
    min_engines: Annotated[int, Field(gt=0, le=PROCESSES_LIMIT)] = 1
    """Fewest engines. All share one copy of the weights. The launcher runs the first, the orchestrator the others."""
    max_engines: Annotated[int, Field(gt=0, le=PROCESSES_LIMIT)] = 1
    """Most engines. Each uses a core, so it is 1 unless you raise it."""
    engine_confirm_s: PositiveFloat = 120.0
    """The orchestrator starts another engine after workers were short of engines for this long: more workers added no
    throughput. Make it longer than a worker takes to start, so that the last engine has its workers before the next
    one starts."""
    engine_idle_s: PositiveFloat = 600.0
    """The orchestrator ends an engine when the others could have done its work for this long. It is much longer than a
    restart takes."""

    @model_validator(mode="after")
    def _external(self) -> Self:
        if (self.kind == "external") != bool(self.url):
            raise ValueError(
                f"url must be given if and only if kind is `external` (got {self.url!r} and `{self.kind}`)"
            )
        if self.min_engines > self.max_engines:
            raise ValueError(
                f"min_engines must not exceed max_engines {self.max_engines} (got {self.min_engines})"
            )
        if self.kind != "tiny" and self.max_engines > 1:
            why = "a run has one vLLM" if self.kind == "vllm" else "the run cannot start such a server"
            raise ValueError(f"max_engines must be 1 with kind `{self.kind}` (got {self.max_engines}): {why}")
        return self
