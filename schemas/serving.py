"""`[inference.vllm]`: how vLLM is started and what it gets."""

from pathlib import Path
from typing import Final

from pydantic import PositiveFloat, PositiveInt, field_validator

from rolloutmq.schemas.section import Section

MIB: Final = 1 << 20
_ONE_READ: Final = (
    "scheduler and worker are one process that takes one step at a time, so that a step is one read"
)
_ATTACHED: Final = "the weights are the trainer's, attached by this run"
_MOVED: Final = "weights that are moved or wrapped are no longer those that the trainer writes"
_COMPILED: Final = "code that is compiled holds the weights of its first version"
_CACHED: Final = "keys and values from elsewhere are of weights that were there before"
_DRAFTED: Final = "drafts come from weights of their own, which no step of the trainer reaches"
_EXACT: Final = "the log-probabilities would be of another model or distribution than the trainer's"
_REACHED: Final = "this run reaches vLLM by it"
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
    "its arguments would go unseen": ("--config",),
}
KEPT: Final = {name: why for why, names in _BY_REASON.items() for name in names}
"""Arguments of vLLM that are not for `arguments`, and why."""


class VllmConfig(Section):
    """`[inference.vllm]`: a vLLM of its own environment, which this run starts, watches and ends."""

    python: Path = Path(".venv-vllm/bin/python")
    """Interpreter of the environment that has vLLM, relative to where the command was started. Not resolved: an
    interpreter finds its environment by the path at which it was called."""
    threads: PositiveInt = 1
    """Cores that it computes with. One, as for every process of a run: a second would be taken from the trainer."""
    kv_cache_bytes: PositiveInt = 256 * MIB
    """Keys and values that it keeps. Left to itself, vLLM would take a part of all memory for that."""
    start_s: PositiveFloat = 300.0
    """How long it may take until it answers: half a minute on two free cores, most of it for imports."""
    stalled_s: PositiveFloat = 120.0
    """How long it may take no step while it has requests, and answer none; then it counts as stalled, and what it has
    is answered 503. Longer than its longest step: a prompt is read in parts of some thousand tokens."""
    grace_s: PositiveFloat = 10.0
    """How long it may take to end after SIGTERM; then it is killed, with all that it started."""
    arguments: tuple[str, ...] = ()
    """Further arguments of vLLM's API server, last: they win over those that are set here, but for those in `KEPT`."""

    @field_validator("arguments")
    @classmethod
    def _without_what_is_kept(cls, arguments: tuple[str, ...]) -> tuple[str, ...]:
        for argument in arguments:
            for name in kept_by(argument):
                raise ValueError(f"{argument} is not to be set here: {KEPT[name]}")
        return arguments


def kept_by(argument: str) -> list[str]:
    """Return the arguments of `KEPT` that vLLM may understand this one as.

    It takes underscores for dashes, a value behind `=` or, for short names, behind nothing, a field behind a point, and
    the beginning of a name, also of a short one, for the whole.
    """
    if not argument.startswith("-") or argument in {"-", "--"}:
        return []
    name = argument.partition("=")[0].partition(".")[0]
    if name.startswith("--"):
        return [kept for kept in KEPT if kept.startswith(name.replace("_", "-"))]
    short = (kept for kept in KEPT if not kept.startswith("--"))
    return [kept for kept in short if name.startswith(kept) or kept.startswith(name)]
