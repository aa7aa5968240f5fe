"""Logs of a run, one JSON object a line, as their readers need them.

The writer may have been killed: a last line that has no newline and does not decode was never finished, and is left
out. Anywhere else such a line is damage, and an error, since a join over what remains would be wrong without a sign.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

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
    if not path.exists():
        return
    decoder = msgspec.json.Decoder(kind)
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            try:
                record = decoder.decode(line)
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                if line.endswith(b"\n"):
                    raise DamagedFileError(str(path), number, str(error)) from None
                return
            yield record
