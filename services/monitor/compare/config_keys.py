"""Keys of configurations with different values. Pure."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from rolloutmq.schemas.config.run import RunConfig

OWN: Final = frozenset({"run.dir", "run.name", "base_dir"})
"""Keys that name a run and the place of its file, so that they differ in any case."""
ABSENT: Final = "absent"
PRESENT: Final = "present"
_MISSING: Final = object()


def differing(configs: Sequence[RunConfig]) -> dict[str, list[Any]]:
    """Return the dotted keys whose values differ, each with the value of every run, in the order of the configurations.

    Defaults count as values. A section that some runs lack is one key, with `present` or `absent`.
    """
    plain = [config.model_dump(mode="json") for config in configs]
    return {key: values for key, values in _differences(plain, "") if key not in OWN}


def value_text(value: Any) -> str:
    """Return a value as TOML would have it, nearly: strings without quotes."""
    if value is None:
        return "none"
    return value if isinstance(value, str) else json.dumps(value)


def _differences(values: Sequence[Any], path: str) -> Iterator[tuple[str, list[Any]]]:
    there = [value for value in values if value is not _MISSING]
    if len(there) == len(values) and all(value == values[0] for value in values):
        return
    if all(isinstance(value, Mapping) for value in there):
        if len(there) < len(values):
            yield path, [ABSENT if value is _MISSING else PRESENT for value in values]
            return
        for name in dict.fromkeys(name for value in there for name in value):
            inner = [value.get(name, _MISSING) for value in values]
            yield from _differences(inner, f"{path}.{name}" if path else str(name))
        return
    yield path, [_told(value) for value in values]


def _told(value: Any) -> Any:
    if value is _MISSING:
        return ABSENT
    return PRESENT if isinstance(value, Mapping) else value
