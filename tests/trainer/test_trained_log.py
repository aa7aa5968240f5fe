"""The log of trained groups, and the ancestry of policies read from it."""

from pathlib import Path

import msgspec
import pytest

from rolloutmq.schemas.files import SettledBatch
from rolloutmq.schemas.wire.envelope import PolicyVersion
from rolloutmq.schemas.wire.envelope import PolicyVersion as V
from rolloutmq.trainer import trained_log
from rolloutmq.trainer.trained_log import PolicyAncestry, TrainedLog


def lines(path: Path) -> list[SettledBatch]:
    return [msgspec.json.decode(line, type=SettledBatch) for line in path.read_bytes().splitlines()]


def batch(step: int) -> SettledBatch:
    return SettledBatch(
        at=1.0, version=PolicyVersion(0, step), trained=(f"g{step}",), staleness=(2,), rewards=(0.5,)
    )


def write(path: Path, *steps: int) -> None:
    opened = TrainedLog(path)
    for step in steps:
        opened.write(batch(step))
    opened.close()


def test_a_line_is_in_the_file_before_anything_is_closed(tmp_path: Path) -> None:
    path = tmp_path / "trained.jsonl"
    opened = TrainedLog(path)
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
    monkeypatch.setattr(trained_log, "_TAIL_BYTES", chunk)
    path = tmp_path / "trained.jsonl"
    write(path, *range(whole))
    with path.open("ab") as file:
        file.write(b'{"at":1.0,"vers')
    write(path, 9)
    assert lines(path) == [*(batch(step) for step in range(whole)), batch(9)]


def line(incarnation: int, step: int, *trained: str, resumed: bool = False) -> bytes:
    version = V(incarnation, step)
    return (
        msgspec.json.encode(SettledBatch(at=0.0, version=version, trained=trained, resumed=resumed)) + b"\n"
    )


def steps(incarnation: int, first: int, last: int, which: str = "a") -> list[bytes]:
    return [line(incarnation, step, f"{which}{step}", "b") for step in range(first, last + 1)]


def told(path: Path, lines: list[bytes], version: V) -> PolicyAncestry:
    path.write_bytes(b"".join(lines))
    return PolicyAncestry.read(path, version)


def test_a_first_life_counts_its_steps(tmp_path: Path) -> None:
    descent = PolicyAncestry.read(tmp_path / "nothing", V(0, 0))
    descent.took(V(0, 1), ["a"])
    assert descent.distance(V(0, 3), V(0, 1)) == 2


def test_steps_that_were_lost_count_as_do_those_since(tmp_path: Path) -> None:
    descent = told(tmp_path / "trained", steps(0, 1, 60), V(1, 50))
    assert descent.distance(V(1, 55), V(0, 60)) == 10 + 5
    assert descent.distance(V(1, 55), V(0, 48)) == 7
    assert descent.distance(V(1, 50), V(0, 50)) == 0


def test_a_step_on_the_same_groups_leads_to_the_same_policy(tmp_path: Path) -> None:
    descent = told(tmp_path / "trained", steps(0, 1, 60), V(1, 50))
    descent.took(V(1, 51), ["b", "a51"])
    descent.took(V(1, 52), [])  # without a signal: no step
    descent.took(V(1, 52), ["b", "a52"])
    assert descent.distance(V(1, 52), V(0, 52)) == 0
    assert descent.distance(V(1, 52), V(0, 60)) == 8


def test_a_step_that_was_sampled_from_and_not_written_down_is_the_one_that_is_taken_again(
    tmp_path: Path,
) -> None:
    descent = told(tmp_path / "trained", steps(0, 1, 53), V(1, 50))
    for step in (51, 52, 53):
        descent.took(V(1, step), [f"a{step}", "b"])
    descent.took(V(1, 54), ["c"])
    assert descent.distance(V(1, 54), V(0, 54)) == 0
    descent.took(V(1, 55), ["d"])
    assert descent.distance(V(1, 55), V(0, 54)) == 1
    assert descent.distance(V(1, 55), V(0, 55)) == 1 + 1, "of which no life can have been"


def test_a_step_behind_one_on_others_is_not_taken_again(tmp_path: Path) -> None:
    descent = told(tmp_path / "trained", steps(0, 1, 53), V(1, 50))
    for step in (51, 52, 53):
        descent.took(V(1, step), [f"a{step}", "other"])
    descent.took(V(1, 54), ["c"])
    assert descent.distance(V(1, 54), V(0, 54)) == 4 + 4


def test_after_a_step_on_others_nothing_is_the_same(tmp_path: Path) -> None:
    descent = told(tmp_path / "trained", steps(0, 1, 60), V(1, 50))
    descent.took(V(1, 51), ["a51", "b"])
    descent.took(V(1, 52), ["b"])
    descent.took(V(1, 53), ["a53", "b"])
    assert descent.distance(V(1, 53), V(0, 53)) == 2 + 2


def test_what_lives_between_did_is_in_the_journal(tmp_path: Path) -> None:
    """The second takes two steps as the first, then its own; the third goes back behind both."""
    lives = [
        *steps(0, 1, 10),
        line(1, 5, resumed=True),
        *steps(1, 6, 7),
        *steps(1, 8, 9, "other"),
        line(2, 4, resumed=True),
    ]
    descent = told(tmp_path / "trained", lives, V(2, 4))
    assert descent.distance(V(1, 9), V(0, 7)) == 2
    assert descent.distance(V(2, 6), V(0, 6)) == 4
    for step in (5, 6):
        descent.took(V(2, step), [f"a{step}", "b"])
    assert descent.distance(V(2, 6), V(0, 6)) == descent.distance(V(2, 6), V(1, 6)) == 0
    assert descent.distance(V(2, 6), V(1, 9)) == 3


def test_a_journal_may_end_in_the_middle_of_a_line_or_have_lost_lives(tmp_path: Path) -> None:
    half = line(0, 6, "a")[:-9]
    descent = told(tmp_path / "trained", [*steps(0, 1, 5), half], V(1, 4))
    assert descent.distance(V(1, 5), V(0, 5)) == 2
    alone = told(tmp_path / "trained", [], V(3, 4))
    assert alone.distance(V(3, 5), V(2, 7)) == 2
