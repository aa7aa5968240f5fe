"""The files of probes come and go with what they say."""

import asyncio
import os
from pathlib import Path

import pytest
from tests.services.orchestrator.fake_broker import until

from rolloutmq.schemas.errors import UnusablePathError
from rolloutmq.services.monitor.probes.probe_files import ProbeFiles, keep_probes


def test_the_files_of_an_earlier_process_go(tmp_path: Path) -> None:
    (tmp_path / "live").touch()
    (tmp_path / "ready").touch()
    ProbeFiles(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("live", "ready", "expected"),
    [
        (True, True, {"live", "ready"}),
        (True, False, {"live"}),
        (False, True, set()),
        (False, False, set()),
    ],
)
def test_a_file_is_there_while_it_holds(tmp_path: Path, live: bool, ready: bool, expected: set[str]) -> None:
    files = ProbeFiles(tmp_path / "probe")
    files.show(live=True, ready=True)
    files.show(live=live, ready=ready)
    assert {path.name for path in (tmp_path / "probe").iterdir()} == expected


def test_a_file_is_touched_again(tmp_path: Path) -> None:
    files = ProbeFiles(tmp_path)
    files.show(live=True, ready=False)
    os.utime(tmp_path / "live", (0, 0))
    files.show(live=True, ready=False)
    assert (tmp_path / "live").stat().st_mtime > 0


def test_a_directory_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UnusablePathError, match="--probe-dir"):
        ProbeFiles(tmp_path / "file" / "probe")


async def test_a_directory_that_goes_away_ends_nothing(tmp_path: Path) -> None:
    files = ProbeFiles(tmp_path / "probe")
    (tmp_path / "probe").rmdir()
    files.show(live=True, ready=True)
    (tmp_path / "probe").mkdir()
    files.show(live=True, ready=True)
    assert (tmp_path / "probe" / "ready").exists()


async def test_they_go_with_the_task_that_keeps_them(tmp_path: Path) -> None:
    keeping = asyncio.create_task(keep_probes(ProbeFiles(tmp_path), lambda: True))
    await until((tmp_path / "ready").exists)
    keeping.cancel()
    await asyncio.wait({keeping})
    assert not list(tmp_path.iterdir())
