"""Sampling of packages of `verifiers`: their fields and those of the section, which win. Pure.

Fields that are not known to leave the distribution unchanged are refused, see `request_fields`.
"""

from collections.abc import Mapping
from typing import Any, Final

from rolloutmq.schemas.config.environment import SamplingConfig
from rolloutmq.schemas.errors import ConfigError
from rolloutmq.services.worker.verifiers.request_fields import hoisted, refusal

GREEDY: Final = (
    "temperature must be above 0 in training, because 0 makes all sequences of a group equal (got 0); set "
    "`sampling.temperature` to 1, and for greedy answers `evaluation.greedy`"
)


def sampling_of(
    key: str,
    theirs: Mapping[str, Any],
    ours: SamplingConfig,
    options: Mapping[str, str] | None = None,
    *,
    trains: bool = True,
) -> dict[str, Any]:
    """Return the fields of each request: those of the environment, and those of the section, which win.

    Args:
        key: Key of the section's sampling.
        theirs: Fields of the package, and of its options.
        ours: The section's sampling.
        options: Keys of the fields that the options set.
        trains: The policy learns from the answers. Others may be greedy.

    Raises:
        ConfigError: A field is refused, see `request_fields`, or the policy would learn from greedy answers.
    """
    given, extra = hoisted(theirs)
    extra |= ours.extra
    chosen = {"max_tokens": ours.max_tokens, "temperature": ours.temperature}
    chosen = {name: one for name, one in chosen.items() if one is not None}
    fields = {name: value for name, value in {**given, **chosen}.items() if value is not None}
    if trains and fields.get("temperature") == 0:
        where = (options or {}).get("temperature", key)
        raise ConfigError(f"{key}.temperature" if ours.temperature is not None else where, GREEDY)
    for name, value in {**fields, **extra}.items():
        problem = refusal(name, value, extra=name in extra)
        if problem and name in ours.extra:
            raise ConfigError(f"{key}.extra", problem)
        if problem and name in (options or {}):
            raise ConfigError((options or {})[name], problem)
        if problem:
            raise ConfigError(key, f"{problem}; the package sets it")
    # Always explicit: the defaults of a server may come from the model's directory.
    return {"temperature": 1.0, "top_p": 1.0, **fields, "extra_body": extra}
