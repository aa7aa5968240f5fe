"""The page of a whole run: from the printed link to its end, with an action, while groups flow."""

import subprocess
import sys
from pathlib import Path

import pytest
from tests.services.dashboard.browser import Browser
from tests.services.dashboard.test_watch import Page

from benchmarks.end_to_end import scenario

STEPS = 60


@pytest.mark.extended
def test_the_page_of_a_quickstart_run(tmp_path: Path) -> None:
    """The run ends as it would without a page."""
    words = ("up", str(scenario.QUICKSTART), "--run-dir", str(tmp_path / "run"), "--plain")
    settings = ("--set", f"trainer.steps={STEPS}")
    command = (sys.executable, "-P", "-m", "rolloutmq.launch.cli", *words, *settings)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        kind, _, link = run.stdout.readline().strip().partition(" ")
        assert kind == "dashboard"
        browser = Browser(link)
        assert browser.enter().status == 204
        with browser.stream() as stream:
            page = Page(stream)
            page.until(lambda page: page.sections["worker_counts"].get("ready"))
            page.until(lambda page: len(page.series.get(("reward", "sort3"), {}).get("t", [])) >= 2)
            told = browser.post("/api/actions/set", {"values": {"environment.sort3.weight": 2}}).json
            assert told["ok"], told
            page.until(lambda page: page.sections["environments"][0]["weight"] == 2.0)
            assert page.sections["run"]["life"] == "living"
            assert page.sections["engines"]
            assert page.sections["decisions"]
            assert page.sections["ledger"]["accepted"] > 0
            assert not page.sections["problems"], page.sections["problems"]
        output = run.stdout.read()
        assert run.wait(300) == 0, output
    assert f"in {STEPS} steps" in output
    assert "0 lost, 0 trained twice" in output
