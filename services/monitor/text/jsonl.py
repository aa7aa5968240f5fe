"""Readers of a run's JSON Lines logs.

A killed writer leaves a last line without newline that does not decode: it was never finished and is skipped. Anywhere
else such a line is damage and an error, since a join over the rest would be silently wrong. `read_whole_lines` counts
the damaged lines instead, for callers that report the count. A line beyond `LINE_LIMIT_BYTES` is damage too, and is
never whole in memory.
"""

from collections import Counter
from collections.abc import Iterator
from math import inf
from pathlib import Path
from typing import IO, Final, NamedTuple, TypeVar

import msgspec

from rolloutmq.bus.files import open_regular
from rolloutmq.schemas.errors import DamagedFileError

T = TypeVar("T")

LINE_LIMIT_BYTES: Final = 16 << 20
"""Longest line: a batch of a hundred thousand groups has a third of it."""


def read_lines(path: Path, kind: type[T], until: float = inf) -> Iterator[T]:
    """Yield the records of a file in order; nothing if there is no such file.

    Args:
        path: The log.
        kind: Type of a line; other fields are ignored.
        until: Size of the file: lines that end later were added since, and are left out.

    Raises:
        DamagedFileError: A complete line does not decode.
    """
    for number, record in _lines(path, kind, until=until):
        if isinstance(record, _Damage):
            raise DamagedFileError(str(path), number, record.why)
        yield record


def read_whole_lines(
    path: Path, kind: type[T], damaged: Counter[str], containing: bytes = b""
) -> Iterator[T]:
    """Yield the records that decode, and count the others under the file's name.

    Lines without the bytes of `containing` are skipped, which is much faster than to decode them.
    """
    for _, record in _lines(path, kind, containing):
        if isinstance(record, _Damage):
            damaged[path.name] += 1
        else:
            yield record


class _Damage(NamedTuple):
    why: str


def _lines(
    path: Path, kind: type[T], containing: bytes = b"", until: float = inf
) -> Iterator[tuple[int, T | _Damage]]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with open_regular(path) as file:
        for number, line in enumerate(_bounded(file), 1):
            if until < inf and file.tell() > until:
                return
            if line is None:
                yield number, _Damage(f"is longer than {LINE_LIMIT_BYTES >> 20} MiB")
                continue
            if containing not in line:
                continue
            try:
                yield number, decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
                if not line.endswith(b"\n"):
                    return
                yield number, _Damage(str(error))


def _bounded(file: IO[bytes]) -> Iterator[bytes | None]:
    """Yield the lines; None in place of one that is too long."""
    while line := file.readline(LINE_LIMIT_BYTES):
        if len(line) < LINE_LIMIT_BYTES or line.endswith(b"\n"):
            yield line
            continue
        while line and not line.endswith(b"\n"):
            line = file.readline(LINE_LIMIT_BYTES)
        yield None
