"""The columns of a received group, made on first use. Pure.

Whatever makes a group undecodable is found when it is received; only the making of its columns waits. The sizes in the
directory of a body are checked once for all bodies with the same directory, and the contents of each body then. A body
that does not pass these checks may still be sound: `codec` reads it column by column, and its rules are the ones that
count. Here is only what follows from them.
"""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.group_layout import ROW
from rolloutmq.bus.encoding.opaque_columns import check_values
from rolloutmq.schemas.errors import InvalidGroupError, LimitExceededError
from rolloutmq.schemas.group import TOKEN_ALIGNED, Column, check_kinds, numpy_dtype
from rolloutmq.schemas.wire.envelope import (
    GROUP_LIMIT_BYTES,
    SEQUENCES_LIMIT,
    ColumnTable,
    Dtype,
    GroupHeader,
)

Arrays = Sequence[Any]
"""The frames of a body: small ones as `bytes`, which Python cuts and reads faster, others as arrays of bytes."""

TABLES_KEPT: Final = 256
"""Cached column tables, so groups with the same columns share one."""
DIRECTORIES_KEPT: Final = 1024
"""Cached directories, of all tables; one of five columns is about a kilobyte."""

U32: Final = np.dtype("<u4")
_OPAQUE: Final = Dtype.OPAQUE
_FEW_BYTES: Final = 1024
_FEW_ROWS: Final = 64
"""Up to these sizes, Python is faster than numpy."""
_FLOATS: Final[Mapping[Dtype, str]] = {Dtype.F16: "e", Dtype.F32: "f", Dtype.F64: "d"}
_struct: Final = lru_cache(maxsize=TABLES_KEPT)(struct.Struct)
_decode_value: Final = msgspec.msgpack.Decoder(Any).decode


class ColumnPlan(NamedTuple):
    """How to read one column."""

    name: str
    dtype: Dtype
    kind: np.dtype[Any] | None
    """Element type of the values; None for an opaque column."""
    block: int
    """Its first block."""
    levels: int
    """Blocks of lengths before the values."""
    owner: str
    """Column with the same lengths; empty if it has its own."""

    @property
    def values(self) -> int:
        """The block of its values."""
        return self.block + self.levels


class TablePlan:
    """How to read the groups of a table: all that is the same for each of them.

    Attributes:
        directory: Format of the directory.
        columns: Plans of the columns by name, in the order of their blocks.
        problem: Why no group can have these columns; empty if one can.
        plain: Columns with one length for each token share those of `tokens`.
        numbers: The columns that are not opaque.
        bools: Places in the directory of the values of such columns.
        opaque: Blocks of the values of opaque columns, by name.
        scores: Place in the directory of the scores.
        letter: Their type as `struct` names it, if it is one that may be infinite.
    """

    __slots__ = ("bools", "columns", "directory", "letter", "numbers", "opaque", "plain", "problem", "scores")

    def __init__(self, table: ColumnTable) -> None:
        self.directory = struct.Struct(f"<{table.blocks * ROW // 8}Q")
        self.columns: dict[str, ColumnPlan] = {}
        self.problem = self._read(table)
        plans = self.columns.values()
        self.numbers = [plan for plan in plans if plan.kind is not None]
        self.bools = [3 * plan.values for plan in plans if plan.dtype is Dtype.BOOL]
        self.opaque = {plan.name: plan.values for plan in plans if plan.kind is None}
        aligned = ["tokens", *(name for name in TOKEN_ALIGNED if name in self.columns)]
        scores = self.columns.get("scores")
        self.scores = 3 * scores.block if scores is not None else -1
        self.letter = _FLOATS.get(scores.dtype, "") if scores is not None else ""
        self.plain = not self.problem and len(set(map(self._root, aligned))) == 1

    def _read(self, table: ColumnTable) -> str:
        """Plan each column; return the problem of the table."""
        kinds: dict[str, tuple[Dtype, int]] = {}
        problem, block = "", 0
        for spec in table.columns:
            is_opaque, depth = spec.dtype is _OPAQUE, spec.depth
            owner = "" if is_opaque else spec.lengths_of
            if owner and (owner not in kinds or kinds[owner][1] != depth):
                problem = problem or (
                    f"column {spec.name}: lengths_of must name an earlier column of the same depth (got {owner})"
                )
            if spec.name in kinds:
                problem = problem or f"column {spec.name}: must be in its table once"
            kind = None if is_opaque else numpy_dtype(spec.dtype)
            self.columns[spec.name] = ColumnPlan(spec.name, spec.dtype, kind, block, spec.blocks - 1, owner)
            kinds[spec.name] = spec.dtype, 0 if is_opaque else depth
            block += spec.blocks
        missing = sorted({"tokens", "mask", "scores"} - kinds.keys())
        if missing:
            problem = problem or f"column {missing[0]} is missing"
        try:
            if not problem:
                check_kinds(kinds)
        except (InvalidGroupError, KeyError) as error:
            problem = str(error)
        return problem

    def _root(self, name: str) -> str:
        """Return the column that has the lengths of another."""
        while owner := self.columns[name].owner:
            name = owner
        return name


@lru_cache(maxsize=TABLES_KEPT)
def plan_of(table: ColumnTable) -> TablePlan:
    """Return the plan of a table; equal tables share one."""
    return TablePlan(table)


Unpack = Callable[[Any, int], tuple[Any, ...]]
"""Reads few numbers at an offset."""


class _Directory(NamedTuple):
    """A directory whose sizes agree with each other, and what is left to check in a body with it."""

    rows: tuple[int, ...]
    """Frame, offset and bytes of each block."""
    sequences: int
    tokens: int
    lengths: list[tuple[int, int, int, int, Unpack | None]]
    """Frame, offset and number of each array of lengths, their sum, and how to read few of them."""
    bools: list[tuple[int, int, int]]
    """Frame, start and end of each array of bools."""
    scores: tuple[int, int, Unpack] | None
    """Frame and offset of few floats that must be finite; None for other scores."""


@lru_cache(maxsize=DIRECTORIES_KEPT)
def _directory(plan: TablePlan, data: bytes, *frames: int) -> _Directory | None:
    """Return the directory of a body with frames of these bytes; None unless all its sizes agree."""
    rows = plan.directory.unpack(data)
    for frame, offset, nbytes in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        if frame >= len(frames) or offset + nbytes > frames[frame]:
            return None
    sizes: dict[str, tuple[int, int]] = {}  # sequences and values of each column
    lengths: list[tuple[int, int, int, int, Unpack | None]] = []
    for name, _, kind, block, levels, owner in plan.numbers:
        assert kind is not None
        at = 3 * (block + levels)
        size, rest = divmod(rows[at + 2], kind.itemsize)
        sizes[name] = size, size
        for level in range(at - 3, 3 * block - 1, -3):
            number, odd = divmod(rows[level + 2], 4)
            lengths.append((rows[level], rows[level + 1], number, size, _unpack(number, "I")))
            rest |= odd
            size = number
        if levels:
            sizes[name] = size, sizes[name][1]
        elif owner:
            if size != sizes[owner][1]:
                return None
            sizes[name] = sizes[owner]
        if rest:
            return None
    sequences, tokens = sizes["tokens"]
    if not 1 <= sequences <= SEQUENCES_LIMIT or any(each != sequences for each, _ in sizes.values()):
        return None
    bools = [(rows[at], rows[at + 1], rows[at + 1] + rows[at + 2]) for at in plan.bools]
    at = plan.scores
    unpack = _unpack(sequences, plan.letter)
    scores = None if unpack is None else (rows[at], rows[at + 1], unpack)
    return _Directory(rows, sequences, tokens, lengths, bools, scores)


def _unpack(number: int, letter: str) -> Unpack | None:
    """Return how to read so many numbers; None for many, and for those of a type without a letter."""
    return _struct(f"<{number}{letter}").unpack_from if letter and number <= _FEW_ROWS else None


class ReceivedColumns(Mapping[str, Column]):
    """The columns of a received group by name, each made on its first use."""

    __slots__ = ("_arrays", "_made", "_plan", "_rows")

    def __init__(
        self, plan: TablePlan, rows: tuple[int, ...], arrays: Arrays, made: dict[str, Column]
    ) -> None:
        self._plan = plan
        self._rows = rows
        self._arrays = arrays
        self._made = made

    def __getitem__(self, name: str) -> Column:
        if (column := self._made.get(name)) is not None:
            return column
        _, dtype, kind, block, levels, owner = self._plan.columns[name]
        assert kind is not None
        lengths = (
            self[owner].lengths
            if owner
            else tuple([self._values(block + level, U32) for level in range(levels)])
        )
        column = self._made[name] = Column.received(dtype, self._values(block + levels, kind), lengths)
        return column

    def _values(self, block: int, kind: np.dtype[Any]) -> NDArray[Any]:
        frame, offset, nbytes = self._rows[3 * block : 3 * block + 3]
        return np.frombuffer(self._arrays[frame], kind, nbytes // kind.itemsize, offset)

    def __contains__(self, name: object) -> bool:
        return name in self._plan.columns

    def __iter__(self) -> Iterator[str]:
        return iter(self._plan.columns)

    def __len__(self) -> int:
        return len(self._plan.columns)

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy and pickle as a dict: a pickled array owns its memory."""
        return dict, (dict(self),)


def received_columns(plan: TablePlan, header: GroupHeader, arrays: Arrays) -> ReceivedColumns | None:
    """Return the columns of a body; None unless they certainly are those of a sound group with this header.

    The frames have as many bytes together as the header says.
    """
    body, size = arrays[0], plan.directory.size
    if not plan.plain or len(body) < size:
        return None
    sizes = (header.nbytes,) if len(arrays) == 1 else [len(array) for array in arrays]
    found = _directory(plan, bytes(body[:size]), *sizes)
    if found is None or found.sequences != header.sequences or found.tokens != header.tokens:
        return None
    for frame, offset, number, total, unpack in found.lengths:
        sum_of = sum(unpack(arrays[frame], offset)) if unpack else _sum(arrays[frame], offset, number)
        if sum_of != total:
            return None
    for frame, start, end in found.bools:
        if not are_bools(arrays[frame][start:end]):
            return None
    if found.scores is not None:
        frame, offset, unpack = found.scores
        if not math.isfinite(sum(unpack(arrays[frame], offset))):
            return None
    made = _decoded(plan, found.rows, arrays) if plan.opaque else {}
    if made is None:
        return None
    columns = ReceivedColumns(plan, found.rows, arrays, made)
    if found.scores is None and not np.isfinite(columns["scores"].numbers()).all():
        return None
    return columns


def _sum(frame: bytes | NDArray[np.uint8], offset: int, number: int) -> int:
    return int(np.frombuffer(frame, U32, number, offset).sum(dtype=np.int64))


def are_bools(raw: bytes | NDArray[np.uint8]) -> bool:
    """Return whether all bytes are 0 or 1."""
    if len(raw) <= _FEW_BYTES:
        return not bytes(raw).translate(None, b"\0\1")
    return bool(np.maximum.reduce(np.frombuffer(raw, np.uint8)) <= 1)


def _decoded(plan: TablePlan, rows: tuple[int, ...], arrays: Arrays) -> dict[str, Column] | None:
    """Return the opaque columns; None if one of them cannot be decoded."""
    blocks: dict[str, memoryview] = {}
    for name, block in plan.opaque.items():
        frame, offset, nbytes = rows[3 * block : 3 * block + 3]
        blocks[name] = memoryview(arrays[frame])[offset : offset + nbytes]
    if sum(block.nbytes for block in blocks.values()) > GROUP_LIMIT_BYTES:
        return None
    try:
        # The number of values in all opaque columns is checked before the first of them is decoded.
        check_values(blocks.values())
        return {name: Column.opaque(_decode_value(block)) for name, block in blocks.items()}
    except (LimitExceededError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
