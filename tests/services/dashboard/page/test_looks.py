"""The page at three widths, light and dark: whole, without a complaint of the browser, and for everybody, with and
without a mouse.
"""

import os
from pathlib import Path
from typing import Any

import pytest
from tests.services.dashboard.page import figures
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer

pytestmark = pytest.mark.rival
SECTIONS = (
    "overview",
    "findings",
    "flow",
    "learning",
    "waits",
    "latency",
    "environments",
    "workers",
    "machines",
    "ledger",
    "dead",
    "decisions",
    "settings",
)
LEFT, RIGHT, END, HOME, ESCAPE = "\ue012", "\ue014", "\ue010", "\ue011", "\ue00c"
FLOW = "#flow .chart"
LOOKS = os.environ.get("ROLLOUTMQ_LOOKS")
"""Folder for pictures of the whole page, to look at."""


def draw_all(browser: Browser, width: int, scheme: str) -> int:
    """Show the whole page at once, so that every section is drawn; return its height."""
    height = int(browser.js("return document.documentElement.scrollHeight"))
    for _ in range(3):
        browser.look(width, height, scheme)
        browser.js("return new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        grown = int(browser.js("return document.documentElement.scrollHeight"))
        if grown == height:
            break
        height = grown
    return height


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1440, 1024, 390])
def test_the_page_is_whole_and_for_everybody(
    browser: Browser, played: PlayedServer, width: int, scheme: str
) -> None:
    browser.look(width, 900, scheme)
    browser.open(played.link)
    browser.until_text(".badge", "live")
    draw_all(browser, width, scheme)
    browser.until_text("#workers .worker-box", "add2-0")
    browser.until_text("#dead", "4 dead groups")
    for section in SECTIONS:
        assert len(browser.text(f"#{section} .section-body")) > 20, section
    drawn = browser.js(
        "return [...document.querySelectorAll('.chart-canvas')].map((n) => n.querySelector('canvas')?.width ?? 0)"
    )
    assert len(drawn) >= 8
    assert min(drawn) > 200
    assert browser.js("return document.documentElement.scrollWidth") <= width
    if LOOKS:
        browser.picture(Path(LOOKS) / f"{width}-{scheme}.png")
    assert "\n".join(browser.violations()) == ""
    assert browser.complaints() == []


def test_the_switch_of_colours_holds_against_the_system(browser: Browser, played: PlayedServer) -> None:
    def back() -> str:
        return str(browser.js("return getComputedStyle(document.documentElement).backgroundColor"))

    browser.look(1440, 900, "light")
    browser.open(played.link)
    browser.until_text(".badge", "live")
    light = back()
    pick = (
        "const s = document.querySelector('select[aria-label=Colours]');"
        "s.value = arguments[0]; s.dispatchEvent(new Event('change'))"
    )
    browser.js(pick, "dark")
    dark = back()
    assert dark != light
    browser.driver.refresh()
    browser.until_text(".badge", "live")
    assert back() == dark
    browser.js(pick, "auto")
    assert back() == light
    assert browser.complaints() == []


def test_a_chart_tells_its_data_without_its_picture(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text("#flow .legend", "ready workers")
    said = browser.js("return document.querySelector('#flow [role=img]').getAttribute('aria-label')")
    assert "ready workers: last 22, lowest 4, highest 22" in said
    browser.click("#flow details summary")
    browser.until_text("#flow details table", "ready workers")
    assert (
        browser.js("return document.querySelectorAll('#flow details')[0].querySelectorAll('tbody tr').length")
        > 15
    )


def test_the_way_of_a_group_of_each_environment_and_of_the_last_minutes(
    browser: Browser, played: PlayedServer
) -> None:
    played.state["hops"][1]["clock_error_s"] = 0.01  # of `send`: two hosts, whose clocks agree no better
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("latency")
    browser.until_text("#latency table", "1.12 s")
    assert "< 10.0 ms" in browser.text("#latency table")
    said = "return document.querySelector('.waterfall').getAttribute('aria-label')"
    assert "Rollout: median 1.12 s, 99 of 100 within 3.81 s" in browser.js(said)
    pick = "const n = document.getElementById(arguments[0]); n.selectedIndex = 1; n.dispatchEvent(new Event('change'))"
    browser.js(pick, "latency-time")
    browser.until_text("#latency table", "560 ms")
    browser.js(pick, "latency-env")
    browser.until_text("#latency table", "336 ms")
    assert browser.complaints() == []


def test_blocked_workers_and_the_bases_of_parts_are_told(browser: Browser, played: PlayedServer) -> None:
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.until_text("#overview .tiles", "Workers blocked")
    tiles = browser.text("#overview .tiles")
    assert "12 % of their time" in tiles
    assert "from the first batch · stale_guard" in tiles
    assert "5 % of the whole run · 1 % from the first batch" in tiles
    browser.show("waits")
    browser.until_text("#waits", "sort3: 3 of 16 wait for stale_guard; add2: 3 of 8 wait for stale_guard")
    browser.show("environments")
    browser.until_text("#environments table", "3 of 16")
    browser.until_text("#environments table", "13 %")


def test_the_slowest_workers_hosts_engines_and_gpus(browser: Browser, played: PlayedServer) -> None:
    pick = (
        "const n = document.getElementById('latency-by'); n.value = arguments[0];"
        "n.dispatchEvent(new Event('change'))"
    )
    first = "return document.querySelector('#latency .waterfall.named ~ div tbody tr').innerText"
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("latency")
    browser.until_text("#latency table", "1.12 s")
    for by, name in (("worker", "sort3-0"), ("host", "node-7"), ("engine", "inference"), ("gpu", "GPU-0000")):
        browser.js(pick, by)
        browser.until(lambda: name in str(browser.js(first)), f"{name} in the first row")  # noqa: B023
        said = browser.js("return document.querySelector('.waterfall.named').getAttribute('aria-label')")
        assert f"The slowest. {name}" in said
        assert "median 2.24 s" in said
    browser.js(pick, "worker")
    browser.until_text("#latency", "24 rows")
    browser.js(
        "const n = document.getElementById('latency-filter'); n.value = 'SORT3-23'; n.dispatchEvent(new Event('input'))"
    )
    browser.until_text("#latency", "1 row, the slowest of each hop first; 24 without the filter")
    assert "\n".join(browser.violations()) == ""
    browser.look(390)
    assert browser.js("return document.documentElement.scrollWidth") <= 390
    browser.js(pick, "env")
    browser.until(lambda: "Send" in browser.text("#latency table"), "the way of a group again")
    assert browser.complaints() == []


def focused_chart(browser: Browser) -> None:
    browser.until_text(f"{FLOW} .legend", "ready workers")
    browser.js(f"document.querySelector('{FLOW} .chart-canvas').focus()")


def said(browser: Browser) -> str:
    return str(browser.js(f"return document.querySelector('{FLOW} [role=status]').textContent"))


def test_the_arrow_keys_move_the_cursor_and_its_values_are_told(
    browser: Browser, played: PlayedServer
) -> None:
    browser.open(played.link)
    focused_chart(browser)
    browser.press(END)
    browser.until(lambda: "ready workers 22" in said(browser), "the last values")
    last = said(browser)
    browser.press(LEFT)
    browser.until(lambda: said(browser) not in {"", last}, "those before")
    assert browser.text(f"{FLOW} .chart-time") in said(browser)
    browser.press(HOME)
    browser.until(lambda: "ready workers 4" in said(browser), "the first values")
    browser.press(RIGHT, RIGHT, RIGHT)
    browser.until(lambda: said(browser) and "ready workers 4" in said(browser), "values further on")
    legend = browser.text(f"{FLOW} .legend")
    assert "ready workers 4" in " ".join(legend.split())
    played.tell("history", {"cursor": "2", "reset": False, "series": []})
    browser.until(lambda: browser.text(f"{FLOW} .legend") == legend, "the cursor stays where it was")
    browser.press(ESCAPE)
    browser.until(
        lambda: "ready workers 22" in " ".join(browser.text(f"{FLOW} .legend").split()),
        "the last values again",
    )
    assert said(browser) == ""
    assert browser.complaints() == []


def test_a_small_loss_has_digits(browser: Browser, played: PlayedServer) -> None:
    played.history = figures.history()
    (steps,) = (one for one in played.history if one["name"] == "steps")
    steps["columns"]["loss"] = [0.00012345 for _ in steps["columns"]["t"]]
    played.state["figures"] = {"loss": 0.00012345, "kl": 2.302585}
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("learning")
    browser.until_text("#learning .legend-item, #learning", "0.00012345")
    told = browser.js(
        "return [...document.querySelectorAll('#learning .legend-item')].map((n) => n.innerText).join('\\n')"
    )
    assert "loss 0.00012345" in " ".join(told.split())
    assert "2.3026" in browser.text("#learning table")


def test_a_section_that_nobody_has_scrolled_to_is_renewed(browser: Browser, played: PlayedServer) -> None:
    browser.look(1440, 300)
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.until_text("#decisions .section-body", "workers")
    now: list[dict[str, Any]] = [
        {"at": figures.BEGAN, "env": "sort3", "text": "3 to 4 workers: far below the fold"}
    ]
    played.change(decisions=now)
    browser.until_text("#decisions", "far below the fold")
    assert browser.js("return scrollY") == 0


def test_an_environment_with_groups_and_no_curve_is_not_called_unmeasured(
    browser: Browser, played: PlayedServer
) -> None:
    played.history = [one for one in figures.history() if one["name"] != "hop"]
    browser.open(played.link)
    browser.until_text(".badge", "live")
    browser.show("latency")
    browser.until_text("#latency table", "1.12 s")
    assert "no curve yet" in browser.text("#latency")
    assert "no latency measured" not in browser.text("#latency")
