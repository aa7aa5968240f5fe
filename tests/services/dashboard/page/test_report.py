"""The report: one file that a browser opens without a server, and whose data does nothing but show."""

import http.server
import json
import threading
from pathlib import Path
from typing import Any

import pytest
from tests.services.dashboard.page import figures
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.test_hostile import PIECES, SCRIPT, intact
from tests.services.dashboard.page.test_looks import SECTIONS, draw_all

from rolloutmq.services.dashboard.page.single_file import single_file

pytestmark = pytest.mark.rival


def data(**more: Any) -> dict[str, Any]:
    return {
        "written": "Written 2026-11-27 00:10:00: values as of then.",
        "state": figures.state(),
        "history": {"reset": True, "series": figures.history()},
        "workers": figures.workers(200),
        "dead": figures.dead_letters(),
        "dead_groups": {"sort3-00000000": figures.dead_group("sort3-00000000")},
        **more,
    }


def written(tmp_path: Path, content: dict[str, Any]) -> str:
    file = tmp_path / "report.html"
    file.write_bytes(single_file(json.dumps(content).encode()))
    return file.as_uri()


@pytest.mark.parametrize("width", [1440, 390])
def test_a_report_opens_without_a_server(browser: Browser, tmp_path: Path, width: int) -> None:
    browser.look(width)
    browser.open(written(tmp_path, data()))
    browser.until_text(".badge", "report")
    assert "Written 2026-11-27" in browser.text(".notice-line")
    draw_all(browser, width, "light")
    for section in SECTIONS:
        assert len(browser.text(f"#{section} .section-body")) > 20, section
    assert browser.js("return document.querySelectorAll('.chart-canvas canvas').length") >= 8
    asked = browser.js("return performance.getEntriesByType('resource').map((one) => one.name)")
    assert asked == []
    shown = (
        "return [...document.querySelectorAll('.action-cell')].filter((n) => n.offsetParent !== null).length"
    )
    assert browser.js(shown) == 0
    assert browser.js("return document.documentElement.scrollWidth") <= width
    assert "\n".join(browser.violations()) == ""
    assert browser.complaints() == []


def test_workers_and_dead_letters_are_read_from_the_file(browser: Browser, tmp_path: Path) -> None:
    browser.open(written(tmp_path, data()))
    browser.show("workers")
    browser.until_text("#workers", "200 workers")
    browser.click(".workers th[data-column=produced] button")
    least = min(row["produced"] for row in figures.workers(200))
    first = "return document.querySelector('.workers tbody tr:nth-child(2) td:nth-child(5)').textContent"
    browser.until(lambda: browser.js(first) == str(least), "the least productive first")
    browser.show("dead")
    browser.until_text("#dead", "4 dead groups")
    browser.click("#dead tbody button.link")
    browser.until_text("dialog", "Sort the digits 7 1 4")
    assert browser.complaints() == []


def test_hostile_data_ends_no_element_of_the_file(browser: Browser, tmp_path: Path) -> None:
    content = data()
    content["state"]["run"]["name"] = "</script>" + SCRIPT
    content["state"]["findings"] = [
        {"env": piece, "finding": "flat", "problem": piece, "remedy": "</script><!--" + piece, "at": 1.0}
        for piece in PIECES
    ]
    browser.open(written(tmp_path, content))
    browser.until_text(".badge", "report")
    browser.until_text("#findings", "onerror")
    intact(browser, 1440)


def test_the_policy_of_the_file_stops_what_others_add(browser: Browser, tmp_path: Path) -> None:
    """The control of the test before: markup that does get into the file does nothing either."""
    hits: list[str] = []

    class Counting(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            hits.append(self.path)
            self.send_response(404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Counting)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        file = tmp_path / "report.html"
        page = single_file(json.dumps(data()).encode()).decode()
        bad = f"<script>window.broken = 1</script><img src='http://127.0.0.1:{server.server_port}/x'>"
        file.write_text(page.replace("</body>", f"{bad}</body>"))
        browser.open(file.as_uri())
        browser.until_text(".badge", "report")
        assert browser.js("return window.broken ?? null") is None
        assert len([one for one in browser.complaints() if "Content Security Policy" in one]) >= 2
        assert hits == []
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
