"""From Atropos' groups to those of the bus, and back, with nothing lost on the way. Pure.

Numbers become columns, in the types that they have; everything else travels as it is. What a column cannot tell, that a
field was an empty list or which environment sent it, is in one column of the gateway's own. A group that did not come
through the gateway has labels made of its mask.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.opaque import encode_opaque
from rolloutmq.schemas.envelope import Dtype
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.trajectory import Column, Group
from rolloutmq.services.gateway.contract import FIELDS, RefusedBodyError, ScoredData, check_messages

OWN_COLUMN: Final = "atropos"
"""The environment's number, and the fields that were empty lists."""
UNNAMED: Final = "unnamed"
"""Id of a group until it is known whether it came before."""
NOT_TRAINED: Final = -100
"""The label of a token that nothing is learned from."""
NUMBERS: Final = (
    *("advantages", "ref_logprobs", "inference_logprobs"),
    *("distill_token_ids", "distill_logprobs"),
)
OPAQUE: Final = ("messages", "generation_params", "overrides", "group_overrides", "images")
_FIELD_OF: Final = {"mask": "masks"}
"""Columns that have another name there."""


class Posted(NamedTuple):
    """One body: its groups, `UNNAMED` yet, and the environments that they name."""

    digest: bytes
    env_ids: Sequence[int | None]
    groups: Sequence[Group]


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
    columns[OWN_COLUMN] = Column.opaque({"env_id": data.env_id, "empty": empty})
    try:
        for name in columns.keys() & set(OPAQUE):
            encode_opaque(name, columns[name])  # here, where nothing has been taken yet
        return Group.build(
            group_id, tokens=data.tokens, mask=data.masks, scores=data.scores, finished_at=at, **columns
        )
    except InvalidGroupError as error:
        field = _FIELD_OF.get(error.column, error.column)
        raise RefusedBodyError(("body", field), f"{field} {error.problem}") from None


def from_group(group: Group) -> dict[str, Any]:
    """Return a group as Atropos' server answers it: every field is there, absent ones are None."""
    own = group.columns[OWN_COLUMN].values if OWN_COLUMN in group else {}
    answer: dict[str, Any] = dict.fromkeys(FIELDS)
    answer["tokens"] = _rows(group.columns["tokens"])
    answer["masks"] = _rows(_labels(group))
    answer["scores"] = group.scores.tolist()
    for name in NUMBERS:
        if name in group:
            answer[name] = _rows(group.columns[name])
    for name in OPAQUE:
        if name in group:
            answer[name] = group.columns[name].values
    for name in own.get("empty", ()):
        answer[name] = []
    answer["env_id"] = own.get("env_id")
    return answer


def _labels(group: Group) -> Column:
    mask, tokens = group.columns["mask"], group.columns["tokens"]
    if OWN_COLUMN in group:
        return mask
    labels: NDArray[Any] = np.where(mask.values.astype(bool), tokens.values, NOT_TRAINED)
    return Column(Dtype.I64, labels.astype(np.int64), mask.lengths)


def _rows(column: Column) -> list[Any]:
    """Return the values as nested lists of Python numbers."""
    values = column.values if column.dtype is not Dtype.BF16 else column.numbers()
    cells: list[Any] = values.tolist()
    for lengths in reversed(column.lengths):
        end = 0
        cells = [cells[end - size : end] for size in lengths.tolist() if (end := end + size) >= 0]
    return cells
