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
_EXACT: Final = "the log-probabilities would be of another model or distribution than the trainer's"
_REACHED: Final = "this run reaches vLLM by it"
KEPT: Final = {
    "--distributed-executor-backend": _ONE_READ,
    "--tensor-parallel-size": _ONE_READ,
    "-tp": _ONE_READ,
    "--pipeline-parallel-size": _ONE_READ,
    "-pp": _ONE_READ,
    "--data-parallel-size": _ONE_READ,
    "-dp": _ONE_READ,
    "--async-scheduling": _ONE_READ,
    "--worker-cls": _ATTACHED,
    "--worker-extension-cls": _ATTACHED,
    "--load-format": _ATTACHED,
    "--weight-transfer-config": _ATTACHED,
    "--no-enforce-eager": _ATTACHED,
    "--model": _EXACT,
    "--dtype": _EXACT,
    "--quantization": _EXACT,
    "-q": _EXACT,
    "--hf-overrides": _EXACT,
    "--hf-config-path": _EXACT,
    "--logprobs-mode": _EXACT,
    "--generation-config": _EXACT,
    "--override-generation-config": _EXACT,
    "--tokenizer": _EXACT,
    "--served-model-name": _REACHED,
    "--uds": _REACHED,
    "--api-key": _REACHED,
    "--no-enable-scale-out": _REACHED,
    "--config": "its arguments would go unseen",
}
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
    the beginning of a name for the whole.
    """
    if not argument.startswith("-") or argument in {"-", "--"}:
        return []
    if argument.startswith("--"):
        name = argument.partition("=")[0].partition(".")[0].replace("_", "-")
        return [kept for kept in KEPT if kept.startswith(name)]
    return [kept for kept in KEPT if not kept.startswith("--") and argument.startswith(kept)]
