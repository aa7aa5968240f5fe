"""Conversion between Atropos' groups and those of the bus, without loss. Pure.

Numbers become columns of the same types; everything else travels as is. One column of the gateway's own stores the
rest: empty list fields, and the sending environment. A group from a native producer gets labels made from its mask.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.opaque_columns import EncodedColumn, encode_opaque, require_few
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.group import Column, Group
from rolloutmq.schemas.loss_mask import IGNORED_LABEL, marked_tokens
from rolloutmq.schemas.wire.envelope import Dtype
from rolloutmq.services.gateway.atropos_wire import (
    FIELDS,
    NUMBERS,
    OPAQUE,
    RefusedBodyError,
    ScoredData,
    check_messages,
    check_overrides,
    temperatures,
)

OWN_COLUMN: Final = "atropos"
"""Column with the environment's number, and the fields that were empty lists."""
UNNAMED: Final = "unnamed"
"""Id of a group until its digest is checked against posts in doubt."""
TEMPERATURES: Final = "temperatures"
"""Column of the bus made of their `temperature`, which trainers need; replies to Atropos' trainers leave it out."""
NOTHING_YET: Final[Mapping[str, Any]] = {
    name: []
    for name in (
        *("tokens", "masks", "scores", "advantages", "ref_logprobs", "generation_params"),
        *("inference_logprobs", "messages", "images"),
    )
}
"""Reply for the latest example while there is none."""
TOKEN_BYTES: Final = 32
"""Approximate JSON size of a token with its label and log-probability."""
VALUE_BYTES: Final = 8
"""Approximate JSON size of any other value with its name."""
PIECE_NUMBERS: Final = 16 << 10
"""Numbers that are encoded at once: about a millisecond."""
LOOKED_AT_BYTES: Final = 256 << 10
"""Size at which the estimate stops: larger is large."""
_ALIGNED: Final = tuple(name for name in NUMBERS if name not in {"tokens", "masks"})
"""Fields with numbers that a group may lack."""
_FIELD_OF: Final = {"mask": "masks"}
"""Columns with another name at Atropos."""


class PostedGroup(NamedTuple):
    """One body: its groups, still `UNNAMED`, their sizes, and their environments."""

    digest: bytes
    env_ids: Sequence[int | None]
    groups: Sequence[Group]
    nbytes: int


def to_group(data: ScoredData, group_id: str, *, at: float) -> Group:
    """Return a group of the bus; `at` is the wall clock.

    Raises:
        RefusedBodyError: Contradicting lengths, a non-finite score, or a message without role or content.
    """
    check_messages(data)
    check_overrides(data)
    columns: dict[str, Any] = {}
    empty = []
    for name in (*_ALIGNED, *OPAQUE):
        value = getattr(data, name)
        if value == [] and data.tokens:
            empty.append(name)
        elif value is not None:
            columns[name] = value
    columns[OWN_COLUMN] = {"env_id": data.env_id, "empty": empty}
    columns[TEMPERATURES] = _temperatures(data)
    try:
        # Validate here, in a thread, and before anything was sent.
        named = columns.keys() & {*OPAQUE, OWN_COLUMN}
        opaque = {name: encode_opaque(name, columns[name]) for name in named}
        require_few(opaque)
        columns |= {name: Column.opaque(EncodedColumn(block)) for name, block in opaque.items()}
        group = Group.build(
            group_id, tokens=data.tokens, mask=data.masks, scores=data.scores, finished_at=at, **columns
        )
        for name in _ALIGNED:
            if name in group and not np.isfinite(group.columns[name].values).all():
                raise InvalidGroupError(name, "has a number that is not finite")  # sent as a string
    except InvalidGroupError as error:
        field = _FIELD_OF.get(error.column, error.column)
        raise RefusedBodyError(("body", field), f"{field} {error.problem}") from None
    return group


def _temperatures(data: ScoredData) -> Column | None:
    """Return the sampling temperature of each token, None if all are 1. Atropos has one for each sequence."""
    warm = temperatures(data)
    if all(one == 1.0 for one in warm):
        return None
    lengths = _row_lengths(data.tokens)
    if len(warm) != len(lengths):  # refused for its lengths
        return None
    return Column(Dtype.F32, np.array(warm, np.float32).repeat(lengths), (lengths,))


def _row_lengths(tokens: Any) -> NDArray[np.uint32]:
    """Return the number of tokens of each sequence."""
    if isinstance(tokens, Column):
        return tokens.lengths[0]
    return np.fromiter(map(len, tokens), np.uint32, len(tokens))


def from_group(group: Group) -> dict[str, Any]:
    """Return a group in Atropos' reply format: with every field, absent ones as None. Large columns are encoded."""
    own = _value(group, OWN_COLUMN) if OWN_COLUMN in group else {}
    answer: dict[str, Any] = dict.fromkeys(FIELDS)
    answer["tokens"] = _rows(group.columns["tokens"])
    answer["masks"] = _rows(_labels(group))
    answer["scores"] = group.scores.tolist()
    for name in _ALIGNED:
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
    return value.value if isinstance(value, EncodedColumn) else value


def json_bytes(group: Group) -> int:
    """Return the approximate JSON size of a group; the estimate stops early for a large one."""
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


def _rows(column: Column) -> Any:
    """Return the values as nested lists of Python numbers; many of them as JSON, made in pieces.

    An encoder holds the interpreter until it is done.
    """
    values = column.values if column.dtype is not Dtype.BF16 else column.numbers()
    if values.size > PIECE_NUMBERS:
        plain = Column(Dtype.F64, values, column.lengths) if column.dtype is Dtype.BF16 else column
        return msgspec.Raw(b"[%b]" % b",".join(map(_row_text, plain.rows())))
    cells: list[Any] = values.tolist()
    for lengths in reversed(column.lengths):
        end = 0
        cells = [cells[end - size : end] for size in lengths.tolist() if (end := end + size) >= 0]
    return cells


def _row_text(row: NDArray[Any] | list[NDArray[Any]]) -> bytes:
    """Return one sequence of a column as JSON."""
    pieces = (row[at : at + PIECE_NUMBERS] for at in range(0, len(row), PIECE_NUMBERS))
    lists = ([cell.tolist() for cell in one] if isinstance(one, list) else one.tolist() for one in pieces)
    return b"[%b]" % b",".join(msgspec.json.encode(one)[1:-1] for one in lists)
