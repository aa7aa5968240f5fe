from pathlib import Path

import msgspec
import pytest

from rolloutmq.schemas.envelope import PolicyVersion
from rolloutmq.schemas.records import SettledBatch
from rolloutmq.trainer import journal
from rolloutmq.trainer.journal import Journal


def lines(path: Path) -> list[SettledBatch]:
    return [msgspec.json.decode(line, type=SettledBatch) for line in path.read_bytes().splitlines()]


def batch(step: int) -> SettledBatch:
    return SettledBatch(
        at=1.0, version=PolicyVersion(0, step), trained=(f"g{step}",), staleness=(2,), rewards=(0.5,)
    )


def write(path: Path, *steps: int) -> None:
    opened = Journal(path)
    for step in steps:
        opened.write(batch(step))
    opened.close()


def test_a_line_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    opened = Journal(path)
    opened.write(batch(1))
    assert lines(path) == [batch(1)]
    opened.close()


def test_later_lives_append(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    write(path, 1, 2)
    write(path, 3)
    assert lines(path) == [batch(1), batch(2), batch(3)]


@pytest.mark.parametrize("chunk", [1, 3, 1 << 16])
@pytest.mark.parametrize("whole", [0, 1, 3])
def test_half_a_line_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, whole: int, chunk: int
) -> None:
    monkeypatch.setattr(journal, "_TAIL_BYTES", chunk)
    path = tmp_path / "trained.jsonl"
    write(path, *range(whole))
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"vers')
    write(path, 9)
    assert lines(path) == [*(batch(step) for step in range(whole)), batch(9)]
