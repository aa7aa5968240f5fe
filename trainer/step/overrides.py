"""Requests of an environment to the trainer, in the opaque columns of a group. Pure.

`overrides` has one map for each sequence, `group_overrides` and `generation_params` have one for the group; their keys
are those of Atropos. One key changes the step: `set_advantage_to_zero`. Others ask for a training that this trainer
does not do, and a group with one of them is rejected by name. All further keys are notes, and ignored.

A sampling temperature is no such request: it has a column of its own, `temperatures` (see `collate`).
"""

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.group import Group

OVERRIDES, GROUP_OVERRIDES = "overrides", "group_overrides"
SAMPLING: Final = "generation_params"
IMAGES: Final = "images"
ZERO_ADVANTAGE: Final = "set_advantage_to_zero"
SUPERVISED: Final = "sft"
TRUNCATED: Final[Mapping[str, tuple[float, float]]] = {
    "top_p": (1.0, np.inf),
    "top_k": (-np.inf, 0.0),
    "min_p": (-np.inf, 0.0),
}
"""Sampling parameters with the range in which they cut off no token."""


def find_fault(group: Group) -> str:
    """Return why the trainer cannot do what the group asks for, or an empty string."""
    rows = _value(group, OVERRIDES)
    if rows and (not isinstance(rows, list | tuple) or len(rows) != group.sequences):
        found = f"{len(rows)} entries" if isinstance(rows, list | tuple) else type(rows).__name__
        return f"{OVERRIDES}: must have one map for each sequence (got {found}, {group.sequences} sequences)"
    for name, settings in _maps(group):
        if settings.get(SUPERVISED):
            return (
                f"{name}: {SUPERVISED} asks for supervised fine-tuning, which this trainer does not do; "
                "train on it elsewhere"
            )
    if _has_content(_value(group, IMAGES)):
        return f"{IMAGES}: the policy reads text alone; leave them out if the tokens do not refer to them"
    return _truncated(_value(group, SAMPLING))


def zeroed(group: Group) -> NDArray[np.bool_]:
    """Return a bool for each sequence `[n]`: its advantage is to be 0. For a group without a fault."""
    rows = _value(group, OVERRIDES) or [{}] * group.sequences
    return np.array([isinstance(row, Mapping) and bool(row.get(ZERO_ADVANTAGE)) for row in rows], bool)


def _maps(group: Group) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for name in (OVERRIDES, GROUP_OVERRIDES):
        value = _value(group, name)
        for one in value if isinstance(value, list | tuple) else [value]:
            if isinstance(one, Mapping):
                yield name, one


def _value(group: Group, name: str) -> Any:
    return group.columns[name].values if name in group else None


def _has_content(images: Any) -> bool:
    """Return whether there is an image; a place for one, such as None, is none."""
    rest = [images]  # no recursion: whoever sends the group chooses the depth
    while rest:
        one = rest.pop()
        if isinstance(one, Mapping):
            rest += one.values()
        elif isinstance(one, list | tuple):
            rest += one
        elif one:
            return True
    return False


def _truncated(sampling: Any) -> str:
    """Check that the tokens came from the whole vocabulary, as their log-probabilities must."""
    for name, (least, most) in TRUNCATED.items():
        value = sampling.get(name) if isinstance(sampling, Mapping) else None
        if isinstance(value, int | float) and not least <= value <= most:
            return (
                f"{SAMPLING}: {name} {value:g} cuts off tokens, so that the log-probabilities are not those of the "
                f"policy; sample without {name}"
            )
    return ""
