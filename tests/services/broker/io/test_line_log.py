"""A line is in the log as a whole or not at all."""

import errno
from io import FileIO
from pathlib import Path
from typing import Any, BinaryIO, cast

import pytest

from rolloutmq.services.broker.io.line_log import LineLog


class Full(FileIO):
    """A file on a disk with room for a few more bytes."""

    room = 1 << 20

    def write(self, data: Any, /) -> int:
        done = super().write(data[: self.room]) or 0
        self.room -= done
        return done


def test_lines_are_appended_by_life_after_life(tmp_path: Path) -> None:
    path = tmp_path / "log"
    for line in (b"one\n", b"two\n"):
        with LineLog.open(path) as log:
            log.write(line)
    assert path.read_bytes() == b"one\ntwo\n"


@pytest.mark.parametrize("torn", [b"half", b"x" * (3 << 20)])
@pytest.mark.parametrize("whole", [b"", b"one\n", b"one\ntwo\n"])
def test_a_torn_last_line_is_cut_off(tmp_path: Path, whole: bytes, torn: bytes) -> None:
    path = tmp_path / "log"
    path.write_bytes(whole + torn)
    with LineLog.open(path) as log:
        log.write(b"next\n")
    assert path.read_bytes() == whole + b"next\n"


def test_a_full_disk_leaves_no_part_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "log"
    with Full(path, "ab+") as file:
        log = LineLog(cast(BinaryIO, file))
        log.write(b"one\n")
        file.room = 3
        with pytest.raises(OSError, match="space") as caught:
            log.write(b"much more\n")
        assert caught.value.errno == errno.ENOSPC
        file.room = 100
        log.write(b"two\n")
    assert path.read_bytes() == b"one\ntwo\n"
