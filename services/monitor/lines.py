"""Logs of a run, one JSON object a line, as their readers need them.

The writer may have been killed: a last line that has no newline and does not decode was never finished, and is left
out. Anywhere else such a line is damage, and an error, since a join over what remains would be wrong without a sign;
who can give a sign counts such lines and goes on.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, TypeVar

import msgspec

from rolloutmq.schemas.errors import DamagedFileError

T = TypeVar("T")


def read_lines(path: Path, kind: type[T]) -> Iterator[T]:
    """Yield the records of a file in their order; nothing if there is no such file.

    Args:
        path: The log.
        kind: What a line is; fields that it does not name are skipped over.

    Raises:
        DamagedFileError: A finished line does not decode.
    """
    for number, record in _lines(path, kind):
        if isinstance(record, _Damage):
            raise DamagedFileError(str(path), number, record.why)
        yield record


def read_whole_lines(path: Path, kind: type[T], damaged: Counter[str]) -> Iterator[T]:
    """Yield the records that decode, and count those that do not under the name of the file."""
    for _, record in _lines(path, kind):
        if isinstance(record, _Damage):
            damaged[path.name] += 1
        else:
            yield record


class _Damage(NamedTuple):
    why: str


def _lines(path: Path, kind: type[T]) -> Iterator[tuple[int, T | _Damage]]:
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                yield number, decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if not line.endswith(b"\n"):
                    return
                yield number, _Damage(str(error))
