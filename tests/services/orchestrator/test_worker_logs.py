"""The logs of workers that come and go do not fill the disk."""

from pathlib import Path

import pytest

from rolloutmq.schemas.config.run import RunSection
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.orchestrator.worker_logs import WorkerLogs


@pytest.fixture
def layout(run_dir: Path) -> RunLayout:
    found = RunLayout(run_dir)
    found.logs.mkdir()
    for name in (*(f"e-{number}" for number in range(12)), "f-0", "f-1", "broker", "up"):
        found.log(name).touch()
    (found.logs / "e-1.log.1").touch()
    (found.logs / "e-1.log.2").touch()
    return found


def test_the_last_of_those_that_are_gone_stay(layout: RunLayout) -> None:
    """Who is there keeps its log, however old it is, and so does whoever is no worker."""
    shelf = WorkerLogs(layout, RunSection(log_workers=2), lambda: {"e-0", "e-3", "f-0"})
    names = {"e-0", "e-3", "e-10", "e-11", "f-0", "f-1"}
    assert {log.stem for log in shelf.logs()} == names
    assert {path.name for path in layout.logs.iterdir()} == {
        f"{name}.log" for name in {*names, "broker", "up"}
    }


def test_few_stay_all(layout: RunLayout) -> None:
    before = set(layout.logs.iterdir())
    assert len(WorkerLogs(layout, RunSection(), set).logs()) == 14
    assert set(layout.logs.iterdir()) == before
