"""`evaluations.jsonl`: one `EvaluationDone` per line, in the order of the points.

A point in between that did not begin when it was due has a `PostponedPoint` there.
"""

import fcntl
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Final

import msgspec

from rolloutmq.bus.files import decode_json, open_regular, private_file
from rolloutmq.schemas.files import PostponedPoint
from rolloutmq.schemas.wire.evaluation import EvaluationDone

logger = logging.getLogger(__name__)

Line = EvaluationDone | PostponedPoint
LINE: Final[Any] = Line  # a union, of which mypy makes no type[...]


def record(path: Path, line: Line) -> None:
    """Append a line, and cut off one that a killed writer left torn. Waits for another writer, which takes a moment."""
    with private_file(path, "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(msgspec.json.encode(line) + b"\n")


def recorded(path: Path) -> Iterator[EvaluationDone]:
    """Yield the points of a file in order; nothing if there is none. A line that does not decode is logged."""
    return (line for line in _lines(path) if isinstance(line, EvaluationDone))


def postponed(path: Path) -> Iterator[PostponedPoint]:
    """Yield the postponed points of a file in order, like `recorded`."""
    return (line for line in _lines(path) if isinstance(line, PostponedPoint))


def _lines(path: Path) -> Iterator[Line]:
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield decode_json(line, LINE)
        except msgspec.DecodeError as error:
            logger.warning("evaluation not read file=%s line=%d error=%s", path, number, error)


def in_force(points: Iterable[EvaluationDone]) -> list[EvaluationDone]:
    """Return the points whose policies the present one descends from, by step; of a step evaluated twice, the last.

    A trainer that resumed from a checkpoint has lost the policies after it: a point of a later incarnation voids those
    of earlier ones at higher steps.
    """
    kept: list[EvaluationDone] = []
    for point in points:
        mine = point.version
        kept = [
            one
            for one in kept
            if one.version.step != mine.step
            and not (one.version.incarnation < mine.incarnation and one.version.step > mine.step)
        ]
        kept.append(point)
    return sorted(kept, key=lambda one: one.version.step)
