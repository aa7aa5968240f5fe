"""Fields of a request that a package of `verifiers` or its section may set. Pure.

The trainer computes the log-probabilities of the whole distribution, and learns from the differences within a group. So
a field must neither cut nor shift the distribution, nor make the sequences of a group alike. Servers have new fields
with each version: those not listed are refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from rolloutmq.schemas.errors import ConfigError

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "best_of": (1,),
    "stream": (False,),
    "echo": (False,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "typical_p": (1,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "bad_words": ([],),
    "min_tokens": (0,),
    "ignore_eos": (False,),
    "use_beam_search": (False,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("auto", "none"),
}
"""Values of fields with which the log-probabilities are those of the whole distribution."""
NEEDED: Final = frozenset({"logprobs", "return_token_ids"})
"""Fields that must be true: training needs what they ask for."""
OWN: Final[Mapping[str, str]] = {
    "temperature": "temperature",
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
}
"""Fields with a key of `sampling`."""
ALLOWED: Final = frozenset(
    {
        "add_generation_prompt",
        "add_special_tokens",
        "cache_salt",
        "chat_template",
        "chat_template_kwargs",
        "continue_final_message",
        "documents",
        "include_reasoning",
        "include_stop_str_in_output",
        "media_io_kwargs",
        "metadata",
        "mm_processor_kwargs",
        "no_stop_trim",
        "parallel_tool_calls",
        "priority",
        "prompt_cache_key",
        "reasoning_effort",
        "request_id",
        "return_tokens_as_token_ids",
        "rid",
        "safety_identifier",
        "separate_reasoning",
        "service_tier",
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "stop",
        "stop_token_ids",
        "store",
        "top_logprobs",
        "user",
    }
)
"""Fields of OpenAI, vLLM and SGLang that say how the prompt is written, where an answer ends and how it is returned."""
_SET_BY_US: Final = frozenset({"model", "messages", "prompt", "tools"})


def hoisted(sampling_args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of a package and those of its `extra_body`, of which fields with a key of ours are among the
    former: a section's value would not win over them otherwise."""
    extra = dict(sampling_args.get("extra_body") or {})
    fields = {name: value for name, value in sampling_args.items() if name != "extra_body"}
    for name in OWN.keys() & extra.keys():
        fields[name] = extra.pop(name)
    return fields, extra


def refusal(name: str, value: Any, *, extra: bool) -> str:
    """Return what is wrong with a field, and what to do; empty if it may be set.

    Args:
        name: Field of the request.
        value: Its value; None leaves the field to the server's default.
        extra: It is a field beside those of OpenAI's client, and would win over them.
    """
    if value is None or name in ALLOWED or (name in OWN and not extra):
        return ""
    if name in NEUTRAL:
        return "" if value in NEUTRAL[name] else _shifted(name, value)
    got = f"(got {value!r:.80})"
    if name in OWN:
        return f"{name} has a key of its own {got}; set `sampling.{OWN[name]}` instead"
    if name in NEEDED:
        return (
            "" if value is True else f"{name} must be true, because training needs them {got}; leave it out"
        )
    if name == "seed":
        return f"seed must be left out, because it makes all sequences of a group equal {got}"
    if name in _SET_BY_US:
        return f"{name} is set for each request {got}; leave it out"
    listed = ", ".join(sorted(ALLOWED))
    return (
        f"{name} is not known to leave the distribution unchanged {got}; leave it out, allowed are {listed}"
    )


def _shifted(name: str, value: Any) -> str:
    return (
        f"{name} must not change the distribution, whose log-probabilities the trainer computes "
        f"(got {value!r:.80}); set {name} of `sampling.extra` to {NEUTRAL[name][0]!r}"
    )


def check_request(sampling_args: Mapping[str, Any]) -> None:
    """Check the fields of one request, which a rollout may have changed. Raises ConfigError."""
    extra = sampling_args.get("extra_body") or {}
    for name, value in {**sampling_args, **extra}.items():
        problem = "" if name == "extra_body" else refusal(name, value, extra=name in extra)
        if problem:
            raise ConfigError("sampling_args", problem)
