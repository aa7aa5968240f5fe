"""Damaged lines of `metrics.jsonl`: one count for the page and for the commands that read the same file."""

from pathlib import Path

from rolloutmq.services.dashboard.record.lines import DAMAGE, decoded
from rolloutmq.services.dashboard.record.record_file import RecordFile


def damaged_lines(path: Path) -> int:
    """Return how many lines of the record do not decode, or are too long; 0 without a file. Blocks on the disk.

    A last line without its end is no damage: it is still being written, or its writer was killed.
    """
    count = 0

    def take(line: bytes) -> None:
        nonlocal count
        try:
            decoded(line)
        except DAMAGE:
            count += 1

    def begin() -> None:
        nonlocal count
        count = 0

    file = RecordFile(path, take, begin)
    while not file.apply(file.fetch()):
        pass
    return count + file.long_lines
