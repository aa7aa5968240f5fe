"""A log is cut while its process goes on writing, and nothing that was printed is missing or there twice."""

import asyncio
import errno
import fcntl
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest

from rolloutmq.bus.lifecycle import LogHandler
from rolloutmq.services.monitor.text.logs import Follower
from rolloutmq.services.process import logbook
from rolloutmq.services.process.logbook import LogLimits, Rotation, archive, last_lines, last_message, rotate

LIMITS = LogLimits(nbytes=1 << 16, files=3)
WRITER = """
import os, sys
for number in range(int(sys.argv[1])):
    os.write(1, b"%07d %s\\n" % (number, b"x" * (number % 90)))
    if number % 1000 == 0:
        os.write(2, b"")
print("done", flush=True)
"""


def can_collapse(folder: Path) -> bool:
    """Whether bytes can be taken from the beginning of a file there."""
    probe = folder / "probe"
    probe.write_bytes(bytes(1 << 17))
    with probe.open("rb+") as file:
        found = logbook._collapse(file, 1 << 16)
    probe.unlink()
    return found


@pytest.fixture(params=["collapse", "copy and empty"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """Both ways to cut; the first where the file system of the test has it."""
    if request.param != "collapse":
        monkeypatch.setattr(logbook, "_fallocate", None)
    elif not can_collapse(tmp_path):
        pytest.skip("this file system cannot cut in one step")
    return str(request.param)


both_ways = pytest.mark.usefixtures("way")


def text_of(log: Path) -> bytes:
    """Return archives and log put together, oldest first."""
    numbers = sorted((int(path.suffix[1:]) for path in log.parent.glob(f"{log.name}.[0-9]*")), reverse=True)
    return b"".join(path.read_bytes() for path in [*(archive(log, number) for number in numbers), log])


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "w-0.log"


def fill(log: Path, lines: range) -> None:
    with log.open("ab") as file:
        file.write(b"".join(b"%07d\n" % number for number in lines))


def test_a_short_log_is_left_alone(log: Path) -> None:
    fill(log, range(10))
    assert rotate(log, LIMITS) == 0
    assert list(log.parent.iterdir()) == [log]


@both_ways
def test_what_was_before_is_in_the_archives_in_order(log: Path) -> None:
    fill(log, range(20_000))
    assert rotate(log, LIMITS) == 2
    assert text_of(log) == b"".join(b"%07d\n" % number for number in range(20_000))
    assert log.stat().st_size <= LIMITS.nbytes
    assert {path.name for path in log.parent.iterdir()} == {"w-0.log", "w-0.log.1", "w-0.log.2"}


@both_ways
def test_number_and_size_are_bounded(log: Path) -> None:
    for part in range(8):
        fill(log, range(30_000 * part, 30_000 * (part + 1)))
        rotate(log, LIMITS)
    files = sorted(log.parent.iterdir())
    assert [path.name for path in files] == ["w-0.log", *(f"w-0.log.{number}" for number in (1, 2, 3))]
    assert sum(path.stat().st_size for path in files) <= 5 * LIMITS.nbytes
    assert text_of(log).endswith(b"0239998\n0239999\n")


@pytest.fixture
def writer(log: Path) -> Iterator["subprocess.Popen[bytes]"]:
    """A process that holds its log as all that we start do, and prints as fast as it can."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-S", "-c", WRITER, "200000"], stdout=output, stderr=output
        )
    yield process
    process.kill()
    process.wait()


def expected(count: int) -> bytes:
    lines = (b"%07d %s\n" % (number, b"x" * (number % 90)) for number in range(count))
    return b"".join(lines) + b"done\n"


@pytest.mark.extended
def test_no_line_is_lost_or_torn_while_the_process_writes(
    log: Path, writer: "subprocess.Popen[bytes]", tmp_path: Path
) -> None:
    """Needs a file system that can cut in one step; the disk of every machine that trains has one."""
    if not can_collapse(tmp_path):
        pytest.skip("this file system cannot cut in one step")
    limits = LogLimits(nbytes=1 << 16, files=1000)
    parts = 0
    while writer.poll() is None:
        parts += rotate(log, limits)
    assert writer.returncode == 0
    assert parts > 20
    assert text_of(log) == expected(200_000)


LINES: Final = 300_000
"""More than the process prints: it may be far ahead of its follower."""


def test_a_follower_shows_every_byte_once_over_rotations(
    log: Path, writer: "subprocess.Popen[bytes]", way: str
) -> None:
    limits = LogLimits(nbytes=1 << 16, files=1000)
    shown = bytearray()
    with Follower(log, LINES) as follower:
        while writer.poll() is None:
            rotate(log, limits)
            for _ in range(3):
                shown += follower.read()
        rotate(log, limits)
        while part := follower.read():
            shown += part
    assert bytes(shown) == text_of(log)
    if way == "collapse":
        assert bytes(shown) == expected(200_000)


@both_ways
def test_a_follower_that_was_away_for_long_goes_on_with_what_is_left(log: Path) -> None:
    fill(log, range(9_000))
    rotate(log, LIMITS)
    with Follower(log, 0) as follower:
        for part in range(1, 5):
            fill(log, range(9_000 * part, 9_000 * (part + 1)))
            rotate(log, LIMITS)
        shown = b"".join(iter(follower.read, b""))
    assert shown == text_of(log)


@both_ways
def test_the_last_lines_reach_into_the_archives(log: Path) -> None:
    fill(log, range(25_000))
    rotate(log, LIMITS)
    for lines in (3, 5_000, 9_000, 20_000, 25_000, 30_000):
        with Follower(log, lines) as follower:
            shown = b"".join(iter(follower.read, b""))
        assert shown == b"".join(b"%07d\n" % number for number in range(25_000))[-8 * lines :]


def test_a_reader_puts_the_cut_off_but_not_for_ever(log: Path) -> None:
    fill(log, range(9_000))
    with log.open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)
        assert rotate(log, LIMITS) == 0
        fill(log, range(9_000, 18_000))
        assert rotate(log, LIMITS) == 2


async def test_the_rotation_looks_again_and_again(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logbook, "LOOK_S", 0.01)
    missing = log.with_name("gone.log")
    task = asyncio.create_task(Rotation(LIMITS, lambda: [missing, log]).run())
    for part in range(2):
        fill(log, range(10_000))
        async with asyncio.timeout(30):
            while not archive(log, part + 1).exists():  # noqa: ASYNC110
                await asyncio.sleep(0.01)
    task.cancel()
    await asyncio.wait({task})


def test_a_disk_that_is_full_is_told_now_and_then_and_harms_nobody(
    log: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> bytes:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    fill(log, range(10_000))
    before = log.read_bytes()
    rotation = Rotation(LIMITS, list)
    with monkeypatch.context() as broken, caplog.at_level(logging.WARNING):
        broken.setattr(os, "pread", full)
        rotation.look([log])
        rotation.look([log])
    assert caplog.text.count("log not cut") == 1
    assert log.read_bytes() == before
    assert list(log.parent.iterdir()) == [log]
    rotation.look([log])
    assert not archive(log, 1).exists(), "it is left alone for a while"
    Rotation(LIMITS, list).look([log])
    assert text_of(log) == before


def test_the_last_lines_of_a_log_are_found(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    assert last_message(log) == ""
    log.write_text("x" * 10_000 + "\nfirst\n\nthe reason\n\n  \n")
    assert last_message(log) == "the reason"
    assert last_lines(log, 2) == ["first", "the reason"]
    assert len("".join(last_lines(log, 9, 100))) <= 100


def test_the_last_message_is_told_without_the_head_of_a_log_record(tmp_path: Path) -> None:
    log = tmp_path / "w.log"
    handler = LogHandler(log.open("w"), closes=True)
    handler.emit(
        logging.makeLogRecord(
            {"name": "rolloutmq.services.worker", "levelname": "ERROR", "msg": "failed x=1"}
        )
    )
    handler.close()
    assert " ERROR rolloutmq.services.worker failed" in log.read_text()
    assert last_message(log) == "failed x=1"
    log.write_text("2026-11-26 12:00:00.000 ERROR another.logger failed\n")
    assert last_message(log) == "2026-11-26 12:00:00.000 ERROR another.logger failed"


@both_ways
def test_the_last_lines_are_found_right_after_a_cut(log: Path) -> None:
    fill(log, range(9_000))
    rotate(log, LIMITS)
    assert last_lines(log, 3) == ["0008997", "0008998", "0008999"]
