import os
from pathlib import Path

import pytest
from tests.descriptors import opened

from rolloutmq.bus.fsync import force


def test_a_file_and_a_directory_are_forced_and_let_go(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    forced: list[Path] = []

    def noted(fd: int) -> None:
        forced.append(Path(f"/proc/self/fd/{fd}").readlink())

    monkeypatch.setattr(os, "fsync", noted)
    (file := tmp_path / "file").touch()
    before = opened()
    force(file)
    force(tmp_path)
    assert forced == [file, tmp_path]
    assert opened() == before


def test_a_disk_that_fails_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_fd: int) -> None:
        raise OSError(28, "No space left on device")

    before = opened()
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        force(tmp_path)
    assert opened() == before
    with pytest.raises(FileNotFoundError):
        force(tmp_path / "nothing")
