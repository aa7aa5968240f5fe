"""`evaluations.jsonl`: one `EvaluationDone` per line, in the order of the points."""

import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import msgspec

from rolloutmq.bus.files import decode_json, open_regular, private_file
from rolloutmq.schemas.wire.evaluation import EvaluationDone

logger = logging.getLogger(__name__)


def record(path: Path, done: EvaluationDone) -> None:
    """Append a point, and cut off a line that a killed writer left torn. One writer at a time."""
    with private_file(path, "ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(msgspec.json.encode(done) + b"\n")


def recorded(path: Path) -> Iterator[EvaluationDone]:
    """Yield the points of a file in order; nothing if there is none. A line that does not decode is logged."""
    try:
        with open_regular(path) as file:
            lines = file.readlines()
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        try:
            yield decode_json(line, EvaluationDone)
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
