"""Rows of a data set as numbered tasks: row i is the same in every worker and every life.

`datasets` converts the files once into its cache, under a lock, and every worker maps the same Arrow files: a row is in
memory while somebody reads it. The order of the rows is a permutation computed from the seed, not a table.
"""

import hashlib
import importlib.util
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, overload

from rolloutmq.schemas.config.environment import DatasetConfig
from rolloutmq.schemas.errors import ConfigError, MissingError, install_remedy

ROUNDS: Final = 4
"""Rounds of the permutation; with four it looks random for any key."""
FORMATS: Final = {".jsonl": "json", ".json": "json", ".parquet": "parquet", ".csv": "csv"}
_Row = Mapping[str, Any]


class Permutation:
    """A random order of the numbers below `count`, without memory: a Feistel network that walks out of its padding."""

    def __init__(self, count: int, seed: int) -> None:
        self._count = count
        self._half = max(1, -(-max(1, count - 1).bit_length() // 2))
        self._mask = (1 << self._half) - 1
        self._key = f"rows {seed}".encode()

    def __getitem__(self, index: int) -> int:
        """Return the number at a place. Raises IndexError beyond the last one."""
        if not 0 <= index < self._count:
            raise IndexError(index)
        found = self._mixed(index)
        while found >= self._count:  # at most four times as many places as numbers
            found = self._mixed(found)
        return found

    def _mixed(self, place: int) -> int:
        left, right = place >> self._half, place & self._mask
        for number in range(ROUNDS):
            text = b"%d %d" % (number, right)
            digest = hashlib.blake2b(text, key=self._key, digest_size=8).digest()
            left, right = right, left ^ (int.from_bytes(digest, "little") & self._mask)
        return left << self._half | right


class Rows(Sequence[_Row]):
    """A part of the rows of a data set, in the order of a permutation. Reads a row when asked for it.

    Args:
        table: The data set.
        order: Order of all its rows.
        places: Places in this order that belong to the part.
    """

    def __init__(self, table: Any, order: Permutation, places: range) -> None:
        self._table = table
        self._order = order
        self._places = places

    def __len__(self) -> int:
        return len(self._places)

    @overload
    def __getitem__(self, index: int) -> _Row: ...
    @overload
    def __getitem__(self, index: slice) -> "Rows": ...
    def __getitem__(self, index: int | slice) -> "_Row | Rows":
        """Return a row, or a part. Raises IndexError beyond the last row."""
        if isinstance(index, slice):
            return Rows(self._table, self._order, self._places[index])
        if index >= len(self._places):
            raise IndexError(f"row {index} of {len(self._places)}")
        row: _Row = self._table[self._order[self._places[index]]]
        return row

    def __iter__(self) -> Iterator[_Row]:
        return (self[index] for index in range(len(self)))


def open_rows(key: str, config: DatasetConfig, base_dir: Path) -> tuple[Rows, Rows]:
    """Open a data set, and return the rows of the training and of the evaluation.

    Blocks while the files are converted, the first time on a machine.

    Args:
        key: Path of the section, for errors.
        config: The section; a data set of a hub is a directory by now.
        base_dir: Directory of the configuration file.

    Raises:
        ConfigError: There is no such file, split or subset, a file cannot be read, or too few rows are left.
        MissingError: `datasets` is not installed.
    """
    if importlib.util.find_spec("datasets") is None:
        raise MissingError("the package datasets", install_remedy("data"))
    table = _table(key, config, base_dir, "split")
    order, held = Permutation(len(table), config.seed), config.eval_rows
    if held >= len(table):
        raise ConfigError(
            f"{key}.eval_rows", f"must leave rows for the training, of {len(table)} (got {held}); lower it"
        )
    train = Rows(table, order, range(held, len(table)))
    if config.eval_split:
        other = _table(key, config, base_dir, "eval_split")
        return train, Rows(other, Permutation(len(other), config.seed), range(len(other)))
    return train, Rows(table, order, range(held)) if held else train


def _table(key: str, config: DatasetConfig, base_dir: Path, which: str) -> Any:
    """Return a split as a mapped table with at least one row."""
    path, split = base_dir / config.path, str(getattr(config, which))
    source = _source(key, config, path)
    # In here, since pandas and pyarrow take a second.
    from datasets import load_dataset  # pyright: ignore[reportMissingImports]
    from datasets.utils.tqdm import disable_progress_bars, tqdm  # pyright: ignore[reportMissingImports]

    tqdm.monitor_interval = 0  # no thread that redraws bars
    disable_progress_bars()  # they would go into the log of the worker
    try:
        found = load_dataset(**source, split=split, keep_in_memory=False)
    except Exception as error:
        raise _explained(key, config, which, error) from error
    if not len(found):
        raise ConfigError(f"{key}.{which}", f"{config.path} has no row in {split!r}; name another split")
    return found


def _source(key: str, config: DatasetConfig, path: Path) -> dict[str, Any]:
    """Return how `datasets` finds the files."""
    subset = {"name": config.subset} if config.subset else {}
    if path.is_file():
        if path.suffix not in FORMATS:
            known = ", ".join(FORMATS)
            raise ConfigError(f"{key}.path", f"must be a file of {known}, or a directory (got {config.path})")
        for name in ("subset", "files"):
            if chosen := getattr(config, name):
                raise ConfigError(
                    f"{key}.{name}",
                    f"is only for a directory or a data set of a hub (got {chosen!r} with {config.path}); remove it",
                )
        return {"path": FORMATS[path.suffix], "data_files": str(path)}
    if not path.is_dir():
        raise ConfigError(
            f"{key}.path", f"there is no file or directory {path}; correct it, or name a data set of a hub"
        )
    files = {"data_files": list(config.files)} if config.files else {}
    return {"path": str(path), **files, **subset}


def _explained(key: str, config: DatasetConfig, which: str, error: Exception) -> ConfigError:
    text = " ".join(str(error.__cause__ or error).split())
    if "split" in text and isinstance(error, ValueError):
        return ConfigError(
            f"{key}.{which}", f"{config.path} has no such split: {text}; name one of its splits"
        )
    if "BuilderConfig" in text or "Config name" in text:
        return ConfigError(f"{key}.subset", f"{config.path}: {text}; name one of its subsets")
    return ConfigError(
        f"{key}.path", f"{config.path} cannot be read: {text}; repair the file, or name another one"
    )
