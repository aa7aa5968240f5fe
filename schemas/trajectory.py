"""Trajectory groups: the unit that environments produce and trainers consume.

A group is `n` sequences sampled for one task, as named columns. A column is flat values plus the lengths that cut them
into rows, so that nothing is padded and nothing is a Python list. `Group.build` makes columns from what an environment
has (lists or arrays); every column keeps the type it came with.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.envelope import (
    COLUMNS_LIMIT,
    SEQUENCES_LIMIT,
    Dtype,
    PolicyVersion,
    RewardSummary,
)
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.numbers import plain_numbers

OPAQUE_COLUMNS: Final = frozenset(
    {"messages", "images", "overrides", "group_overrides", "generation_params", "stop_reasons"}
    | {"instance_ids", "repetition_ids", "members", "distill_tokenizer"}
)
"""Columns whose values the bus carries without looking: any msgpack value, bit for bit."""

COLUMN_DEPTH: Final[Mapping[str, int]] = {
    "tokens": 1,
    "mask": 1,
    "scores": 0,
    "inference_logprobs": 1,
    "ref_logprobs": 1,
    "advantages": 1,
    "temperatures": 1,
    "distill_token_ids": 2,
    "distill_logprobs": 2,
}
"""Nesting of the columns that every trainer knows; any other name may have any depth."""

DEPTH_LIMIT: Final = 2
"""Deepest nesting that travels: `[n][length][k]`."""
ID_CHARS: Final = 128
_COLUMN_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")

_ALIGNED_WITH_TOKENS: Final = ("mask", "inference_logprobs", "ref_logprobs", "advantages", "temperatures")

_NUMPY_OF: Final[Mapping[Dtype, np.dtype[Any]]] = {
    Dtype.BOOL: np.dtype("|b1"),
    Dtype.I8: np.dtype("|i1"),
    Dtype.U8: np.dtype("|u1"),
    Dtype.I16: np.dtype("<i2"),
    Dtype.U16: np.dtype("<u2"),
    Dtype.I32: np.dtype("<i4"),
    Dtype.U32: np.dtype("<u4"),
    Dtype.I64: np.dtype("<i8"),
    Dtype.U64: np.dtype("<u8"),
    Dtype.F16: np.dtype("<f2"),
    Dtype.BF16: np.dtype("<u2"),
    Dtype.F32: np.dtype("<f4"),
    Dtype.F64: np.dtype("<f8"),
}
_DTYPE_OF: Final = {kind: dtype for dtype, kind in _NUMPY_OF.items() if dtype is not Dtype.BF16}
_OPAQUE: Final = Dtype.OPAQUE
_LENGTHS: Final = np.dtype(np.uint32)
_FEW_ROWS: Final = 64
"""So many lengths are added up sooner one by one than by numpy."""


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Return the little-endian numpy type in which values of `dtype` lie; BF16 lies as its 16 bits."""
    return _NUMPY_OF[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """Values with their row lengths.

    Attributes:
        dtype: Element type on the wire.
        values: Flat array `[total]`, or any Python value where `dtype` is OPAQUE.
        lengths: One array per level of nesting: `()` for `[n]`; `(rows[n],)` for ragged; `(rows[n], cells[sum rows])`
            for `[n][length][k]`. All u32.
    """

    dtype: Dtype
    values: Any
    lengths: tuple[NDArray[np.uint32], ...] = ()

    @property
    def depth(self) -> int:
        return len(self.lengths)

    def numbers(self) -> NDArray[np.float64]:
        """Return the values as doubles, whatever they travel as. Copies."""
        values: NDArray[Any] = self.values
        if self.dtype is Dtype.BF16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64)

    def rows(self) -> list[Any]:
        """Return one entry a sequence: scalars, views `[length]`, or lists of views. Copies no values."""
        if self.dtype is _OPAQUE or not self.lengths:
            return list(self.values)
        cells: list[Any] = _cut(self.values, self.lengths[-1])
        for lengths in reversed(self.lengths[:-1]):
            ends = np.cumsum(lengths, dtype=np.int64)
            cells = [cells[int(e) - int(n) : int(e)] for e, n in zip(ends, lengths, strict=True)]
        return cells

    @classmethod
    def opaque(cls, value: Any) -> "Column":
        """Wrap any msgpack value: None, bool, int, float, str, bytes, lists and maps of them. A column stays itself."""
        return value if isinstance(value, Column) else cls(Dtype.OPAQUE, value)

    @classmethod
    def build(cls, name: str, data: Any, depth: int | None = None) -> "Column":
        """Make a column from nested lists or arrays.

        Arrays keep their element type; Python ints become i32 where they fit and i64 where they do not, floats f64,
        bools bool.

        Raises:
            InvalidGroupError: The data is not numeric or its nesting does not match `depth`.
        """
        if isinstance(data, Column):
            return data
        if isinstance(data, np.ndarray) and data.dtype != object:
            return _from_array(name, data, depth)
        try:
            rows = list(data)
        except TypeError:
            raise InvalidGroupError(name, "is neither a list nor an array") from None
        found = _nesting(rows) if depth is None else depth
        if found > DEPTH_LIMIT:
            raise InvalidGroupError(name, f"is nested {found} deep, at most {DEPTH_LIMIT} can travel")
        lengths: list[NDArray[np.uint32]] = []
        pieces, total = [rows], len(rows)
        try:
            for _ in range(found):
                pieces = _joined(pieces)
                sizes = list(map(len, pieces))
                lengths.append(np.fromiter(sizes, np.uint32, len(sizes)))
                total = sum(sizes)
            values = plain_numbers(pieces, total)
            flat = _joined(pieces) if values is None else []
        except (TypeError, ValueError):
            raise InvalidGroupError(name, f"is not nested {found} deep") from None
        if values is None:
            values = _typed(name, flat)
        return _of_values(name, values, tuple(lengths))

    def check(self, name: str) -> None:
        """Raise InvalidGroupError unless values and lengths are of one piece."""
        if self.dtype is _OPAQUE:
            return
        values = self.values
        if not isinstance(values, np.ndarray) or values.dtype != _NUMPY_OF[self.dtype]:
            raise InvalidGroupError(name, f"does not hold {self.dtype.name} in little-endian order")
        if self.depth > DEPTH_LIMIT:
            raise InvalidGroupError(name, f"is nested {self.depth} deep, at most {DEPTH_LIMIT} can travel")
        size = values.size
        for level in reversed(self.lengths):
            if level.dtype != _LENGTHS or level.ndim != 1 or _total(level) != size:
                raise InvalidGroupError(name, "has lengths that do not add up")
            size = level.size


def _total(lengths: NDArray[np.uint32]) -> int:
    return sum(lengths.tolist()) if lengths.size <= _FEW_ROWS else int(lengths.sum(dtype=np.int64))


def _cut(values: NDArray[Any], lengths: NDArray[np.uint32]) -> list[NDArray[Any]]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    starts = [0, *ends][:-1]
    return [values[start:end] for start, end in zip(starts, ends, strict=True)]


def _joined(rows: list[Any]) -> list[Any]:
    if rows and all(isinstance(row, np.ndarray) for row in rows) and rows[0].ndim == 1:
        return [np.concatenate(rows)]
    return list(chain.from_iterable(rows))


def _nesting(rows: Sequence[Any]) -> int:
    depth = 0
    level: Any = rows
    while True:
        inner = next((row for row in level if isinstance(row, list | tuple | np.ndarray)), None)
        if inner is None:
            return depth
        depth += 1
        level = next((r for r in level if isinstance(r, list | tuple | np.ndarray) and len(r)), ())


def _from_array(name: str, data: NDArray[Any], depth: int | None) -> Column:
    if depth is not None and data.ndim != depth + 1:
        raise InvalidGroupError(name, f"has {data.ndim} dimensions, needs {depth + 1}")
    if not 1 <= data.ndim <= DEPTH_LIMIT + 1:
        raise InvalidGroupError(name, f"has {data.ndim} dimensions, 1 to {DEPTH_LIMIT + 1} can travel")
    rows, lengths = 1, []
    for size, inner in pairwise(data.shape):
        rows *= size
        lengths.append(np.full(rows, inner, _LENGTHS))
    return _of_values(name, data.reshape(-1), tuple(lengths))


def _typed(name: str, flat: list[Any]) -> NDArray[Any]:
    """Let numpy find a type for what is not of one type of Python's own."""
    if len(flat) == 1 and isinstance(flat[0], np.ndarray):
        return flat[0]
    try:
        values = np.array(flat) if flat else np.empty(0, np.float64)
    except (ValueError, OverflowError) as error:
        raise InvalidGroupError(name, str(error)) from None
    if values.ndim != 1:
        raise InvalidGroupError(name, "is nested deeper than its depth")
    if values.dtype.kind == "f" and flat and all(isinstance(value, int) for value in flat):
        raise InvalidGroupError(name, "has integers that fit no type together")
    if not flat and name in {"tokens", "mask"}:
        values = values.astype(np.int32)
    if values.dtype == np.int64 and _fits_i32(values):
        values = values.astype(np.int32)
    return values


def _fits_i32(values: NDArray[Any]) -> bool:
    info = np.iinfo(np.int32)
    return not values.size or bool(values.min() >= info.min and values.max() <= info.max)


def _of_values(name: str, values: NDArray[Any], lengths: tuple[NDArray[np.uint32], ...]) -> Column:
    dtype = _DTYPE_OF.get(values.dtype)
    if dtype is None:
        dtype = _DTYPE_OF.get(values.dtype.newbyteorder("<"))
    if dtype is None:
        raise InvalidGroupError(name, f"has elements of type {values.dtype}, which cannot travel")
    return Column(dtype, np.ascontiguousarray(values, _NUMPY_OF[dtype]), lengths)


@dataclass(frozen=True, slots=True, eq=False)
class Group:
    """`n` sequences sampled for one task, with where and when they came from.

    Attributes:
        group_id: Unique in the run.
        columns: By name, in the order in which they travel.
        oldest, newest: Policy versions of the first and the last sampled token.
        started_at, finished_at: Wall-clock seconds of the rollout.
        env: Environment it came from; filled in by the producer.
        task: Id of the task it answers, empty if the environment drew its own.
        stamped: The policy versions were told. If not, the producer puts those it knew when the rollout began.
    """

    group_id: str
    columns: Mapping[str, Column]
    oldest: PolicyVersion = PolicyVersion()
    newest: PolicyVersion = PolicyVersion()
    started_at: float = 0.0
    finished_at: float = 0.0
    env: str = ""
    task: str = ""
    sequences: int = field(default=0)
    tokens: int = field(default=0)
    stamped: bool = True

    @classmethod
    def build(
        cls,
        group_id: str,
        *,
        tokens: Any,
        mask: Any,
        scores: Any,
        oldest: PolicyVersion | None = None,
        newest: PolicyVersion | None = None,
        started_at: float = 0.0,
        finished_at: float = 0.0,
        task: str = "",
        **columns: Any,
    ) -> "Group":
        """Make a group from lists or arrays and check that its columns agree.

        Args:
            group_id: Unique in the run.
            tokens: `[n][length]` token ids.
            mask: `[n][length]`, what of it is trained on (bool, 0 and 1, or labels as the environment has them).
            scores: `[n]` rewards.
            oldest: Policy version of the first sampled token. None: the newest that the producer knew when the
                rollout began.
            newest: Policy version of the last one; `oldest` if not given.
            started_at: Wall-clock seconds at which the rollout began.
            finished_at: Wall-clock seconds at which it was scored.
            task: Id of the task it answers.
            columns: Any of the other columns of the design, or columns of your own. None means absent.

        Raises:
            InvalidGroupError: A column has an unusable type or contradicts another.
        """
        given = {"tokens": tokens, "mask": mask, "scores": scores, **columns}
        built = {
            name: Column.opaque(data)
            if name in OPAQUE_COLUMNS
            else Column.build(name, data, COLUMN_DEPTH.get(name))
            for name, data in given.items()
            if data is not None
        }
        group = cls(
            group_id,
            built,
            oldest or PolicyVersion(),
            newest or oldest or PolicyVersion(),
            started_at,
            finished_at,
            task=task,
            sequences=len(built["scores"].values),
            tokens=int(built["tokens"].values.size),
            stamped=oldest is not None,
        )
        group.check()
        return group

    def check(self) -> None:
        """Raise InvalidGroupError unless the columns agree with each other and with the limits."""
        if not 1 <= self.sequences <= SEQUENCES_LIMIT:
            raise InvalidGroupError("scores", f"{self.sequences} sequences, 1 to {SEQUENCES_LIMIT} allowed")
        if len(self.columns) > COLUMNS_LIMIT:
            raise InvalidGroupError("*", f"{len(self.columns)} columns, at most {COLUMNS_LIMIT} allowed")
        if not 1 <= len(self.group_id) <= ID_CHARS:
            raise InvalidGroupError("group_id", f"must have 1 to {ID_CHARS} characters")
        if len(self.task) > ID_CHARS:
            raise InvalidGroupError("task", f"is longer than {ID_CHARS} characters")
        for name, column in self.columns.items():
            self._check_column(name, column)
        if self.columns["tokens"].values.dtype.kind not in "iu":
            raise InvalidGroupError("tokens", "are not integers")
        if not np.isfinite(self.columns["scores"].numbers()).all():
            raise InvalidGroupError("scores", "is not finite")
        self._check_lengths(_ALIGNED_WITH_TOKENS)

    def _check_column(self, name: str, column: Column) -> None:
        depth = COLUMN_DEPTH.get(name)
        if depth is None:
            if not _COLUMN_NAME.fullmatch(name):
                raise InvalidGroupError(
                    name, "is no name: a-z, 0-9 and _, at most 48, beginning with a letter"
                )
        elif column.depth != depth or column.dtype is _OPAQUE:
            raise InvalidGroupError(name, f"is not numbers nested {depth} deep")
        column.check(name)
        if column.dtype is _OPAQUE:
            return
        rows = len(column.lengths[0]) if column.lengths else len(column.values)
        if rows != self.sequences:
            raise InvalidGroupError(name, f"has {rows} rows for {self.sequences} scores")

    def _check_lengths(self, names: Iterable[str]) -> None:
        (rows,) = self.columns["tokens"].lengths
        for name in names:
            column = self.columns.get(name)
            if column is None or column.lengths[0] is rows:
                continue
            if column.lengths[0].tobytes() != rows.tobytes():
                raise InvalidGroupError(name, "has other lengths than tokens")

    @property
    def scores(self) -> NDArray[Any]:
        """Rewards `[n]`, in the element type they came with."""
        values: NDArray[Any] = self.columns["scores"].values
        return values

    def rewards(self) -> RewardSummary:
        """Summarise the scores for the header."""
        scores = self.columns["scores"].numbers().tolist()
        low, high, count = min(scores), max(scores), len(scores)
        try:
            mean = math.fsum(scores) / count
        except OverflowError:
            # The sum is too large where the mean is not; that of halves is not either.
            mean = 2 * math.fsum(score / 2 / count for score in scores)
        return RewardSummary(min(max(mean, low), high), low, high)

    def __getitem__(self, name: str) -> list[Any]:
        """Return the rows of a column; KeyError if the group has none of that name."""
        return self.columns[name].rows()

    def __contains__(self, name: object) -> bool:
        return name in self.columns
