"""Trajectory groups: the unit that environments produce and trainers consume.

A group holds `n` sequences of one prompt as named columns. A column is a flat array plus the lengths of its rows:
nothing is padded and nothing is a Python list. `Group.build` makes columns from lists or arrays; each column keeps its
element type.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise
from typing import Any, Final, Literal, get_args, overload

import msgspec
import numpy as np
from numpy.typing import NDArray

from rolloutmq.schemas.arrays import plain_numbers
from rolloutmq.schemas.errors import InvalidGroupError
from rolloutmq.schemas.loss_mask import marked_tokens
from rolloutmq.schemas.printable import html_table, printable
from rolloutmq.schemas.token_values import check_token_values
from rolloutmq.schemas.wire.envelope import (
    COLUMNS_LIMIT,
    SEQUENCES_LIMIT,
    Dtype,
    GroupHeader,
    GroupId,
    PolicyVersion,
    RewardSummary,
    Seconds,
    TaskRef,
)

RATINGS: Final = "ratings"
"""Column `[n][raters]` of what each rater gave each sequence, NaN if missing; see `services.rewards`."""
RATERS: Final = "raters"
"""Opaque column beside `ratings`: for each sequence the weights of its raters by name."""

OPAQUE_COLUMNS: Final = frozenset(
    {"messages", "images", "overrides", "group_overrides", "generation_params", "stop_reasons"}
    | {"instance_ids", "repetition_ids", "members", "distill_tokenizer", RATERS}
)
"""Columns that the bus stores without decoding: any msgpack value, bit for bit."""

AlignedName = Literal["mask", "inference_logprobs", "ref_logprobs", "advantages", "temperatures"]
"""Columns with one value for each token, of any element type."""
NestedName = Literal["distill_token_ids", "distill_logprobs"]
TOKEN_ALIGNED: Final[tuple[str, ...]] = get_args(AlignedName)
COLUMN_DEPTH: Final[Mapping[str, int]] = {
    "tokens": 1,
    "scores": 0,
    **dict.fromkeys(TOKEN_ALIGNED, 1),
    **dict.fromkeys(get_args(NestedName), 2),
}
"""Nesting of the columns that every trainer knows; a column of another name may have any depth."""

DEPTH_LIMIT: Final = 2
"""Deepest nesting of a column: `[n][length][k]`."""
_SHAPES: Final = (
    "[n]: one value for each sequence",
    "[n][length]: one list for each sequence",
    "[n][length][k]: one list for each token of each sequence",
)
_ORIGIN: Final[Mapping[str, Any]] = {
    "group_id": GroupId,
    "task": TaskRef,
    "oldest": PolicyVersion,
    "newest": PolicyVersion,
    "started_at": Seconds,
    "finished_at": Seconds,
}
"""Fields of the header that the caller gives, with their types on the wire."""
_origin: Final = msgspec.msgpack.Decoder(
    tuple[GroupId, TaskRef, PolicyVersion, PolicyVersion, Seconds, Seconds]
)
_encode: Final = msgspec.msgpack.Encoder().encode
_COLUMN_NAME: Final = re.compile(r"[a-z][a-z0-9_]{0,47}")

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
_FLOATS: Final = frozenset({Dtype.F32, Dtype.F64})
_LENGTHS: Final = np.dtype(np.uint32)
IDS_SHOWN: Final = 16
"""Most token ids of a sequence in a notebook."""
_FEW_ROWS: Final = 64
"""Up to this many numbers, Python is faster than numpy."""


def numpy_dtype(dtype: Dtype) -> np.dtype[Any]:
    """Return the little-endian numpy type that stores values of `dtype`; BF16 is stored as its 16 bits."""
    return _NUMPY_OF[dtype]


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """A flat array with its row lengths.

    Attributes:
        dtype: Element type on the wire.
        values: Flat array `[total]`, or any Python value where `dtype` is OPAQUE.
        lengths: One array per level of nesting: `()` for `[n]`; `(rows[n],)` for ragged; `(rows[n], cells[sum rows])`
            for `[n][length][k]`. All u32.
    """

    dtype: Dtype
    values: Any
    lengths: tuple[NDArray[np.uint32], ...] = ()

    @classmethod
    def received(
        cls, dtype: Dtype, values: NDArray[Any], lengths: tuple[NDArray[np.uint32], ...]
    ) -> "Column":
        """Return a column; at half of the cost of the constructor, which assigns by name."""
        column = cls.__new__(cls)
        set_dtype, set_values, set_lengths = _column_slots
        set_dtype(column, dtype)
        set_values(column, values)
        set_lengths(column, lengths)
        return column

    @property
    def depth(self) -> int:
        """Levels of nesting below `[n]`."""
        return len(self.lengths)

    def numbers(self) -> NDArray[np.float64]:
        """Return a copy of the flat values `[total]` as doubles."""
        values: NDArray[Any] = self.values
        if self.dtype is Dtype.BF16:
            values = (values.astype(np.uint32) << 16).view(np.float32)
        return values.astype(np.float64)

    def rows(self) -> list[Any]:
        """Return one entry for each sequence: a scalar, a view `[length]`, or a list of views. Copies no values."""
        if self.dtype is _OPAQUE or not self.lengths:
            return list(self.values)
        cells: list[Any] = _cut(self.values, self.lengths[-1])
        for lengths in reversed(self.lengths[:-1]):
            ends = np.cumsum(lengths, dtype=np.int64)
            cells = [cells[int(e) - int(n) : int(e)] for e, n in zip(ends, lengths, strict=True)]
        return cells

    @classmethod
    def opaque(cls, value: Any) -> "Column":
        """Wrap any msgpack value: None, bool, int, float, str, bytes, lists and maps of them.

        A `Column` is returned unchanged.
        """
        return value if isinstance(value, Column) else cls(Dtype.OPAQUE, value)

    @classmethod
    def build(cls, name: str, data: Any, depth: int | None = None) -> "Column":
        """Build a column from nested lists or arrays.

        Arrays keep their element type. Python ints become i32 if all fit, otherwise i64; floats become f64 and bools
        bool.

        Args:
            name: Name of the column, for errors.
            data: `[n]`, `[n][length]` or `[n][length][k]`. A `Column` is returned unchanged.
            depth: Required nesting: 0, 1 or 2. None takes the nesting of the data.

        Raises:
            InvalidGroupError: The data is not numeric, or its nesting differs from `depth`.
        """
        if isinstance(data, Column):
            return data
        if isinstance(data, np.ndarray) and data.dtype != object:
            return _from_array(name, data, depth)
        try:
            rows = list(data)
        except TypeError:
            raise InvalidGroupError(name, f"must be a list or an array (got {type(data).__name__})") from None
        found = _nesting(rows) if depth is None else depth
        if found > DEPTH_LIMIT:
            raise InvalidGroupError(name, f"must be nested at most {DEPTH_LIMIT} deep (got {found})")
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
            raise InvalidGroupError(name, f"must have the shape {_SHAPES[found]}") from None
        if values is None:
            values = _typed(name, flat)
        return _of_values(name, values, tuple(lengths))

    def check(self, name: str, like: "Column | None" = None) -> None:
        """Raise InvalidGroupError unless the lengths match the values; those of `like` were checked, and may be its."""
        if self.dtype is _OPAQUE:
            return
        values = self.values
        if not isinstance(values, np.ndarray) or values.dtype != _NUMPY_OF[self.dtype]:
            raise InvalidGroupError(name, f"values must be a little-endian array of {self.dtype.name}")
        size = values.size
        if like is not None and self.lengths is like.lengths and size == like.values.size:
            return
        for level in reversed(self.lengths):
            if level.dtype != _LENGTHS or level.ndim != 1 or _total(level) != size:
                raise InvalidGroupError(name, "lengths must be u32 and add up to the number of values")
            size = level.size


_column_slots: Final = tuple(getattr(Column, name).__set__ for name in Column.__slots__)


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
        raise InvalidGroupError(name, f"must have {depth + 1} dimensions (got {data.ndim})")
    if not 1 <= data.ndim <= DEPTH_LIMIT + 1:
        raise InvalidGroupError(name, f"must have 1 to {DEPTH_LIMIT + 1} dimensions (got {data.ndim})")
    rows, lengths = 1, []
    for size, inner in pairwise(data.shape):
        rows *= size
        lengths.append(np.full(rows, inner, _LENGTHS))
    return _of_values(name, data.reshape(-1), tuple(lengths))


def _typed(name: str, flat: list[Any]) -> NDArray[Any]:
    """Let numpy choose a type for numbers that are not all Python ints, all floats or all bools."""
    if len(flat) == 1 and isinstance(flat[0], np.ndarray):
        return flat[0]
    try:
        values = np.array(flat) if flat else np.empty(0, np.float64)
    except (ValueError, OverflowError) as error:
        raise InvalidGroupError(name, f"must be numbers: {error}") from None
    if values.ndim != 1:
        raise InvalidGroupError(name, "has lists where numbers must stand")
    if values.dtype.kind == "f" and flat and all(isinstance(value, int) for value in flat):
        raise InvalidGroupError(name, "its integers fit no common 64-bit type")
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
        raise InvalidGroupError(name, f"must be numbers or bools (got elements of type {values.dtype})")
    return Column(dtype, np.ascontiguousarray(values, _NUMPY_OF[dtype]), lengths)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Group:
    """`n` sequences of one prompt, with their origin.

    Attributes:
        group_id: Unique in the run.
        columns: Columns by name, in wire order.
        oldest, newest: Policy versions of the first and the last sampled token.
        started_at, finished_at: Start and end of the rollout, wall-clock seconds since the epoch.
        env: Environment; set on groups that a consumer pulls.
        task: Id of the submitted task that the group answers; empty if the environment drew its own task.
        sequences: Number of sequences, `n`.
        tokens: Tokens of all sequences.
        stamped: The caller gave the policy versions. If False, the producer sets the version it knew when the rollout
            began.
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

    def __post_init__(self) -> None:
        """Raise InvalidGroupError unless the wire can carry ids, policy versions and times.

        A producer could send neither a group without a header nor any group behind it.
        """
        origin = (self.group_id, self.task, self.oldest, self.newest, self.started_at, self.finished_at)
        try:
            _origin.decode(_encode(origin))
            if math.isfinite(self.started_at) and math.isfinite(self.finished_at):
                return
        except (msgspec.MsgspecError, TypeError, ValueError, OverflowError):
            pass
        for (name, wanted), value in zip(_ORIGIN.items(), origin, strict=True):
            if problem := _unsendable(wanted, value):
                raise InvalidGroupError(name, f"{problem} (got {value!a:.80})")

    @classmethod
    def received(cls, header: GroupHeader, columns: Mapping[str, Column], env: str) -> "Group":
        """Return a group whose ids, versions and times came over the wire, so they need no check."""
        group = cls.__new__(cls)
        # The slots themselves: an assignment by name costs twice as much, and a pull makes many groups.
        (
            set_id, set_columns, set_oldest, set_newest, set_start, set_finish, set_env, set_task, set_sequences,
            set_tokens, set_stamped,
        ) = _group_slots  # fmt: skip
        set_id(group, header.group_id)
        set_columns(group, columns)
        set_oldest(group, header.oldest)
        set_newest(group, header.newest)
        set_start(group, header.started_at)
        set_finish(group, header.finished_at)
        set_env(group, env)
        set_task(group, header.task)
        set_sequences(group, header.sequences)
        set_tokens(group, header.tokens)
        set_stamped(group, True)
        return group

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
        """Build a group from lists or arrays, and check that its columns agree.

        Args:
            group_id: Unique in the run; 1 to 128 characters.
            tokens: Token ids `[n][length]`, prompt and answer; none is negative.
            mask: Loss mask `[n][length]`: bools, 0 and 1, or labels: -100 where nothing is learned, and any other
                integer where something is.
            scores: Rewards `[n]`, finite.
            oldest: Policy version of the first sampled token. None: the newest version that the producer knew when
                the rollout began.
            newest: Policy version of the last sampled token, at least `oldest`. None: `oldest`.
            started_at: Start of the rollout, wall-clock seconds since the epoch.
            finished_at: Time of scoring, wall-clock seconds since the epoch.
            task: Id of the submitted task that the group answers.
            columns: Further columns; None means absent. `inference_logprobs`, `ref_logprobs`, `advantages` and
                `temperatures` are `[n][length]`; `distill_token_ids` and `distill_logprobs` are `[n][length][k]`;
                the names in `OPAQUE_COLUMNS` take any msgpack value; other names take numbers of any nesting up to
                `[n][length][k]`.

        Raises:
            InvalidGroupError: A column has an unusable type, shape or value, or contradicts another; or the wire
                cannot carry one of the other arguments.
        """
        given = {"tokens": tokens, "mask": mask, "scores": scores, **columns}
        for name in ("tokens", "mask", "scores"):
            if given[name] is None:
                raise InvalidGroupError(name, "is required (got None)")
        built = {
            name: Column.opaque(data)
            if name in OPAQUE_COLUMNS
            else Column.build(name, data, COLUMN_DEPTH.get(name))
            for name, data in given.items()
            if data is not None
        }
        _share_lengths(built)
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
        check_token_values(group)
        check_versions(oldest, newest)
        return group

    def check(self) -> None:
        """Raise InvalidGroupError unless the columns agree with each other and with the limits."""
        check_kinds({name: (column.dtype, column.depth) for name, column in self.columns.items()})
        self.check_values()

    def check_values(self) -> None:
        """Do what `check` does, for columns whose kinds are checked."""
        if not 1 <= self.sequences <= SEQUENCES_LIMIT:
            raise InvalidGroupError("scores", f"must have 1 to {SEQUENCES_LIMIT} rows (got {self.sequences})")
        checked: Column | None = None
        for name, column in self.columns.items():
            if column.dtype is _OPAQUE:
                continue
            column.check(name, checked)
            rows = len(column.lengths[0]) if column.lengths else len(column.values)
            if rows != self.sequences:
                raise InvalidGroupError(
                    name, f"must have one row for each sequence (got {rows} rows, {self.sequences} scores)"
                )
            checked = column
        self._check_scores()
        self._check_lengths(TOKEN_ALIGNED)

    def _check_scores(self) -> None:
        scores = self.columns["scores"].numbers()
        few = scores.size <= _FEW_ROWS
        if not (all(map(math.isfinite, scores.ravel().tolist())) if few else np.isfinite(scores).all()):
            row = int(np.argmin(np.isfinite(scores)))
            raise InvalidGroupError("scores", f"row {row} is not finite (got {scores[row]})")

    def _check_lengths(self, names: Iterable[str]) -> None:
        (rows,) = self.columns["tokens"].lengths
        for name in names:
            column = self.columns.get(name)
            if column is None or column.lengths[0] is rows:
                continue
            if column.lengths[0].tobytes() != rows.tobytes():
                row = int(np.argmax(column.lengths[0] != rows))
                raise InvalidGroupError(
                    name, f"row {row} has {column.lengths[0][row]} values, tokens has {rows[row]}"
                )

    @property
    def scores(self) -> NDArray[Any]:
        """Rewards `[n]`, in their original element type."""
        values: NDArray[Any] = self.columns["scores"].values
        return values

    def rewards(self) -> RewardSummary:
        """Return the moments and the range of the scores, as doubles. `m2` is infinite if it overflows."""
        column = self.columns["scores"]
        scores = (column.values if column.dtype in _FLOATS else column.numbers()).tolist()
        low, high, count = min(scores), max(scores), len(scores)
        try:
            mean = math.fsum(scores) / count
        except OverflowError:
            # The sum overflows although the mean does not: add halves instead.
            mean = 2 * math.fsum(score / 2 / count for score in scores)
        mean = min(max(mean, low), high)
        try:
            m2 = math.fsum([(deviation := score - mean) * deviation for score in scores])
        except OverflowError:
            m2 = math.inf
        return RewardSummary(mean, low, high, m2)

    @overload
    def __getitem__(self, name: Literal["tokens"]) -> list[NDArray[np.integer[Any]]]: ...
    @overload
    def __getitem__(self, name: AlignedName) -> list[NDArray[Any]]: ...
    @overload
    def __getitem__(self, name: NestedName) -> list[list[NDArray[Any]]]: ...
    @overload
    def __getitem__(self, name: str) -> list[Any]: ...

    def __getitem__(self, name: str) -> list[Any]:
        """Return the rows of a column, as `Column.rows` does; KeyError if the group has no such column."""
        return self.columns[name].rows()

    def __contains__(self, name: object) -> bool:
        return name in self.columns

    @property
    def _title(self) -> str:
        of = f" of {self.env}" if self.env else ""
        sizes = f"{counted(self.sequences, 'sequence')}, {counted(self.tokens, 'token')}"
        return f"Group {self.group_id}{of}: {sizes}, policy {policy_range(self.oldest, self.newest)}"

    def __repr__(self) -> str:
        """Return one line: a notebook asks for it beside the table, and arrays of a whole batch are megabytes."""
        return f"<{printable(self._title)}>"

    def _repr_html_(self) -> str:
        """Return a table of the first sequences, for a notebook."""
        ends = np.cumsum(self.columns["tokens"].lengths[0], dtype=np.int64)
        marked = np.concatenate(([0], np.cumsum(marked_tokens(self))))[ends]
        sampled = np.diff(marked, prepend=0)
        scores, tokens = self.columns["scores"].numbers(), self["tokens"]
        rows = (
            (row, f"{scores[row]:.4g}", len(ids), sampled[row], _ids(ids)) for row, ids in enumerate(tokens)
        )
        return html_table(self._title, ("", "score", "tokens", "sampled", "token ids"), rows, self.sequences)


def _share_lengths(columns: dict[str, Column]) -> None:
    """Let the columns with one value for each token have the lengths of the tokens, where theirs are equal."""
    lengths = columns["tokens"].lengths
    if len(lengths) != 1:
        return
    kind, rows = lengths[0].dtype, lengths[0].tobytes()
    for name in TOKEN_ALIGNED:
        column = columns.get(name)
        if column is not None and len(column.lengths) == 1:
            own = column.lengths[0]
            if own.dtype == kind and own.tobytes() == rows:
                columns[name] = Column(column.dtype, column.values, lengths)


_group_slots: Final = tuple(getattr(Group, name).__set__ for name in Group.__slots__)


def check_kinds(kinds: Mapping[str, tuple[Dtype, int]]) -> None:
    """Raise InvalidGroupError unless columns of these element types and depths can be those of a group."""
    if len(kinds) > COLUMNS_LIMIT:
        raise InvalidGroupError("*", f"too many columns (got {len(kinds)}, limit {COLUMNS_LIMIT})")
    for name, (dtype, depth) in kinds.items():
        wanted = COLUMN_DEPTH.get(name)
        if wanted is None:
            if not _COLUMN_NAME.fullmatch(name):
                raise InvalidGroupError(
                    name, "invalid name; use at most 48 of a-z, 0-9 and _, and begin with a letter"
                )
        elif depth != wanted or dtype is _OPAQUE:
            raise InvalidGroupError(name, f"must be numbers of the shape {_SHAPES[wanted]}")
        if depth > DEPTH_LIMIT:
            raise InvalidGroupError(name, f"must be nested at most {DEPTH_LIMIT} deep (got {depth})")
    tokens = _NUMPY_OF[kinds["tokens"][0]]
    if tokens.kind not in "iu":
        raise InvalidGroupError("tokens", f"must be integers (got {tokens})")


def check_versions(oldest: PolicyVersion | None, newest: PolicyVersion | None, where: str = "") -> None:
    """Check the policy versions of the first and the last sampled token, as far as given; `where` begins the error.

    Raises:
        InvalidGroupError: The first is newer.
    """
    if oldest is not None and newest is not None and oldest > newest:
        raise InvalidGroupError(
            "oldest",
            f"{where}must not be newer than newest {newest.incarnation}.{newest.step} "
            f"(got {oldest.incarnation}.{oldest.step})",
        )


def counted(number: int, noun: str) -> str:
    """Return a number with its noun."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def policy_range(oldest: PolicyVersion, newest: PolicyVersion) -> str:
    """Return the policy versions of a group, as `incarnation.step`."""
    first, last = (f"{one.incarnation}.{one.step}" for one in (oldest, newest))
    return first if first == last else f"{first} to {last}"


def _ids(ids: NDArray[Any]) -> str:
    shown = " ".join(map(str, ids[:IDS_SHOWN].tolist()))
    return f"{shown} …" if len(ids) > IDS_SHOWN else shown


def _unsendable(wanted: Any, value: Any) -> str:
    """Return why the wire cannot carry a value of the header, or an empty string."""
    if isinstance(value, float) and not math.isfinite(value):
        return "must be finite"
    try:
        msgspec.msgpack.decode(_encode(value), type=wanted)
    except UnicodeEncodeError:
        return "must be text that UTF-8 can encode, without lone surrogates"
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError) as error:
        return f"cannot be sent: {error}"
    return ""
