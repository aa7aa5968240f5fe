"""Sampling of packages of `verifiers`: their fields and those of the section, which win. Pure.

Log-probabilities are those of the whole distribution, as the trainer computes them: what cuts or shifts it is refused.
"""

from collections.abc import Mapping
from typing import Any, Final

from rolloutmq.schemas.config.environment import SamplingConfig
from rolloutmq.schemas.errors import ConfigError

NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "n": (1,),
    "stream": (False,),
    "top_p": (1,),
    "top_k": (-1, 0),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
}
"""Values of request fields with which the log-probabilities are those of the whole distribution."""


def sampling_of(key: str, theirs: Mapping[str, Any], ours: SamplingConfig) -> dict[str, Any]:
    """Return the fields of each request: those of the environment, and those of the section, which win.

    Raises:
        ConfigError: A field cuts or shifts the distribution.
    """
    extra = {**(theirs.get("extra_body") or {}), **ours.extra}
    chosen = {"max_tokens": ours.max_tokens, "temperature": ours.temperature}
    fields = {
        name: value
        for name, value in {
            **theirs,
            **{name: one for name, one in chosen.items() if one is not None},
        }.items()
        if name != "extra_body" and value is not None
    }
    for name, value in {**fields, **extra}.items():
        if name in NEUTRAL and value is not None and value not in NEUTRAL[name]:
            raise ConfigError(
                f"{key}.extra" if name in ours.extra else key,
                f"{name} must not change the distribution, whose log-probabilities the trainer computes "
                f"(got {value!r}); set {name} of `sampling.extra` to {NEUTRAL[name][0]!r}",
            )
    # Always explicit: the defaults of a server may come from the model's directory.
    return {"temperature": 1.0, "top_p": 1.0, **fields, "extra_body": extra}
