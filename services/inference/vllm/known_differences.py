"""Models with which vLLM is known not to compute what transformers computes, by name, with the reason. Pure.

Everything else is decided by comparison (`weight_matching`). The table of tested families and RoPE types is in
`docs/guides/vllm.md`.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

from rolloutmq.schemas.errors import WeightsMismatchError

KEYS: Final = {
    **dict.fromkeys(
        ("num_experts", "num_local_experts", "n_routed_experts"),
        "vLLM keeps the matrices of experts in layouts of its own and, on a CPU, packs them into copies",
    ),
    **dict.fromkeys(("vision_config", "audio_config"), "only models that read text alone are compared"),
}
"""Keys of a configuration that no accepted model has."""

ROPE: Final = {
    "longrope": "vLLM takes one set of factors for every length, transformers chooses it by the longest sequence of a "
    "batch",
}
"""RoPE types that are never the same."""

ROUNDING: Final = {
    "linear": "vLLM divides positions by the factor, transformers divides frequencies; this rounds alike only if the "
    "factor is a power of two",
}
"""RoPE types that round in other places, unless the numbers are kind."""


def require_none(config: Mapping[str, Any]) -> None:
    """Check a configuration of transformers.

    Raises:
        WeightsMismatchError: The model has a known difference; names the family or the RoPE type, and the reason.
    """
    family = config.get("model_type", "unknown")
    for key, why in KEYS.items():
        if config.get(key):
            raise WeightsMismatchError(f"config.{key}", f"`{family}` is not supported with vLLM: {why}")
    for kind in rope_types(config):
        if kind in ROPE:
            raise WeightsMismatchError(
                "config.rope_parameters", f"RoPE `{kind}` is not supported with vLLM: {ROPE[kind]}"
            )


def rope_types(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the RoPE types of a configuration, which may have one for each kind of layer."""
    found = config.get("rope_parameters") or {}
    for parameters in (found, *found.values()):
        if isinstance(parameters, Mapping) and "rope_type" in parameters:
            yield parameters["rope_type"]


def remark(config: Mapping[str, Any]) -> str:
    """Return why rotation tables differ, if that is known; otherwise an empty string."""
    return "".join(f"; {ROUNDING[kind]}" for kind in sorted(set(rope_types(config)) & ROUNDING.keys()))
