"""The data of a report: what the page would have asked the server, at one moment, and bounded."""

import json
from pathlib import Path
from typing import Any

import pytest
from tests.services.dashboard.page.test_files import Elements

from rolloutmq.launch.commands import steer
from rolloutmq.schemas.files import RunLayout
from rolloutmq.services.broker.server import Broker
from rolloutmq.services.dashboard.page.report import write_page


def data_of(page: Path) -> dict[str, Any]:
    elements = Elements()
    elements.feed(page.read_text("utf-8"))
    data: dict[str, Any] = json.loads(elements.texts["script"][0])
    return data


def test_a_run_that_ended(ended: RunLayout, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    write_page(ended.root, page)
    data = data_of(page)
    assert data["state"]["run"]["life"] == "ended"
    assert data["state"]["run"]["ended"] == "the trainer is done"
    (rewards,) = [one for one in data["history"]["series"] if one["name"] == "steps"]
    assert rewards["columns"]["reward"][-1] == pytest.approx(0.5)
    assert [row["p50_s"] > 0 for row in data["state"]["hops"]] == [True]
    assert data["dead"] == []
    assert page.stat().st_mode & 0o777 == 0o600
    assert page.stat().st_size < 300_000


def test_a_run_that_lives(broker: Broker, run_dir: Path, tmp_path: Path) -> None:
    del broker  # it serves
    page = tmp_path / "report.html"
    write_page(run_dir, page)
    state = data_of(page)["state"]
    assert state["run"]["life"] == "living"
    assert state["queue"]["high_bytes"] > 0


def test_a_directory_of_a_hostile_name_and_a_damaged_record(ended: RunLayout, tmp_path: Path) -> None:
    with ended.metrics.open("ab") as file:
        file.write(b'{"kind": "pressure", </script><script>alert(1)</script>\n\xff\xfe\n' * 100)
    moved = tmp_path / "<script>\udcff'\"&"
    ended.root.rename(moved)
    page = tmp_path / "report.html"
    write_page(moved, page)
    data = data_of(page)
    assert data["state"]["record"]["damaged_lines"] >= 100
    assert page.read_text("utf-8").count("<script") == 2


def test_the_command_writes_the_page_beside_what_it_prints(
    ended: RunLayout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "report.html"
    assert steer.report(ended.root, as_json=False, page=page) == 0
    assert data_of(page)["state"]["run"]["name"] == "sort"
    assert "produced against trained" in capsys.readouterr().out
    with pytest.raises(OSError, match="No such file"):
        steer.report(ended.root, as_json=False, page=tmp_path / "missing" / "report.html")
