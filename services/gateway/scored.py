"""From Atropos' groups to those of the bus, and back, with nothing lost on the way. Pure.

Numbers become columns, in the types that they have; everything else travels as it is. What a column cannot tell, that a
field was an empty list or which environment sent it, is in one column of the gateway's own. A group that did not come
through the gateway has labels made of its mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.opaque import Encoded, encode_opaque, require_few
from rolloutmq.schemas.envelope import Dtype
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.mask import IGNORED_LABEL, marked_tokens
from rolloutmq.schemas.trajectory import Column, Group
from rolloutmq.services.gateway.contract import FIELDS, RefusedBodyError, ScoredData, check_messages

OWN_COLUMN: Final = "atropos"
"""The environment's number, and the fields that were empty lists."""
UNNAMED: Final = "unnamed"
"""Id of a group until it is known whether it came before."""
NUMBERS: Final = (
    *("advantages", "ref_logprobs", "inference_logprobs"),
    *("distill_token_ids", "distill_logprobs"),
)
OPAQUE: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
NOTHING_YET: Final[Mapping[str, Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}
"""What is answered for the latest example while there is none."""
TOKEN_BYTES: Final = 32
"""About what a token is as text, with its label and its log-probability."""
VALUE_BYTES: Final = 8
"""About what any other value is, with its name."""
LOOKED_AT_BYTES: Final = 256 << 10
"""What is larger is large."""
_FIELD_OF: Final = {"mask": "masks"}
"""Columns that have another name there."""


class Posted(NamedTuple):
    """One body: its groups, `UNNAMED` yet, how large they are, and the environments that they name."""

    digest: bytes
    env_ids: Sequence[int | None]
    groups: Sequence[Group]
    nbytes: int


def to_group(data: ScoredData, group_id: str, *, at: float) -> Group:
    """Return a group of the bus; `at` is the wall clock.

    Raises:
        RefusedBodyError: Lengths contradict each other, a score is not finite, or a message has no role or content.
    """
    check_messages(data)
    columns: dict[str, Any] = {}
    empty = []
    for name in (*NUMBERS, *OPAQUE):
        value = getattr(data, name)
        if value == [] and data.tokens:
            empty.append(name)
        elif value is not None:
            columns[name] = value
    columns[OWN_COLUMN] = {"env_id": data.env_id, "empty": empty}
    try:
        # Here, in a thread, and before anything has been taken.
        named = columns.keys() & {*OPAQUE, OWN_COLUMN}
        opaque = {name: encode_opaque(name, columns[name]) for name in named}
        require_few(opaque)
        columns |= {name: Column.opaque(Encoded(block)) for name, block in opaque.items()}
        group = Group.build(
            group_id, tokens=data.tokens, mask=data.masks, scores=data.scores, finished_at=at, **columns
        )
        for name in NUMBERS:
            if name in group and not np.isfinite(group.columns[name].values).all():
                raise InvalidGroupError(name, "has a number that is not finite")  # it came as a text
    except InvalidGroupError as error:
        field = _FIELD_OF.get(error.column, error.column)
        raise RefusedBodyError(("body", field), f"{field} {error.problem}") from None
    return group


def from_group(group: Group) -> dict[str, Any]:
    """Return a group as Atropos' server answers it: every field is there, absent ones are None."""
    own = _value(group, OWN_COLUMN) if OWN_COLUMN in group else {}
    answer: dict[str, Any] = dict.fromkeys(FIELDS)
    answer["tokens"] = _rows(group.columns["tokens"])
    answer["masks"] = _rows(_labels(group))
    answer["scores"] = group.scores.tolist()
    for name in NUMBERS:
        if name in group:
            answer[name] = _rows(group.columns[name])
    for name in OPAQUE:
        if name in group:
            answer[name] = _value(group, name)
    for name in own.get("empty", ()):
        answer[name] = []
    answer["env_id"] = own.get("env_id")
    return answer


def _value(group: Group, name: str) -> Any:
    value = group.columns[name].values
    return value.value if isinstance(value, Encoded) else value


def json_bytes(group: Group) -> int:
    """Return about how many bytes a group is as JSON; what is very large is not looked at to its end."""
    size = group.tokens * TOKEN_BYTES
    rest = [group.columns[name].values for name in OPAQUE if name in group]
    while rest and size < LOOKED_AT_BYTES:
        value = rest.pop()
        size += VALUE_BYTES
        if isinstance(value, str | bytes):
            size += len(value)
        elif isinstance(value, dict):
            rest += value.values()
        elif isinstance(value, list | tuple):
            rest += value
    return size


def _labels(group: Group) -> Column:
    mask, tokens = group.columns["mask"], group.columns["tokens"]
    if OWN_COLUMN in group:
        return mask
    labels: NDArray[Any] = np.where(marked_tokens(group), tokens.values, IGNORED_LABEL)
    return Column(Dtype.I64, labels.astype(np.int64), mask.lengths)


def _rows(column: Column) -> list[Any]:
    """Return the values as nested lists of Python numbers."""
    values = column.values if column.dtype is not Dtype.BF16 else column.numbers()
    cells: list[Any] = values.tolist()
    for lengths in reversed(column.lengths):
        end = 0
        cells = [cells[end - size : end] for size in lengths.tolist() if (end := end + size) >= 0]
    return cells
