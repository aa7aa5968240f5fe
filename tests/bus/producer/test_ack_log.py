"""The ack log: every line is whole and true, after disk faults and kills too."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from rolloutmq.bus.encoding.codec import encode_group
from rolloutmq.bus.producer.ack_log import AckLog
from rolloutmq.bus.producer.spool import Spool, SpoolEntry
from rolloutmq.schemas.files import AckedGroup
from rolloutmq.schemas.group import Group
from rolloutmq.schemas.wire.envelope import Split


def entry(name: str) -> SpoolEntry:
    group = Group.build(name, tokens=[[1]], mask=[[1]], scores=[0.0])
    return Spool(1 << 20).add(group, encode_group(group, 1 << 20))


def names(path: Path) -> list[str]:
    return [msgspec.json.decode(line, type=AckedGroup).group_id for line in path.read_bytes().splitlines()]


def test_lines_are_there_at_once_and_the_file_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "acks" / "p.jsonl"
    for life in range(2):
        log = AckLog(path)
        log.write([entry(f"a-{life}"), entry(f"b-{life}")], 3)
        log.write([], 3)
        assert names(path) == [f"{letter}-{n}" for n in range(life + 1) for letter in "ab"]
        log.close()
        log.close()


@pytest.mark.parametrize("torn", [b"", b'{"gro', b"x" * 10_000])
@pytest.mark.parametrize("lines", [0, 1, 100])
def test_a_torn_last_line_is_cut(tmp_path: Path, torn: bytes, lines: int) -> None:
    path = tmp_path / "p.jsonl"
    log = AckLog(path)
    log.write([entry(f"g-{index}") for index in range(lines)], 3)
    log.close()
    with path.open("ab") as file:
        file.write(torn)
    log = AckLog(path)
    log.write([entry("next")], 4)
    log.close()
    assert names(path) == [*(f"g-{index}" for index in range(lines)), "next"]


@pytest.mark.parametrize(
    ("times", "duration_s"),
    [((100.0, 102.5), 2.5), ((0.0, 0.0), None)],
)
def test_line_says_what_the_group_is_like(
    tmp_path: Path, times: tuple[float, float], duration_s: float | None
) -> None:
    columns: dict[str, Any] = {"tokens": [[1, 2, 3], [4]], "mask": [[1, 1, 1], [1]], "scores": [0.25, 1.0]}
    group = Group.build("g", **columns, started_at=times[0], finished_at=times[1])
    log = AckLog(tmp_path / "p.jsonl", "math", Split.EVAL)
    log.write([Spool(1 << 20).add(group, encode_group(group, 1 << 20))], 3)
    log.close()
    line = msgspec.json.decode((tmp_path / "p.jsonl").read_bytes(), type=AckedGroup)
    assert (line.env, line.split, line.sequences, line.tokens) == ("math", Split.EVAL, 2, 4)
    assert (line.duration_s, line.reward) == (duration_s, 0.625)


def test_line_of_an_earlier_version_is_read() -> None:
    line = msgspec.json.decode(b'{"group_id":"g","session":1,"seq":2,"at":3.0}', type=AckedGroup)
    assert (line.sequences, line.duration_s, line.reward) == (0, None, None)


class _Full:
    """A file on a disk that takes some bytes and then none, until there is room."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.data = bytearray()

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(28, "No space left on device")
        taken = min(self.room, len(data))
        self.room -= taken
        self.data += data[:taken]
        return taken


def test_lines_wait_for_room_on_a_full_disk(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log, disk = AckLog(tmp_path / "p.jsonl"), _Full(room=10)
    log.close()
    log._file = disk  # type: ignore[assignment]
    for index in range(3):
        log.write([entry(f"g-{index}")], 3)
    assert caplog.text.count("ack log not written") == 1
    disk.room = 1 << 20
    log.write([entry("g-3")], 3)
    lines = bytes(disk.data).splitlines()
    assert [msgspec.json.decode(line, type=AckedGroup).group_id for line in lines] == [
        f"g-{n}" for n in range(4)
    ]


def test_what_the_disk_never_took_is_said_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    log = AckLog(Path("/dev/full"))
    log.write([entry("g-0"), entry("g-1")], 3)
    log.close()
    assert "ack log lost lines file=/dev/full lines=2" in caplog.text


def test_without_a_path_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    log = AckLog(None)
    log.write([entry("g")], 1)
    log.close()
    assert not list(tmp_path.iterdir())
    assert not caplog.records, "and nothing is missed"
