"""The stage: what a killed receiver leaves in it counts only if it is whole."""

import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from rolloutmq.bus.files import write_private
from rolloutmq.bus.rundir import read_json
from rolloutmq.schemas.errors import MissingError
from rolloutmq.schemas.files import RunLayout, StagedWeights
from rolloutmq.schemas.wire.envelope import PolicyVersion as V
from rolloutmq.trainer.weights.stream.chunks import CHUNK_BYTES, digest
from rolloutmq.trainer.weights.stream.stage import Stage

LAYOUT = "a" * 64
NBYTES = 5 * CHUNK_BYTES + 100


@pytest.fixture
def file(host: RunLayout) -> Iterator[Path]:
    yield host.stage
    if (left := Stage.adopt(host.stage)) is not None:
        left.close(host.stage, remove=True)


def put(stage: Stage, index: int, value: int) -> None:
    place = stage.place(index)
    place[:] = value
    stage.keep(index, digest(place))


def blocks(file: Path) -> int:
    named = read_json(file, StagedWeights)
    assert named is not None
    return Path(named.path).stat().st_blocks * 512


def test_kept_chunks_are_there_in_the_next_life(file: Path) -> None:
    first = Stage.create(LAYOUT, NBYTES, file)
    put(first, 1, 7)
    put(first, 5, 9)
    first.place(3)[:] = 1  # and is killed before the chunk is whole
    first.close(file)
    second = Stage.adopt(file)
    assert second is not None
    assert second.layout == LAYOUT
    assert [(index, set(data.tolist()), data.size) for index, data in second.kept()] == [
        (1, {7}, CHUNK_BYTES),
        (5, {9}, 100),
    ]
    assert second.whole is None
    second.close(file, remove=True)
    assert not file.exists()


def test_chunks_behind_one_another_are_kept_as_one(file: Path) -> None:
    stage = Stage.create(LAYOUT, NBYTES, file)
    for index in (0, 2, 3, 5):
        put(stage, index, index)
    found = [(index, sorted(set(data.tolist())), data.size) for index, data in stage.kept()]
    assert found == [(0, [0], CHUNK_BYTES), (2, [2, 3], 2 * CHUNK_BYTES), (5, [5], 100)]
    stage.close(file, remove=True)


def test_a_chunk_that_is_overwritten_does_not_count_meanwhile(file: Path) -> None:
    stage = Stage.create(LAYOUT, NBYTES, file)
    put(stage, 1, 7)
    stage.place(1)
    assert [*stage.kept()] == []
    stage.close(file, remove=True)


def test_a_whole_version_is_told_until_chunks_change_again(file: Path) -> None:
    stage = Stage.create(LAYOUT, NBYTES, file)
    put(stage, 0, 1)
    stage.seal(V(3, 4), "nonce:9")
    sealed: object = stage.whole
    assert sealed == (V(3, 4), "nonce:9")
    stage.reopen()
    reopened: object = stage.whole
    assert reopened is None
    assert len([*stage.kept()]) == 1
    stage.clear()
    assert [*stage.kept()] == []
    stage.close(file, remove=True)


def test_memory_is_taken_for_received_chunks_only(file: Path) -> None:
    stage = Stage.create(LAYOUT, NBYTES, file)
    empty = blocks(file)
    put(stage, 2, 1)
    assert blocks(file) - empty == CHUNK_BYTES
    put(stage, 2, 2)
    assert blocks(file) - empty == CHUNK_BYTES
    stage.close(file, remove=True)


def test_missing_memory_is_told(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    stage = Stage.create(LAYOUT, NBYTES, file)
    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MissingError, match=r"shared memory for a chunk of weights \(No space left"):
        stage.place(0)
    stage.close(file, remove=True)


def test_what_is_no_stage_is_not_adopted(file: Path) -> None:
    assert Stage.adopt(file) is None
    write_private(file, b'{"path": "/dev/shm/rolloutmq-none-stage", "nonce": "none"}')
    assert Stage.adopt(file) is None
    made = Stage.create(LAYOUT, NBYTES, file)
    named = read_json(file, StagedWeights)
    assert named is not None
    made.close(file)
    with Path(named.path).open("r+b") as cut:
        cut.truncate(100)
    assert Stage.adopt(file) is None
    Path(named.path).unlink()
    file.unlink()


def test_digests_show_every_change() -> None:
    data = np.arange(10_003, dtype=np.uint32).view(np.uint8)
    before = digest(data)
    for at in (0, 8, 999, data.size - 1):
        changed = data.copy()
        changed[at] ^= 1
        assert digest(changed)[0] != before[0]
        assert digest(changed)[1] != before[1]
    swapped = np.concatenate((data[8:16], data[:8], data[16:]))
    assert digest(swapped)[1] == before[1]  # sums do not see this
    assert digest(swapped)[0] != before[0]
