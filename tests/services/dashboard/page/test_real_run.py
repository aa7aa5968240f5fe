"""A real run and the real server, from the first step to the report; and the pictures of the pages, made of it."""

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.test_looks import draw_all

pytestmark = [pytest.mark.rival, pytest.mark.timeout(900)]
ROOT = Path(__file__).parents[4]
TRAINS = ROOT / ".venv" / "bin" / "python"
"""The environment that has torch; this one has the browser's driver."""
COMMAND = ("-m", "rolloutmq.launch.cli")
PICTURES = os.environ.get("ROLLOUTMQ_PICTURES")
"""Folder for the pictures of the pages: docs/images."""
COLOURS = 256
STEPS = 200


@contextmanager
def started(python: Path, *words: str) -> Iterator["subprocess.Popen[str]"]:
    """Run a command of ours until the end of the block."""
    process = subprocess.Popen(
        [str(python), *COMMAND, *words],
        cwd=ROOT / "examples",
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.communicate(timeout=120)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()


def link_of(output: IO[str] | None) -> str:
    """Return the link that a server prints first."""
    assert output is not None
    line = output.readline()
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/#token=\S+\n", line), line
    return line.strip()


def picture(browser: Browser, name: str, width: int, height: int, scheme: str, section: str = "") -> None:
    """Save what the window shows with few colours, if pictures are wanted: from a section on, or from the top."""
    if PICTURES is None:
        return
    from PIL import Image

    path = ROOT / PICTURES / name
    browser.look(width, height, scheme)
    browser.show(section) if section else browser.js("scrollTo(0, 0)")
    browser.js("return new Promise((done) => setTimeout(done, 500))")
    browser.picture(path)
    with Image.open(path) as image:
        image.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    assert path.stat().st_size < 150_000


def test_from_the_first_step_to_the_report(browser: Browser, tmp_path: Path) -> None:
    if not TRAINS.exists():
        pytest.skip("no environment with torch: make .venv/.installed")
    run_dir, page = tmp_path / "quickstart", tmp_path / "report.html"
    settings = (f"run.dir={run_dir}", f"trainer.steps={STEPS}", "evaluation.enabled=true")
    words = [word for setting in settings for word in ("--set", setting)]
    with started(TRAINS, "up", "quickstart.toml", *words) as run:
        browser.until(
            lambda: (run_dir / "metrics.jsonl").exists() or run.poll() is not None, "the run has begun"
        )
        with started(Path(sys.executable), "dashboard", str(run_dir)) as server:
            link = link_of(server.stdout)
            browser.open(link)
            browser.until_text(".badge", "live")
            assert "token" not in browser.js("return location.href")
            browser.until_text(".progress", f"of {STEPS}")
            browser.until(lambda: re.search(r"step [1-9]\d* of", browser.text(".progress")), "the first step")
            browser.until_text("#flow .legend", "ready workers")
            scale_to_three(browser)
            browser.show("overview")
            browser.until(lambda: re.search(r"step 1\d\d of", browser.text(".progress")), "half of the steps")
            picture(browser, "dashboard.png", 1440, 900, "light")
            browser.until_text(".badge", "finished")
            draw_all(browser, 1440, "light")
            browser.until_text("#learning", "Evaluation, point")
            browser.until_text(".notice-line", "The run has ended: the trainer is done.")
            assert "= the sum of all states." in browser.text("#ledger")
            assert browser.js("return document.querySelectorAll('.chart-canvas canvas').length") >= 5
            assert "\n".join(browser.violations()) == ""
            latencies_by_worker(browser)
            picture(browser, "dashboard-latency.png", 1440, 900, "light", "latency")
            picture(browser, "dashboard-dark.png", 1440, 900, "dark")
            picture(browser, "dashboard-phone.png", 390, 844, "light")
            browser.look(1440)
            assert browser.complaints() == []
            server.send_signal(signal.SIGINT)
            browser.until_text(".badge", "disconnected")
        run.wait(120)
    with started(Path(sys.executable), "report", str(run_dir), "--page", str(page)) as report:
        assert report.wait(120) == 0
    browser.open(page.as_uri())
    browser.until_text(".badge", "report")
    browser.until_text(".progress", f"step {STEPS} of {STEPS}")
    assert browser.complaints() == []


def latencies_by_worker(browser: Browser) -> None:
    """See the rollouts of a worker and the calls to an engine, then the way of a group again."""
    pick = (
        "const n = document.getElementById('latency-by'); n.value = arguments[0];"
        "n.dispatchEvent(new Event('change'))"
    )
    browser.show("latency")
    browser.js(pick, "worker")
    browser.until_text("#latency .waterfall.named", "sort3-0 rollout")
    browser.js(pick, "engine")
    browser.until_text("#latency .waterfall.named", "inference")
    browser.js(pick, "env")
    browser.until_text("#latency .waterfall", "Rollout")


def scale_to_three(browser: Browser) -> None:
    """Pin the number of workers by the page, and see the run's answer and its new target."""
    browser.show("environments")
    browser.click("#environments .action-cell button")
    browser.js("document.getElementById('scale-count').value = '3'")
    browser.click("dialog button[type=submit]")
    browser.until(lambda: browser.text("dialog .answer p"), "an answer")
    assert browser.js("return document.querySelector('dialog .answer p').className") == "good", browser.text(
        "dialog"
    )
    browser.click("dialog .dialog-head button")
    browser.until_text("#environments", "of 3, pinned")
