"""Dead letters of a run for a page: the list, and the contents of one with its text.

The contents come from an environment and are checked like those of any group; what does not decode is a problem to
show. A reply has a bounded number of sequences, tokens and characters. Blocks on the disk.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
from numpy.typing import NDArray

from rolloutmq.bus.encoding.codec import decode_group
from rolloutmq.bus.tokenizer_fingerprint import FILE, student_directory
from rolloutmq.schemas.config.run import RunConfig
from rolloutmq.schemas.errors import RolloutMQError, WireError
from rolloutmq.schemas.files import RunLayout
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.loss_mask import marked_tokens
from rolloutmq.schemas.printable import moment
from rolloutmq.schemas.wire.envelope import Dtype, GroupHeader
from rolloutmq.services.broker.journal.dead_letters import DeadEntry, DeadGroup, DeadLetterStore
from rolloutmq.services.monitor.text.columns import preview, shape

ROWS_LIMIT: Final = 500
"""Most letters of one reply."""
SEQUENCES_LIMIT: Final = 8
TOKENS_LIMIT: Final = 4096
"""Most sequences of one reply, and most tokens of each."""
CONTENTS_LIMIT_BYTES: Final = 64 << 20
"""Largest file whose contents are read."""


class Tokenizer(Protocol):
    """Text of token ids."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str: ...


class Tokenizers:
    """The tokenizer of a run, loaded once for each state of its file."""

    def __init__(self, layout: RunLayout) -> None:
        self._layout = layout
        self._known: tuple[Path, int] | None = None
        self._tokenizer: Tokenizer | None = None
        self.why = ""
        """Why there is none."""

    def of(self, config: RunConfig | str) -> Tokenizer | None:
        """Return the tokenizer of the policy; None if there is none to be read here."""
        if isinstance(config, str):
            self.why = "the configuration of the run cannot be read"
            return None
        path = student_directory(config, self._layout) / FILE
        try:
            from tokenizers import Tokenizer as Loaded

            known = path, path.stat().st_mtime_ns
            if known != self._known:
                self._tokenizer = Loaded.from_file(str(path))
                self._known, self.why = known, ""
        except ModuleNotFoundError:
            self._tokenizer, self.why = None, "the package tokenizers is not installed"
        except Exception as error:  # noqa: BLE001 - tokenizers raises nothing narrower
            self._tokenizer, self._known = None, None
            self.why = f"{path}: {error}"
        return self._tokenizer


class DeadLetters:
    """Reader of the dead letters of one run. For one call at a time.

    Args:
        layout: The run directory.
    """

    def __init__(self, layout: RunLayout) -> None:
        self._directory = layout.dead
        self._tokenizers = Tokenizers(layout)

    def page(self, offset: int, limit: int) -> dict[str, Any]:
        """Return some letters, the newest first."""
        store = self._store()
        paths = store.paths()[::-1]
        shown = paths[offset : offset + min(limit, ROWS_LIMIT)]
        rows = [_row(entry) for path in shown if (entry := store.entry(path)) is not None]
        return {"total": len(paths), "offset": offset, "rows": rows}

    def show(
        self, group_id: str, order: int | None, config: RunConfig | str, sequence: int, limit: int
    ) -> dict[str, Any] | None:
        """Return everything about a dead group, with some of its sequences; None if there is no such letter.

        Args:
            group_id: The group.
            order: Its number in the run, which finds it at once; None to search.
            config: Configuration of the run, or why it cannot be read.
            sequence: First sequence.
            limit: Most sequences, up to `SEQUENCES_LIMIT`.
        """
        store = self._store()
        entry = self._entry(store, group_id, order)
        if entry is None or entry.letter is None:
            return None
        if entry.nbytes > CONTENTS_LIMIT_BYTES:
            problem = f"{entry.nbytes:,} bytes are too many to show here; see `rolloutmq dead show`"
            return {**_letter(entry), "problem": problem, "sequences": [], "columns": []}
        found = store.open(entry.order)
        if found is None:
            return None
        tokenizer = self._tokenizers.of(config)
        named = "the run's tokenizer" if tokenizer is not None else f"none: {self._tokenizers.why}"
        return {
            **_letter(entry),
            "tokenizer": named,
            **_contents(found, tokenizer, sequence, min(limit, SEQUENCES_LIMIT)),
        }

    def _entry(self, store: DeadLetterStore, group_id: str, order: int | None) -> DeadEntry | None:
        paths = store.paths() if order is None else [self._directory / f"{order:012d}.rmq"]
        for path in paths:
            entry = store.entry(path)
            letter = None if entry is None else entry.letter
            if letter is not None and letter.group.header.group_id == group_id:
                return entry
        return None

    def _store(self) -> DeadLetterStore:
        return DeadLetterStore(self._directory, 0, sync=False)


def _row(entry: DeadEntry) -> dict[str, Any]:
    letter = entry.letter
    if letter is None:
        return {"order": entry.order, "file": entry.path.name, "damaged": entry.problem}
    header = letter.group.header
    return {
        "group_id": header.group_id,
        "order": entry.order,
        "env": letter.group.env,
        "split": letter.group.split.name.lower(),
        "producer": letter.group.producer,
        "reason": letter.reason,
        "at": letter.at,
        "deliveries": letter.deliveries,
        "failures": letter.failures,
        "sequences": header.sequences,
        "tokens": header.tokens,
        "bytes": header.nbytes,
        "kept": letter.kept,
        "damaged": "",
    }


def _letter(entry: DeadEntry) -> dict[str, Any]:
    row = _row(entry)
    assert entry.letter is not None
    group = entry.letter.group
    header = group.header
    return {
        **{name: each for name, each in row.items() if name != "sequences"},
        "history": [
            *_rollout(header),
            f"{moment(group.at)}  accepted from {group.producer}, number {header.seq} of session {group.session}",
            f"{moment(entry.letter.at)}  dead after {entry.letter.deliveries} deliveries",
        ],
        "problem": "",
        "tokenizer": "",
        "sequences_total": header.sequences,
        "offset": 0,
    }


def _rollout(header: GroupHeader) -> Iterator[str]:
    """Yield when the rollout began and ended; the SDK need not tell it."""
    for at, what, version in (
        (header.started_at, "began", header.oldest),
        (header.finished_at, "ended", header.newest),
    ):
        if at:
            yield f"{moment(at)}  rollout {what}, policy {_version(version)}"


def _version(version: Any) -> str:
    return f"{version.incarnation}.{version.step}"


def _contents(found: DeadGroup, tokenizer: Tokenizer | None, sequence: int, limit: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"offset": sequence, "sequences": [], "columns": []}
    if found.frames is None:
        return {
            **nothing,
            "problem": "its contents are damaged" if found.damaged else "its contents were not kept",
        }
    meta = found.meta
    try:
        group = decode_group(meta.header, meta.table, found.frames, meta.env)
    except (WireError, RolloutMQError, ValueError) as error:
        return {**nothing, "problem": f"its contents do not decode: {error}"}
    return {
        "offset": sequence,
        "sequences": [*_sequences(group, tokenizer, sequence, limit)],
        "columns": [
            {"name": name, "kind": shape(column), "preview": preview(column)}
            for name, column in group.columns.items()
        ],
    }


def _sequences(
    group: Group, tokenizer: Tokenizer | None, sequence: int, limit: int
) -> Iterator[dict[str, Any]]:
    tokens = _rows(group, "tokens")
    if tokens is None:
        return
    lengths = [row.size for row in tokens]
    marked = _cut(marked_tokens(group), lengths) if "mask" in group.columns else None
    logprobs, advantages = _rows(group, "inference_logprobs"), _rows(group, "advantages")
    scores = _rows(group, "scores")
    for index in range(sequence, min(sequence + limit, len(tokens))):
        ids = tokens[index][:TOKENS_LIMIT].astype(np.int64)
        mask = np.ones(ids.size, bool) if marked is None else marked[index][: ids.size]
        yield {
            "index": index,
            "score": None if scores is None else _number(scores[index]),
            "advantage": _mean(advantages, index, mask),
            "tokens_total": lengths[index],
            "cut": lengths[index] > ids.size,
            "pieces": [*_pieces(index, ids, mask, tokenizer, logprobs, advantages)],
        }


def _pieces(
    index: int,
    ids: NDArray[np.int64],
    mask: NDArray[np.bool_],
    tokenizer: Tokenizer | None,
    logprobs: Sequence[Any] | None,
    advantages: Sequence[Any] | None,
) -> Iterator[dict[str, Any]]:
    """Yield each run of tokens with the same mask."""
    edges = [0, *(np.flatnonzero(np.diff(mask)) + 1).tolist(), ids.size] if ids.size else []
    for begin, end in pairwise(edges):
        part = ids[begin:end].tolist()
        inside = np.zeros(ids.size, bool)
        inside[begin:end] = True
        yield {
            "text": _text(part, tokenizer),
            "trained": bool(mask[begin]),
            "tokens": end - begin,
            "ids": part if tokenizer is None else [],
            "logprob_mean": _mean(logprobs, index, inside),
            "advantage_mean": _mean(advantages, index, inside),
        }


def _text(ids: list[int], tokenizer: Tokenizer | None) -> str:
    if tokenizer is None:
        return ""
    try:
        return tokenizer.decode(ids, skip_special_tokens=False)
    except Exception:  # noqa: BLE001 - ids may be any numbers, and tokenizers raises nothing narrower
        return " ".join(map(str, ids))


def _rows(group: Group, name: str) -> list[Any] | None:
    """Return a numeric column by sequence; None if there is none."""
    column = group.columns.get(name)
    if column is None or column.dtype is Dtype.OPAQUE:
        return None
    if not column.lengths:
        return [*column.numbers()]
    return _cut(column.numbers(), column.lengths[0].tolist()) if column.depth == 1 else None


def _cut(values: NDArray[Any], lengths: list[int]) -> list[NDArray[Any]]:
    return np.split(values, np.cumsum(lengths, dtype=np.int64)[:-1])


def _mean(rows: Sequence[Any] | None, index: int, where: NDArray[np.bool_]) -> float | None:
    """Return the mean of a sequence's values where wanted; None for none."""
    if rows is None or index >= len(rows):
        return None
    row = np.asarray(rows[index], np.float64)
    if row.ndim == 0:
        return _number(row)
    values = row[: where.size][where[: row.size]]
    values = values[np.isfinite(values)]
    return _number(values.mean()) if values.size else None


def _number(value: Any) -> float | None:
    number = float(value)
    return float(f"{number:.6g}") if np.isfinite(number) else None
