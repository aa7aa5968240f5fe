"""Charts without a mouse, figures with enough digits, and sections that nobody has scrolled to."""

from typing import Any

import pytest
from tests.services.dashboard.page import figures
from tests.services.dashboard.page.browser import Browser
from tests.services.dashboard.page.played_server import PlayedServer

pytestmark = pytest.mark.rival
LEFT, RIGHT, END, HOME, ESCAPE = "\ue012", "\ue014", "\ue010", "\ue011", "\ue00c"
FLOW = "#flow .chart"


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
