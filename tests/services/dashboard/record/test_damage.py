"""The page and the commands count the same lines as damaged."""

from pathlib import Path

import pytest

from rolloutmq.services.dashboard.record.damage import damaged_lines
from rolloutmq.services.dashboard.record.record_file import LINE_LIMIT_BYTES, RecordFile
from rolloutmq.services.dashboard.record.run_record import RunRecord


@pytest.mark.parametrize(
    ("line", "count"),
    [
        (b'{"t":1.0,"kind":"pressure"}', 0),
        (b'{"t":1.0,"kind":"of_later_version","rows":7}', 0),
        (b"", 0),
        (b'{"t":1.0,"kind":"pre', 1),
        (b"\xff", 1),
        (b"[" * 10_000, 1),
        (b'{"kind":"latency_sample"}', 1),
        (b'{"t":1.0,"kind": "latency_sample","rows":7}', 1),
        (b'{"t":1.0,"kind":"step_done","step":"x"}', 1),
        (b'{"t":1.0,"kind":"step_done","step":1' + b"0" * 400 + b"}", 1),
        (b'{"t":1.0,"kind":"engine_sample","busy":"x"}', 1),
        (b'{"t":1.0,"topic":"' + b"x" * LINE_LIMIT_BYTES + b'"}', 1),
    ],
)
def test_the_count_is_that_of_the_page(tmp_path: Path, line: bytes, count: int) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"t":1.0}\n' + line + b'\n{"t":2.0}\n{"never": "fini')
    record = RunRecord()
    file = RecordFile(path, record.take, lambda: None)
    while not file.apply(file.fetch()):
        pass
    assert damaged_lines(path) == record.damaged + file.long_lines == count


def test_without_a_file_nothing_is_damaged(tmp_path: Path) -> None:
    assert damaged_lines(tmp_path / "none.jsonl") == 0
